"""The values inside a model while it computes a prompt: what our engine's steps give, under the graph's names."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from genai.kvcache.budget import available_memory, format_bytes

from ..engine.dense import DenseDecoder
from ..engine.paged import PagedDecoder
from ..errors import ContextOverflowError, InputError, UnsupportedModelError
from ..runtime.segments import TapeStep
from .scored_text import pending_logits

if TYPE_CHECKING:
    from genai.kernels.registry import Kernel

    from ..model import Model
    from ..runtime.plan import Plan, Step

Observer = Callable[["Step", Sequence[Any]], tuple[Any, ...]]


@dataclass(frozen=True)
class TracedValue:
    """One value: the operator that gave it, and the array, [1, T, ...] for T tokens of a prompt."""

    op_type: str
    array: NDArray[Any]


def trace_values(
    model: Model,
    tokens: NDArray[np.int64],
    *,
    instead: Mapping[str, NDArray[Any]] | None = None,
    memory: int | None = None,
) -> dict[str, TracedValue]:
    """Every value that a prompt's prefill computes, by name, in the order of computation.

    The prompt is computed in one step from an empty cache, with the logits of every token. Values that a fusion left
    out are not among them; a fused operator's result has the name of the last one that it stands for.

    Args:
        tokens: int64 [T].
        instead: values to go on with in place of those of the same name and size that this model computed; then an
            operator's result shows its own error alone, not what those before it did.
        memory: most bytes for the values; None = a third of the memory available now.

    Raises:
        ContextOverflowError: more tokens than the model's context.
        InputError: the values do not fit into memory.
    """
    limit = model.config.model.context_length
    if len(tokens) > limit:
        raise ContextOverflowError(
            f"the prompt has {len(tokens)} tokens", f"the model's context_length is {limit}", "shorten the prompt"
        )
    tracer = _Tracer(instead or {}, available_memory() // 3 if memory is None else memory)
    decoder = copy.copy(model.decoder)
    if not isinstance(decoder, (PagedDecoder, DenseDecoder)):
        raise UnsupportedModelError(
            f"the values inside a {type(decoder).__name__} cannot be seen", "it has no plan of steps", "use another"
        )
    decoder.plan = _observed(decoder.plan, tracer.see)
    sequence = decoder.open()
    try:
        sequence.append(tokens.tolist())
        pending_logits(decoder, sequence, all_rows=True, token_budget=len(tokens))
    finally:
        sequence.close()
    return tracer.values


class _Tracer:
    def __init__(self, instead: Mapping[str, NDArray[Any]], memory: int) -> None:
        self.values: dict[str, TracedValue] = {}
        self._instead, self._memory, self._kept = instead, memory, 0

    def see(self, step: Step, results: Sequence[Any]) -> tuple[Any, ...]:
        """Keep a step's results; returns those to go on with."""
        going_on = list(results)
        for index, name in enumerate(step.names[: len(going_on)]):
            value = results[index]
            if name and isinstance(value, (np.ndarray, np.generic)) and is_number(np.asarray(value)):
                self._keep(name, step.op_type, value)
                replacement = self._instead.get(name)
                if replacement is not None and replacement.size == value.size:
                    going_on[index] = np.array(replacement, value.dtype).reshape(value.shape)
        return tuple(going_on)

    def _keep(self, name: str, op_type: str, value: Any) -> None:
        self._kept += value.nbytes
        if self._kept > self._memory:
            raise InputError(
                f"the values inside the model take more than {format_bytes(self._memory)}",
                "all of them are kept, to be compared",
                "shorten the prompt: a few tokens show where models part",
            )
        # Kernels may use their memory again, so this must be a copy.
        self.values[name] = TracedValue(op_type, np.array(value))


def is_number(array: NDArray[Any]) -> bool:
    """Whether an array holds numbers that can be subtracted."""
    return array.dtype.kind in "fiu" or array.dtype.name == "bfloat16"


def _observed(plan: Plan, observer: Observer) -> Plan:
    """The same plan, whose steps go on with what the observer returns. Bodies of If and Loop stay unseen."""
    return replace(plan, steps=tuple(_observed_step(step, observer) for step in plan.steps))


def _observed_step(step: Step, observer: Observer) -> Step:
    if isinstance(step.kernel, TapeStep):
        return replace(step, kernel=_observed_tape(step, step.kernel, observer))

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return observer(step, step.kernel(context, inputs))

    return replace(step, kernel=kernel)


def _observed_tape(step: Step, tape: TapeStep, observer: Observer) -> Kernel:
    """A tape's nodes one by one."""
    parts = [
        (replace(step, label=op_type, op_type=op_type, kernel=part, names=tuple(part.made)), part)
        for op_type, part in tape.apart()
    ]

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        values = dict(zip(tape.given, inputs, strict=True))
        for part_step, part in parts:
            results = part(context, [values[name] for name in part.given])
            values.update(zip(part.made, observer(part_step, results), strict=True))
        return tuple(values[name] for name in tape.made)

    return kernel


def arrays(values: Mapping[str, TracedValue]) -> dict[str, NDArray[Any]]:
    """The arrays alone."""
    return {name: value.array for name, value in values.items()}
