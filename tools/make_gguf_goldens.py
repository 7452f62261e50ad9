"""Write tests/convert/gguf_goldens: llama.cpp's results for the files that tools/gguf_models.py writes.

usage: python -m tools.make_gguf_goldens [--work FOLDER], after `python -m tools.compare_peers setup --engine llama.cpp`
with the same folder (default ~/.cache/genai/peers).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from genai.quant.ggml import GGML_TYPES
from tools import gguf_models
from tools.gguf_models import SHAPES, TOKENS, VOCABULARIES, add_value, close, write_model
from tools.peers.engines.base import WORKERS
from tools.peers.engines.llama_cpp import LlamaCpp
from tools.peers.processes import run_logged

TARGET = Path(__file__).resolve().parent.parent / "tests" / "convert" / "gguf_goldens"
TEXTS = VOCABULARIES.with_name("texts.json")
# Every STEP-th logit is stored.
STEP = 3
KINDS = ("F32", "F16", "BF16", *(kind.name for kind in GGML_TYPES.values()))
# One pre-tokenizer for each set of regular expressions.
PRE_TOKENIZERS = (
    "llama-bpe", "qwen2", "qwen35", "gpt-2", "starcoder", "falcon", "deepseek-v3", "deepseek-coder", "tekken", "gpt-4o",
    "bloom", "viking", "minicpm5", "seed-coder", "default",
)  # fmt: skip
MORE_TEXTS = (
    "<s>Hi <|im_start|>user\nHello<|im_end|>\n", "a <defined> b<defined>c",
    "Don't DON'T HelloWorld camelCase ABCdef x'S 'tis it's 12345678 3,000.50", "  \n\n  x \t\n y  ",
    "if(a&&b){c+=1;}//…«»", "日本語テスト 한국어 Привет мир",
)  # fmt: skip
_SPECIAL = ("<|im_start|>", "<|im_end|>", "<s>", "</s>")


def texts() -> list[str]:
    """Return the texts to tokenise."""
    return [*json.loads(TEXTS.read_text(encoding="utf-8"))["torture"], *MORE_TEXTS]


def write_vocabulary(path: Path, kind: str) -> Path:
    """Write a file with only a tokenizer; `kind` is a pre-tokenizer's name, or a kind such as "llama" or "t5"."""
    known = json.loads(VOCABULARIES.read_text(encoding="utf-8"))
    values = (_byte_level if kind in PRE_TOKENIZERS else _pieces)(known, kind)
    writer = gguf.GGUFWriter(str(path), "llama")
    shape = {
        "context_length": 64, "embedding_length": 32, "block_count": 1, "feed_forward_length": 32,
        "attention.head_count": 1, "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    for key, value in shape.items():
        add_value(writer, f"llama.{key}", value)
    for key, value in values.items():
        add_value(writer, f"tokenizer.ggml.{key}", value)
    writer.add_tensor("token_embd.weight", np.zeros((len(values["tokens"]), 32), np.float32))
    close(writer)
    return path


def _byte_level(known: dict[str, Any], pre: str) -> dict[str, Any]:
    listed = known["byte_level"]
    tokens = sorted(listed["vocab"], key=listed["vocab"].get)
    added = [token for token in _SPECIAL if token not in tokens]
    return {
        "model": "gpt2", "pre": pre, "tokens": [*tokens, *added, "<defined>"],
        "token_type": [1] * len(tokens) + [3] * len(added) + [4],
        "merges": [" ".join(merge) for merge in listed["merges"]],
        "bos_token_id": len(tokens) + added.index("<s>"), "eos_token_id": len(tokens) + added.index("<|im_end|>"),
    }  # fmt: skip


def _pieces(known: dict[str, Any], kind: str) -> dict[str, Any]:
    if kind == "t5":
        listed = known["unigram"]["vocab"]
        return {
            "model": "t5", "tokens": [token for token, _ in listed], "scores": [float(score) for _, score in listed],
            "token_type": [3, 3, 2] + [1] * (len(listed) - 3), "eos_token_id": 1, "unknown_token_id": 2,
            "padding_token_id": 0, "add_space_prefix": True, "remove_extra_whitespaces": True,
        }  # fmt: skip
    listed = known["sentencepiece_bpe"]
    tokens = sorted(listed["vocab"], key=listed["vocab"].get)
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(listed["merges"]):
        ranks.setdefault("".join(merge), rank)
    scores = [-float(ranks.get(token, len(ranks) + id_) + 1) for id_, token in enumerate(tokens)]
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3}
    types = [kinds.get(token, 6 if token.startswith("<0x") else 1) for token in tokens]
    more = ["<|im_start|>", "<defined>", "[PAD1]"]
    roles = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {
        "model": "llama", "tokens": [*tokens, *more], "scores": [*scores, -1e3, -1e3, -1e3],
        "token_type": [*types, 3, 4, 5], "add_space_prefix": kind != "llama-no-prefix",
        **({} if kind == "llama-no-roles" else roles),
    }  # fmt: skip


VOCABULARY_KINDS = (*PRE_TOKENIZERS, "llama", "llama-no-prefix", "llama-no-roles", "t5")


def main() -> None:
    """Write the files, run llama.cpp on them, and store its results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("~/.cache/genai/peers"))
    work = parser.parse_args().work.expanduser()
    engine = LlamaCpp()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        models = {f"shape/{name}": write_model(place / f"{name}.gguf", shape) for name, shape in SHAPES.items()}
        for kind in KINDS[1:]:
            models[f"type/{kind}"] = write_model(place / f"type-{kind}.gguf", SHAPES["llama"], kind)
        adapter = gguf_models.write_adapter(place / "adapter.gguf", SHAPES["llama"])
        logits = {name: [str(path), None] for name, path in models.items()}
        logits["adapter/llama"] = [str(models["shape/llama"]), str(adapter)]
        vocabularies = {kind: str(write_vocabulary(place / f"v-{kind}.gguf", kind)) for kind in VOCABULARY_KINDS}
        job = {"logits": logits, "tokens": TOKENS, "ids": vocabularies, "texts": texts()}
        (place / "job.json").write_text(json.dumps(job), encoding="utf-8")
        worker = [engine.venv(work).python, str(WORKERS / "llama_goldens.py"), str(place / "job.json")]
        environment = {**os.environ, **engine.environment(work)}
        run_logged([*worker, str(place / "result.json")], engine.venv(work).log, environment)
        result = json.loads((place / "result.json").read_text(encoding="utf-8"))
    TARGET.mkdir(exist_ok=True)
    arrays = {name: np.array(rows, np.float32)[:, ::STEP] for name, rows in result["logits"].items()}
    np.savez_compressed(TARGET / "logits.npz", **arrays)
    (TARGET / "ids.json").write_text(json.dumps(result["ids"]) + "\n", encoding="utf-8")
    print(f"{len(arrays)} models, {len(result['ids'])} vocabularies: {TARGET}", file=sys.stderr)


if __name__ == "__main__":
    main()
