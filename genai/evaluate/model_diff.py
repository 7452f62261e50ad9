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
from .values import TracedValue, import_onnxruntime, is_number, onnxruntime_values, trace_values

if TYPE_CHECKING:
    from ..models.model import Model

# Twice what int8 activations add up to over the layers of the bundled model (docs/evaluation.md).
DEFAULT_TOLERANCE = 0.05
# float64 copies are made of so many numbers at a time.
_BLOCK = 1 << 20
_LAYER = re.compile(r"(?:^|[./_])(?:layers?|blocks?|h)[._](\d{1,9})(?:[./_]|$)")


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
        isolated: whether every operator got base's values, so that errors did not add up.
        values: those in both, in the other's order of computation.
        only_in_base, only_in_other: names of the rest; fused operators leave such values out.
        first: index of the first value whose error exceeds the tolerance; None if there is none.
    """

    base: str
    other: str
    tokens: int
    tolerance: float
    isolated: bool
    values: tuple[ValueDiff, ...]
    only_in_base: tuple[str, ...]
    only_in_other: tuple[str, ...]
    first: int | None

    @property
    def layers_only_in_base(self) -> tuple[int, ...]:
        """Layers of which the other run has no value."""
        return self._layers_without(self.only_in_base, self.only_in_other)

    @property
    def layers_only_in_other(self) -> tuple[int, ...]:
        """Layers of which base's run has no value."""
        return self._layers_without(self.only_in_other, self.only_in_base)

    def _layers_without(self, names: tuple[str, ...], opposite: tuple[str, ...]) -> tuple[int, ...]:
        present = {value.layer for value in self.values} | {layer_of(name) for name in opposite}
        return tuple(sorted({layer for layer in map(layer_of, names) if layer is not None and layer not in present}))


def diff_models(
    base: Model, other: Model, tokens: NDArray[np.int64], *, tolerance: float = DEFAULT_TOLERANCE, isolate: bool = False
) -> ModelDiff:
    """Compare what two models compute for one prompt, value by value: names that both graphs use.

    Args:
        base, other: two folders, or one folder loaded with other options.
        tokens: int64 [T], see encode_prompt.
        tolerance: relative RMS error above which a value counts as parted.
        isolate: give every operator of `other` the values that base computed, so that errors do not add up.

    Raises:
        OptionError: the tolerance is not above 0.
        VocabularyMismatchError: the tokens do not mean the same to both.
        InputError: no value has the same name in both, or the prompt is too long to keep them.
    """
    check_tolerance(tolerance)
    check_same_vocabulary(base, other)
    expected = {name: value.array for name, value in trace_values(base, tokens).items()}
    computed = trace_values(other, tokens, instead=expected if isolate else None)
    return _compared(expected, computed, (_label(base), _label(other)), len(tokens), tolerance, isolate)


def diff_with_onnxruntime(
    model: Model,
    tokens: NDArray[np.int64],
    *,
    tolerance: float = DEFAULT_TOLERANCE,
    isolate: bool = False,
    threads: int | None = None,
) -> ModelDiff:
    """Compare what this engine computes with what onnxruntime computes from the same graph; onnxruntime is the base.

    Values that only the mask or the past need are not computed here, so they are not compared.

    Raises:
        MissingPackageError, ModelOutputError, UnsupportedModelError: see onnxruntime_values.
        OptionError, InputError: see diff_models.
    """
    check_tolerance(tolerance)
    import_onnxruntime()
    # Ours first: it is refused if all the values do not fit into memory.
    computed = trace_values(model, tokens)
    expected = onnxruntime_values(model, tokens, computed, threads=threads)
    if isolate:
        computed = trace_values(model, tokens, instead=expected)
    labels = f"onnxruntime on {model.folder}", _label(model)
    return _compared(expected, computed, labels, len(tokens), tolerance, isolate)


def check_tolerance(tolerance: float) -> None:
    """Raises OptionError unless it is a finite number above 0."""
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not 0 < tolerance < math.inf:
        raise OptionError(
            f"tolerance = {tolerance!r}", "a relative error above 0 is expected", f"use for example {DEFAULT_TOLERANCE}"
        )


def _label(model: Model) -> str:
    device = model.decoder.executor.device
    return f"{'genai' if device == 'cpu' else device} on {model.folder}"


def _compared(
    base: Mapping[str, NDArray[Any]],
    other: Mapping[str, TracedValue],
    labels: tuple[str, str],
    num_tokens: int,
    tolerance: float,
    isolated: bool,
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
        isolated=isolated,
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


def _aligned(left: NDArray[Any], right: NDArray[Any], num_tokens: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Both flat. Where one side has the last token's row only (a pruned head), so has the result."""
    left, right = left.reshape(-1), right.reshape(-1)
    if left.size == num_tokens * right.size:
        left = left[left.size - right.size :]
    elif right.size == num_tokens * left.size:
        right = right[right.size - left.size :]
    return left, right


def _errors(value: NDArray[Any], base: NDArray[Any]) -> tuple[float, float, float]:
    """Relative RMS error, largest absolute difference, cosine. Equal infinities, and NaN in both, do not differ."""
    largest, sums = 0.0, np.zeros(4)
    for first in range(0, value.size, _BLOCK):
        a, b = (x[first : first + _BLOCK].astype(np.float64) for x in (value, base))
        finite = np.isfinite(a) & np.isfinite(b)
        if not (finite | (a == b) | (np.isnan(a) & np.isnan(b))).all():
            return math.inf, math.inf, 0.0
        a, b = a[finite], b[finite]
        difference = a - b
        largest = max(largest, float(np.abs(difference).max(initial=0.0)))
        sums += (difference @ difference, a @ a, b @ b, a @ b)
    error, of_value, of_base, product = sums.tolist()
    if error == 0:
        return 0.0, 0.0, 1.0
    relative = math.sqrt(error / of_base) if of_base else math.inf
    return relative, largest, product / math.sqrt(of_value * of_base) if of_value and of_base else 0.0
