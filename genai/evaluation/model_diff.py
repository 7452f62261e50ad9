"""Where two runs part: their values compared one by one, in the order of computation."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, OptionError
from .divergence import check_same_vocabulary
from .onnxruntime_values import onnxruntime_values
from .values import TracedValue, arrays, is_number, trace_values

if TYPE_CHECKING:
    from ..model import Model

DEFAULT_TOLERANCE = 0.01
_LAYER = re.compile(r"(?:^|[./_])(?:layers?|blocks?|h)[._](\d+)(?:[./_]|$)")


@dataclass(frozen=True)
class ValueDiff:
    """One value in both runs.

    Attributes:
        name, op_type: the value, and the operator that gives it in the other run.
        layer: number in its name; None outside the layers.
        shape, base_shape: in the other run and in base's.
        relative_rms: ||other - base|| / ||base||; infinite if the shapes do not fit, or where only one is finite.
        max_abs: largest |other - base|.
        cosine: of the angle between both, as vectors.
    """

    name: str
    op_type: str
    layer: int | None
    shape: tuple[int, ...]
    base_shape: tuple[int, ...]
    relative_rms: float
    max_abs: float
    cosine: float


@dataclass(frozen=True)
class ModelDiff:
    """All values of two runs of one prompt.

    Attributes:
        base, other: what was compared.
        tokens: length of the prompt.
        tolerance: relative RMS error up to which values count as equal.
        values: those in both, in the other's order of computation.
        only_in_base, only_in_other: names of the rest; fused operators leave such values out.
        first: index of the first value whose error exceeds the tolerance; None if there is none.
    """

    base: str
    other: str
    tokens: int
    tolerance: float
    values: tuple[ValueDiff, ...]
    only_in_base: tuple[str, ...]
    only_in_other: tuple[str, ...]
    first: int | None

    @property
    def layers_only_in_base(self) -> tuple[int, ...]:
        """Layers of which the other run has no value."""
        return self._layers_without(self.only_in_base)

    @property
    def layers_only_in_other(self) -> tuple[int, ...]:
        """Layers of which base's run has no value."""
        return self._layers_without(self.only_in_other)

    def _layers_without(self, names: tuple[str, ...]) -> tuple[int, ...]:
        shared = {value.layer for value in self.values}
        return tuple(sorted({layer for layer in map(layer_of, names) if layer is not None and layer not in shared}))


def diff_models(
    base: Model, other: Model, tokens: NDArray[np.int64], *, tolerance: float = DEFAULT_TOLERANCE
) -> ModelDiff:
    """Compare what two models compute for one prompt, value by value: names that both graphs use.

    Args:
        base, other: two folders, or one folder loaded with other options.
        tokens: int64 [T], see encode_prompt.
        tolerance: relative RMS error above which a value counts as parted.

    Raises:
        OptionError: the tolerance is not above 0.
        VocabularyMismatchError: the tokens do not mean the same to both.
        InputError: no value has the same name in both, or the prompt is too long to keep them.
    """
    check_tolerance(tolerance)
    check_same_vocabulary(base, other)
    expected = arrays(trace_values(base, tokens))
    return _compared(expected, trace_values(other, tokens), (_label(base), _label(other)), len(tokens), tolerance)


def diff_with_onnxruntime(
    model: Model, tokens: NDArray[np.int64], *, tolerance: float = DEFAULT_TOLERANCE, threads: int | None = None
) -> ModelDiff:
    """Compare what this engine computes with what onnxruntime computes from the same graph; onnxruntime is the base.

    Values that only the mask or the past need are not computed here, so they are not compared.

    Raises:
        MissingPackageError, ModelOutputError, UnsupportedModelError: see onnxruntime_values.
        OptionError, InputError: see diff_models.
    """
    check_tolerance(tolerance)
    ours = trace_values(model, tokens)
    theirs = {name: array for name, array in onnxruntime_values(model, tokens, ours, threads=threads).items()}
    labels = f"onnxruntime on {model.folder}", _label(model)
    return _compared(theirs, ours, labels, len(tokens), tolerance)


def check_tolerance(tolerance: float) -> None:
    """Raises OptionError unless it is a finite number above 0."""
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not 0 < tolerance < math.inf:
        raise OptionError(
            f"tolerance = {tolerance!r}", "a relative error above 0 is expected", f"use for example {DEFAULT_TOLERANCE}"
        )


def _label(model: Model) -> str:
    return f"genai on {model.folder}"


def _compared(
    base: Mapping[str, NDArray[Any]],
    other: Mapping[str, TracedValue],
    labels: tuple[str, str],
    num_tokens: int,
    tolerance: float,
) -> ModelDiff:
    shared = [name for name in other if name in base and is_number(base[name])]
    if not shared:
        raise InputError(
            f"no value has the same name in {labels[0]} and {labels[1]}",
            "values are compared by name, so both graphs must come from the same exporter",
            "compare their outputs by `genai eval kld`",
        )
    values = tuple(_value_diff(name, base[name], other[name], num_tokens) for name in shared)
    return ModelDiff(
        base=labels[0],
        other=labels[1],
        tokens=num_tokens,
        tolerance=tolerance,
        values=values,
        only_in_base=tuple(name for name in base if name not in other),
        only_in_other=tuple(name for name in other if name not in base),
        # `not <=` also finds NaN.
        first=next((i for i, value in enumerate(values) if not value.relative_rms <= tolerance), None),
    )


def _value_diff(name: str, base: NDArray[Any], other: TracedValue, num_tokens: int) -> ValueDiff:
    mine, theirs = _aligned(other.array, base, num_tokens)
    errors = _errors(mine, theirs) if mine.size == theirs.size else (math.inf, math.inf, 0.0)
    return ValueDiff(name, other.op_type, layer_of(name), other.array.shape, base.shape, *errors)


def layer_of(name: str) -> int | None:
    """The layer that a value's name tells: 3 for "/model/layers.3/mlp/Mul/output_0"."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def _aligned(
    left: NDArray[Any], right: NDArray[Any], num_tokens: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Both flat. Where one side has the last token's row only (a pruned head), so has the result."""
    flat = [np.asarray(array, np.float64).reshape(-1) for array in (left, right)]
    for index, longer in enumerate(flat):
        shorter = flat[1 - index]
        if longer.size == num_tokens * shorter.size:
            flat[index] = longer[longer.size - shorter.size :]
    return flat[0], flat[1]


def _errors(value: NDArray[np.float64], base: NDArray[np.float64]) -> tuple[float, float, float]:
    """Relative RMS error, largest absolute difference, cosine. Equal infinities, and NaN in both, do not differ."""
    same = (value == base) | (np.isnan(value) & np.isnan(base))
    finite = np.isfinite(value) & np.isfinite(base)
    if not (same | finite).all():
        return math.inf, math.inf, 0.0
    # Scaled, so that squares of float32's largest values do not overflow and those of the smallest count.
    value, base = value[finite], base[finite]
    scale = max(np.abs(value).max(initial=0.0), np.abs(base).max(initial=0.0)) or 1.0
    a, b = value / scale, base / scale
    size_a, size_b, difference = (float(np.linalg.norm(x)) for x in (a, b, a - b))
    largest = float(np.abs(value - base).max(initial=0.0))
    if difference == 0:
        return 0.0, largest, 1.0
    relative = difference / size_b if size_b else math.inf
    return relative, largest, float(a @ b) / (size_a * size_b) if size_a and size_b else 0.0
