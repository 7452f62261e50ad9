"""Decoding with weights of 2, 3 and 4 bits, beside llama.cpp's and ik_llama.cpp's forms of the same size, in turns.

    python -m tools.compare_peers setup --work WORK --engine llama.cpp --engine ik_llama.cpp    # once: compiles them
    python -m tools.format_speed --work WORK [--repeat 3]

Models of Llama-3.2-1B's shape with random weights are made where they are missing; every matrix has the one form, head
and embedding too. Some of the peers' forms take minutes per hundred million weights to quantise: that is done to one
layer, which the file then has 16 times. Beside tokens per second: the share of plain reading's bandwidth, measured in
the same turn, that the bytes of a step make.
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
# Name, engine, and how its model is made; the uniform form comes first, then the one with fewer bits.
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
    """One model in one engine.

    Attributes:
        bits: of the class. nbytes: that a step reads. decode: tokens per second, by turn. share: of plain reading.
    """

    bits: int
    name: str
    engine: Engine
    model: Path
    nbytes: int
    decode: list[float]
    share: list[float]


def main(arguments: Sequence[str] | None = None) -> None:
    """Make what is missing, measure in turns, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("~/.cache/genai/peers"), help="engines and models")
    parser.add_argument("--repeat", type=positive, default=3, help="processes of each engine")
    parser.add_argument("--engine", action="append", choices=ENGINES, help="only this one's forms; may be repeated")
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
    print("\n| bits | engine | format | GB per step | tok/s | share of plain reading |\n|---|---|---|---|---|---|")
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
    """A GGUF file whose every matrix has one form: one layer, quantised by the engine's library, and its copies."""
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
