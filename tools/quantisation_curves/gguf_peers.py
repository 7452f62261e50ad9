"""Outputs of llama.cpp's and ik_llama.cpp's quantisers, with an importance matrix from the same calibration text.

The library that made an output also dequantises it to float32, so that no result depends on our readers.
"""

from __future__ import annotations

import os
import struct
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from genai.quantize.source import FloatModel
from tools.peers.engines.ik_llama import IkLlama
from tools.peers.engines.llama_cpp import LlamaCpp
from tools.peers.processes import run_logged

from .points import Points, point
from .subject import Measuring

FLOATS = 0
# Values of llama_ftype.
LLAMA_CPP = {
    "Q2_K": 10, "Q3_K_S": 11, "Q3_K_M": 12, "Q4_0": 2, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18, "Q8_0": 7,
    "IQ2_XXS": 19, "IQ2_XS": 20, "IQ2_S": 28, "IQ2_M": 29, "IQ3_XXS": 23, "IQ3_XS": 22, "IQ3_S": 26, "IQ3_M": 27,
    "IQ4_NL": 25, "IQ4_XS": 30,
}  # fmt: skip
IK_LLAMA_CPP = {
    "IQ2_KS": 147, "IQ2_K": 138, "IQ2_KL": 155, "IQ3_KS": 154, "IQ3_K": 139, "IQ4_KSS": 148, "IQ4_KS": 145,
    "IQ4_K": 140, "IQ5_KS": 150, "IQ5_K": 141, "IQ6_K": 142, "IQ2_KT": 151, "IQ3_KT": 152, "IQ4_KT": 153,
}  # fmt: skip
# Names of matrices in our graphs, which fuse queries, keys and values -> names in GGUF files.
_NAMES = {
    "attn.qkv_proj": ("attn_q", "attn_k", "attn_v"), "attn.o_proj": ("attn_output",), "mlp.gate_proj": ("ffn_gate",),
    "mlp.up_proj": ("ffn_up",), "mlp.down_proj": ("ffn_down",),
}  # fmt: skip
PEERS: tuple[tuple[LlamaCpp, Mapping[str, int]], ...] = ((LlamaCpp(), LLAMA_CPP), (IkLlama(), IK_LLAMA_CPP))


class Quantiser:
    """One library's quantiser, which our program calls; the program is linked to the library.

    Args:
        engine: the library, compiled by `tools.compare_peers setup`.
        work: folder of the peers.
    """

    def __init__(self, engine: LlamaCpp, work: Path) -> None:
        self._engine, self._folder = engine, engine.folder(work)
        self._libraries = self._folder / "build" / "bin"
        self._program = self._linked(Path(__file__).with_name("quantise_gguf.cpp"))

    def run(self, source: Path, output: Path, kind: int, importance: Path | None = None, *, pure: bool = False) -> int:
        """Quantise a file and return the number of bytes of all matrices.

        Args:
            kind: a value of llama_ftype.
            importance: file of the importance matrix.
            pure: True to give all matrices the type of `kind`.

        Raises:
            subprocess.CalledProcessError: the library failed.
        """
        command = [
            self._program,
            str(source),
            str(output),
            str(kind),
            str(importance or "-"),
            *(["pure"] if pure else []),
        ]
        environment = {**os.environ, **self._environment}
        said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        rows = [line.split() for line in said.splitlines() if line.count(" ") == 4]
        return sum(int(nbytes) for _, _, count, _, nbytes in rows if count != "1")

    def repeat_layer(self, source: Path, output: Path, architecture: str, layers: int) -> None:
        """Write a file with `layers` copies of another file's only layer."""
        program = self._linked(Path(__file__).with_name("repeat_layer.cpp"))
        run_logged([program, str(source), str(output), architecture, str(layers)], self._log, self._environment)

    @property
    def _log(self) -> Path:
        return self._folder / "setup.log"

    @property
    def _environment(self) -> Mapping[str, str]:
        return {"LD_LIBRARY_PATH": str(self._libraries)}

    def _linked(self, source: Path) -> str:
        """Compile a C++ file with the library's headers, link it to the library, and return the program's path."""
        vendored, program = self._folder / "source" / "vendor" / self._engine.vendored, self._folder / source.stem
        headers = [f"-I{vendored / place}" for place in ("include", "ggml/include")]
        libraries = [str(path) for path in sorted(self._libraries.glob("lib*.so"))]
        run_logged(["c++", "-O1", "-std=c++17", str(source), *headers, *libraries, "-o", str(program)], self._log)
        return str(program)


def measure(measuring: Measuring, peers: Path, work: Path, points: Points) -> None:
    """Measure every type of both libraries, quantised with an importance matrix."""
    subject = measuring.subject
    folder = work / subject.name / "gguf"
    folder.mkdir(parents=True, exist_ok=True)
    importance = folder / "importance.bin"
    floats = folder / "floats.gguf"
    for engine, kinds in PEERS:
        due = [name for name in kinds if not points.has(subject.name, engine.name, name)]
        if not due or not engine.versions(peers):
            continue
        if not importance.exists():
            write_importance(importance, measuring.importance())
        if not floats.exists():
            write_floats(subject.checkpoint, floats, "F32", peers, folder / "log")
        quantiser = Quantiser(engine, peers)
        for name in due:
            made, back = folder / f"{engine.name}-{name}.gguf", folder / "back.gguf"
            begin = time.perf_counter()
            nbytes = quantiser.run(floats, made, kinds[name], importance)
            seconds = time.perf_counter() - begin
            quantiser.run(made, back, FLOATS)
            with FloatModel(back) as model:
                quality = measuring.quality(model)
            points.add(
                point(subject.name, engine.name, name, 8 * nbytes / measuring.elements, quality, seconds=seconds)
            )
            made.unlink()


def write_floats(checkpoint: Path, output: Path, kind: str, peers: Path, log: Path) -> None:
    """Write a GGUF file of floats with the `gguf` package in llama.cpp's environment."""
    worker = Path(__file__).resolve().parent.parent / "peers" / "workers" / "write_gguf.py"
    run_logged([LlamaCpp().venv(peers).python, str(worker), str(checkpoint), str(output), kind], log)


def write_importance(path: Path, squares: Mapping[str, NDArray[np.float32]]) -> None:
    """Write the importance matrix in the format that quantise_gguf.cpp reads."""
    with path.open("wb") as file:
        for name, values in squares.items():
            for plain in (one.encode() for one in gguf_names(name)):
                file.write(struct.pack("<I", len(plain)) + plain + struct.pack("<I", len(values)))
                file.write(np.ascontiguousarray(values, np.float32).tobytes())


def gguf_names(name: str) -> list[str]:
    """Return the names of the GGUF tensors that hold one of our matrices."""
    stem = name.removesuffix(".weight").removesuffix(".MatMul")
    if stem == "lm_head":
        return ["output.weight"]
    _, _, layer, place = stem.split(".", 3)
    return [f"blk.{layer}.{one}.weight" for one in _NAMES[place]]
