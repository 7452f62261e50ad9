"""The comparison with other engines: its files, resuming, and messages, without any of them installed."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import ml_dtypes  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

import genai  # noqa: E402
from tools import compare_peers  # noqa: E402
from tools.peers import adapter, measure, results  # noqa: E402
from tools.peers.cases import Case, Job, Measured, cases  # noqa: E402
from tools.peers.checkpoint import make_checkpoint  # noqa: E402
from tools.peers.engines import ENGINES, OURS, PEERS  # noqa: E402
from tools.peers.engines.base import Engine, last_json  # noqa: E402
from tools.peers.measure import Comparison, make_models  # noqa: E402
from tools.peers.processes import Outcome, PeerError, run_measured, spinning  # noqa: E402
from tools.peers.report import render  # noqa: E402
from tools.peers.results import Ceiling, Results, ResultsError, Run, load  # noqa: E402
from tools.peers.shapes import SHAPES, Shape  # noqa: E402
from tools.peers.workers import timing  # noqa: E402
from tools.random_weights import RandomWeights  # noqa: E402

TINY, LLAMA = SHAPES["tiny"], SHAPES["llama-3.2-1b"]
MACHINE = {
    "processor": "Some processor",
    "cores": 2,
    "features": ["AVX2", "FMA"],
    "last_level_cache": 2**25,
    "memory": 2**34,
    "system": "Linux",
    "python": "3.11.7",
}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A work folder with the tiny checkpoint and our model of it."""
    folder = tmp_path_factory.mktemp("peers")
    said: list[str] = []
    assert make_models(folder, [TINY], [OURS], said.append)
    return folder


@pytest.fixture
def sample() -> Results:
    """Two engines on one shape, every case three times, the busy one with a newer commit; a peer that fails once."""
    found = Results(dict(MACHINE))
    for case in cases(2).values():
        versions = {"genai": "1.0", "commit": "def" if case.busy else "abc"}
        for speed in (30.0, 40.0, 90.0):
            first = None if case.warm else 2.0
            ours = Measured(10 * speed, speed, first, 10**9)
            found.runs.append(Run("genai", LLAMA.name, case.name, ours, versions=versions))
            if case.peers:
                theirs = replace(ours, decode=speed / 2, first_token=first and 3.0, peak_bytes=2 * 10**9)
                found.runs.append(Run("llama.cpp", LLAMA.name, case.name, theirs, versions={"gguf": "0.3"}))
            threads = case.threads or 2
            products = {threads: {"fp32": 0.5e12, "vnni int8": 1.5e12}}
            found.ceilings.append(Ceiling(LLAMA.name, case.name, {threads: 40e9}, products))
    found.runs.append(Run("onnxruntime-genai", LLAMA.name, "busy", error="python was ended by SIGSEGV: "))
    return found


class TestShapes:
    def test_packed_bytes_of_the_1b_shape(self) -> None:
        """1.236 billion weights in matrices at 4.5 bits, and 16 layers of 8 heads of 64 keys and values."""
        layer = 2048 * (2048 + 512 + 512 + 2048) + 3 * 2048 * 8192
        assert LLAMA.packed_bytes == (128256 * 2048 + 16 * layer) * 9 // 16
        assert LLAMA.kv_bytes_per_token == 2 * 16 * 8 * 64 * 2
        assert LLAMA.operations_per_token == 2 * 16 * layer

    def test_a_step_reads_weights_once_and_every_sequence(self) -> None:
        step = LLAMA.bytes_per_step(100, batch=4)
        assert step == LLAMA.packed_bytes + 400 * LLAMA.kv_bytes_per_token

    def test_sizes_suit_blocks_of_32(self) -> None:
        for shape in SHAPES.values():
            assert shape.config["hidden_size"] % 32 == shape.config["intermediate_size"] % 32 == 0


class TestCheckpoint:
    def test_weights_are_those_of_the_seed(self, work: Path) -> None:
        found = load_file(work / "checkpoints" / "tiny" / "model.safetensors")
        expected = RandomWeights(TINY.spec, 0)
        assert set(found) == set(expected)
        name = "model.layers.3.self_attn.k_proj.weight"
        np.testing.assert_array_equal(found[name], expected[name].astype(ml_dtypes.bfloat16))

    def test_the_tokenizer_fills_the_vocabulary(self, work: Path) -> None:
        tokenizer = Tokenizer.from_file(str(work / "checkpoints" / "tiny" / "tokenizer.json"))
        assert tokenizer.get_vocab_size() == TINY.config["vocab_size"]
        text = "def naïve(): return '東京'\n"
        assert tokenizer.decode(tokenizer.encode(text).ids) == text

    def test_a_larger_vocabulary_is_padded(self, tmp_path: Path) -> None:
        shape = Shape("wide", "wide", {**TINY.config, "vocab_size": 9000, "num_hidden_layers": 1})
        folder = make_checkpoint(tmp_path / "wide", shape)
        vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        assert sorted(vocabulary.values()) == list(range(9000))

    def test_what_is_there_stays(self, tmp_path: Path) -> None:
        (tmp_path / "tiny").mkdir()
        assert make_checkpoint(tmp_path / "tiny", TINY) == tmp_path / "tiny"
        assert not list((tmp_path / "tiny").iterdir())


class TestAdapter:
    def test_every_projection_has_one(self, work: Path, tmp_path: Path) -> None:
        folder = adapter.make_adapter(tmp_path / "a", TINY)
        with genai.Model(OURS.model(work, "tiny"), quiet=True) as model:
            genai.Adapters(model).load(folder, "one")
        stored = load_file(folder / "adapter_model.safetensors")
        assert len(stored) == 2 * 7 * TINY.config["num_hidden_layers"]
        assert {min(array.shape) for array in stored.values()} == {adapter.RANK}

    def test_a_graph_with_its_inputs_computes_the_sum(self, tmp_path: Path) -> None:
        folder = adapter.make_adapter(tmp_path / "a", TINY)
        factors = adapter.factors_of(folder)
        rng = np.random.default_rng(1)
        nodes, weights = [], []
        for name, first in factors.items():
            if ".lora_A." in name:
                module = name.partition(".lora_A.")[0]
                rows, columns = first.shape[0], factors[name.replace("lora_A", "lora_B")].shape[1]
                weights.append(onnx.numpy_helper.from_array(rng.standard_normal((rows, columns), np.float32), module))
                node = f"/{module.replace('.', '/').replace('layers/', 'layers.')}/MatMul"
                nodes.append(onnx.helper.make_node("MatMul", [f"x{rows}", module], [f"y/{module}"], node))
        widths = sorted({int(node.input[0][1:]) for node in nodes})
        inputs = [onnx.helper.make_tensor_value_info(f"x{width}", 1, [2, width]) for width in widths]
        outputs = [onnx.helper.make_tensor_value_info(node.output[0], 1, None) for node in nodes]
        model = onnx.helper.make_model(
            onnx.helper.make_graph(nodes, "g", inputs, outputs, weights),
            opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10,
        )  # fmt: skip
        onnx.save(model, tmp_path / "m.onnx")
        feeds = {f"x{width}": rng.standard_normal((2, width), np.float32) for width in widths}
        names = [node.output[0] for node in nodes]
        session = genai.InferenceSession(tmp_path / "m.onnx")
        plain = dict(zip(names, session.run(None, feeds), strict=True))
        adapter.add_adapter_inputs(tmp_path / "m.onnx", folder)
        session = genai.InferenceSession(tmp_path / "m.onnx")
        for feed in (feeds, feeds | factors):
            for name, found in zip(names, session.run(None, feed), strict=True):
                module = name.removeprefix("y/")
                first, second = (factors[f"{module}.lora_{factor}.MatMul.weight"] for factor in "AB")
                delta = feeds[f"x{len(first)}"] @ first @ second if feed is not feeds else 0
                np.testing.assert_allclose(found, plain[name] + delta, atol=1e-4)

    def test_a_graph_without_its_projections(self, tmp_path: Path) -> None:
        folder = adapter.make_adapter(tmp_path / "a", TINY)
        graph = onnx.helper.make_graph([], "g", [], [])
        onnx.save(onnx.helper.make_model(graph), tmp_path / "m.onnx")
        with pytest.raises(ValueError, match="no projection"):
            adapter.add_adapter_inputs(tmp_path / "m.onnx", folder)

    def test_an_engine_without_one_is_left_out(self, work: Path, tmp_path: Path) -> None:
        said: list[str] = []
        comparison = Comparison(Results(dict(MACHINE)), tmp_path / "r.json", work, 1, 1, said.append)
        assert not comparison._takes_part(ENGINES["llama.cpp"], TINY, cases(2)["adapter-batch-1"])
        assert any("llama.cpp skipped: no adapter" in line for line in said)


class TestEngines:
    def test_every_command_names_the_model(self, tmp_path: Path) -> None:
        for engine in ENGINES.values():
            model = engine.model(tmp_path, "tiny")
            for case in cases(2).values():
                job = Job.of(case, str(model), 2048, 2)
                assert any(str(model) in argument for argument in engine.command(tmp_path, job))

    def test_nothing_is_installed_in_an_empty_folder(self, tmp_path: Path) -> None:
        assert OURS.versions(tmp_path)
        assert not any(peer.versions(tmp_path) for peer in PEERS)

    def test_a_workers_line(self) -> None:
        job = Job("m", 10, prompt=100, new=20, batch=4, threads=1, warm=True)
        text = 'noise\n{"prefill_seconds": 2.0, "decode_seconds": 4.0, "first_token_at": 12.5}\n'
        outcome = Outcome(text, started=10.0, seconds=9.0, peak_bytes=7)
        assert OURS.measured(job, outcome) == Measured(200.0, 20.0, None, 7)
        assert OURS.measured(replace(job, warm=False), outcome) == Measured(None, None, 2.5, 7)

    @pytest.mark.parametrize("name", ENGINES)
    def test_an_answer_that_is_none(self, name: str) -> None:
        job = Job("m", 10, prompt=100, new=20, batch=1, threads=1, warm=True)
        with pytest.raises(PeerError, match="the output is not a worker"):
            ENGINES[name].measured(job, Outcome("no idea\n{broken\n", 0.0, 1.0, 7))

    def test_last_json(self) -> None:
        assert last_json('{"a": 1}\n{"a": 2}\n{oops\n') == {"a": 2}
        assert last_json("") == {}

    def test_a_build_that_fails_leaves_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        with pytest.raises(PeerError):
            OURS.make_model(tmp_path, tmp_path / "empty")
        assert not list(OURS.model(tmp_path, "empty").parent.iterdir())


class TestProcesses:
    def test_time_memory_and_output(self) -> None:
        code = "x = bytearray(300_000_000); import time; time.sleep(0.3); print('done')"
        outcome = run_measured([sys.executable, "-c", code], {}, timeout=60)
        assert outcome.output == "done\n"
        assert outcome.seconds >= 0.3
        assert 300e6 < outcome.peak_bytes < 600e6

    def test_a_failure_says_what_was_said(self) -> None:
        with pytest.raises(PeerError, match=r"failed with exit status 3: no such luck"):
            run_measured(
                [sys.executable, "-c", "import sys; print('no such luck', file=sys.stderr); sys.exit(3)"], {}, 60
            )

    def test_a_signal_is_named(self) -> None:
        with pytest.raises(PeerError, match="SIGSEGV"):
            run_measured([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"], {}, 60)

    def test_a_program_that_takes_too_long(self) -> None:
        with pytest.raises(PeerError, match=r"longer than 0 s"):
            run_measured([sys.executable, "-c", "import time; time.sleep(60)"], {}, timeout=0.2)

    def test_a_program_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(PeerError, match="cannot be started"):
            run_measured([str(tmp_path / "nothing")], {}, 60)

    def test_spinners_end(self) -> None:
        with pytest.raises(KeyboardInterrupt):
            with spinning(2):
                raise KeyboardInterrupt


class TestResults:
    def test_what_is_saved_is_loaded(self, sample: Results, tmp_path: Path) -> None:
        path = tmp_path / "new" / "results.json"
        sample.save(path)
        assert load(path) == sample
        assert [file.name for file in path.parent.iterdir()] == ["results.json"]

    def test_medians(self, sample: Results) -> None:
        assert sample.median("genai", LLAMA.name, "context-128", lambda found: found.decode) == 40.0
        assert sample.median("genai", LLAMA.name, "cold", lambda found: found.first_token) == 2.0
        assert sample.median("onnxruntime-genai", LLAMA.name, "busy", lambda found: found.decode) is None

    def test_forget(self, sample: Results) -> None:
        sample.forget({"genai"}, {LLAMA.name}, {"context-8192", "cold"})
        left = {(run.engine, run.case) for run in sample.runs}
        assert ("genai", "cold") not in left
        assert ("llama.cpp", "cold") in left
        assert sample.ceilings_of(LLAMA.name, "cold")
        assert not sample.ceilings_of(LLAMA.name, "context-8192")

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', '{"format": 2}', '{"format": 99}'])
    def test_other_files(self, text: str, tmp_path: Path) -> None:
        (tmp_path / "r.json").write_text(text)
        with pytest.raises(ResultsError, match=r"r\.json"):
            load(tmp_path / "r.json")

    def test_another_machine(self, sample: Results, tmp_path: Path) -> None:
        sample.save(tmp_path / "r.json")
        with pytest.raises(ResultsError, match="choose another file"):
            results.load_or_begin(tmp_path / "r.json")


class TestComparison:
    def test_ours_really_runs_and_a_second_time_does_nothing(
        self, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Comparison, "_measure_ceilings", lambda self, shape, case: None)
        found, said = Results(results.this_machine()), []
        comparison = Comparison(found, tmp_path / "r.json", work, cores=1, repeat=1, say=said.append)
        adapter.make_adapter(work / "adapters" / "tiny", TINY)
        wanted = [
            Case("context-128", 16, 4), Case("cold", 16, 1, warm=False), Case("adapter-batch-1", 16, 4, adapter=True)
        ]  # fmt: skip
        comparison.run([TINY], [OURS, PEERS[0]], wanted)
        warm, cold, adapted = (run.measured for run in load(tmp_path / "r.json").runs)
        assert warm is not None and cold is not None and adapted is not None and adapted.decode
        assert warm.prefill and warm.decode and warm.first_token is None
        assert cold.first_token and cold.decode is None
        assert any("not installed" in line for line in said)
        before = list(found.runs)
        comparison.run([TINY], [OURS], wanted)
        assert found.runs == before

    def test_turns(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ceilings, every engine, and again; failed runs and existing results are not repeated."""
        order: list[str] = []

        def measured(self: Comparison, engine: Engine, shape: Shape, case: Case) -> Run:
            order.append(engine.name)
            if engine.name == "llama.cpp":
                return Run(engine.name, shape.name, case.name, error="does not")
            return Run(engine.name, shape.name, case.name, Measured(1.0, 1.0, None, 1))

        monkeypatch.setattr(Comparison, "_measured", measured)
        monkeypatch.setattr(Comparison, "_installed", lambda self, engine: True)
        monkeypatch.setattr(Comparison, "_has_model", lambda self, engine, shape: True)
        monkeypatch.setattr(Comparison, "_rehearse", lambda self, shape, engines, cases: None)
        monkeypatch.setattr(
            Comparison,
            "_measure_ceilings",
            lambda self, shape, case: (
                order.append("ceilings"),
                self.results.ceilings.append(Ceiling(shape.name, case.name, {}, {})),
            ),
        )
        found = Results(dict(MACHINE), runs=[Run("genai", "tiny", "c", Measured(1.0, 1.0, None, 1))])
        engines = [ENGINES[name] for name in ("genai", "openvino-genai", "llama.cpp")]
        Comparison(found, tmp_path / "r.json", tmp_path, 1, 3, lambda line: None).run(
            [TINY], engines, [Case("c", 1, 1)]
        )
        peer, second = "openvino-genai", "ceilings genai openvino-genai".split()
        assert order == ["ceilings", peer, "llama.cpp", *second, *second]

    def test_what_is_missing_is_said_and_left_out(self, tmp_path: Path) -> None:
        found, said = Results(dict(MACHINE)), []
        comparison = Comparison(found, tmp_path / "r.json", tmp_path, 1, 2, said.append)
        comparison.run([TINY], [OURS, PEERS[0]], [Case("c", 1, 1)])
        assert not found.runs
        assert any("genai skipped: no model (`models` makes one)" in line for line in said)
        assert any("onnxruntime-genai: skipped: not installed" in line for line in said)

    def test_other_versions_are_said(self, tmp_path: Path) -> None:
        old = Run("genai", "tiny", "c", Measured(1.0, 1.0, None, 1), versions={"genai": "0.0.1"})
        found, said = Results(dict(MACHINE), runs=[old]), []
        Comparison(found, tmp_path / "r.json", tmp_path, 1, 1, said.append).run([], [OURS], [])
        assert any("tiny c was measured with {'genai': '0.0.1'}" in line for line in said)

    def test_failures_are_recorded(self, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Failing ceilings and failing engines do not end the run."""
        monkeypatch.setattr(measure, "run_measured", _fail)
        found, said = Results(dict(MACHINE)), []
        Comparison(found, tmp_path / "r.json", work, 1, 3, said.append).run([TINY], [OURS], [Case("c", 1, 1)])
        assert [run.error for run in found.runs] == ["it broke"]
        assert any("ceilings: it broke" in line for line in said)


def _fail(*arguments: object) -> Outcome:
    raise PeerError("it broke")


class TestReport:
    def test_the_page(self, sample: Results) -> None:
        page = render(sample)
        share = 40 * LLAMA.bytes_per_step(128 + 64) / 40e9
        ours = next(line for line in page.splitlines() if line.startswith("| genai | 40.0"))
        assert f"| 40.0 ({share:.0%}) |" in ours
        assert "| 2.00 s | 1.00 GB | 40.0 (100%) |" in ours
        assert f"| 400 ({400 * LLAMA.operations_per_token / 1.5e12:.0%}) |" in ours
        assert "| llama.cpp | 2.00x |" in page
        assert "| 1.50x | 2.00x |" in page  # the first token, and memory: theirs over ours
        assert "- onnxruntime-genai, llama-3.2-1b, busy: python was ended by SIGSEGV" in page
        assert "python -m tools.compare_peers run" in page
        assert "Some processor, 2 cores used" in page
        assert "| genai | genai 1.0, commit abc; busy: commit def |" in page
        assert "| llama.cpp | gguf 0.3 |" in page
        assert "span 150% of the figure" in page

    def test_tables_are_rectangular(self, sample: Results) -> None:
        widths: list[int] = []
        for line in render(sample).splitlines():
            if not line.startswith("|"):
                widths = []
                continue
            widths.append(line.count("|"))
            assert widths[0] == widths[-1], line

    def test_nothing_measured(self) -> None:
        page = render(Results(dict(MACHINE)))
        assert "## The machine" in page
        assert "All engines" not in page

    def test_what_was_not_measured_is_a_dash(self, sample: Results) -> None:
        sample.runs = [run for run in sample.runs if run.case == "context-128"]
        page = render(sample)
        assert "| genai | 40.0 (" in page
        assert "### Threads" not in page
        assert "| - | - |" in page

    def test_what_an_adapter_costs(self, sample: Results) -> None:
        sample.runs = [
            replace(run, measured=replace(run.measured, decode=run.measured.decode / 1.25))
            if run.measured and (run.engine, run.case) == ("genai", "adapter-batch-1")
            else run
            for run in sample.runs
        ]
        assert "| genai | 40.0 | 32.0 | 25.0% | 40.0 | 40.0 | 0.0% |" in render(sample)


class TestCommandLine:
    def test_report(self, sample: Results, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        sample.save(tmp_path / "r.json")
        page = tmp_path / "page.md"
        assert compare_peers.main(["report", "--json", str(tmp_path / "r.json"), "-o", str(page)]) == 0
        assert page.read_text(encoding="utf-8") == render(sample)
        assert "wrote" in capsys.readouterr().out

    def test_no_results(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert compare_peers.main(["report", "--work", str(tmp_path)]) == 2
        assert "results.json cannot be read" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "arguments",
        [
            [],
            ["run", "--engine", "nobody"],
            ["run", "--case", "context-7"],
            ["run", "--repeat", "0"],
            ["models", "--shape", "huge"],
            ["report", "--again"],
        ],
    )
    def test_bad_arguments(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            compare_peers.main(arguments)
        assert ended.value.code == 2
        assert "usage" in capsys.readouterr().err

    def test_models_say_what_is_not_installed(self, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
        asked = ["models", "--work", str(work), "--shape", "tiny", "--engine", "openvino-genai"]
        assert compare_peers.main(asked) == 1
        assert "openvino-genai: not installed" in capsys.readouterr().out


def test_what_warms_an_engine_up_is_not_what_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise an engine that caches prompts would have nothing to compute in the measured run."""
    asked = []

    def generate(rows, steps):
        asked.append((rows, steps))
        return 1.0, 2.0

    timing.measure(generate, {"vocab_size": 1000, "batch": 2, "prompt": 700, "new": 8, "warm": True})
    (warm, warm_steps), (rows, steps) = asked
    assert [len(row) for row in warm] == [timing.WARM_PROMPT] * 2 and [len(row) for row in rows] == [700] * 2
    assert (warm_steps, steps) == (timing.WARM_STEPS, 8)
    assert all(a[:8] != b[:8] for a in warm for b in rows)
    assert json.loads(capsys.readouterr().out)["decode_seconds"] == 2.0
