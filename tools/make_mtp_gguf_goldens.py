"""Write the goldens of MTP heads in GGUF files in tests/convert/mtp_gguf_goldens, which llama.cpp computes.

    python -m tools.make_mtp_gguf_goldens LLAMA_CPP BUILD

LLAMA_CPP is the source folder of llama.cpp, and BUILD is the folder with its libraries. The tool compiles
tools/mtp_llama_cpp.cpp with g++. A golden holds the vectors of the decoder (`hidden_states`) and every STEP-th logit of
the head, for TOKENS of the file that `write_model_with_head` writes.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import save_file

from tools import gguf_models
from tools.gguf_models import HIDDEN, SHAPES

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "convert" / "mtp_gguf_goldens"
# The architectures, and the distance of a layer with attention from the end.
LAYERS = {"deepseek2": 1, "glm4moe": 1, "qwen35": 2, "qwen35moe": 1}
TOKENS = np.random.default_rng(1).integers(3, 200, 30)
STEP = 5


def head_tensors(name: str) -> dict[str, np.ndarray]:
    """Return the tensors of an MTP head for a shape: those of a layer with attention, with different numbers."""
    shape, random = SHAPES[name], np.random.default_rng(5)
    copied, path = f"blk.{shape.layers - LAYERS[name]}.", f"blk.{shape.layers}."
    tensors = {}
    for stored, array in gguf_models.tensors(shape, gguf_models.normal(np.random.RandomState(0))):
        if stored.startswith(copied):
            noise = random.standard_normal(array.shape, np.float32)
            tensors[stored.replace(copied, path)] = array + np.float32(0.1 * array.std()) * noise
    matrix = random.standard_normal((HIDDEN, 2 * HIDDEN), np.float32)
    tensors[f"{path}nextn.eh_proj.weight"] = matrix * np.float32((2 * HIDDEN) ** -0.5)
    for norm in ("enorm", "hnorm", "shared_head_norm"):
        tensors[f"{path}nextn.{norm}.weight"] = 1 + np.float32(0.2) * random.standard_normal(HIDDEN, np.float32)
    return tensors


def write_model_with_head(path: Path, name: str) -> Path:
    """Write a GGUF file of a shape with an MTP head."""
    shape = SHAPES[name]
    writer = gguf.GGUFWriter(str(path), shape.arch)
    changes = {f"{shape.arch}.block_count": shape.layers + 1, f"{shape.arch}.nextn_predict_layers": 1}
    for key, value in (gguf_models.metadata(shape) | changes).items():
        gguf_models.add_value(writer, key, value)
    for stored, array in (
        dict(gguf_models.tensors(shape, gguf_models.normal(np.random.RandomState(0)))) | head_tensors(name)
    ).items():
        writer.add_tensor(stored, array)
    gguf_models.close(writer)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("llama_cpp", type=Path)
    parser.add_argument("build", type=Path)
    options = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        source, program = Path(__file__).with_name("mtp_llama_cpp.cpp"), work / "program"
        includes = [f"-I{options.llama_cpp / part}" for part in ("include", "ggml/include", "src")]
        libraries = [f"-L{options.build}", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{options.build.resolve()}"]
        subprocess.run(["g++", "-O1", *includes, source, "-o", program, *libraries], check=True)
        (work / "tokens").write_text(" ".join(map(str, TOKENS)))
        for name in LAYERS:
            file = write_model_with_head(work / f"{name}.gguf", name)
            subprocess.run([program, file, work / "tokens", work / "result"], check=True, stderr=subprocess.DEVNULL)
            found, count = np.fromfile(work / "result", np.float32), len(TOKENS)
            rows, logits = found[: count * HIDDEN].reshape(count, -1), found[count * HIDDEN :].reshape(count - 1, -1)
            arrays = {"hidden_states": rows, "logits": np.ascontiguousarray(logits[:, ::STEP])}
            save_file(arrays, FOLDER / f"{name}.safetensors")
            print(f"{name}: logits spread by {logits.std():.3g}")


if __name__ == "__main__":
    main()
