"""Compare the decode speed of exported graphs with graphs of `genai build`, and write the table of folder-layouts.md.

    python tools/export_speed.py FOLDER [NAME ...] [--write]

The tool needs torch and transformers. It writes one checkpoint of about 100 MB with random weights per architecture
into FOLDER, exports it with torch.onnx, and builds it with `genai build --precision fp32`. Existing folders are used
again. Both graphs decode the same tokens in turn. The ratio compares the means of the fastest third of the steps.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import make_exports

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "folder-layouts.md"
BEGIN, END = "<!-- speed of exports -->", "<!-- end -->"
STEPS, PROMPT = 60, 32
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
CHANGES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 512, "n_layer": 8, "n_head": 8, "n_positions": 512},
    "gpt_neox": {"num_key_value_heads": 8, "rotary_pct": 0.5, "intermediate_size": 2048},
    "gemma2": {"query_pre_attn_scalar": 64, "sliding_window": 64},
    "phi3": {"original_max_position_embeddings": 512},
    "phi": {"partial_rotary_factor": 0.5, "num_key_value_heads": 8},
}
# name -> (model_type, exporter, the name of the exporter in make_exports)
EXPORTS = {
    "gemma2_script": ("gemma2", "TorchScript, operator set 17", ""),
    "gpt2_script": ("gpt2", "TorchScript, operator set 17", ""),
    "gpt_neox_script": ("gpt_neox", "TorchScript, operator set 17", ""),
    "llama_script": ("llama", "TorchScript, operator set 17", ""),
    "phi3_script": ("phi3", "TorchScript, operator set 17", ""),
    "phi_dynamo": ("phi", "dynamo, operator set 18", "dynamo"),
    "qwen2_opset23": ("qwen2", "dynamo, operator set 23", "opset23_dynamo"),
    "qwen3_dynamo": ("qwen3", "dynamo, operator set 18", "dynamo"),
}


def export(folder: Path, name: str) -> None:
    """Write the checkpoint, and the folder of the exported graph."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tools.builder_architectures import write_tokenizer

    model_type, _, exporter = EXPORTS[name]
    make_exports.LAYERS, make_exports.VOCAB = SIZES["num_hidden_layers"], SIZES["vocab_size"]
    torch.manual_seed(0)
    sizes = {key: value for key, value in SIZES.items() if model_type != "gpt2" or key not in make_exports.OTHER_NAMES}
    config = AutoConfig.for_model(model_type, **{**sizes, **CHANGES.get(model_type, {})})
    attention = "eager" if model_type == "gemma2" else "sdpa"  # sdpa ignores the softcap
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    source, target = folder / f"{model_type}_source", folder / name
    if not source.exists():
        model.save_pretrained(source)
        write_tokenizer(source)
    target.mkdir()
    make_exports._export_by_torch(exporter, model, target)
    for path in source.glob("*.json"):
        shutil.copy(path, target)


def measure(exported: Path, built: Path) -> tuple[float, float, list[str]]:
    """Return the difference of the logits, the ratio of the times per token, and the operators in NumPy."""
    import genai
    from genai.engine.decoder import compute

    models = [genai.Model(path, quiet=True) for path in (exported, built)]
    assert all(model.info.flattened for model in models), models[0].info.reason
    sequences = [model.decoder.open() for model in models]
    logits = []
    for model, sequence in zip(models, sequences, strict=True):
        sequence.append(range(3, 3 + PROMPT))
        logits.append(compute(model.decoder, [sequence])[0][-1])
    ratio = decode_ratio(models, sequences)
    error = float(np.abs(logits[0] - logits[1]).max() / np.abs(logits[1]).max())
    return error, ratio, on_the_host(models[0])


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", choices=[*EXPORTS, []])
    parser.add_argument("--write", action="store_true", help="Write the table; measures all exports.")
    options = parser.parse_args()
    from genai.convert import ExportOptions, build_model

    options.folder.mkdir(parents=True, exist_ok=True)
    rows = ["| `model_type` | `torch.onnx` | difference of logits | time per token | operators in NumPy |"]
    rows.append("|---|---|---|---|---|")
    for name in EXPORTS if options.write else options.names or EXPORTS:
        model_type, exporter, _ = EXPORTS[name]
        if not (options.folder / name).exists():
            export(options.folder, name)
        built = options.folder / f"{model_type}_ours"
        if not built.exists():
            build_model(options.folder / f"{model_type}_source", built, ExportOptions(precision="fp32"))
        error, ratio, host = measure(options.folder / name, built)
        slow = ", ".join(f"`{one}`" for one in host) or "none"
        rows.append(f"| {model_type} | {exporter} | {error:.0e} | {ratio:.2f} | {slow} |")
        print(rows[-1], flush=True)
    if options.write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        _, _, after = rest.partition(END)
        versions = f"Exported with torch {version('torch')} and transformers {version('transformers')}:"
        text = "\n".join([versions, "", *rows])
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
