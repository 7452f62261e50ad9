"""The minimum work of a step, and the machine's ceilings, which are measured between the runs to be compared."""

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

# Larger than a last-level cache. Other virtual machines on the same host may occupy parts of that cache.
BUFFER_BYTES = 2**29
_SECONDS = 0.2


@dataclass(frozen=True)
class Ceiling:
    """A limit of the machine by which speeds are divided. The limit is measured right after each run.

    Attributes:
        name: name of the measured quantity.
        unit: amount needed per unit of speed: bytes per token, or operations per token.
        measure: function that returns the limit, per second.
    """

    name: str
    unit: float
    measure: Callable[[], float]


def measure_of(executor: Executor, name: str) -> Callable[[], float] | None:
    """Return a function that measures the executor's device: its memory bandwidth in bytes/s ("bandwidth"), or its
    operations per second in an arithmetic. Return None if there is no measurement for the device.
    """
    if executor.ceiling(name) is not None:
        return lambda: executor.ceiling(name) or 0.0
    if executor.free_bytes() is not None:  # a device with separate memory
        return None
    return bandwidth(executor.threads) if name == "bandwidth" else products(name, executor.threads)


def ceiling_of(model: Model, name: str, unit: float, measured: str) -> Ceiling | None:
    """Return a ceiling of the model's device, or None if there is no measurement for the device."""
    measure = measure_of(model.decoder.executor, measured)
    return None if measure is None else Ceiling(name, unit, measure)


def share_of(measure: Callable[[], float] | None, reached: float) -> float | None:
    """Return `reached` divided by the measured ceiling, or None if there is no measurement."""
    return None if measure is None else reached / measure()


def bandwidth(threads: int | None) -> Callable[[], float]:
    """Return a function that measures the host's memory read bandwidth in bytes/s, with `threads` threads."""
    return lambda: measure_bandwidth(BUFFER_BYTES, threads=threads, seconds=_SECONDS).bytes_per_second


def products(arithmetic: str, threads: int | None) -> Callable[[], float]:
    """Return a function that measures operations per second on registers only, in one arithmetic."""
    return lambda: measure_products(threads=threads or default_threads(), repeat=1, only=arithmetic)[arithmetic]


@dataclass(frozen=True)
class Traffic:
    """The memory traffic and arithmetic of one model's steps.

    Attributes:
        weight_bytes: packed weights that a decode step of one sequence reads. Mixtures of experts count only the
            experts that one token selects; larger batches read more.
        products_per_token: multiplications by weights per token, including the weights of the selected experts. The LM
            head is left out, because it is computed only for rows whose logits are needed.
        kv_bytes_per_token: bytes of keys and values that a decode step reads per token of context.
        arithmetic: the arithmetic that computes most of a prefill, as named by `doctor.speeds`.
        state_bytes: bytes of a sequence's states in recurrent layers.
    """

    weight_bytes: int
    products_per_token: int
    kv_bytes_per_token: int
    arithmetic: str
    state_bytes: int = 0

    def decode_bytes(self, context: int, batch: int) -> int:
        """Return the bytes of a decode step of `batch` sequences, each with `context` tokens of context.

        These are the bytes that the step reads, and the states of recurrent layers that it writes.
        """
        return self.weight_bytes + batch * (context * self.kv_bytes_per_token + 2 * self.state_bytes)

    def prefill_operations(self, tokens: int) -> int:
        """Return the number of additions and multiplications with weights for a prompt, without attention."""
        return 2 * tokens * self.products_per_token


def traffic_of(model: Model) -> Traffic | None:
    """Return the traffic of a model, or None if it is unknown because the graph is not flat or uses host nodes."""
    decoder = model.decoder
    if not isinstance(decoder, PagedDecoder) or any(isinstance(part, HostNode) for part in decoder.program.parts):
        return None
    program, executor = decoder.program, decoder.executor
    weight_bytes, products = 0, Counter[str]()
    for op in program.ops:
        chosen = op.per_token if isinstance(op, MoE) else 1  # number of experts that one token selects
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
        state_bytes=decoder.storage.layout.bytes_per_state,
    )
