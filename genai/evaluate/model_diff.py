"""Comparison of two runs, value by value in the order of computation, to find where they diverge."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..common.html_parts import figures, passage, table
from ..errors import InputError, OptionError
from .divergence import check_same_vocabulary
from .values import TracedValue, import_onnxruntime, is_number, onnxruntime_values, trace_values

if TYPE_CHECKING:
    from ..models.model import Model

# Twice the error that int8 activations accumulate over the layers of the bundled model (docs/explanation/numerics.md).
DEFAULT_TOLERANCE = 0.05
# Maximum number of values that are copied to float64 at a time.
_BLOCK = 1 << 20
# The numbers of values that are interesting before and after the first value that differs.
_BEFORE, _AFTER = 3, 2
_LAYER = re.compile(r"(?:^|[./_])(?:layers?|blocks?|h)[._](\d{1,9})(?:[./_]|$)")


@dataclass(frozen=True)
class ValueDiff:
    """One value in both runs.

    Attributes:
        name: name of the value.
        op_type: operator that computes the value in the other run.
        layer: layer number in the name; None for values outside the layers.
        shape: shape in the other run.
        base_shape: shape in base's run.
        relative_rms: ||other - base|| / ||base||; infinite if the shapes do not match or only one side is finite.
        max_abs: largest |other - base|.
        cosine: cosine of the angle between the two values as vectors.
    """

    name: str
    op_type: str
    layer: int | None
    shape: tuple[int, ...]
    base_shape: tuple[int, ...]
    relative_rms: float
    max_abs: float
    cosine: float

    @property
    def shape_text(self) -> str:
        """The shape as text; if the shapes differ, followed by base's shape."""
        shape, base = ("×".join(map(str, one)) or "scalar" for one in (self.shape, self.base_shape))
        return shape if shape == base else f"{shape} ({base})"


@dataclass(frozen=True)
class ModelDiff:
    """All values of two runs of one prompt.

    Attributes:
        base: label of the reference run.
        other: label of the run that is compared with it.
        tokens: length of the prompt.
        tolerance: maximum relative RMS error at which values count as equal.
        isolated: True if every operator received base's values, so that errors did not accumulate.
        values: values that both runs have, in the other run's order of computation.
        only_in_base: names of the values that only base's run has, usually because the other graph's operators are
            fused.
        only_in_other: names of the values that only the other run has.
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
        """The layers without any value in the other run."""
        return self._layers_without(self.only_in_base, self.only_in_other)

    @property
    def layers_only_in_other(self) -> tuple[int, ...]:
        """The layers without any value in base's run."""
        return self._layers_without(self.only_in_other, self.only_in_base)

    def interesting(self) -> list[int]:
        """Return the indices of the worst value in each layer and of the values around the first difference."""
        worst: dict[int | None, int] = {}
        for index, value in enumerate(self.values):
            best = worst.setdefault(value.layer, index)
            if value.relative_rms > self.values[best].relative_rms:
                worst[value.layer] = index
        near = range(self.first - _BEFORE, self.first + _AFTER + 1) if self.first is not None else range(0)
        return sorted({*worst.values(), *(i for i in near if 0 <= i < len(self.values))})

    def verdict(self) -> str:
        """Describe the first difference."""
        how = "each operator alone" if self.isolated else "errors accumulate"
        if self.first is None:
            return f"no value differs: relative RMS error ≤ {self.tolerance:g} in all {len(self.values)} values ({how})"
        value = self.values[self.first]
        where = "outside the layers" if value.layer is None else f"layer {value.layer}"
        before = max((v.relative_rms for v in self.values[: self.first]), default=0.0)
        return (
            f"first difference: {where}, {value.op_type} {value.name!r}: relative RMS error {value.relative_rms:.2e} > "
            f"{self.tolerance:g} ({how}; at most {before:.1e} in the preceding values)"
        )

    def _repr_html_(self) -> str:
        """Return the verdict and the most interesting values for a notebook."""
        heads = ("", "layer", "operator", "relative RMS", "maximum", "cosine", "shape", "value")
        rows = [
            (
                ">" if index == self.first else "", "-" if value.layer is None else value.layer, value.op_type,
                f"{value.relative_rms:.1e}", f"{value.max_abs:.1e}", f"{value.cosine:.6f}", value.shape_text,
                value.name,
            )
            for index, value in ((index, self.values[index]) for index in self.interesting())
        ]  # fmt: skip
        sides = figures([("BASE", self.base), ("OTHER", self.other), ("prompt", f"{self.tokens} tokens")])
        return sides + passage(self.verdict()) + table(heads, rows)

    def _layers_without(self, names: tuple[str, ...], opposite: tuple[str, ...]) -> tuple[int, ...]:
        present = {value.layer for value in self.values} | {layer_of(name) for name in opposite}
        return tuple(sorted({layer for layer in map(layer_of, names) if layer is not None and layer not in present}))


def diff_models(
    base: Model, other: Model, tokens: NDArray[np.int64], *, tolerance: float = DEFAULT_TOLERANCE, isolate: bool = False
) -> ModelDiff:
    """Compare the values that two models compute for one prompt, for all names that occur in both graphs.

    Args:
        base: the reference model.
        other: a model from another folder, or from the same folder with other options.
        tokens: int64 [T]; see encode_prompt.
        tolerance: relative RMS error above which a value counts as different.
        isolate: True to run every operator of `other` on base's values, so that errors do not accumulate.

    Raises:
        OptionError: the tolerance is not above 0.
        VocabularyMismatchError: the models' vocabularies differ.
        InputError: no value has the same name in both models, or the prompt's values do not fit into memory.
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
    """Compare this engine's values with onnxruntime's values for the same graph; onnxruntime is the base.

    This engine does not compute values that only the mask or the past needs, so those values are not compared.

    Raises:
        MissingPackageError, ModelOutputError, UnsupportedModelError: as in onnxruntime_values.
        OptionError, InputError: as in diff_models.
    """
    check_tolerance(tolerance)
    import_onnxruntime()
    # Our run is first, because it raises an error if the values do not fit into memory.
    computed = trace_values(model, tokens)
    expected = onnxruntime_values(model, tokens, computed, threads=threads)
    if isolate:
        computed = trace_values(model, tokens, instead=expected)
    labels = f"onnxruntime on {model.folder}", _label(model)
    return _compared(expected, computed, labels, len(tokens), tolerance, isolate)


def check_tolerance(tolerance: float) -> None:
    """Raise OptionError unless the tolerance is a finite number above 0."""
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not 0 < tolerance < math.inf:
        raise OptionError(
            f"tolerance = {tolerance!r}",
            "the tolerance must be a relative error above 0",
            f"use a number such as {DEFAULT_TOLERANCE}",
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
            "values are compared by name, so the same exporter must have written both graphs",
            "compare the outputs of the models with `genai eval kld`",
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
        # `not <=` is also True for NaN.
        first=next((i for i, value in enumerate(values) if not value.relative_rms <= tolerance), None),
    )


def _value_diff(name: str, base: NDArray[Any], other: TracedValue, num_tokens: int) -> ValueDiff:
    mine, theirs = _aligned(other.array, base, num_tokens)
    errors = _errors(mine, theirs) if mine.size == theirs.size else (math.inf, math.inf, 0.0)
    return ValueDiff(name, other.op_type, layer_of(name), other.array.shape, base.shape, *errors)


def layer_of(name: str) -> int | None:
    """Return the layer number in a value's name: 3 for "/model/layers.3/mlp/Mul/output_0"."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def _aligned(left: NDArray[Any], right: NDArray[Any], num_tokens: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return flat arrays. If one array has only the last token's row (a pruned head), cut the other to that row."""
    left, right = left.reshape(-1), right.reshape(-1)
    if left.size == num_tokens * right.size:
        left = left[left.size - right.size :]
    elif right.size == num_tokens * left.size:
        right = right[right.size - left.size :]
    return left, right


def _errors(value: NDArray[Any], base: NDArray[Any]) -> tuple[float, float, float]:
    """Return relative RMS error, largest absolute difference and cosine. Equal infinities and NaN count as equal."""
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
