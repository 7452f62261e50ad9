"""Measure the time and anonymous memory of `genai build` on a random checkpoint of Llama-3.2-1B's shape (Linux).

    python tools/bench_build.py FOLDER [PRECISION]

The checkpoint (2.5 GB) stays in FOLDER for later runs; the built model is deleted.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
import threading
import time
from pathlib import Path

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from genai.convert import ExportOptions, build_model
from genai.convert.architectures import find
from genai.convert.hf_config import HFConfig
from genai.convert.tensors import tensor_shapes

CONFIG = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
CHUNK = 1 << 24


def write_checkpoint(folder: Path) -> None:
    from tokenizers import Tokenizer, models

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    Tokenizer(models.BPE({"<s>": 0, "</s>": 1}, [])).save(str(folder / "tokenizer.json"))
    shapes = tensor_shapes(find("llama").describe(HFConfig(CONFIG)))
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    rng = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for shape in shapes.values():
            for first in range(0, count := int(np.prod(shape)), CHUNK):
                values = rng.standard_normal(min(CHUNK, count - first), np.float32) * np.float32(0.02)
                file.write(values.astype(ml_dtypes.bfloat16).tobytes())


def watch_memory(peak: list[int]) -> None:
    while True:
        lines = Path("/proc/self/status").read_text().splitlines()
        peak[0] = max(peak[0], *(int(line.split()[1]) for line in lines if line.startswith("RssAnon")))
        time.sleep(0.02)


def main() -> None:
    folder, precision = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "int4"
    checkpoint, output = folder / "checkpoint", folder / "built"
    if not checkpoint.exists():
        write_checkpoint(checkpoint)
    with (checkpoint / "model.safetensors").open("rb") as file:  # reading the file puts it into the page cache
        while file.read(CHUNK):
            pass
    shutil.rmtree(output, ignore_errors=True)
    peak = [0]
    threading.Thread(target=watch_memory, args=(peak,), daemon=True).start()
    start = time.monotonic()
    build_model(checkpoint, output, ExportOptions(precision=precision))  # type: ignore[arg-type]
    seconds = time.monotonic() - start
    print(f"{precision}: {seconds:.1f} s, peak anonymous memory {peak[0] / 1024:.0f} MiB, {os.cpu_count()} cores")
    shutil.rmtree(output)


if __name__ == "__main__":
    main()
