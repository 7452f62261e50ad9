"""`genai bench session --suite`: models, settings, results, and what became slower."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import helper

from genai.bench import suite as suites
from genai.bench.suite import SuiteModel, bench_suite, default_sizes, read_suite
from genai.bench.suite_report import SuiteResult, grown, read_result
from genai.bench.suite_worker import class_of
from genai.cli.app import run
from genai.errors import InputError, OptionError
from genai.onnx.reader import read_model

Capture = pytest.CaptureFixture[str]
SHAPES = {"text": ["batch", "sequence"], "image": ["batch", 3, "height", 8], "rows": [None, 4]}


def write(path: Path, shape: list[Any], op: str = "Neg", dtype: int = 1) -> None:
    values = [helper.make_tensor_value_info(value, dtype, shape) for value in "xy"]
    graph = helper.make_graph([helper.make_node(op, ["x"], ["y"])], "g", values[:1], values[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Models with the dimensions of texts and images, and of rows without names."""
    for name, shape in SHAPES.items():
        write(tmp_path / f"{name}.onnx", shape)
    return tmp_path


def row(model: str, threads: int = 1, kind: str = "fp32", **ratios: float) -> dict[str, Any]:
    times = {f"{name}_{of}": 1.5 for name in ("run", "create") for of in ("ms", "least_ms", "spread_ms")}
    times |= {"first_ms": 2.0, "peak_mb": 1200.0} | {"run_ratio": 1.0, "create_ratio": 1.0, "memory_ratio": 1.0}
    theirs = {f"onnxruntime_{name}": value for name, value in times.items() if not name.endswith("ratio")}
    return {"model": model, "threads": threads, "class": kind, "difference": 1e-7, **times, **theirs, **ratios}


def test_sizes_by_the_names_of_dimensions(folder: Path) -> None:
    found = {path.stem: default_sizes(read_model(path).graph.inputs, {"sequence": 7}) for path in folder.glob("*.onnx")}
    assert found == {"text": {"batch": 1, "sequence": 7}, "image": {"batch": 1, "height": 224}, "rows": {"x:0": 1}}


@pytest.mark.parametrize(
    ("op", "dtype", "kind"), [("Neg", 1, "fp32"), ("Neg", 10, "fp16"), ("DynamicQuantizeLinear", 1, "int8")]
)
def test_classes(tmp_path: Path, op: str, dtype: int, kind: str) -> None:
    write(tmp_path / "m.onnx", [1], op, dtype)
    assert class_of(read_model(tmp_path / "m.onnx")) == kind


def test_settings(folder: Path) -> None:
    plain = read_suite(folder)
    assert [model.path.stem for model in plain.models] == ["image", "rows", "text"]
    assert plain.threads[0] == 1 and plain.repeat == 10 and plain.dims == {}
    settings = {"dims": {"sequence": 64}, "threads": [3], "repeat": 5}
    models = {"image.onnx": {"class": "tiny"}, "text": {"dims": {"batch": 2}, "inputs": "x.npz"}}
    (folder / "suite.json").write_text(json.dumps({**settings, "models": models}), encoding="utf-8")
    chosen = read_suite(folder, ["te*", "image"])
    assert (chosen.dims, chosen.threads, chosen.repeat) == ({"sequence": 64}, [3], 5)
    assert chosen.models == [
        SuiteModel(folder / "image.onnx", {}, None, "tiny"),
        SuiteModel(folder / "text.onnx", {"batch": 2}, folder / "x.npz"),
    ]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dim": {}}, "did you mean 'dims'?"),
        ({"dims": []}, '"dims" is a list'),
        ({"dims": {"n": "2"}}, "the size of 'n' is '2'"),
        ({"threads": [0]}, '"threads" is [0]'),
        ({"repeat": True}, '"repeat" is True'),
        ({"models": {"txt": {}}}, "did you mean 'text'?"),
        ({"models": {"text": {"size": 1}}}, "text: the key 'size' is unknown"),
        ({"models": {"text": {"inputs": 1}}}, 'text: "inputs" is 1'),
        ({"models": {"text": {"class": "fp64"}}}, "the classes are fp32, fp16, int8, tiny"),
        ({"models": {"text": {"dims": {"n": -1}}}}, "text: the size of 'n' is -1"),
    ],
)
def test_bad_settings(folder: Path, settings: dict[str, Any], said: str) -> None:
    (folder / "suite.json").write_text(json.dumps(settings), encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read_suite(folder)
    assert said in str(caught.value) and "suite.json" in caught.value.what


def test_folders_and_patterns_without_models(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="contains no models"):
        read_suite(tmp_path / "absent")
    with pytest.raises(OptionError, match="--only imag matches no model"):
        read_suite(folder, ["text", "imag"])


@pytest.mark.oracle
def test_a_folder_with_a_damaged_model(folder: Path, capsys: Capture) -> None:
    pytest.importorskip("onnxruntime")
    (folder / "junk.onnx").write_bytes(b"junk")
    (folder / "suite.json").write_text('{"models": {"text": {"dims": {"sequence": 9}}}}', encoding="utf-8")
    file = folder / "result.json"
    command = ["bench", "session", "--suite", str(folder), "--only", "text", "--only", "junk", "-o", str(file)]
    assert run([*command, "--cpu", "-r", "2"]) == 1
    captured = capsys.readouterr()
    assert "junk cannot be measured: " in captured.err and "not an ONNX model" in captured.err
    assert "geometric means" in captured.out and "\ntext\n" in captured.out
    result = read_result(file)
    (found,) = result.measured
    assert result.cpu and not result.interrupted and [one["model"] for one in result.failed] == ["junk"]
    assert (found["class"], found["difference"], found["dims"]) == ("tiny", 0, {"batch": 1, "sequence": 9})
    assert min(found[name] for name in ("run_ratio", "create_ratio", "first_ratio", "memory_ratio")) > 0


@pytest.fixture
def canned(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace the processes: `canned(reply)` calls a function with the arguments of each process."""
    pytest.importorskip("onnxruntime")

    def replace(reply: Callable[[str, dict[str, Any]], dict[str, Any]]) -> None:
        def result_of(arguments: list[str], stdin: str = "") -> dict[str, Any]:
            if stdin:
                return reply("compare", json.loads(stdin))
            return {"first_ms": 1.0, "peak_bytes": 2e6 if arguments[2] == "genai" else 1e6}

        monkeypatch.setattr(suites, "_result_of", result_of)

    return replace


def compared(kind: str, task: dict[str, Any]) -> dict[str, Any]:
    found = row(Path(task["path"]).name, task["threads"])
    return {name: value for name, value in found.items() if "peak" not in name and "first" not in name}


@pytest.mark.oracle
def test_rows_by_threads(folder: Path, canned: Callable[..., None]) -> None:
    tasks, steps = [], []

    def reply(kind: str, task: dict[str, Any]) -> dict[str, Any]:
        tasks.append(task)
        return compared(kind, task)

    canned(reply)
    suite = read_suite(folder, ["text"])
    options = {"dims": {"batch": 4}, "repeat": 3, "progress": lambda done, total: steps.append((done, total))}
    rows = list(bench_suite(suite, threads=[1, 2], **options))
    assert [(one["model"], one["threads"], one["memory_ratio"]) for one in rows] == [("text", 1, 2.0), ("text", 2, 2.0)]
    assert [(task["dims"], task["repeat"], task["cpu"]) for task in tasks] == [({"batch": 4}, 3, False)] * 2
    assert steps == [(step, 6) for step in range(6)]


@pytest.mark.oracle
def test_an_interrupt_keeps_what_was_measured(folder: Path, canned: Callable[..., None], capsys: Capture) -> None:
    def reply(kind: str, task: dict[str, Any]) -> dict[str, Any]:
        if "text" in task["path"]:
            raise KeyboardInterrupt
        return compared(kind, task)

    canned(reply)
    files = [folder / f"result.{suffix}" for suffix in ("json", "md", "html")]
    outputs = [part for file in files for part in ("-o", str(file))]
    assert run(["bench", "session", "--suite", str(folder), "-t", "1", *outputs]) == 130
    assert "geometric means" in capsys.readouterr().out
    result = read_result(files[0])
    assert result.interrupted and [one["model"] for one in result.rows] == ["image", "rows"]
    assert all("The measurement was interrupted." in file.read_text(encoding="utf-8") for file in files[1:])


@pytest.mark.oracle
def test_what_became_slower(folder: Path, canned: Callable[..., None], capsys: Capture) -> None:
    canned(compared)
    command = ["bench", "session", "--suite", str(folder), "--only", "text", "-t", "1"]
    file = folder / "old.json"
    assert run([*command, "-o", str(file)]) == 0
    assert run([*command, "--against", str(file)]) == 0
    old = json.loads(file.read_text(encoding="utf-8"))
    old["rows"][0]["memory_ratio"] = 1.6
    file.write_text(json.dumps({**old, "processor": "8086"}), encoding="utf-8")
    capsys.readouterr()
    assert run([*command, "--against", str(file)]) == 1
    said = capsys.readouterr().err
    assert "grown by more than 5 %: text, 1 thread: memory ratio 1.6 -> 2 (+25 %)" in said
    assert "measured on another processor: 8086" in said
    assert run([*command[:-2], "--cpu", "--against", str(file)]) == 2
    assert "without --cpu" in capsys.readouterr().err


def test_means_and_growth() -> None:
    old = SuiteResult(False, [row("a", run_ratio=1.0), row("b", run_ratio=2.0)], "p", "1", "1", "d")
    new = SuiteResult(
        False,
        [row("a", run_ratio=1.04), row("b", run_ratio=2.2, memory_ratio=0.5), row("c", 2, "int8", run_ratio=4.0)],
        "p", "1", "1", "d",
    )  # fmt: skip
    assert grown(new, old) == ["b, 1 thread: run ratio 2 -> 2.2 (+10 %)"]
    means = {(mean["class"], mean["threads"]): mean for mean in new.means()}
    assert list(means) == [("fp32", 1), ("int8", 2), ("all", 1), ("all", 2)]
    assert means["fp32", 1]["run_ratio"] == pytest.approx((1.04 * 2.2) ** 0.5) and means["fp32", 1]["models"] == 2


def test_pages_escape_names_and_name_failures() -> None:
    rows = [row("<b>|"), {"model": "bad", "threads": 1, "error": "<i>"}, row("wrong") | {"difference": None}]
    result = SuiteResult(True, rows, "p", "1", "1", "d")
    page, text = result.page(), result.markdown()
    assert "<b>|" not in page and "&lt;b&gt;|" in page and "&lt;i&gt;" in page and page.count("<svg") == 3
    assert "stroke-dasharray" in page and "CPU times of one thread" in page
    assert "- bad, 1 thread: <i>" in text and "| <b>\\| | fp32 | 1 | 1.5 (1.5) |" in text and "| infinite |" in text


@pytest.mark.parametrize("text", ["[]", "{}", '{"rows": [{"model": 1}]}'])
def test_files_that_are_no_results(tmp_path: Path, text: str) -> None:
    (tmp_path / "old.json").write_text(text, encoding="utf-8")
    with pytest.raises(InputError):
        read_result(tmp_path / "old.json")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "pass MODEL.onnx, or --suite FOLDER"),
        (["m.onnx", "--suite", "."], "--suite cannot be used with the model 'm.onnx'"),
        (["--suite", ".", "--compare"], "--compare cannot be used with --suite"),
        (["m.onnx", "--only", "a"], "--only needs --suite"),
        (["m.onnx", "-o", "a.json"], "--output needs --suite"),
        (["m.onnx", "--against", "a.json"], "--against needs --suite"),
        (["m.onnx", "--cpu", "-t", "2"], "--cpu cannot be used with --threads 2"),
        (["--suite", ".", "-o", "a.txt"], "choose a name that ends in .json, .md or .html"),
        (["--suite", ".", "-o", "a.json", "--against", "a.json"], "is the same file as --against"),
    ],
)
def test_contradictory_flags(flags: list[str], said: str, capsys: Capture) -> None:
    if "." in flags:
        pytest.importorskip("onnxruntime")
    assert run(["bench", "session", *flags]) == 2
    assert said in capsys.readouterr().err


def test_without_onnxruntime(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    assert run(["bench", "session", "--suite", str(folder)]) == 1
    assert "pip install onnxruntime" in capsys.readouterr().err
