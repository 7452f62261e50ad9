"""The slow decoder: a graph that cannot be flattened, run as it is, one sequence after another.

Past keys and values are dense arrays that the graph itself grows. Correct for any decoder whose interface is
input_ids, attention_mask, position_ids and past/present tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from genai.kernels.cpu.team import Team

from ..errors import UnsupportedModelError
from ..graph.names import GraphNames
from ..runtime.plan import Plan
from ..runtime.python_loop import run
from .decoder import Logits


@dataclass(frozen=True)
class DenseInput:
    """A graph input: element type and static shape (None where it varies)."""

    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]


class DenseSequence:
    """Tokens and the graph's own past tensors [1, kv_heads, length, head_size] by input name."""

    def __init__(self, empty: dict[str, np.ndarray]) -> None:
        self.tokens: list[int] = []
        self.past = dict(empty)
        self.num_computed = 0

    def append(self, tokens: Sequence[int], *, together: int = 0) -> None:
        """See DecoderSequence; the graph is the same for all."""
        self.tokens.extend(tokens)

    def rewind(self, length: int) -> None:
        del self.tokens[length:]
        self.num_computed = min(self.num_computed, max(length - 1, 0))
        self.past = {name: value[:, :, : self.num_computed] for name, value in self.past.items()}

    def drop_cache(self) -> None:
        self.past = {name: value[:, :, :0] for name, value in self.past.items()}
        self.num_computed = 0

    def close(self) -> None:
        self.past = {}
        self.num_computed = 0


class DenseDecoder:
    """Runs a decoder graph as exported.

    Args:
        plan: the compiled graph.
        team: threads of its kernels.
        inputs: its inputs by name.
        names: what they mean.
        vocab_size: width of the logits.
        past_shape: (kv_heads, head_size), where the graph leaves them open.
    """

    def __init__(
        self,
        plan: Plan,
        team: Team,
        inputs: dict[str, DenseInput],
        names: GraphNames,
        vocab_size: int,
        past_shape: tuple[int, int],
    ) -> None:
        self.team = team
        self.plan, self.inputs, self.names, self.vocab_size = plan, inputs, names, vocab_size
        self._layers = _layers(inputs, names)
        self._empty = {name: _empty_past(name, inputs[name], past_shape) for pair in self._layers for name in pair[:2]}

    def open(self) -> DenseSequence:
        """A new empty sequence."""
        return DenseSequence(self._empty)

    def fork(self, sequence: DenseSequence) -> DenseSequence:
        """See Decoder.fork: the graph makes new arrays at every step, so the old ones are shared."""
        other = DenseSequence(sequence.past)
        other.tokens, other.num_computed = list(sequence.tokens), sequence.num_computed
        return other

    def step(
        self, sequences: Sequence[DenseSequence], *, all_rows: Collection[int] = (), token_budget: int | None = None
    ) -> list[Logits | None]:
        """See Decoder.step; it computes every pending token, one sequence after another, whatever the budget."""
        before = [(sequence.past, sequence.num_computed) for sequence in sequences]
        try:
            return [
                self._run(sequence, index in all_rows) if sequence.num_computed < len(sequence.tokens) else None
                for index, sequence in enumerate(sequences)
            ]
        except BaseException:
            for sequence, state in zip(sequences, before, strict=True):
                sequence.past, sequence.num_computed = state
            raise

    def interrupt(self, sequences: Collection[DenseSequence]) -> None:
        """See Decoder.interrupt: what the graph has begun, it ends."""

    def reuse(self, sequence: DenseSequence) -> int:
        """See Decoder.reuse: dense state belongs to its sequence, there is nothing to find."""
        return 0

    def publish(self, sequence: DenseSequence) -> None:
        """See Decoder.publish: nothing is shared."""

    def _run(self, sequence: DenseSequence, all_rows: bool) -> Logits:
        total, start = len(sequence.tokens), sequence.num_computed
        results = run(self.plan, {**self._feeds(sequence, start, total), **sequence.past})
        logits = np.asarray(results[self.names.logits], np.float32).reshape(-1, self.vocab_size)
        if all_rows and len(logits) != total - start:
            raise UnsupportedModelError(
                f"the graph gave {len(logits)} rows of logits for {total - start} tokens",
                "it computes the last row only (prune_lm_head), and it could not be flattened",
                "export the model without prune_lm_head to get every row",
            )
        sequence.past = {
            past: results[present] for pair in self._layers for past, present in zip(pair[:2], pair[2:], strict=True)
        }
        sequence.num_computed = total
        return logits if all_rows else logits[-1:]

    def _feeds(self, sequence: DenseSequence, start: int, total: int) -> dict[str, np.ndarray]:
        values = {
            self.names.input_ids: np.asarray([sequence.tokens[start:]]),
            self.names.attention_mask: np.ones((1, total)),
            self.names.position_ids: np.arange(start, total)[None, :],
        }
        return {name: value.astype(self.inputs[name].dtype) for name, value in values.items() if name in self.inputs}

    def close(self) -> None:
        """Give the threads back; nothing else is kept outside the sequences."""
        self.team.close()


def _layers(inputs: dict[str, DenseInput], names: GraphNames) -> list[tuple[str, ...]]:
    """Per layer: past key, past value, present key, present value."""
    templates = (names.past_key, names.past_value, names.present_key, names.present_value)
    layers: list[tuple[str, ...]] = []
    while names.past_key.replace("%d", str(len(layers))) in inputs:
        layers.append(tuple(template.replace("%d", str(len(layers))) for template in templates))
    known = {name for pair in layers for name in pair} | {names.input_ids, names.attention_mask, names.position_ids}
    if unknown := sorted(set(inputs) - known):
        raise UnsupportedModelError(
            f"the graph wants inputs {', '.join(unknown)}",
            "their meaning is not known, so they cannot be fed",
            "name them in genai_config.json (model.decoder.inputs) or export the decoder without them",
        )
    return layers


def _empty_past(name: str, value: DenseInput, past_shape: tuple[int, int]) -> np.ndarray:
    if len(value.shape) != 4:
        raise UnsupportedModelError(
            f"past tensor {name!r} has {len(value.shape)} dimensions",
            "[batch, kv_heads, length, head_size] is expected",
            "export the decoder with separate past keys and values",
        )
    kv_heads, head_size = value.shape[1] or past_shape[0], value.shape[3] or past_shape[1]
    return np.zeros((1, kv_heads, 0, head_size), value.dtype)
