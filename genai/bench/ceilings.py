"""What a step must do at least, and the machine's ceilings, measured between the runs that are compared with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from genai.common.cores import default_threads
from genai.kernels.device import Executor
from genai.kernels.ir import HostNode, MoE, Per, projections

from ..doctor.speeds import measure_bandwidth, measure_products
from ..engine.paged import PagedDecoder
from ..models.model import Model

# More than a last-level cache of which other machines on the same host take their share.
BUFFER_BYTES = 2**29
_SECONDS = 0.2


@dataclass(frozen=True)
class Ceiling:
    """What speeds are shares of; it is measured right after each run.

    Attributes:
        name: what is measured.
        unit: how much one unit of speed asks of it: bytes per token, operations per token.
        measure: gives it, per second.
    """

    name: str
    unit: float
    measure: Callable[[], float]


def measure_of(executor: Executor, name: str) -> Callable[[], float] | None:
    """What the device that computes can do at most per second: bytes that it reads ("bandwidth"), or operations in an
    arithmetic. None = nobody measures it.
    """
    if executor.ceiling(name) is not None:
        return lambda: executor.ceiling(name) or 0.0
    if executor.free_bytes() is not None:  # a device with memory of its own
        return None
    return bandwidth(executor.threads) if name == "bandwidth" else products(name, executor.threads)


def ceiling_of(model: Model, name: str, unit: float, measured: str) -> Ceiling | None:
    """A ceiling of the device that computes a model; None = nobody measures it."""
    measure = measure_of(model.decoder.executor, measured)
    return None if measure is None else Ceiling(name, unit, measure)


def share_of(measure: Callable[[], float] | None, reached: float) -> float | None:
    """What was reached of it."""
    return None if measure is None else reached / measure()


def bandwidth(threads: int | None) -> Callable[[], float]:
    """Bytes per second of the host reading its memory with so many threads."""
    return lambda: measure_bandwidth(BUFFER_BYTES, threads=threads, seconds=_SECONDS).bytes_per_second


def products(arithmetic: str, threads: int | None) -> Callable[[], float]:
    """Operations per second of registers alone, in one kind of arithmetic."""
    return lambda: measure_products(threads=threads or default_threads(), repeat=1, only=arithmetic)[arithmetic]


@dataclass(frozen=True)
class Traffic:
    """Per step of one model.

    Attributes:
        weight_bytes: packed weights, all of which a step of few tokens reads once. Of experts only those count that one
            token chooses: a step of one sequence reads so many, a larger batch more.
        products_per_token: multiplications with weights that every token needs (of experts with those that it chooses);
            the head's, which only wanted rows need, are left out.
        kv_bytes_per_token: keys and values that a decode step reads per token of context.
        arithmetic: the kind of products in which most of a prompt is computed, as `machine.speeds` names it.
    """

    weight_bytes: int
    products_per_token: int
    kv_bytes_per_token: int
    arithmetic: str

    def decode_bytes(self, context: int, batch: int) -> int:
        """Bytes that a decode step of `batch` sequences with so many tokens of context reads."""
        return self.weight_bytes + batch * context * self.kv_bytes_per_token

    def prefill_operations(self, tokens: int) -> int:
        """Additions and multiplications with weights (attention left out) for a prompt."""
        return 2 * tokens * self.products_per_token


def traffic_of(model: Model) -> Traffic | None:
    """None where it is not known: graphs that are not flattened, or have nodes that run on the host."""
    decoder = model.decoder
    if not isinstance(decoder, PagedDecoder) or any(isinstance(part, HostNode) for part in decoder.program.parts):
        return None
    program, executor = decoder.program, decoder.executor
    weight_bytes, products = 0, Counter[str]()
    for op in program.ops:
        chosen = op.per_token if isinstance(op, MoE) else 1  # of each weight's experts, per token
        for weight in (projection.weight for projection in projections(op)):
            weight_bytes += executor.packed_bytes(weight, program.constants) * chosen // max(weight.experts, 1)
            if all(program.types[name].per is Per.TOKEN for name in op.outputs):
                prompts = executor.arithmetic(op, program.constants, prefill=True)
                arithmetic = prompts or executor.arithmetic(op, program.constants, prefill=False) or "fp32"
                products[arithmetic] += chosen * weight.rows * weight.columns
    return Traffic(
        weight_bytes=weight_bytes,
        products_per_token=products.total(),
        kv_bytes_per_token=model.info.kv_bytes_per_token,
        arithmetic=products.most_common(1)[0][0] if products else "fp32",
    )
