"""The tensors of a checkpoint under the names that the writer asks for, and what must hold before a byte is written."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from .architecture import Architecture, Source
from .checkpoint import Checkpoint
from .spec import DecoderSpec
from .tensors import tensor_shapes
from .weights import row_chunks

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
# Stored by older exports, and computed anew by everybody.
_DERIVED = re.compile(r"(rotary_emb\.(inv_freq|cos_cached|sin_cached)|\.masked_bias|\.attn\.bias|\.attention\.bias)$")

Progress = Callable[[int], None]


class CheckpointWeights(Mapping[str, NDArray[Any]]):
    """What a decoder reads, out of a checkpoint.

    Args:
        force: NaN and infinity become 0 instead of an error; `replaced` then lists the tensors.
        progress: told the bytes of every tensor that is read.

    Raises:
        InputError: tensors are missing, left over, or a tied head differs from the embeddings.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        architecture: Architecture,
        spec: DecoderSpec,
        *,
        force: bool = False,
        progress: Progress = lambda count: None,
    ) -> None:
        self._checkpoint, self._force, self._progress = checkpoint, force, progress
        self._prefix = _missing_prefix(checkpoint, architecture.source(spec, TABLE).names[0])
        self._sources = {name: self._stored(architecture.source(spec, name)) for name in tensor_shapes(spec)}
        self.replaced: list[str] = []
        head = self._stored(architecture.source(spec, HEAD)).names[0]
        self._check_names(head if spec.tie_word_embeddings else "")
        if spec.tie_word_embeddings and head in checkpoint:
            self._check_tied(head)

    def __getitem__(self, name: str) -> NDArray[Any]:
        source = self._sources[name]
        tensors = [self._checkpoint[stored] for stored in source.names]
        tensor = tensors[0] if len(tensors) == 1 else np.concatenate(tensors)
        try:
            tensor = tensor if source.view is None else source.view(tensor)
        except (ValueError, IndexError) as error:
            raise InputError(
                f"{source.names[0]} has shape {list(tensor.shape)}, which does not hold {name}",
                str(error),
                "check that config.json and the weights belong together",
            ) from error
        self._progress(tensor.nbytes)
        return self._without_gaps(source.names[0], tensor) if self._force else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors that will be read."""
        names = {name for source in self._sources.values() for name in source.names}
        return sum(self._checkpoint[name].nbytes for name in names)

    def _stored(self, source: Source) -> Source:
        """The same source by the names in the files, where these leave out the base model's prefix."""
        return Source(tuple(name.removeprefix(self._prefix) for name in source.names), source.view)

    def _check_names(self, tied_head: str) -> None:
        wanted = {name for source in self._sources.values() for name in source.names}
        if missing := sorted(wanted - set(self._checkpoint)):
            close = get_close_matches(missing[0], list(self._checkpoint), 3)
            raise InputError(
                f"the checkpoint lacks {len(missing)} tensors that its config.json calls for, first {missing[0]!r}",
                f"of {len(self._checkpoint)} tensors the closest are {', '.join(close) or 'none'}",
                "check that config.json and the weights belong together",
            )
        unread = sorted(set(self._checkpoint) - wanted - {tied_head})
        if unread := [name for name in unread if not _DERIVED.search(name)]:
            raise InputError(
                f"the checkpoint has {len(unread)} tensors that its config.json has no use for, first {unread[0]!r}",
                "left out, they would change every answer",
                "check that config.json and the weights belong together; merge adapters, remove extra heads",
            )

    def _check_tied(self, head: str) -> None:
        """A head stored beside the embeddings that it is tied to must be the same."""
        table = self._sources[TABLE].names[0]
        one, two = self._checkpoint[table], self._checkpoint[head]
        if one.shape != two.shape or not all(
            np.array_equal(a, b, equal_nan=True)
            for a, b in zip(row_chunks(table, one, finite=False), row_chunks(head, two, finite=False), strict=True)
        ):
            raise InputError(
                f"{head} differs from {table}, to which config.json ties it",
                "with tie_word_embeddings both are one matrix",
                "set tie_word_embeddings to false in config.json if the head is one of its own",
            )

    def _without_gaps(self, name: str, tensor: NDArray[Any]) -> NDArray[Any]:
        finite = np.isfinite(tensor)
        if finite.all():
            return tensor
        self.replaced.append(name)
        return np.where(finite, tensor, tensor.dtype.type(0))


def _missing_prefix(checkpoint: Checkpoint, table: str) -> str:
    """Such as "transformer.", where a checkpoint of the base model alone leaves it out."""
    prefix, _, rest = table.partition(".")
    return f"{prefix}." if table not in checkpoint and rest in checkpoint else ""
