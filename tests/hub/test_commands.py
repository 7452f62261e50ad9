"""`genai pull`, `list`, `show`, `rm`, and MODEL by name in every command."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import genai
from genai.cli.app import run
from genai.errors import GenaiError, ModelFolderError, OptionError
from genai.hub.store import models
from genai.models.folders import bundled_model
from tools.checkpoint_gguf import write_gguf
from tools.local_hub import Fault, LocalHub

from .conftest import CHECKPOINT, left

Capture = pytest.CaptureFixture[str]
QUESTION = ["-p", "What is 12 + 7?"]


@pytest.fixture
def tiny(hub: LocalHub, chatting: dict[str, bytes]) -> LocalHub:
    """A hub with a checkpoint that chats."""
    hub.add("org/tiny-llama", {**chatting, "pytorch_model.bin": b"x" * 9999}, facts={"cardData": {"license": "mit"}})
    return hub


def test_chat_with_a_name(tiny: LocalHub, cache: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first use asks, pulls and builds; the second use does none of these."""
    assert run(["chat", "org/tiny-llama", *QUESTION]) == 1
    said = capsys.readouterr().err
    assert "org/tiny-llama is not in the cache" in said and "is not a terminal" in said
    assert "`genai pull org/tiny-llama`" in said and "--yes" in said
    assert left(cache) == []

    assert run(["chat", "org/tiny-llama", "--yes", *QUESTION]) == 0
    first = capsys.readouterr()
    assert first.out.strip() == "19"
    for text in ("safetensors (1 file), 8.8 MB, into", "licence: mit", "the weights need about", "INT4 model"):
        assert text in first.err
    assert not any("pytorch_model" in path for path in tiny.paths())

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asked = len(tiny.requests)
    for name in ("org/tiny-llama", "hf:org/tiny-llama", "tiny-llama", f"{tiny.url}/org/tiny-llama/tree/main"):
        assert run(["chat", name, "--no-build", *QUESTION]) == 0
        again = capsys.readouterr()
        assert (again.out, again.err) == (first.out, "")
    assert len(tiny.requests) == asked


def test_a_model_that_does_not_fit_is_said_before_the_download(
    tiny: LocalHub, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genai.common.memory_limits.available_memory", lambda: 1_000_000)
    assert run(["chat", "org/tiny-llama", *QUESTION]) == 1
    said = capsys.readouterr().err
    assert "the model will not fit in memory: the weights need about 2.8 MB of memory; 1.0 MB is free" in said
    assert not any("/resolve/" in path for path in tiny.paths())


def test_precisions(tiny: LocalHub, capsys: Capture) -> None:
    assert run(["pull", "org/tiny-llama", "--precision", "int8"]) == 0
    built = Path(capsys.readouterr().out.strip())
    assert built.parent.name == "built" and built.name.startswith("tiny-llama-int8-")
    # As it was built last; then in another way, beside it.
    assert run(["generate", "tiny-llama", "-p", "x", "-n", "1", "--no-build"]) == 0
    assert run(["generate", "tiny-llama", "-p", "x", "-n", "1", "--precision", "fp32"]) == 0
    assert sorted(folder.name.split("-")[2] for folder in models()[0].built()) == ["fp32", "int8"]
    capsys.readouterr()
    assert run(["chat", "tiny-llama", "--precision", "int3", *QUESTION]) == 2
    assert "int3" in capsys.readouterr().err
    assert run(["chat", "--precision", "int8", *QUESTION]) == 2
    assert "without MODEL" in capsys.readouterr().err
    assert run(["chat", str(bundled_model()), "--precision", "int8", *QUESTION]) == 2
    assert "only a checkpoint can be stored in another precision" in capsys.readouterr().err


def test_an_onnx_folder_in_a_repository(hub: LocalHub, capsys: Capture) -> None:
    place = "cpu_and_mobile/cpu-int4-rtn-block-32-acc-level-4"
    files = {f"{place}/{path.name}": path.read_bytes() for path in bundled_model().iterdir() if path.is_file()}
    other = {path.replace("cpu_and_mobile/cpu", "cuda/cuda"): data for path, data in files.items()}
    hub.add("org/onnx", {**files, **other, "README.md": b"x"})
    assert run(["pull", "org/onnx", "--precision", "int8"]) == 2
    assert "omit --precision" in capsys.readouterr().err
    assert hub.paths() == ["/api/models/org/onnx"]
    assert run(["chat", "org/onnx", "--yes", *QUESTION]) == 0
    first = capsys.readouterr()
    assert first.out.strip() == "19"
    assert f"the ONNX folder {place}, written for CPUs, 3." in first.err
    assert "Building" not in first.err
    assert not any("/cuda/" in path for path in hub.paths())
    assert run(["info", "onnx", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["folder"].endswith(place)
    assert run(["list"]) == 0
    assert "onnx, 3" in (shown := capsys.readouterr().out) and "int4" in shown
    assert run(["chat", "onnx", "--precision", "int8", *QUESTION]) == 2
    assert "omit --precision" in capsys.readouterr().err
    with genai.LLM("org/onnx") as llm, genai.Model("onnx") as model:
        assert llm.chat("What is 12 + 7?").text == "19"
        assert model.folder == llm.model.folder


def test_a_gguf_file(hub: LocalHub, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first use builds a model folder beside the file; later ones need neither a network nor a build."""
    names = {kind: f"pebble-{kind}.gguf" for kind in ("Q8_0", "Q4_0")}
    files = {name: write_gguf(CHECKPOINT, tmp_path / name, kind).read_bytes() for kind, name in names.items()}
    hub.add("org/pebble-GGUF", files)
    assert run(["pull", "org/pebble-GGUF:Q8_0"]) == 0
    place = Path(capsys.readouterr().out.strip())
    assert place.read_bytes() == files["pebble-Q8_0.gguf"]
    assert run(["list"]) == 0
    assert "gguf, 4.7 MB, Q8_0" in capsys.readouterr().out
    assert run(["chat", "org/pebble-GGUF:Q8_0", "--no-build", *QUESTION]) == 1
    assert "GGUF file that has not been built" in capsys.readouterr().err
    assert run(["chat", "org/pebble-GGUF:Q8_0", "--yes", *QUESTION]) == 0
    first = capsys.readouterr()
    assert first.out.strip() == "19"
    (model,) = models()
    (built,) = model.built()
    assert built.parent == model.folder / "built" and built.name.startswith("pebble-Q8_0-kept-")
    assert f"stored in {built}" in first.err and "Building a model with unchanged weights" in first.err
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run(["chat", "org/pebble-GGUF:Q8_0", "--no-build", *QUESTION]) == 0
    assert capsys.readouterr() == (first.out, "")
    assert run(["generate", "org/pebble-GGUF:Q8_0", "--precision", "int8", "-p", "x", "-n", "1", "--yes"]) == 0
    assert len(models()[0].built()) == 2
    capsys.readouterr()
    assert run(["list"]) == 0
    assert "Q8_0 → int8, kept" in capsys.readouterr().out
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with genai.LLM("org/pebble-GGUF:Q4_0", pull=True, quiet=True) as llm:
        assert llm.model.folder.name.startswith("pebble-Q4_0-kept-")


def test_list_show_and_rm(tiny: LocalHub, cache: Path, capsys: Capture) -> None:
    assert run(["list"]) == 0
    assert "the cache is empty" in capsys.readouterr().err
    assert run(["pull", "org/tiny-llama"]) == 0
    assert run(["show", "tiny-llama"]) == 0
    assert "nothing yet" in capsys.readouterr().out
    assert run(["pull", "org/tiny-llama", "--precision", "int4"]) == 0
    capsys.readouterr()

    assert run(["list"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("org/tiny-llama") and "checkpoint, 11." in shown and "float16 → int4" in shown
    assert run(["list", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["models"]
    assert row["name"] == "org/tiny-llama" and row["bytes"] > 11_000_000 and row["pulled"].startswith("20")

    assert run(["show", "org/tiny-llama"]) == 0
    shown = capsys.readouterr().out
    commit = tiny.repositories["org/tiny-llama"].commit
    for text in (
        "licence",
        "mit",
        commit,
        f"{tiny.url}/org/tiny-llama",
        "model.safetensors 8.7 MB",
        "4,328,704",
        str(cache),
    ):
        assert text in shown
    assert run(["show", "org/tiny-llama", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["revision"] == commit and facts["info"]["layers"] == 6 and len(facts["built"]) == 1

    assert run(["rm", "tiny-llama"]) == 1
    assert "`genai rm tiny-llama --yes`" in capsys.readouterr().err
    assert run(["rm", "tiny-llama", "--yes"]) == 0
    assert "11." in capsys.readouterr().err
    assert left(cache) == []
    for command in (["rm", "tiny-llama", "--yes"], ["rm", "../../etc", "--yes"], ["show", "tiny-llama"]):
        assert run(command) == 1
        assert "is not in the cache" in capsys.readouterr().err or "rm" not in command


def test_unfinished_pulls_are_listed_and_removed(tiny: LocalHub, cache: Path, capsys: Capture) -> None:
    tiny.faults["/cdn/"] = [Fault(cut=0)] * 99
    assert run(["pull", "org/tiny-llama"]) == 1
    capsys.readouterr()
    assert run(["list"]) == 0
    assert "org--tiny-llama  unfinished, " in capsys.readouterr().out
    assert run(["rm", "org/tiny-llama", "--yes"]) == 0
    assert left(cache) == []


def test_programs_name_models(tiny: LocalHub, capsys: Capture) -> None:
    with pytest.raises(ModelFolderError, match="not a model folder") as caught:
        genai.LLM("org/tiny-llama")
    assert "`genai pull org/tiny-llama`" in caught.value.fix and "pull=True" in caught.value.fix
    assert tiny.requests == []
    with genai.LLM("org/tiny-llama", pull=True, quiet=True) as llm:
        assert llm.chat("What is 12 + 7?").text == "19"
    assert capsys.readouterr() == ("", "")
    with genai.LLM("tiny-llama", precision="int8", quiet=True) as llm:
        assert llm.model.folder.name.startswith("tiny-llama-int8")
    with genai.Model("org/tiny-llama") as model, pytest.raises(OptionError, match="without a model name"):
        genai.LLM(model, pull=True)
    with pytest.raises(OptionError, match="without a model name"):
        genai.LLM(precision="int8")


def test_other_commands_take_names(tiny: LocalHub, capsys: Capture, tmp_path: Path) -> None:
    assert run(["build", "org/tiny-llama", "-o", str(tmp_path / "out")]) == 1
    assert "is not a terminal" in capsys.readouterr().err
    assert run(["pull", "org/tiny-llama"]) == 0
    assert run(["build", "org/tiny-llama", "-o", str(tmp_path / "out"), "--precision", "fp16"]) == 0
    assert (tmp_path / "out" / "genai_config.json").is_file()
    assert run(["info", "org/tiny-llama"]) == 0
    assert "size after build" in capsys.readouterr().out
    assert run(["bench", "decode", "org/tiny-llama", "-n", "2", "-c", "4", "-r", "1"]) == 0
    assert run(["info", "org/tiny-llama"]) == 0
    assert run(["quantize", "tiny-llama", "-o", str(tmp_path / "q"), "-m", "rtn", "--no-eval"]) == 0
    assert run(["lora", "merge", "org/none", str(tmp_path), "-o", str(tmp_path / "m")]) == 1


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "genai", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_two_processes_pull_at_once(tiny: LocalHub, cache: Path) -> None:
    tiny.faults["/cdn/"] = [Fault(pause=60.0)]
    first = start("pull", "org/tiny-llama")
    wait_until(lambda: any("/cdn/" in path for path in tiny.paths()))
    second = start("pull", "org/tiny-llama")
    assert second.stderr is not None
    while "another process that is downloading" not in (line := second.stderr.readline()):
        assert line
    tiny.stop.set()  # the first goes on
    (out, err), (other_out, other_err) = first.communicate(timeout=60), second.communicate(timeout=60)
    assert (first.returncode, second.returncode) == (0, 0), err + other_err
    assert out == other_out == f"{models()[0].path}\n"
    assert sum(path.endswith("model.safetensors") for path in tiny.paths()) == 1
    assert not any((cache / ".partial").iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_pull_that_is_ended_goes_on(tiny: LocalHub, cache: Path, number: int) -> None:
    digest = next(one for one in tiny.repositories["org/tiny-llama"].listing() if "safetensors" in one["rfilename"])
    tiny.faults[digest["lfs"]["sha256"]] = [Fault(pause=30.0)]
    process = start("pull", "org/tiny-llama")
    half = digest["size"] // 2

    def came() -> int:
        with suppress(FileNotFoundError):  # a small file that is whole by now has its own name
            return max((path.stat().st_size for path in cache.rglob("*.part")), default=0)
        return 0

    wait_until(lambda: came() >= half - 8192)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[signal.Signals(number)]
    assert ("the download is kept" in err) == (number != signal.SIGKILL)
    assert models() == []
    begin = came()
    tiny.requests.clear()
    assert run(["pull", "org/tiny-llama"]) == 0
    asked = [headers.get("range") for path, headers in tiny.requests if digest["lfs"]["sha256"] in path]
    assert asked == [f"bytes={begin}-"]
    assert (models()[0].path / "model.safetensors").stat().st_size == digest["size"]


def test_every_error_is_one_of_ours(tiny: LocalHub, capsys: Capture) -> None:
    """Whatever is given for a name: a message in three parts, no traceback."""
    for given in ("hf:", "hf:a/b/c", "https://", "x" * 3000, "a\nb", "org/name@..", "-", "~nobody/x", "*/*"):
        for command in (["pull", given], ["chat", given, "--yes", *QUESTION], ["show", given], ["rm", given, "--yes"]):
            assert run(command) in (1, 2), command
            assert "error: " in capsys.readouterr().err
        with pytest.raises(GenaiError):
            genai.pull(given, quiet=True)
    for given in ("\udcff/x", "\udcff", "a\0b"):
        with pytest.raises(GenaiError):
            genai.pull(given, quiet=True)


def test_something_in_the_place_of_a_model(tiny: LocalHub, cache: Path, capsys: Capture) -> None:
    """The command that the error names clears the place, and keeps what has come."""
    place = cache / "org--tiny-llama"
    place.mkdir(parents=True)
    (place / "file").write_text("x")
    assert run(["pull", "org/tiny-llama"]) == 1
    assert "`genai rm org--tiny-llama`" in capsys.readouterr().err
    assert run(["rm", "org--tiny-llama", "--yes"]) == 0
    assert not place.exists()
    place.write_text("x")
    asked = len(tiny.requests)
    assert run(["pull", "org/tiny-llama"]) == 1
    assert f"move {place} to another folder" in capsys.readouterr().err
    place.unlink()
    assert run(["pull", "org/tiny-llama"]) == 0
    assert len(tiny.requests) == asked + 2  # two listings; the files were there


def test_folders_with_odd_names_are_listed_in_one_line(cache: Path, capsys: Capture) -> None:
    (cache / "a\nb\x1b[31m").mkdir(parents=True)
    assert run(["list"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("\n") == 2 and "\x1b" not in shown  # the folder and the total
