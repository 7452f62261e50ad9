"""Decode speed with 2-, 3- and 4-bit weights, compared with formats of the same size in llama.cpp and ik_llama.cpp.

    python -m tools.compare_peers setup --work WORK --engine llama.cpp --engine ik_llama.cpp    # once: compiles
    python -m tools.format_speed --work WORK [--repeat 3]

Missing models are created. They have Llama-3.2-1B's shape, random weights and all matrices in one format, including the
head and embedding. Some of the peers' formats take minutes per hundred million weights to quantise. Therefore only one
layer is quantised, and the file contains 16 copies of it. The engines are measured in turns. The table shows tokens per
second, and the read rate of the weights as a share of the memory bandwidth that was measured in the same turn.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from genai.bench.ceilings import bandwidth
from genai.common.cores import default_threads
from tools.arguments import positive
from tools.peers.cases import Case
from tools.peers.checkpoint import make_checkpoint
from tools.peers.engines.base import Engine
from tools.peers.engines.genai_toolkit import GenaiToolkit
from tools.peers.engines.ik_llama import IkLlama
from tools.peers.engines.llama_cpp import LlamaCpp
from tools.peers.shapes import SHAPES
from tools.peers.turns import in_turns
from tools.quantisation_curves.gguf_peers import IK_LLAMA_CPP, LLAMA_CPP, Quantiser, write_floats

SHAPE, CASE = "llama-3.2-1b", Case("forms", 64, 64)
# Name, engine, and the arguments that make the model. Our uniform format comes first, then our non-uniform format.
FORMATS: dict[int, tuple[tuple[str, Engine, tuple[str, ...]], ...]] = {
    bits: (
        (f"{bits} bits by 32", GenaiToolkit(), ("--bits", str(bits))),
        (f"nl{bits}", GenaiToolkit(), ("--format", f"nl{bits}")),
        *((name, LlamaCpp(), (str(LLAMA_CPP[name]),)) for name in theirs),
        *((name, IkLlama(), (str(IK_LLAMA_CPP[name]),)) for name in of_ik),
    )
    for bits, theirs, of_ik in (
        (2, ("Q2_K",), ("IQ2_KS",)),
        (3, ("Q3_K_S",), ("IQ3_KS",)),
        (4, ("Q4_0", "IQ4_XS"), ("IQ4_KS",)),
    )
}

ENGINES = tuple(dict.fromkeys(engine.name for forms in FORMATS.values() for _, engine, _ in forms))


@dataclass
class Contender:
    """One model, and the results of the engine that runs it.

    Attributes:
        bits: bits per weight, which formats of the same size share.
        name: name of the format.
        engine: the engine.
        model: path of the model.
        nbytes: bytes that a step reads.
        decode: tokens per second, by turn.
        share: share of the memory bandwidth, by turn.
    """

    bits: int
    name: str
    engine: Engine
    model: Path
    nbytes: int
    decode: list[float]
    share: list[float]


def main(arguments: Sequence[str] | None = None) -> None:
    """Create the missing models, measure the engines in turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("~/.cache/genai/peers"), help="folder of engines and models")
    parser.add_argument("--repeat", type=positive, default=3, help="processes per engine")
    parser.add_argument("--engine", action="append", choices=ENGINES, help="measure only this engine; may be repeated")
    asked = parser.parse_args(arguments)
    work = asked.work.expanduser().resolve()
    checkpoint = make_checkpoint(work / "checkpoints" / SHAPE, SHAPES[SHAPE])
    contenders = list(_made(work, checkpoint, asked.engine or ENGINES))
    reading, vocab_size = bandwidth(default_threads()), int(SHAPES[SHAPE].config["vocab_size"])
    most = reading()
    for one, measured in in_turns(
        work, CASE, vocab_size, contenders, asked.repeat, lambda one: (one.engine, one.model)
    ):
        before, most = most, reading()
        if measured.decode:
            one.decode.append(measured.decode)
            one.share.append(measured.decode * one.nbytes / max(before, most))
            print(
                f"{len(one.decode)}/{asked.repeat} {one.engine.name} {one.name}: {measured.decode:.1f} tok/s",
                flush=True,
            )
    print("\n| bits | engine | format | GB per step | tok/s | share of bandwidth |\n|---|---|---|---|---|---|")
    for one in contenders:
        cells = (one.bits, one.engine.title, one.name, f"{one.nbytes / 1e9:.3f}")
        print(f"| {' | '.join(map(str, cells))} | {_middle(one.decode):.1f} | {_middle(one.share):.2f} |")


def _made(work: Path, checkpoint: Path, engines: Sequence[str]) -> Iterator[Contender]:
    folder = work / "forms"
    folder.mkdir(parents=True, exist_ok=True)
    for bits, forms in FORMATS.items():
        for name, engine, how in forms:
            if engine.name not in engines:
                continue
            model = folder / f"{engine.name}-{name.replace(' ', '-')}"
            if isinstance(engine, LlamaCpp):
                model = model.with_name(model.name + ".gguf")
                if not model.exists():
                    _quantised_by(engine, work, folder, model, int(how[0]))
                nbytes = model.stat().st_size
            else:
                if not model.exists():
                    command = [sys.executable, "-m", "genai", "quantize", str(checkpoint), "-o", str(model), *how]
                    subprocess.run([*command, "--method", "rtn", "--no-eval"], check=True)
                nbytes = sum(path.stat().st_size for path in model.glob("*.onnx*"))
            yield Contender(bits, name, engine, model, nbytes, [], [])


def _quantised_by(engine: LlamaCpp, work: Path, folder: Path, model: Path, kind: int) -> None:
    """Write a GGUF file in one format: one layer that the engine's library quantised, and copies of this layer."""
    whole = SHAPES[SHAPE]
    layer = replace(whole, config=dict(whole.config) | {"num_hidden_layers": 1})
    floats, one, partial = folder / "floats.gguf", folder / "layer.gguf", model.with_suffix(".partial")
    if not floats.exists():
        write_floats(make_checkpoint(folder / "layer", layer), floats, "F16", work, folder / "log")
    quantiser = Quantiser(engine, work)
    quantiser.run(floats, one, kind, pure=True)
    quantiser.repeat_layer(one, partial, str(whole.config["model_type"]), int(whole.config["num_hidden_layers"]))
    one.unlink()
    partial.rename(model)


def _middle(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("nan")


if __name__ == "__main__":
    main()
