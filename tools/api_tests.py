"""Run onnxruntime-genai's own API tests against `genai`: `python -m tools.api_tests CHECKOUT`.

CHECKOUT is a checkout of onnxruntime-genai's repository, which stays unchanged. The tests expect five downloaded
models; small models with random weights and the same interface replace them. The exit status is 1 if a case that is not
in `WAITING`, `WAITING_FILES` or `DIFFERS` fails.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

FILES = (
    "test_onnxruntime_genai_api.py", "models/test_decoder_state_input_ids.py", "test_onnxruntime_genai_engine.py",
    "models/test_gemma4_models.py", "models/test_n_gram_decoding.py", "models/test_parakeet_tdt.py",
    "models/test_qwen_3_5_text_only.py", "models/test_qwen_fara_models.py", "models/test_speculative_decoding.py",
)  # fmt: skip
# Prefixes of case names, and the unsupported feature that these cases need.
WAITING = {
    "test_marian": "encoder-decoder models",
    "test_phi3v": "images",
    "test_pipeline_model": "models in several graphs",
    "test_streaming_asr": "speech",
    "test_whisper": "speech",
}
# The same for all cases of a file.
WAITING_FILES = {
    "test_onnxruntime_genai_engine": "graphs with block tables as inputs",
    "test_gemma4_models": "images",
    "test_parakeet_tdt": "speech",
    "test_qwen_fara_models": "images",
}
# Cases of the files for speculative decoding that expect something else than this toolkit does, and what it does.
_REWINDS = "rewind_to(n) leaves n tokens, and the next call does not append the removed token n again"
_COMPUTES_LATE = "the step that verifies the next proposals also computes tokens that were chosen before"
_NO_INPUTS = "graphs with inputs other than tokens and states run as exported, without speculation"
DIFFERS = {
    "test_get_logits_after_nonzero_rewind_matches_boundary_reappend": _REWINDS,
    "test_get_logits_after_rewind_matches_reappend": _REWINDS,
    "test_fast_forward_tokens_share_one_batched_verify_round": _COMPUTES_LATE,
    "test_fast_forward_carry_spans_multiple_k_limited_rounds": (
        "the width of a round does not limit the tokens that a grammar determines"
    ),
    "test_speedup_formula_with_measured_target_baseline": _COMPUTES_LATE,
    "test_no_repeat_ngram_size": "no_repeat_ngram_size can be used with a draft model",
    "test_unsupported_config_fails_fast_without_corrupting_model[bad2]": (
        "no_repeat_ngram_size can be used with a draft model"
    ),
    "test_rejected_sampling_forced_tokens_share_rng_checkpoint": (
        "the graph of the test runs as exported, because it expands a constant to the number of tokens"
    ),
    "test_get_logits_mid_round_pruned_target_is_side_effect_free": (
        "graphs that return only the last row of logits run as exported, without speculation"
    ),
    "test_named_input_falls_back_to_draft": _NO_INPUTS,
    "test_unknown_extra_input_throws": "set_model_input refuses unknown inputs at once",
    "test_extra_input_reaches_both_children_and_adapter_reaches_target": _NO_INPUTS,
    "test_runtime_profiling_reaches_both_child_sessions": "there are no sessions of onnxruntime to profile",
}
_SIZES: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_size": 16,
    "context_length": 512,
}
_PHI2 = {"vocab_size": 51200, "bos_token_id": 50256, "eos_token_ids": (50256,), "pad_token_id": 50256}
# The folder that the tests look for, the model that replaces it, and the folder that provides the tokenizer.
_STAND_INS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("phi-2/int4/cpu", _PHI2, "pipeline-model"),
    ("phi-3-mini/int4/cpu", {"vocab_size": 32064}, "phi3-v"),
    ("qwen-2.5-0.5b/int4/cpu", {**_PHI2, "hidden_size": 896}, "pipeline-model"),
    ("qwen3-speculative/qwen3-0.6b", {**_PHI2, "model_type": "qwen3"}, "pipeline-model"),
    ("qwen3-speculative/qwen3-1.7b", {**_PHI2, "model_type": "qwen3", "num_layers": 2}, "pipeline-model"),
)


@dataclass(frozen=True)
class Case:
    """The result of one case: its name, its outcome, the reason, and its file's name.

    Outcomes are "passed", "failed", "skipped", "waits" (see `WAITING`) and "differs" (see `DIFFERS`).
    """

    name: str
    outcome: str
    reason: str = ""
    file: str = ""


def run(checkout: Path) -> list[Case]:
    """Run the tests in a copy of a checkout of onnxruntime-genai."""
    with tempfile.TemporaryDirectory() as name:
        workshop = Path(name)
        shutil.copytree(checkout / "test", workshop / "test", ignore=shutil.ignore_patterns("*.cpp", "csharp"))
        models = workshop / "test" / "models"
        write_stand_ins(models)
        (workshop / "shim").mkdir()
        redirect = "import sys, genai\nsys.modules['onnxruntime_genai'] = genai\n"
        (workshop / "shim" / "onnxruntime_genai.py").write_text(redirect, encoding="utf-8")
        tests = workshop / "test" / "python"
        path = os.pathsep.join([str(workshop / "shim"), str(Path(__file__).resolve().parent.parent)])
        report = workshop / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tests}"]
        files = [str(tests / file) for file in FILES if (tests / file).is_file()]
        arguments = [f"--junitxml={report}", f"--test_models={models}", *files]
        environment = {**os.environ, "PYTHONPATH": path, "ORT_DISABLE_TELEMETRY": "1"}
        done = subprocess.run([*command, *arguments], cwd=tests, env=environment, capture_output=True, text=True)
        if not report.is_file():
            raise SystemExit(f"pytest wrote no report:\n{done.stdout}{done.stderr}")
        return [_case(element) for element in ElementTree.parse(report).iter("testcase")]


def _case(element: ElementTree.Element) -> Case:
    name, parts = element.get("name", ""), element.get("classname", "").split(".")
    file = next((part for part in parts if part.startswith("test_")), "")
    for kind, outcome in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        found = element.find(kind)
        if found is not None:
            waits = next((why for start, why in WAITING.items() if name.startswith(start)), WAITING_FILES.get(file, ""))
            if waits and outcome == "failed":
                return Case(name, "waits", waits, file)
            differs = next((what for start, what in DIFFERS.items() if name.startswith(start)), "")
            if differs and outcome == "failed":
                return Case(name, "differs", differs, file)
            return Case(name, outcome, (found.get("message") or "").strip().split("\n")[0], file)
    return Case(name, "passed", "", file)


def write_stand_ins(models: Path) -> None:
    """Write small models with random weights to the folders of the models that the tests download."""
    from genai.convert import DecoderSpec, ExportOptions, write_model_folder
    from tools.random_weights import RandomWeights

    for name, changes, tokenizer in _STAND_INS:
        folder = models / name
        if not (models / tokenizer).is_dir():
            continue
        spec = DecoderSpec(**{**_SIZES, **changes})
        folder.parent.mkdir(parents=True, exist_ok=True)
        weights = RandomWeights(spec, seed=spec.num_layers)  # a target and its draft differ
        write_model_folder(folder, spec, ExportOptions(), weights, tokenizer_dir=models / tokenizer)
        if "speculative" in name:
            _put_into_one_file(folder / "model.onnx")
        else:
            _show_hidden_states(folder / "model.onnx", spec.hidden_size)


def _put_into_one_file(path: Path) -> None:
    """Move the weights into the model's file, because the tests copy only that file."""
    import onnx

    model = onnx.load(path)
    path.with_name("model.onnx.data").unlink()
    onnx.save(model, path)


def _show_hidden_states(path: Path, width: int) -> None:
    """Make the head's input an output of the graph, as the builder's option `include_hidden_states` does."""
    import onnx
    from onnx import helper

    model = onnx.load(path, load_external_data=False)
    head = next(node for node in model.graph.node if "logits" in node.output)
    old = head.input[0]
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = ["hidden_states" if name == old else name for name in names]
    shape = ["batch_size", "sequence_length", width]
    model.graph.output.append(helper.make_tensor_value_info("hidden_states", onnx.TensorProto.FLOAT, shape))
    kept = [value for value in model.graph.value_info if value.name not in (old, "hidden_states")]
    del model.graph.value_info[:]
    model.graph.value_info.extend(kept)
    path.write_bytes(model.SerializeToString())


def _totals(cases: list[Case]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in Counter(case.outcome for case in cases).items())


def main() -> None:
    """Print each case and the totals of each file and of all files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("checkout", type=Path)
    given = parser.parse_args()
    if not (given.checkout / "test" / "python" / FILES[0]).is_file():
        parser.error(f"{given.checkout} is not a checkout of onnxruntime-genai: test/python/{FILES[0]} is missing")
    cases = run(given.checkout.resolve())
    for case in cases:
        print(f"{case.outcome:<8} {case.name}{': ' if case.reason else ''}{case.reason}")
    for file in dict.fromkeys(case.file for case in cases):
        print(f"{file}: {_totals([case for case in cases if case.file == file])}")
    print(_totals(cases))
    sys.exit(any(case.outcome == "failed" for case in cases))


if __name__ == "__main__":
    main()
