"""Measure decode steps that PyTorch computes as one CUDA graph, for comparison in tools/gpu_day.py.

    python -m tools.torch_steps SHAPE [--weights int4] [--batch 64]

Print one JSON line per measurement: the microseconds of a step of `batch` sequences with `context` tokens each. Weights
are random: bfloat16, or int4 in blocks of 32 with PyTorch's own kernel (`_weight_int4pack_mm`). The host does no work
per step, because lengths are fixed when the graph is captured. A server has to do more work per step.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from genai.convert import DecoderSpec

from .arguments import positive
from .peers.shapes import SHAPES

BLOCK, _INNER_TILES, _WARM, _REPEATS = 32, 8, 3, 20
KINDS = ("int4", "bfloat16")


@dataclass
class Linears:
    """A factory of linear layers with random weights of one kind."""

    torch: Any
    device: str
    kind: str

    def __call__(self, outputs: int, columns: int) -> Callable[[Any], Any]:
        torch = self.torch
        if self.kind == "bfloat16":
            weight = torch.randn(outputs, columns, device=self.device, dtype=torch.bfloat16) * columns**-0.5
            return lambda x: torch.nn.functional.linear(x, weight)
        numbers = torch.stack(
            (torch.full((columns // BLOCK, outputs), 0.2 * columns**-0.5), torch.zeros(columns // BLOCK, outputs)), 2
        ).to(self.device, torch.bfloat16)
        aten = torch.ops.aten
        if self.device == "cpu":
            codes = torch.randint(0, 16, (outputs, columns), dtype=torch.int32)
            packed, multiply = aten._convert_weight_to_int4pack_for_cpu(codes, 1), aten._weight_int4pack_mm_for_cpu
        else:
            both = torch.randint(0, 256, (outputs, columns // 2), dtype=torch.uint8, device=self.device)
            packed, multiply = aten._convert_weight_to_int4pack(both, _INNER_TILES), aten._weight_int4pack_mm
        return lambda x: multiply(x, packed, BLOCK, numbers)


class Decoder:
    """A Llama-like decoder for `batch` sequences with `context` tokens.

    Attributes:
        tokens: int64 [batch]; a step reads and replaces it.
    """

    def __init__(self, torch: Any, spec: DecoderSpec, linear: Linears, batch: int, context: int) -> None:
        self._torch, self._spec, self._batch, self._context = torch, spec, batch, context
        device, half = linear.device, torch.bfloat16
        width, inner, size = spec.hidden_size, spec.intermediate_size, spec.head_size
        self._heads, self._kv_heads, self._size = spec.num_attention_heads, spec.num_key_value_heads, size
        joined = (self._heads + 2 * self._kv_heads) * size
        self._layers = [
            (linear(joined, width), linear(width, self._heads * size), linear(2 * inner, width), linear(width, inner))
            for _ in range(spec.num_layers)
        ]
        cached = (spec.num_layers, 2, batch, self._kv_heads, context + 1, size)
        self._cache = torch.randn(cached, device=device, dtype=half)
        self._norm = torch.ones(width, device=device, dtype=half)
        self._embedding = torch.randn(spec.vocab_size, width, device=device, dtype=half)
        self._head = linear(spec.vocab_size, width)
        angles = context * 1e4 ** -(torch.arange(size // 2, device=device) / (size // 2))
        self._cos, self._sin = (f(angles).repeat(2).to(half) for f in (torch.cos, torch.sin))
        self.tokens = torch.zeros(batch, device=device, dtype=torch.int64)

    def step(self) -> None:
        """Compute the next token of each sequence."""
        functional = self._torch.nn.functional
        x = self._embedding[self.tokens]
        for number, (joined, out, gate_up, down) in enumerate(self._layers):
            x = x + out(self._attended(number, joined(self._normed(x))))
            gate, up = gate_up(self._normed(x)).chunk(2, -1)
            x = x + down(functional.silu(gate) * up)
        self.tokens.copy_(self._head(self._normed(x)).argmax(-1))

    def _normed(self, x: Any) -> Any:
        return self._torch.nn.functional.rms_norm(x, (x.shape[-1],), self._norm, 1e-5)

    def _attended(self, layer: int, joined: Any) -> Any:
        heads, kv_heads, size = self._heads, self._kv_heads, self._size
        q, k, v = joined.view(self._batch, -1, size).split((heads, kv_heads, kv_heads), 1)
        keys, values = self._cache[layer]
        keys[:, :, self._context], values[:, :, self._context] = self._rotated(k), v
        attend = self._torch.nn.functional.scaled_dot_product_attention
        found = attend(self._rotated(q).unsqueeze(2), keys, values, enable_gqa=True)
        return found.reshape(self._batch, heads * size)

    def _rotated(self, x: Any) -> Any:
        first, second = x.chunk(2, -1)
        return x * self._cos + self._torch.cat((-second, first), -1) * self._sin


def measured(torch: Any, shape: str, kind: str, batch: int, context: int, device: str) -> Iterator[dict[str, Any]]:
    """Measure a step as a CUDA graph; on the CPU, only run it once as a test."""
    decoder = Decoder(torch, SHAPES[shape].spec, Linears(torch, device, kind), batch, context)
    step = captured(torch, decoder.step) if device != "cpu" else decoder.step
    microseconds = timed(torch, step) if device != "cpu" else 0.0
    if device == "cpu":
        step()
    row = {"what": f"PyTorch {torch.__version__}, {shape}, {kind}", "sequences": batch, "context": context}
    yield row | {"us": microseconds} | ({"tok/s": batch / microseconds * 1e6} if microseconds else {})


def captured(torch: Any, step: Callable[[], None]) -> Callable[[], None]:
    """Return a step as one CUDA graph, after warm-up steps."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    replay: Callable[[], None] = graph.replay
    return replay


def timed(torch: Any, step: Callable[[], None]) -> float:
    """Return the microseconds of a step by the GPU's clock: the median over steps that are queued back to back."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS + 1)]
    step()
    for number, event in enumerate(events):
        event.record()
        if number < _REPEATS:
            step()
    torch.cuda.synchronize()
    taken = sorted(one.elapsed_time(other) for one, other in pairwise(events))
    return float(taken[len(taken) // 2]) * 1e3


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--weights", action="append", default=[], choices=KINDS, help="weights; may be repeated [all]")
    parser.add_argument("--batch", action="append", default=[], type=positive, metavar="N", help="repeatable [1, 64]")
    parser.add_argument("--context", type=positive, default=1024, metavar="N")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    try:
        import torch
    except ImportError:
        print("torch_steps: PyTorch is not installed", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    with torch.inference_mode():
        for kind in options.weights or KINDS:
            for batch in options.batch or (1, 64):
                for row in measured(torch, options.shape, kind, batch, options.context, options.device):
                    print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
