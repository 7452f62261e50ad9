"""Named weights, read one tensor at a time and validated against the shapes that the architecture expects."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
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
from .tensors import HEAD, TABLE, tensor_shapes

# Number of floats converted at a time: 16 MiB of float32.
_CHUNK_FLOATS = 1 << 22


class Weights:
    """Reads tensors by their Hugging Face names from a mapping that may load them lazily.

    Args:
        stored_name: returns the name in the mapping of the tensor with a Hugging Face name.

    Raises:
        InputError: a tensor is missing, has the wrong shape, is not of a float type, or contains NaN or infinity.
    """

    def __init__(self, tensors: Mapping[str, NDArray[Any]], stored_name: Callable[[str], str] = str) -> None:
        self._tensors, self._stored_name = tensors, stored_name

    def tensor(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return the tensor as floats; quantised blocks are dequantised to float32."""
        tensor = self.stored(name, shape)
        if type_of(tensor) is not None:
            try:
                tensor = dequantize(tensor)
            except QuantizationError as error:
                raise not_finite(name) from error
        order = self.order(name)
        return tensor if order is None else tensor[:, np.argsort(order)]

    def order(self, name: str) -> NDArray[np.int64] | None:
        """Return the column order of a stored matrix (its column i is the matrix's column order[i]), or None."""
        return self._tensors.order(self._stored_name(name)) if isinstance(self._tensors, CheckpointWeights) else None

    def kinds(self, names: Iterable[str]) -> set[np.dtype[Any]]:
        """Return the dtypes in which tensors are stored."""
        tensors, names = self._tensors, map(self._stored_name, names)
        if isinstance(tensors, CheckpointWeights):
            return {tensors.kind(name) for name in names}
        return {np.asarray(tensors[name]).dtype for name in names}

    @property
    def rounded(self) -> dict[str, tuple[float, float]]:
        """The sum of squared errors and the sum of squared values of the weights that were rounded, by type."""
        return self._tensors.rounded if isinstance(self._tensors, CheckpointWeights) else {}

    def note_rounded(self, kind: str, error: float, total: float) -> None:
        """Add to the sum of squared errors and the sum of squared values of the weights of a type."""
        before = self.rounded.get(kind, (0.0, 0.0))
        self.rounded[kind] = before[0] + error, before[1] + total

    @property
    def prequantized(self) -> dict[tuple[str, str], int]:
        """The number of matrices written exactly as stored, by block type and by the runtimes that read them."""
        return self._tensors.prequantized if isinstance(self._tensors, CheckpointWeights) else {}

    def note_prequantized(self, kind: str, readers: str, count: int) -> None:
        """Count matrices of a type that were written unchanged."""
        self.prequantized[kind, readers] = self.prequantized.get((kind, readers), 0) + count

    def stored(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return the tensor as it is stored: floats, or blocks that are quantised along the columns."""
        name = self._stored_name(name)
        try:  # not `in`: the default Mapping.__contains__ would load the tensor
            tensor = np.asarray(self._tensors[name])
        except KeyError as error:
            known = sorted(self._tensors)
            close = get_close_matches(name, known, 3)
            raise InputError(
                f"the weights have no tensor {name!r}",
                f"there are {len(known)} tensors" + (f" (the closest names are {', '.join(close)})" if close else ""),
                "use Hugging Face tensor names, and check the configuration's biases, norms and tied embeddings",
            ) from error
        # The dtype.kind of bfloat16 and of ml_dtypes' 8-bit floats is not "f", so the name is compared.
        kind = type_of(tensor)
        if kind is None and tensor.dtype.kind != "f" and "float" not in tensor.dtype.name:
            raise InputError(
                f"{name} has type {tensor.dtype}",
                "weights must be floating-point numbers",
                "use the float checkpoint instead of a quantised checkpoint",
            )
        actual = tensor.shape if kind is None else (*tensor.shape[:-1], tensor.shape[-1] * kind.columns)
        if actual != shape:
            raise InputError(
                f"{name} has shape {list(actual)}, expected {list(shape)}",
                "the expected shape follows from the model's configuration",
                "check that the configuration and the weights belong to the same model",
            )
        return tensor

    def vector(self, name: str, size: int) -> NDArray[np.float32]:
        """Return a norm weight or a bias as float32."""
        vector = self.tensor(name, (size,)).astype(np.float32)
        require_finite(name, vector)
        return vector


@dataclass(frozen=True)
class Chunks(Iterable[NDArray[np.float32]]):
    """A tensor as float32 chunks, which can be iterated over more than once.

    Args:
        matrices: returns named matrices [n_i, k], in the weights' layout, to be concatenated along their rows.
        transposed: True if the tensor is the transpose of the concatenated matrix.
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
    """Yield a matrix as float32, some rows at a time. If `finite` is True, raise InputError on NaN or infinity."""
    step = max(1, _CHUNK_FLOATS // matrix.shape[1])
    for first in range(0, len(matrix), step):
        chunk = matrix[first : first + step].astype(np.float32)
        if finite:
            require_finite(name, chunk)
        yield chunk


def transposed_chunks(named: Iterable[tuple[str, NDArray[Any]]]) -> Iterator[NDArray[np.float32]]:
    """Yield the transpose of concatenated matrices [n_i, k] as float32 [k, sum of n_i], some rows at a time."""
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
    """Return values as float16. Raise InputError if a value overflows."""
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float16)
    if not np.isfinite(narrow).all():
        raise InputError(
            f"{name} contains {float(np.abs(values).max()):g}",
            f"the largest float16 number is {float(np.finfo(np.float16).max):g}",
            "store these weights as fp32, int8 or int4",
        )
    return narrow


def require_finite(name: str, values: NDArray[np.float32]) -> None:
    """Raise InputError if the values contain NaN or infinity."""
    if not np.isfinite(values).all():
        raise not_finite(name)


def not_finite(name: str) -> InputError:
    """Return the error for a tensor with NaN or infinity."""
    return InputError(
        f"{name} contains NaN or infinite values",
        "NaN or infinity in a weight makes all logits wrong",
        "check the training run or the download that produced these weights",
    )


# Buffers that older exports store and every runtime recomputes.
_DERIVED = re.compile(r"(rotary_emb\.(inv_freq|cos_cached|sin_cached)|\.masked_bias|\.attn\.bias|\.attention\.bias)$")

Progress = Callable[[int], None]


def unused_names(architecture: Architecture, spec: DecoderSpec, checkpoint: Checkpoint) -> str:
    """Return a regular expression for the names of tensors that do not affect the logits; "" if there are none."""
    paths = _head_paths(architecture, spec, checkpoint)
    return "|".join(filter(None, [architecture.unused, *(f"^{re.escape(path)}" for path in paths)]))


def _head_paths(architecture: Architecture, spec: DecoderSpec, checkpoint: Checkpoint) -> list[str]:
    """Return the start of the names of each layer of the MTP head that the checkpoint has."""
    paths: list[str] = []
    head = architecture.mtp
    if head is None:
        return paths
    (projection,) = architecture.source(spec, "mtp.fc.weight").names
    rest = projection.removeprefix(head.path(spec, 0))
    while (path := head.path(spec, len(paths))) and path not in paths and path + rest in checkpoint:
        paths.append(path)
    return paths


def are_equal(checkpoint: Checkpoint, first: str, second: str) -> bool:
    """Return True if two matrices of a checkpoint have the same values, which may be stored in different types."""
    both = (checkpoint[name] for name in (first, second))
    one, other = (dequantize(matrix) if type_of(matrix) is not None else matrix for matrix in both)
    return one.shape == other.shape and all(
        np.array_equal(a, b, equal_nan=True)
        for a, b in zip(row_chunks(first, one, finite=False), row_chunks(second, other, finite=False), strict=True)
    )


class CheckpointWeights(Mapping[str, NDArray[Any]]):
    """The weights of a decoder, read from a checkpoint.

    Args:
        force: True to replace NaN and infinity with 0 instead of raising; `replaced` then lists the tensors.
        progress: called with the size in bytes of every tensor that is read.

    Attributes:
        reports: the functions that are called with these sizes.

    Raises:
        InputError: tensors are missing or unused, or a tied head differs from the embeddings.
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
        self._checkpoint, self._force = checkpoint, force
        architecture = architecture.stored_in(checkpoint)
        self._unused = re.compile(unused_names(architecture, spec, checkpoint) or "$^")
        self.reports = [progress]
        prefix, _, rest = (table := architecture.source(spec, TABLE).names[0]).partition(".")
        # Checkpoints of a base model without a head omit a prefix such as "transformer.".
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
        tensors = [self._floats(stored) if source.floats else self._checkpoint[stored] for stored in source.names]
        tensor = tensors[0] if len(tensors) == 1 else np.concatenate(tensors)
        try:
            tensor = tensor if source.view is None else source.view(tensor)
        except (ValueError, IndexError) as error:
            raise InputError(
                f"{name} cannot be extracted from {source.names[0]} with shape {list(tensor.shape)}",
                str(error),
                "check that config.json and the weights belong to the same model",
            ) from error
        if name not in self._seen:
            self._seen.add(name)
            for report in self.reports:
                report(tensor.nbytes)
        return self._without_gaps(source.names[0], tensor) if self._force else tensor

    def _floats(self, stored: str) -> NDArray[Any]:
        """Return a tensor of the checkpoint as floats, with the columns in their original order."""
        tensor, order = self._checkpoint[stored], self._checkpoint.order(stored)
        if type_of(tensor) is None:
            return tensor
        try:
            floats = dequantize(tensor)
        except QuantizationError as error:
            raise not_finite(stored) from error
        return floats if order is None else floats[:, np.argsort(order)]

    def kind(self, name: str) -> np.dtype[Any]:
        """Return the dtype in which a tensor is stored, without reading it; float32 if it is read as floats."""
        source = self._sources[name]
        kind = self._checkpoint.kind(source.names[0])
        return np.dtype(np.float32) if source.floats and kind.names else kind

    def order(self, name: str) -> NDArray[np.int64] | None:
        """Return the column order of a stored matrix, or None; see Checkpoint.order."""
        source = self._sources[name]
        return None if source.floats else self._checkpoint.order(source.names[0])

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    @property
    def total_bytes(self) -> int:
        """The total size in bytes of the tensors that will be read."""
        names = {name for source in self._sources.values() for name in source.names}
        return sum(self._checkpoint.nbytes(name) for name in names)

    def _stored(self, source: TensorSource) -> TensorSource:
        """Return the source with the names in the files, which may omit the base model's prefix."""
        return replace(source, names=tuple(name.removeprefix(self._prefix) for name in source.names))

    def _check_names(self, tied_head: str) -> None:
        needed = {name for source in self._sources.values() for name in source.names}
        if missing := sorted(needed - set(self._checkpoint)):
            close = get_close_matches(missing[0], list(self._checkpoint), 3)
            raise InputError(
                f"the checkpoint lacks {len(missing)} tensors that its configuration requires, such as {missing[0]!r}",
                f"the files have {len(self._checkpoint)} tensors; the closest names are {', '.join(close) or 'none'}",
                "check that config.json and the weights belong to the same model",
            )
        unread = sorted(set(self._checkpoint) - needed - {tied_head})
        unread = [name for name in unread if not (_DERIVED.search(name) or self._unused.search(name))]
        if unread := [name for name in unread if not self._adds_nothing(name)]:
            raise InputError(
                f"the checkpoint has {len(unread)} tensors that its configuration does not use, such as {unread[0]!r}",
                "ignoring them would change the model's output",
                "check that config.json and the weights belong to the same model, and merge adapters or remove extra "
                "heads",
            )

    def _adds_nothing(self, name: str) -> bool:
        """Return True for biases that are all zero, which older quantisers add to every matrix."""
        return name.endswith(".bias") and not self._checkpoint[name].any()

    def _check_tied(self, head: str) -> None:
        """Raise InputError if a stored head differs from the embeddings that it is tied to."""
        table = self._sources[TABLE].names[0]
        if not are_equal(self._checkpoint, table, head):
            raise InputError(
                f"{head} differs from {table}, although config.json sets tie_word_embeddings",
                "tied embeddings share one matrix",
                "if the head is a separate matrix, set tie_word_embeddings to false in config.json",
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
