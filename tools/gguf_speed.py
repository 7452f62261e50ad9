"""Compare a GGUF file's import time, prefill and decode speed with llama.cpp, in turns.

    python -m tools.compare_peers setup --engine llama.cpp --work WORK    # once: compiles llama.cpp
    python -m tools.gguf_speed --work WORK [--repeat 3]

If the file is missing, it is written: Llama-3.2-1B's shape as Q4_K_M, with random blocks.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from genai.quant.ggml import GGML_TYPES
from tools.arguments import positive
from tools.gguf_models import add_value, close, random_blocks
from tools.peers.cases import Case
from tools.peers.engines.base import Engine
from tools.peers.engines.genai_toolkit import GenaiToolkit
from tools.peers.engines.llama_cpp import LlamaCpp
from tools.peers.turns import in_turns

HIDDEN, LAYERS, WIDTH, VOCAB, KEYS = 2048, 16, 8192, 128256, 512
_SPECIAL, _PART_ROWS = 256, 64
CASE = Case("gguf", 512, 48)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("~/.cache/genai/peers"), help="folder of engines and file")
    parser.add_argument("--repeat", type=positive, default=3, help="processes per engine")
    asked = parser.parse_args(arguments)
    work = asked.work.expanduser().resolve()
    file, folder = work / "gguf" / "llama-3.2-1b-q4_k_m.gguf", work / "gguf" / "imported"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        print(f"writing {file}", flush=True)
        write_q4_k_m(file)
    file.read_bytes()  # loads the file into the page cache for both engines
    shutil.rmtree(folder, ignore_errors=True)
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-m", "genai", "build", str(file), "-o", str(folder)], check=True)
    print(f"import: {time.perf_counter() - begin:.1f} s", flush=True)
    engines: list[tuple[Engine, Path]] = [(GenaiToolkit(), folder), (LlamaCpp(), file)]
    found: dict[str, list[Any]] = {engine.name: [] for engine, _ in engines}
    for (engine, _), measured in in_turns(work, CASE, VOCAB, engines, asked.repeat, lambda one: one):
        found[engine.name].append(measured)
        print(f"{len(found[engine.name])}/{asked.repeat} {engine.name}: {_said([measured])}", flush=True)
    for name, runs in found.items():
        print(f"median {name}: {_said(runs)}")


def _said(runs: Sequence[Any]) -> str:
    prefill, decode = (statistics.median(getattr(run, name) for run in runs) for name in ("prefill", "decode"))
    return f"prefill {prefill:.0f} tok/s, decode {decode:.1f} tok/s"


def write_q4_k_m(path: Path) -> None:
    """Write the file with the types that llama.cpp assigns to the matrices in Q4_K_M; all norms' weights are 1."""
    writer, random = gguf.GGUFWriter(str(path), "llama"), np.random.RandomState(0)
    sizes = {
        "context_length": 131072, "embedding_length": HIDDEN, "block_count": LAYERS, "feed_forward_length": WIDTH,
        "attention.head_count": 32, "attention.head_count_kv": 8, "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": 64, "rope.freq_base": 500000.0, "vocab_size": VOCAB,
    }  # fmt: skip
    for key, value in ({f"llama.{key}": value for key, value in sizes.items()} | vocabulary(VOCAB)).items():
        add_value(writer, key, value)

    def matrix(name: str, rows: int, columns: int, kind: str) -> None:
        number = gguf.GGMLQuantizationType[kind]
        found = GGML_TYPES[number]
        part = random_blocks(found, (_PART_ROWS, columns // found.columns), random, columns**-0.5)
        rows_of = random.permutation(np.arange(rows) % _PART_ROWS)
        writer.add_tensor(f"{name}.weight", part.reshape(_PART_ROWS, -1)[rows_of], raw_dtype=number)

    matrix("token_embd", VOCAB, HIDDEN, "Q6_K")
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for layer in range(LAYERS):
        block, more = f"blk.{layer}", "Q6_K" if _takes_more(layer) else "Q4_K"
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{block}.{norm}.weight", np.ones(HIDDEN, np.float32))
        for part, rows, columns, kind in (
            ("attn_q", HIDDEN, HIDDEN, "Q4_K"), ("attn_k", KEYS, HIDDEN, "Q4_K"), ("attn_v", KEYS, HIDDEN, more),
            ("attn_output", HIDDEN, HIDDEN, "Q4_K"), ("ffn_gate", WIDTH, HIDDEN, "Q4_K"),
            ("ffn_up", WIDTH, HIDDEN, "Q4_K"), ("ffn_down", HIDDEN, WIDTH, more),
        ):  # fmt: skip
            matrix(f"{block}.{part}", rows, columns, kind)
    close(writer)


def _takes_more(layer: int) -> bool:
    eighth = LAYERS // 8
    return layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2


def vocabulary(size: int) -> dict[str, Any]:
    """Return a vocabulary of this size: bytes, pairs, triples and markers."""
    others = (chr(0x100 + number) for number in range(256))
    printable = {*range(33, 127), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters = [chr(byte) if byte in printable else next(others) for byte in range(256)]
    tokens, merges = dict.fromkeys(letters), []
    for first in [*letters, *(a + b for a in letters for b in letters)]:
        for second in letters:
            if len(tokens) < size - _SPECIAL and first + second not in tokens:
                tokens[first + second] = None
                merges.append(f"{first} {second}")
    marks = [f"<|mark {number}|>" for number in range(_SPECIAL)]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.tokens": [*tokens, *marks],
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3] * _SPECIAL, "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": size - 2, "tokenizer.ggml.eos_token_id": size - 1,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
