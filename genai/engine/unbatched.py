"""The slow decoder: it runs a graph that cannot be flattened exactly as exported, one sequence at a time.

Past keys and values are dense arrays that the graph itself extends. This decoder works for any model with the inputs
input_ids, attention_mask, position_ids and past/present tensors; the caller of a sequence sets any other inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from genai.kernels.device import Executor

from ..errors import InputError, StateError, UnsupportedModelError
from ..onnx.decoder_names import GraphNames
from ..session.loop import Plan, run
from .adapter_mix import AdapterMix
from .decoder import Decoder, check_width
from .scheduler import Pending, StepPlan
from .sequence import AdapterHistory, DecoderSequence, Logits
from .stored import StoredArray, StoredTokens


@dataclass(frozen=True)
class UnbatchedInput:
    """A graph input: its element type and static shape (None for dynamic dimensions)."""

    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]


class UnbatchedSequence(DecoderSequence):
    """Tokens, the graph's past tensors [..., length, head_size] by input name, and inputs that the caller set."""

    def __init__(self, decoder: UnbatchedDecoder, past: dict[str, np.ndarray], given: dict[str, np.ndarray]) -> None:
        super().__init__()
        self.decoder, self.past, self.given = decoder, dict(past), dict(given)
        # Inputs that earlier tokens were computed with, from before the caller changed them.
        self.given_history: AdapterHistory[dict[str, np.ndarray]] = AdapterHistory()
        self.num_computed = 0

    def pending(self) -> Pending:
        first = self.num_computed
        return Pending(self.given_history.end_of(first, len(self.tokens)) - first, False)

    def fork(self) -> Self:
        # The graph makes new arrays at every step, so the old ones are shared.
        other = type(self)(self.decoder, self.past, self.given)
        other.tokens, other.num_computed = [*self.tokens], self.num_computed
        other.given_history = self.given_history.copy()
        return other

    def give(self, name: str, value: NDArray[Any]) -> None:
        wanted = self.decoder.wanted
        if name not in wanted:
            names = ", ".join(wanted) or "none"
            raise InputError(
                f"the graph has no input {name!r} to set", f"inputs that can be set: {names}", "set one of these inputs"
            )
        self.given_history.note(self.num_computed, dict(self.given))
        self.given[name] = np.asarray(value, self.decoder.inputs[name].dtype)

    def rewind(self, length: int) -> None:
        super().rewind(length)
        self.given_history.cut(length)

    def stored_arrays(self) -> list[tuple[StoredArray, Iterator[NDArray[np.uint8]]]]:
        given, defaults = self.given, self.decoder.defaults
        if given.keys() != defaults.keys() or any(given[name] is not value for name, value in defaults.items()):
            raise StateError(
                "additional graph inputs were set for this sequence",
                "a saved state does not include these inputs, but the sequence cannot continue without them",
                "omit set_model_input and adapters that replace inputs, or save only the tokens",
            )
        arrays = self.decoder.arrays_for(self.num_computed)
        pieces = [np.ascontiguousarray(self.past[array.name]) for array in arrays]
        return [(array, iter([piece.reshape(-1).view(np.uint8)])) for array, piece in zip(arrays, pieces, strict=True)]

    def truncate(self, length: int = 0) -> int:
        self.num_computed = min(self.num_computed, length)
        self.past = {name: value[..., : self.num_computed, :] for name, value in self.past.items()}
        return self.num_computed

    def close(self) -> None:
        super().close()
        self.past = {}


class UnbatchedDecoder(Decoder):
    """Runs a decoder graph as exported.

    Args:
        plan: the compiled graph.
        executor: the device of its kernels.
        inputs: the graph's inputs by name.
        names: the names of inputs and outputs, by role.
        vocab_size: width of the logits.
        past_shape: (kv_heads, head_size), used where the graph's dimensions are dynamic.
    """

    def __init__(
        self,
        plan: Plan,
        executor: Executor,
        inputs: dict[str, UnbatchedInput],
        names: GraphNames,
        vocab_size: int,
        past_shape: tuple[int, int],
    ) -> None:
        self.executor = executor
        self.plan, self.inputs, self.names, self.vocab_size = plan, inputs, names, vocab_size
        self._presents = _presents(inputs, names)
        # The additional inputs of every new sequence.
        self.defaults: dict[str, np.ndarray] = {}
        self._empty = {name: _empty_past(name, inputs[name], past_shape, names) for name in self._presents}
        known = {*self._presents, names.input_ids, names.attention_mask, names.position_ids}
        self.wanted = tuple(sorted(set(inputs) - known))
        self.output_names = tuple(name for name in plan.output_names if name not in self._presents.values())

    def open(self) -> UnbatchedSequence:
        return UnbatchedSequence(self, self._empty, self.defaults)

    def arrays_for(self, num_stored: int) -> list[StoredArray]:
        shapes = {name: (*empty.shape[:-2], num_stored, empty.shape[-1]) for name, empty in self._empty.items()}
        return [StoredArray(name, self._empty[name].dtype.name, shape) for name, shape in shapes.items()]

    def restore(
        self,
        stored: StoredTokens,
        read: Callable[[memoryview], None],
        adapters: AdapterMix | None = None,
        *,
        earlier: bool = False,
    ) -> UnbatchedSequence:
        sequence = self.open()
        sequence.adapt(adapters)
        for array in self.arrays_for(stored.num_stored):
            past = np.empty(array.shape, array.dtype)
            read(past.reshape(-1).view(np.uint8).data)
            sequence.past[array.name] = past
        sequence.tokens, sequence.num_computed = list(stored.tokens), stored.num_stored
        return sequence

    def step(
        self,
        sequences: Sequence[DecoderSequence],
        step: StepPlan,
        *,
        all_rows: Collection[int] = (),
        output: str = "",
    ) -> list[Logits | None]:
        own = [sequence for sequence in sequences if isinstance(sequence, UnbatchedSequence)]
        if len(own) != len(sequences):
            raise TypeError("the sequence belongs to another kind of decoder")
        before = [(sequence.past, sequence.num_computed) for sequence in own]
        results: list[Logits | None] = [None] * len(own)
        try:
            for index, count, _ in step:
                results[index] = self._run(own[index], count, index in all_rows, output or self.names.logits)
        except BaseException:
            for sequence, state in zip(own, before, strict=True):
                sequence.past, sequence.num_computed = state
            raise
        return results

    def _run(self, sequence: UnbatchedSequence, count: int, all_rows: bool, output: str) -> Logits | None:
        start, end = sequence.num_computed, sequence.num_computed + count
        given = sequence.given_history.of(start, sequence.given)
        results = run(self.plan, {**self._feeds(sequence, start, end), **sequence.past, **given})
        logits = np.asarray(results[output], np.float32)
        if output == self.names.logits:
            check_width(logits, self.vocab_size)
        logits = logits.reshape(-1, logits.shape[-1])
        if all_rows and len(logits) != count:
            raise UnsupportedModelError(
                f"the graph returned {len(logits)} rows of logits for {count} tokens",
                "the graph computes only the last row (prune_lm_head), and cannot be flattened",
                "to get every row, export the model without prune_lm_head",
            )
        sequence.past = {past: results[present] for past, present in self._presents.items()}
        sequence.num_computed = end
        return logits if all_rows else logits[-1:] if end == len(sequence.tokens) else None

    def _feeds(self, sequence: UnbatchedSequence, start: int, end: int) -> dict[str, np.ndarray]:
        for name in self.wanted:
            if name not in sequence.given:
                raise InputError(
                    f"Missing Input: {name}",
                    "the graph requires this input, and its meaning is unknown",
                    f"call Generator.set_model_input({name!r}, array) first, or define the input in genai_config.json "
                    "(model.decoder.inputs)",
                )
        values = {
            self.names.input_ids: np.asarray([sequence.tokens[start:end]]),
            self.names.attention_mask: np.ones((1, end)),
            self.names.position_ids: np.arange(start, end)[None, :],
        }
        return {name: value.astype(self.inputs[name].dtype) for name, value in values.items() if name in self.inputs}


def _presents(inputs: dict[str, UnbatchedInput], names: GraphNames) -> dict[str, str]:
    """Return the present tensor that replaces each past tensor."""
    presents: dict[str, str] = {}
    layer = 0
    while (pairs := [(past.replace("%d", str(layer)), present) for past, present in names.pasts.items()])[0][
        0
    ] in inputs:
        presents |= {past: present.replace("%d", str(layer)) for past, present in pairs}
        layer += 1
    if missing := [past for past in presents if past not in inputs]:
        raise UnsupportedModelError(
            f"the graph has no input {missing[0]!r}",
            "each layer needs past keys and past values",
            "correct model.decoder.inputs in genai_config.json",
        )
    return presents


def _empty_past(name: str, value: UnbatchedInput, past_shape: tuple[int, int], names: GraphNames) -> np.ndarray:
    together = (2,) if names.past else ()
    if len(value.shape) != 4 + len(together):
        expected = "[2, batch" if together else "[batch"
        raise UnsupportedModelError(
            f"past tensor {name!r} has {len(value.shape)} dimensions",
            f"expected shape: {expected}, kv_heads, length, head_size]",
            "export the decoder with separate past keys and values, or with past_names and both in one tensor",
        )
    kv_heads, head_size = value.shape[-3] or past_shape[0], value.shape[-1] or past_shape[1]
    return np.zeros((*together, 1, kv_heads, 0, head_size), value.dtype)
