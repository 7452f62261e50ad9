"""Quantisation methods, one per module. A method converts a float matrix and a grid to coded blocks."""

from __future__ import annotations

from genai.kernels.weights import QuantizationError

from . import awq, distill, gptq, hqq, rtn, search
from .base import InputStatistics as InputStatistics, Method as Method, MethodResult as MethodResult

METHODS: dict[str, Method] = {
    method.name: method
    for method in (rtn.METHOD, search.SEARCH, search.IMPORTANCE, hqq.METHOD, gptq.METHOD, awq.METHOD, distill.METHOD)
}


def method(name: str) -> Method:
    """Return the method with a given name.

    Raises:
        QuantizationError: there is no method with this name.
    """
    if name not in METHODS:
        raise QuantizationError(f"method is {name!r}, but must be one of {list(METHODS)}")
    return METHODS[name]
