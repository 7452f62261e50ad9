"""Make thirty folders with the tools of their exporters, run each folder, and write the table of folder-layouts.md.

    python tools/published_folders.py FOLDER [NAME ...] [--optimum PYTHON] [--again] [--small] [--write]

The tool needs torch, transformers, onnxruntime-genai and onnxscript. `--optimum` is a Python with optimum-onnx, which
needs transformers 4. The tool writes one checkpoint of about 100 MB with random weights per architecture into FOLDER,
exports it, and builds it with `genai build` in the precision of each export. Existing folders and results are used
again, so an interrupted run continues. `--write` writes the results to published_folders.json and the table to the
page; a test compares the two.

Each folder must reply to `genai chat FOLDER`, and to `genai chat org/NAME` through a local hub. Its logits are compared
with those of transformers, and the logits of three sequences in one batch with those of each sequence alone. The time
per token is compared with the time of the built folder: both decode the same tokens in turn, and the ratio compares the
means of the fastest third of the steps.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import builder_architectures, make_exports
from tools.builder_architectures import Form
from tools.local_hub import LocalHub

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "folder-layouts.md"
RESULTS = ROOT / "tools" / "published_folders.json"
BEGIN, END = "<!-- published folders -->", "<!-- end -->"
PROMPT, STEPS = 40, 60
SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SMALL_SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
CHANGES: dict[str, dict[str, Any]] = {
    "gpt_neox": {"rotary_pct": 0.5},
    # Exports with torch's SDPA, such as optimum's, ignore the cap of the scores.
    "gemma2": {"query_pre_attn_scalar": 64, "sliding_window": 64, "attn_logit_softcapping": None},
    "phi3": {"original_max_position_embeddings": 512},
    "phi": {"partial_rotary_factor": 0.5},
}
# transformers' classes without an implementation of SDPA.
EAGER = ("gemma2",)
WITHOUT_GROUPS = ("gpt_neox", "phi")
GPT2 = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
# The largest difference of logits from transformers, relative to the largest logit. The weights are random, so rounded
# weights cost more than in a trained model. A folder may also differ by this factor more than the built folder.
BOUNDS = {"fp32": 1e-5, "fp16": 5e-3, "int8": 0.15, "int4": 0.4}
FACTOR = 1.1
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@dataclass(frozen=True)
class Case:
    """One folder.

    Attributes:
        model_type: the architecture.
        make: writes the folder from a checkpoint.
        exporter: the tools that wrote the graph.
        files: the names of the graphs.
        precision: the precision of the folder that `genai build` writes for comparison.
        accuracy: the option with which the time is measured: "int8" for graphs that require float32 activations.
    """

    model_type: str
    make: Callable[[Job, Path], None]
    exporter: str
    files: str = "`model.onnx`"
    precision: str = "fp32"
    accuracy: str = "auto"


@dataclass(frozen=True)
class Job:
    """A case with its checkpoint, and the Python that has optimum."""

    case: Case
    source: Path
    optimum: str


@dataclass
class Result:
    """The results of one folder.

    Attributes:
        failures: the checks that failed, in words.
        reason: the reason why the folder runs one sequence at a time; empty = it runs batched.
        error: difference of the logits from transformers.
        built_error: the same for the built folder.
        ratio: time per token, relative to the built folder.
        host: operators in NumPy.
    """

    failures: list[str] = field(default_factory=list)
    reason: str = ""
    error: float = 0.0
    built_error: float = 0.0
    ratio: float = 0.0
    host: list[str] = field(default_factory=list)


def in_optimum(job: Job, program: str, *arguments: str) -> None:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "ORT_DISABLE_TELEMETRY": "1"}
    subprocess.run([job.optimum, "-c", program, *arguments], check=True, env=environment, capture_output=True)


def by_optimum(job: Job, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        source = Path(scratch) / "source"
        shutil.copytree(job.source, source)
        config = json.loads((source / "config.json").read_text())
        # transformers 4 reads these values at the top level, where transformers 5 does not write them.
        changed = {**config, "rope_theta": 10000.0, **CHANGES.get(job.case.model_type, {})}
        (source / "config.json").write_text(json.dumps(changed))
        program = """\
import sys
from optimum.exporters.onnx import main_export
main_export(*sys.argv[1:], task="text-generation-with-past", do_validation=False, no_post_process=False)
"""
        in_optimum(job, program, str(source), str(target))


def by_torch(exporter: str) -> Callable[[Job, Path], None]:
    def make(job: Job, target: Path) -> None:
        make_exports._export_by_torch(exporter, loaded(job.source), target)

    return make


def two_decoders(job: Job, target: Path) -> None:
    """Write the decoders of prompts and of later tokens, as optimum did before version 2."""
    import torch

    model = loaded(job.source)
    make_exports._export_by_torch("", model, target)
    (target / "model.onnx").rename(target / "decoder_with_past_model.onnx")

    class Prompts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any) -> Any:
            given = {"attention_mask": attention_mask, "position_ids": position_ids, "use_cache": True}
            result = self.model(input_ids, **given)
            present = [tensor for layer in result.past_key_values.layers for tensor in (layer.keys, layer.values)]
            return (result.logits, *present)

    ids = torch.randint(3, 300, (2, 5))
    names = ["input_ids", "attention_mask", "position_ids"]
    kinds = [f"present.{layer}.{kind}" for layer in range(model.config.num_hidden_layers) for kind in ("key", "value")]
    torch.onnx.export(
        Prompts(),
        (ids, torch.ones_like(ids), torch.arange(5)[None].expand(2, -1).contiguous()),
        str(target / "decoder_model.onnx"),
        input_names=names,
        output_names=["logits", *kinds],
        dynamic_axes={name: {0: "b", 1: "s"} for name in names} | {name: {0: "b", 2: "t"} for name in kinds},
        opset_version=17,
        dynamo=False,
    )


def merged_decoders(job: Job, target: Path) -> None:
    two_decoders(job, target)
    graphs = [target / "decoder_model.onnx", target / "decoder_with_past_model.onnx"]
    program = (
        "import sys; from optimum.onnx import merge_decoders; merge_decoders(*sys.argv[1:3], save_path=sys.argv[3])"
    )
    in_optimum(job, program, *map(str, graphs), str(target / "decoder_model_merged.onnx"))
    for path in graphs:
        path.unlink()


def by_builder(form: Form, name: str = "") -> Callable[[Job, Path], None]:
    """Return the function that calls onnxruntime-genai's builder; `name` is a graph in transformers.js' layout."""

    def make(job: Job, target: Path) -> None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            builder_architectures.build(job.source, target, form)
        if name:
            as_transformers_js(target, name)

    return make


def as_transformers_js(target: Path, name: str) -> None:
    """Move the graph to onnx/, with its weights beside it in .onnx_data, and remove genai_config.json."""
    import onnx

    model = onnx.load(target / "model.onnx")
    for path in ("model.onnx", "model.onnx.data", "genai_config.json"):
        (target / path).unlink(missing_ok=True)
    save(model, target / "onnx" / name)


def save(model: Any, path: Path) -> None:
    import onnx

    path.parent.mkdir(exist_ok=True)
    onnx.save(model, path, save_as_external_data=True, location=f"{path.name}_data")


def quantised(first: Callable[[Job, Path], None], name: str, quantise: Callable[[Any], Any]) -> Callable[..., None]:
    """Return the function that exports, and quantises the graph with onnxruntime's tools."""

    def make(job: Job, target: Path) -> None:
        import onnx

        first(job, target)
        model = quantise(onnx.load(target / "model.onnx"))
        for path in target.glob("model.onnx*"):
            path.unlink()
        (target / "genai_config.json").unlink(missing_ok=True)
        save(model, target / "onnx" / name)

    return make


def to_int8(model: Any, *, unsigned: bool = False) -> Any:
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "model.onnx"
        kind = QuantType.QUInt8 if unsigned else QuantType.QInt8
        extra = {"EnableSubgraph": True, "MatMulConstBOnly": True}
        quantize_dynamic(model, path, per_channel=unsigned, weight_type=kind, extra_options=extra)
        return onnx.load(path)


def to_uint8(model: Any) -> Any:
    return to_int8(model, unsigned=True)


def to_int4(model: Any) -> Any:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantiser = MatMulNBitsQuantizer(model, block_size=32, is_symmetric=True, accuracy_level=4)
    quantiser.process()
    return quantiser.model.model


def to_nf4(model: Any) -> Any:
    from onnxruntime.quantization.matmul_bnb4_quantizer import MatMulBnb4Quantizer

    quantiser = MatMulBnb4Quantizer(model, MatMulBnb4Quantizer.NF4, 64)
    quantiser.process()
    return quantiser.model.model


def split_embeddings(job: Job, target: Path) -> None:
    """Write a decoder of embeddings and the graph of its embeddings, as for models that also read images."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper
    from safetensors.numpy import load_file

    by_builder(Form("int4", options=("exclude_embeds=true",)), "decoder_model_merged_q4.onnx")(job, target)
    table = load_file(job.source / "model.safetensors")["model.embed_tokens.weight"]
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])
    found = helper.make_tensor_value_info("inputs_embeds", TensorProto.FLOAT, ["batch", "sequence", table.shape[1]])
    node = helper.make_node("Gather", ["table", "input_ids"], ["inputs_embeds"])
    graph = helper.make_graph([node], "embed", [ids], [found], [numpy_helper.from_array(table, "table")])
    decoder = onnx.load(target / "onnx" / "decoder_model_merged_q4.onnx", load_external_data=False)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=decoder.ir_version)
    onnx.save(model, target / "onnx" / "embed_tokens.onnx")


OPTIMUM, SCRIPT, DYNAMO = "optimum", "`torch.onnx`, TorchScript", "`torch.onnx`, dynamo"
BUILDER, GENAI = "builder", "onnxruntime-genai's builder for"
CASES: dict[str, Case] = {
    **{
        f"optimum-{model_type}": Case(model_type, by_optimum, OPTIMUM)
        for model_type in ("gemma2", "gpt2", "gpt_neox", "llama", "phi", "phi3", "qwen2", "qwen3")
    },
    **{
        f"script-{model_type}": Case(model_type, by_torch(""), SCRIPT)
        for model_type in ("gemma2", "gpt_neox", "llama", "phi3")
    },
    **{
        f"dynamo-{model_type}": Case(model_type, by_torch("dynamo"), f"{DYNAMO}, operator set 18")
        for model_type in ("gpt2", "phi", "qwen3")
    },
    "dynamo23-qwen2": Case("qwen2", by_torch("opset23_dynamo"), f"{DYNAMO}, operator set 23"),
    "js-fp32": Case("llama", by_builder(Form("fp32"), "model.onnx"), BUILDER, "`onnx/model.onnx`"),
    "js-fp16": Case("llama", by_builder(Form("fp16"), "model_fp16.onnx"), BUILDER, "`onnx/model_fp16.onnx`", "fp16"),
    "js-q4": Case("qwen2", by_builder(Form("int4"), "model_q4.onnx"), BUILDER, "`onnx/model_q4.onnx`", "int4"),
    "js-q4f16": Case(
        "qwen2", by_builder(Form("int4", "webgpu"), "model_q4f16.onnx"), BUILDER, "`onnx/model_q4f16.onnx`", "int4"
    ),
    "js-int8": Case(
        "llama",
        quantised(by_builder(Form("fp32")), "model_int8.onnx", to_int8),
        f"{BUILDER}, `quantize_dynamic`",
        "`onnx/model_int8.onnx`",
        "int8",
    ),
    "js-uint8": Case(
        "qwen3",
        quantised(by_optimum, "model_quantized.onnx", to_uint8),
        f"{OPTIMUM}, `quantize_dynamic`",
        "`onnx/model_quantized.onnx`",
        "int8",
    ),
    "js-optimum-q4": Case(
        "qwen3",
        quantised(by_optimum, "model_q4.onnx", to_int4),
        f"{OPTIMUM}, `MatMulNBitsQuantizer`",
        "`onnx/model_q4.onnx`",
        "int4",
    ),
    "js-bnb4": Case(
        "qwen3",
        quantised(by_optimum, "model_bnb4.onnx", to_nf4),
        f"{OPTIMUM}, `MatMulBnb4Quantizer`",
        "`onnx/model_bnb4.onnx`",
        "int4",
        "int8",
    ),
    "merged": Case("llama", merged_decoders, f"{SCRIPT}, optimum's `merge_decoders`", "`decoder_model_merged.onnx`"),
    "two-decoders": Case("qwen2", two_decoders, SCRIPT, "`decoder_model.onnx`, `decoder_with_past_model.onnx`"),
    "split": Case(
        "qwen3",
        split_embeddings,
        BUILDER,
        "`onnx/decoder_model_merged_q4.onnx`, `onnx/embed_tokens.onnx`",
        "int4",
    ),
    "genai-cuda": Case(
        "phi3", by_builder(Form("int4", "cuda")), f"{GENAI} CUDA, int4", precision="int4", accuracy="int8"
    ),
    "genai-dml": Case(
        "llama", by_builder(Form("int4", "dml")), f"{GENAI} DirectML, int4", precision="int4", accuracy="int8"
    ),
    "genai-webgpu": Case("qwen3", by_builder(Form("fp16", "webgpu")), f"{GENAI} WebGPU, fp16", precision="fp16"),
}


def loaded(source: Path) -> Any:
    """Return the model of a checkpoint, as transformers loads it."""
    from transformers import AutoModelForCausalLM

    attention = "eager" if source.name.removesuffix("_source") in EAGER else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(source, attn_implementation=attention).eval()
    make_exports.LAYERS, make_exports.VOCAB = model.config.num_hidden_layers, SIZES["vocab_size"]
    return model


def write_checkpoint(source: Path, model_type: str, sizes: dict[str, Any]) -> None:
    """Write a checkpoint with random weights, its tokenizer, and the logits that transformers computes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {**sizes, **CHANGES.get(model_type, {})}
    if model_type in WITHOUT_GROUPS:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    if model_type == "gpt2":
        named = {GPT2.get(name, name): value for name, value in sizes.items()}
        sizes = {name: value for name, value in named.items() if name not in make_exports.OTHER_NAMES}
        sizes["n_positions"] = sizes.pop("max_position_embeddings")
    torch.manual_seed(0)
    config, attention = AutoConfig.for_model(model_type, **sizes), "eager" if model_type in EAGER else "sdpa"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
        ids = np.random.default_rng(0).integers(3, 300, PROMPT)
        logits = model.eval()(torch.tensor(ids[None])).logits[0].numpy()
    part = source.with_name(f"{source.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    builder_architectures.VOCAB = SIZES["vocab_size"]
    builder_architectures.write_tokenizer(part)
    settings = json.loads((part / "tokenizer_config.json").read_text())
    (part / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    np.savez(part / "golden.npz", ids=ids, logits=logits)
    part.rename(source)


def prepare(folder: Path, name: str, sizes: dict[str, Any], optimum: str) -> tuple[Path, Path, Path]:
    """Return the checkpoint, the exported folder and the built folder, and write those that do not exist."""
    from genai.convert import ExportOptions, build_model

    case = CASES[name]
    source, target = folder / f"{case.model_type}_source", folder / name
    built = folder / f"{case.model_type}_{case.precision}_ours"
    if not source.exists():
        write_checkpoint(source, case.model_type, sizes)
    if not target.exists():
        part = target.with_name(f"{name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        case.make(Job(case, source, optimum), part)
        for path in source.glob("*.json"):
            if not (part / path.name).exists():
                shutil.copy(path, part)
        part.rename(target)
    if not built.exists():
        build_model(source, built, ExportOptions(precision=case.precision))  # type: ignore[arg-type]
    return source, target, built


def replies(name: str, folder: Path) -> list[str]:
    """Return the failures of `genai chat` with the folder, and with the name of a repository in a local hub."""
    environment, pulled = os.environ | {"PYTHONPATH": str(ROOT)}, Path(os.environ["GENAI_CACHE_DIR"]) / "genai" / "hub"
    found = []
    with tempfile.TemporaryDirectory() as home, LocalHub() as hub:
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        hub.add(f"published/{name}", files)
        environment |= {"HF_HOME": home, "HF_ENDPOINT": hub.url}
        for model in (str(folder), f"published/{name}"):
            command = [sys.executable, "-m", "genai", "chat", model, "--yes", "--max-tokens", "8", "--temperature", "0"]
            done = subprocess.run(command, input="ABC", capture_output=True, text=True, env=environment)
            found.append(done.stdout if done.returncode == 0 else "")
            shutil.rmtree(pulled, ignore_errors=True)
            if not found[-1].strip():
                return [f"`genai chat {model}`: {done.stderr.strip()[-300:]}"]
    return [] if found[0] == found[1] else ["the folder and the repository reply differently"]


def logits_of(folder: Path, golden: Any) -> tuple[float, bool, str]:
    """Return the difference from transformers, True if a batch computes each sequence as alone, and the reason if
    the folder runs one sequence at a time."""
    import genai
    from genai.engine.decoder import compute
    from tools.models_table import rows_of

    ids, logits = golden["ids"].tolist(), golden["logits"]
    with genai.Model(folder, accuracy="fp32", quiet=True) as model:
        pieces = [rows_of(model, ids, step) for step in (PROMPT, 7, 1)]
        error = max(float(np.abs(rows - logits).max() / np.abs(logits).max()) for rows in pieces)
        lengths = (PROMPT, 5, 17)
        sequences = [model.decoder.open() for _ in lengths]
        for sequence, length in zip(sequences, lengths, strict=True):
            sequence.append(ids[:length])
        together = compute(model.decoder, sequences, all_rows=True)
        alone = [rows_of(model, ids[:length], length) for length in lengths]
        equal = all(map(np.array_equal, together, alone))
        return error, equal, model.info.reason if not model.info.flattened else ""


def decode_ratio(models: Sequence[Any], sequences: Sequence[Any]) -> float:
    """Return the first model's time per token, relative to the second model's. Both decode the same tokens in turn."""
    from genai.engine.decoder import compute

    times: list[list[float]] = [[], []]
    for step in range(STEPS):
        for which in (0, 1) if step % 2 else (1, 0):
            sequences[which].append([5 + step])
            start = time.perf_counter()
            compute(models[which].decoder, [sequences[which]])
            times[which].append(time.perf_counter() - start)
    theirs, ours = (float(np.mean(sorted(found)[: STEPS // 3])) for found in times)
    return theirs / ours


def on_the_host(model: Any) -> list[str]:
    """Return the operators that a batched model computes in NumPy, sorted."""
    from genai.kernels.ir import HostNode

    parts = getattr(getattr(model.decoder, "program", None), "parts", ())
    return sorted({part.op_type for part in parts if isinstance(part, HostNode)})


def speed(exported: Path, built: Path, accuracy: str) -> tuple[float, list[str]]:
    """Return the ratio of the times per token, and the operators in NumPy."""
    import genai

    options: dict[str, Any] = {"quiet": True, "accuracy": accuracy}
    with genai.Model(exported, **options) as first, genai.Model(built, **options) as second:
        sequences = [model.decoder.open() for model in (first, second)]
        for sequence in sequences:
            sequence.append(range(3, 3 + PROMPT))
        ratio, host = decode_ratio((first, second), sequences), on_the_host(first)
        for sequence in sequences:
            sequence.close()
        return ratio, host


def examine(name: str, source: Path, target: Path, built: Path) -> Result:
    case, golden = CASES[name], np.load(source / "golden.npz")
    result = Result(replies(name, target))
    result.error, equal, result.reason = logits_of(target, golden)
    result.built_error = logits_of(built, golden)[0]
    if not equal:
        result.failures.append("a batch computes other logits than its sequences alone")
    if not result.error <= max(BOUNDS[case.precision], FACTOR * result.built_error):
        result.failures.append(f"the logits differ by {result.error:.1e}")
    result.ratio, result.host = speed(target, built, case.accuracy)
    return result


def row(name: str, result: Result) -> str:
    case = CASES[name]
    how = ", ".join(f"`{one}`" for one in result.host) or "none"
    if result.reason:
        how = "one sequence at a time"
    return (
        f"| {case.exporter} | {case.files} | {case.model_type} | {result.error:.0e} | {result.built_error:.0e} "
        f"| {how} | {result.ratio:.2f}{' (`--accuracy int8`)' if case.accuracy == 'int8' else ''} |"
    )


def versions(python: str) -> str:
    """Return the versions of the tools; `python` is the Python that has optimum."""
    packages = ("torch", "transformers", "onnxruntime", "onnxruntime-genai")
    written = ", ".join(f"{package} {version(package)}" for package in packages)
    program = "from importlib.metadata import version as v; print('optimum-onnx', v('optimum-onnx'), 'with', " \
              "'transformers', v('transformers'))"  # fmt: skip
    optimum = subprocess.run([python, "-c", program], check=True, capture_output=True, text=True).stdout.strip()
    return f"{written}, and {optimum}"


def table(results: dict[str, Result], tools: str) -> str:
    """Return the generated part of the page."""
    passed = sum(not result.failures for result in results.values())
    batched = sum(not result.reason for result in results.values())
    fast = sum(not result.reason and result.ratio <= 1.1 for result in results.values())
    lines = [
        f"Written with {tools}. Of {len(results)} folders, {passed} pass all checks, {batched} run batched, and {fast} "
        "take at most 1.1 times as long per token.",
        "",
        "| tool | graphs | `model_type` | difference of logits | the same, built | in NumPy | time per token |",
        "|---|---|---|---|---|---|---|",
        *(row(name, result) for name, result in results.items()),
    ]
    return "\n".join(lines)


def stored_results() -> tuple[dict[str, Result], str]:
    """Return the results in published_folders.json, and the versions of the tools."""
    stored = json.loads(RESULTS.read_text(encoding="utf-8"))
    return {name: Result(**fields) for name, fields in stored["folders"].items()}, stored["tools"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", choices=[*CASES, []])
    parser.add_argument("--optimum", default=sys.executable, help="A Python with optimum-onnx.")
    parser.add_argument("--again", action="store_true", help="Run the folders again that have results.")
    parser.add_argument("--small", action="store_true", help="Write checkpoints of 1 MB, to try the tool.")
    parser.add_argument("--write", action="store_true", help="Write the table from the results of all folders.")
    options = parser.parse_args()
    cache = options.folder / "cache"
    os.environ |= {"GENAI_CACHE_DIR": str(cache.resolve()), "ORT_DISABLE_TELEMETRY": "1"}
    sizes = SIZES | (SMALL_SIZES if options.small else {})
    stored = options.folder / "results"
    stored.mkdir(parents=True, exist_ok=True)
    results = {}
    for name in options.names or CASES:
        path = stored / f"{name}.json"
        try:
            if options.again or not path.exists():
                result = examine(name, *prepare(options.folder, name, sizes, options.optimum))
                path.write_text(json.dumps(asdict(result)))
        except Exception as error:  # the other folders are still of interest
            said = error.stderr.decode()[-500:] if isinstance(error, subprocess.CalledProcessError) else ""
            print(f"{name}: {type(error).__name__}: {error} {said}", flush=True)
            continue
        results[name] = Result(**json.loads(path.read_text()))
        print(row(name, results[name]), *results[name].failures, results[name].reason, flush=True)
    if options.write and len(results) < len(CASES):
        raise SystemExit("the table needs the results of all folders")
    if options.write:
        tools = versions(options.optimum)
        folders = {name: asdict(result) for name, result in results.items()}
        RESULTS.write_text(json.dumps({"tools": tools, "folders": folders}, indent=1) + "\n", encoding="utf-8")
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text(f"{before}{BEGIN}\n\n{table(results, tools)}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
