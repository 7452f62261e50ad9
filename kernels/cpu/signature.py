"""Signatures of kernels, such as "void(float32[:,::1], int64)": what the callers of machine code must know of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

# Of a native operator.
NATIVE = "int64(int64, int64, int64, int64, int64)"

_PARAMETER = re.compile(r"\s*(\w+)\s*(\[[^\]]*\])?\s*(?:,|$)")


@dataclass(frozen=True)
class Parameter:
    """One parameter: a number (dtype is None) or an array."""

    text: str
    is_float: bool = False
    dtype: np.dtype[Any] | None = None
    axes: int = 0

    def fits(self, given: Any) -> bool:
        """Whether it is an array of this type and number of axes."""
        return isinstance(given, np.ndarray) and given.dtype == self.dtype and given.ndim == self.axes

    def __str__(self) -> str:
        return self.text


def parse(signature: str) -> tuple[Parameter, ...]:
    """The parameters of a kernel.

    Raises:
        ValueError: it is no signature, or returns something.
    """
    found = re.fullmatch(r"void\((.*)\)", signature)
    if found is None:
        raise ValueError(f"the signature is {signature!r}, expected void(...)")
    inside, at, parameters = found.group(1), 0, []
    while at < len(inside):
        match = _PARAMETER.match(inside, at)
        if match is None:
            raise ValueError(f"the signature is {signature!r}: no type at {inside[at:]!r}")
        name, axes = match.groups()
        if axes is None:
            parameters.append(Parameter(name, name.startswith("float")))
        else:
            parameters.append(Parameter(name + axes, False, np.dtype(name), axes.count(",") + 1))
        at = match.end()
    return tuple(parameters)
