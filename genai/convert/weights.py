"""Named weights, checked as they are read: one tensor at a time, each with the shape that the architecture asks for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.weights import QuantizationError
from genai.quant.block_types import dequantize, type_of, without_gaps

from ..errors import InputError
from .architectures.common import Architecture, TensorSource
from .checkpoint import Checkpoint
from .spec import DecoderSpec
from .tensors import tensor_shapes

# Floats that are converted at once: 16 MiB of float32.
_CHUNK_FLOATS = 1 << 22


class Weights:
    """Reads tensors by their Hugging Face names from a mapping that may load them lazily.

    Raises:
        InputError: a tensor is missing, is not of a float type, has another shape, or holds NaN or infinity.
    """

    def __init__(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        self._tensors = tensors

    def tensor(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """The tensor as floats; quantised blocks become float32."""
        tensor = self.stored(name, shape)
        if type_of(tensor) is not None:
            try:
                tensor = dequantize(tensor)
            except QuantizationError as error:
                raise not_finite(name) from error
        order = self.order(name)
        return tensor if order is None else tensor[:, np.argsort(order)]

    def order(self, name: str) -> NDArray[np.int64] | None:
        """None, or: column i of what is stored is the matrix's column order[i]."""
        return self._tensors.order(name) if isinstance(self._tensors, CheckpointWeights) else None

    def kinds(self, names: Iterable[str]) -> set[np.dtype[Any]]:
        """The types in which tensors are stored."""
        tensors = self._tensors
        if isinstance(tensors, CheckpointWeights):
            return {tensors.kind(name) for name in names}
        return {np.asarray(tensors[name]).dtype for name in names}

    @property
    def rounded(self) -> dict[str, tuple[float, float]]:
        """By the type of what could not be kept exactly: the sums of squares of the errors, and of the values."""
        return self._tensors.rounded if isinstance(self._tensors, CheckpointWeights) else {}

    def note_rounded(self, kind: str, error: float, total: float) -> None:
        """Note how far weights of a type are off, by sums of squares."""
        before = self.rounded.get(kind, (0.0, 0.0))
        self.rounded[kind] = before[0] + error, before[1] + total

    @property
    def prequantized(self) -> dict[tuple[str, str], int]:
        """By the type of blocks and by who reads them: matrices that were written exactly as they were stored."""
        return self._tensors.prequantized if isinstance(self._tensors, CheckpointWeights) else {}

    def note_prequantized(self, kind: str, readers: str, count: int) -> None:
        """Note that matrices of a type were written as they were."""
        self.prequantized[kind, readers] = self.prequantized.get((kind, readers), 0) + count

    def stored(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """The tensor as it is stored: floats, or quantised blocks of the columns."""
        try:  # not `in`: a mapping's default test is to load the tensor
            tensor = np.asarray(self._tensors[name])
        except KeyError as error:
            known = sorted(self._tensors)
            close = get_close_matches(name, known, 3)
            raise InputError(
                f"the weights have no tensor {name!r}",
                f"there are {len(known)} tensors" + (f"; the closest names are {', '.join(close)}" if close else ""),
                "name tensors as Hugging Face does, and check the configuration's biases, norms and tied embeddings",
            ) from error
        # bfloat16 and the 8-bit floats of ml_dtypes say "V", or nothing, as their kind.
        kind = type_of(tensor)
        if kind is None and tensor.dtype.kind != "f" and "float" not in tensor.dtype.name:
            raise InputError(
                f"{name} has type {tensor.dtype}",
                "weights are floating-point numbers",
                "give the float checkpoint, not a quantised one",
            )
        actual = tensor.shape if kind is None else (*tensor.shape[:-1], tensor.shape[-1] * kind.columns)
        if actual != shape:
            raise InputError(
                f"{name} has shape {list(actual)}, expected {list(shape)}",
                "the sizes follow from the model's configuration",
                "check that configuration and weights belong together",
            )
        return tensor

    def vector(self, name: str, size: int) -> NDArray[np.float32]:
        """A norm weight or a bias as float32."""
        vector = self.tensor(name, (size,)).astype(np.float32)
        require_finite(name, vector)
        return vector


@dataclass(frozen=True)
class Chunks(Iterable[NDArray[np.float32]]):
    """A tensor as float32, piece by piece, which can be read more than once.

    Args:
        matrices: named matrices [n_i, k] that stand below each other, as the weights have them.
        transposed: the tensor is the transpose of all of them.
    """

    matrices: Callable[[], Iterable[tuple[str, NDArray[Any]]]]
    transposed: bool = False

    def __iter__(self) -> Iterator[NDArray[np.float32]]:
        if self.transposed:
            yield from transposed_chunks(self.matrices())
        else:
            for name, matrix in self.matrices():
                yield from row_chunks(name, matrix)


def row_chunks(name: str, matrix: NDArray[Any], *, finite: bool = True) -> Iterator[NDArray[np.float32]]:
    """A matrix as float32, some rows at a time; InputError if they are to be finite and are not."""
    step = max(1, _CHUNK_FLOATS // matrix.shape[1])
    for first in range(0, len(matrix), step):
        chunk = matrix[first : first + step].astype(np.float32)
        if finite:
            require_finite(name, chunk)
        yield chunk


def transposed_chunks(named: Iterable[tuple[str, NDArray[Any]]]) -> Iterator[NDArray[np.float32]]:
    """The transpose of matrices [n_i, k] below each other, as float32 [k, sum of n_i], some rows at a time."""
    matrices = dict(named)
    columns = next(iter(matrices.values())).shape[1]
    rows = sum(len(matrix) for matrix in matrices.values())
    step = max(1, _CHUNK_FLOATS // rows)
    for first in range(0, columns, step):
        part = slice(first, min(first + step, columns))
        chunk = np.empty((part.stop - first, rows), np.float32)
        start = 0
        for name, matrix in matrices.items():
            target = chunk[:, start : start + len(matrix)]
            target[:] = matrix[:, part].T
            require_finite(name, target)
            start += len(matrix)
        yield chunk


def narrowed(name: str, values: NDArray[np.float32]) -> NDArray[np.float16]:
    """Values as float16. Raises InputError: one of them is too large for it."""
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float16)
    if not np.isfinite(narrow).all():
        raise InputError(
            f"{name} holds {float(np.abs(values).max()):g}",
            f"float16 ends at {float(np.finfo(np.float16).max):g}",
            "store these weights as fp32, int8 or int4",
        )
    return narrow


def require_finite(name: str, values: NDArray[np.float32]) -> None:
    """Raise InputError if there is NaN or infinity among the values."""
    if not np.isfinite(values).all():
        raise not_finite(name)


def not_finite(name: str) -> InputError:
    """The error for a tensor with NaN or infinity."""
    return InputError(
        f"{name} holds NaN or infinite values",
        "every token would come out wrong",
        "check the training run or the download that made these weights",
    )


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
        prefix, _, rest = (table := architecture.source(spec, TABLE).names[0]).partition(".")
        # Such as "transformer.", where a checkpoint of the base model alone leaves it out.
        self._prefix = f"{prefix}." if table not in checkpoint and rest in checkpoint else ""
        self._seen: set[str] = set()
        self.rounded: dict[str, tuple[float, float]] = {}
        self.prequantized: dict[tuple[str, str], int] = {}
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
        if name not in self._seen:
            self._seen.add(name)
            self._progress(tensor.nbytes)
        return self._without_gaps(source.names[0], tensor) if self._force else tensor

    def kind(self, name: str) -> np.dtype[Any]:
        """The type in which a tensor is stored, without reading it."""
        return self._checkpoint.kind(self._sources[name].names[0])

    def order(self, name: str) -> NDArray[np.int64] | None:
        """Where the columns of what is stored are those of the matrix in another order; see Checkpoint."""
        return self._checkpoint.order(self._sources[name].names[0])

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors that will be read."""
        names = {name for source in self._sources.values() for name in source.names}
        return sum(self._checkpoint.nbytes(name) for name in names)

    def _stored(self, source: TensorSource) -> TensorSource:
        """The same source by the names in the files, where these leave out the base model's prefix."""
        return TensorSource(tuple(name.removeprefix(self._prefix) for name in source.names), source.view)

    def _check_names(self, tied_head: str) -> None:
        needed = {name for source in self._sources.values() for name in source.names}
        if missing := sorted(needed - set(self._checkpoint)):
            close = get_close_matches(missing[0], list(self._checkpoint), 3)
            raise InputError(
                f"the checkpoint lacks {len(missing)} tensors that its configuration calls for, first {missing[0]!r}",
                f"of {len(self._checkpoint)} tensors the closest are {', '.join(close) or 'none'}",
                "check that config.json and the weights belong together",
            )
        unread = sorted(set(self._checkpoint) - needed - {tied_head})
        if unread := [name for name in unread if not _DERIVED.search(name) and not self._adds_nothing(name)]:
            raise InputError(
                f"the checkpoint has {len(unread)} tensors that its configuration has no use for, first {unread[0]!r}",
                "left out, they would change every answer",
                "check that config.json and the weights belong together; merge adapters, remove extra heads",
            )

    def _adds_nothing(self, name: str) -> bool:
        """Biases of zeros, which older quantisers give to every matrix."""
        return name.endswith(".bias") and not self._checkpoint[name].any()

    def _check_tied(self, head: str) -> None:
        """A head stored beside the embeddings that it is tied to must be the same."""
        table = self._sources[TABLE].names[0]
        both = (self._checkpoint[name] for name in (table, head))
        table_matrix, head_matrix = (dequantize(matrix) if type_of(matrix) is not None else matrix for matrix in both)
        if table_matrix.shape != head_matrix.shape or not all(
            np.array_equal(a, b, equal_nan=True)
            for a, b in zip(
                row_chunks(table, table_matrix, finite=False), row_chunks(head, head_matrix, finite=False), strict=True
            )
        ):
            raise InputError(
                f"{head} differs from {table}, to which config.json ties it",
                "with tie_word_embeddings both are one matrix",
                "set tie_word_embeddings to false in config.json if the head is one of its own",
            )

    def _without_gaps(self, name: str, tensor: NDArray[Any]) -> NDArray[Any]:
        if type_of(tensor) is not None:
            mended = without_gaps(tensor)
            if mended is not tensor:
                self.replaced.append(name)
            return mended
        finite = np.isfinite(tensor)
        if finite.all():
            return tensor
        self.replaced.append(name)
        return np.where(finite, tensor, tensor.dtype.type(0))
