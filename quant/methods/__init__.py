"""Methods of quantisation, one per file: a float matrix and a grid in, coded blocks out."""

from __future__ import annotations

from genai.kernels.weights import QuantizationError

from . import awq, distill, gptq, hqq, rtn, search
from .base import InputStatistics as InputStatistics, Method as Method, MethodResult as MethodResult

METHODS: dict[str, Method] = {
    method.name: method
    for method in (rtn.METHOD, search.SEARCH, search.IMPORTANCE, hqq.METHOD, gptq.METHOD, awq.METHOD, distill.METHOD)
}


def method(name: str) -> Method:
    """A method by its name.

    Raises:
        QuantizationError: there is none of that name.
    """
    if name not in METHODS:
        raise QuantizationError(f"method is {name!r}, expected one of {list(METHODS)}")
    return METHODS[name]
