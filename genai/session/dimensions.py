"""Sizes of symbolic dimensions, including dimensions whose name is a formula, such as "past_length + length".

Exporters give a dimension that depends on others the text of the formula as its name: optimum writes
"past_sequence_length + sequence_length", and PyTorch writes "2*s0" or "s0//2 + 1".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from ..errors import OptionError
from ..onnx.ir import Value
from .arguments import shape_of

# A name may contain dots and hyphens. A minus sign between names therefore needs spaces.
_TOKEN = re.compile(
    r"\s*(?:(?P<number>[0-9]{1,18})(?![\w.])|(?P<name>[A-Za-z_][\w.]*(?:-\w[\w.]*)*)|(?P<sign>//|[-+*/(),]))"
)
_MOST_CHARACTERS = 200
_LARGEST = 2**62
_FUNCTIONS: dict[str, Callable[..., int]] = {"max": max, "Max": max, "min": min, "Min": min}
# Dimensions that onnxruntime-genai's exporter names without a formula.
_SUMS = {
    "total_sequence_length": ("past_sequence_length", "sequence_length"),
    "total_seq_len": ("past_seq_len", "seq_len"),
}

Size = Callable[[Callable[[str], int]], int]


class _NotAFormula(Exception):
    """The text is a plain name."""


class Formula:
    """A dimension as a formula of other dimensions.

    The grammar has whole numbers, names, +, -, *, / and // (both round down), parentheses, min and max.

    Attributes:
        names: the dimensions that the formula depends on, each once.
    """

    def __init__(self, text: str) -> None:
        self.names: tuple[str, ...] = ()
        self._tokens = list(_tokens(text))
        self._compute = self._sum()
        if self._tokens:
            raise _NotAFormula

    def __call__(self, size_of: Callable[[str], int]) -> int:
        """Return the value. `size_of` returns the size of a name. Raises ArithmeticError for a division by zero."""
        return self._compute(size_of)

    def _take(self, *signs: str) -> str:
        if self._tokens and self._tokens[0][0] == "sign" and self._tokens[0][1] in signs:
            return self._tokens.pop(0)[1]
        return ""

    def _sum(self) -> Size:
        value = self._product()
        while sign := self._take("+", "-"):
            value = _applied(sign, value, self._product())
        return value

    def _product(self) -> Size:
        value = self._factor()
        while sign := self._take("*", "/", "//"):
            value = _applied(sign, value, self._factor())
        return value

    def _factor(self) -> Size:
        if self._take("("):
            value = self._sum()
            self._expect(")")
            return value
        kind, text = self._tokens.pop(0) if self._tokens else ("", "")
        if kind == "number":
            return lambda _: int(text)
        if kind != "name":
            raise _NotAFormula
        if text in _FUNCTIONS and self._take("("):
            return self._arguments(_FUNCTIONS[text])
        self.names = (*self.names, *([] if text in self.names else [text]))
        return lambda size_of: size_of(text)

    def _arguments(self, function: Callable[..., int]) -> Size:
        parts = [self._sum()]
        while self._take(","):
            parts.append(self._sum())
        self._expect(")")
        return lambda size_of: function([part(size_of) for part in parts])

    def _expect(self, sign: str) -> None:
        if not self._take(sign):
            raise _NotAFormula


def _applied(sign: str, left: Size, right: Size) -> Size:
    def value(size_of: Callable[[str], int]) -> int:
        a, b = left(size_of), right(size_of)
        found = a + b if sign == "+" else a - b if sign == "-" else a * b if sign == "*" else a // b
        if abs(found) > _LARGEST:
            raise OverflowError("the size is too large")
        return found

    return value


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    place, text = 0, text.rstrip()
    if len(text) > _MOST_CHARACTERS:
        raise _NotAFormula
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None or match.lastgroup is None:
            raise _NotAFormula
        yield match.lastgroup, match[match.lastgroup]
        place = match.end()


def formula_of(name: str) -> Formula | None:
    """Return the formula that a dimension's name is; None for a plain name, such as "batch" or "batch-size"."""
    try:
        formula = Formula(name)
    except _NotAFormula:
        return None
    return formula if formula.names != (name.strip(),) else None


def dim_name(value: Value, axis: int) -> str:
    """Return the name of a dimension; the name of an unnamed dimension is "INPUT:AXIS"."""
    return str(shape_of(value)[axis] or f"{value.name}:{axis}")


class Sizes:
    """The sizes of the inputs' dimensions.

    Args:
        inputs: all inputs of the model.
        given: sizes that the user set: of symbolic dimensions, of the dimensions in formulas, and of unnamed
            dimensions as "INPUT:AXIS". All other dimensions that are no formula have the size 1.
        found: sizes of dimensions of the arrays that the user passed; `given` takes precedence.

    Attributes:
        chosen: dimensions whose size this object chose, with the size.
        free: the names of all dimensions that no formula determines.

    Raises:
        OptionError: no input has a dimension of a given name, a given size is negative, or a formula's given size
            differs from the sizes given for its parts.
    """

    def __init__(
        self, inputs: Sequence[Value], given: Mapping[str, int], found: Mapping[str, int] | None = None
    ) -> None:
        self._known = {**(found or {}), **given}
        self.chosen: dict[str, int] = {}
        named = dict.fromkeys(
            dim_name(value, axis)
            for value in inputs
            for axis, dim in enumerate(shape_of(value))
            if not isinstance(dim, int)
        )
        self._formulas = {name: formula for name in named if (formula := _sum_or_formula(name, named))}
        parts = dict.fromkeys(part for formula in self._formulas.values() for part in formula.names)
        self.free = tuple(name for name in dict.fromkeys([*named, *parts]) if name not in self._formulas)
        _check_given(given, dict.fromkeys([*named, *parts]))
        for name, formula in self._formulas.items():
            if name in given and all(part in given for part in formula.names) and self._computed(name) != given[name]:
                sizes = ", ".join(f"{part}={given[part]}" for part in formula.names)
                raise OptionError(
                    f"--dim {name}={given[name]}", f"it is {self._computed(name)} for {sizes}", "leave one of them out"
                )

    def __getitem__(self, name: str) -> int:
        """Return the size of a dimension by its name, or by "INPUT:AXIS"; see dim_name.

        Raises:
            OptionError: a formula has no value, or a negative one, for these sizes.
        """
        if name in self._known:
            return self._known[name]
        size = self._computed(name) if name in self._formulas else 1
        self.chosen[name] = size
        return size

    def _computed(self, name: str) -> int:
        formula = self._formulas[name]
        try:
            size = formula(self._part)
        except ArithmeticError as error:
            raise self._refused(name, f"{error}") from error
        if size < 0:
            raise self._refused(name, f"its value would be {size}")
        return size

    def _part(self, name: str) -> int:
        return self._known[name] if name in self._known else self._computed(name) if name in self._formulas else 1

    def _refused(self, name: str, why: str) -> OptionError:
        parts = self._formulas[name].names
        sizes = ", ".join(f"{part}={self._part(part)}" for part in parts)
        return OptionError(
            f"the dimension {name!r} cannot be computed from {sizes}",
            why,
            "set other sizes with " + " ".join(f"--dim {part}=SIZE" for part in parts),
        )


def _sum_or_formula(name: str, named: Mapping[str, object]) -> Formula | None:
    parts = _SUMS.get(name, ())
    return Formula(" + ".join(parts)) if parts and all(part in named for part in parts) else formula_of(name)


def _check_given(given: Mapping[str, int], known: Mapping[str, object]) -> None:
    for name, size in given.items():
        if name not in known:
            fix = (
                f"use one of the model's dimensions: {', '.join(known)}"
                if known
                else "remove --dim; all dimensions of the inputs have fixed sizes"
            )
            raise OptionError(f"--dim {name}={size}", "no input of the model has a dimension with that name", fix)
        if size < 0:
            raise OptionError(f"--dim {name}={size}", "a size cannot be negative", "use a whole number from 0")


def sizes_in(inputs: Sequence[Value], arrays: Mapping[str, object]) -> dict[str, int]:
    """Return the sizes of the named dimensions that the shapes of these arrays determine."""
    found: dict[str, int] = {}
    for value in inputs:
        shape = getattr(arrays.get(value.name), "shape", ())
        for dim, size in zip(shape_of(value), shape, strict=False):
            if isinstance(dim, str) and dim:
                found.setdefault(dim, int(size))
    return found
