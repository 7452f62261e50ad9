"""Joining what is declared of a value's type with what inference found."""

from __future__ import annotations

import re
from dataclasses import replace

from .types import Dim, SparseTensorType, TensorType, Type

# Symbols that ONNX's inference makes up for unknown extents; each run numbers them anew.
_GENERATED = re.compile(r"unk__\d+")
_Arrays = TensorType | SparseTensorType


def merged(found: Type, declared: Type | None) -> Type:
    """What was found, with declared extents and symbols where it left them open."""
    if not isinstance(found, _Arrays) or not isinstance(declared, _Arrays) or type(found) is not type(declared):
        return found
    if declared.dtype is not found.dtype or declared.shape is None:
        return found
    if found.shape is None:
        return without_generated(declared)
    if len(found.shape) != len(declared.shape):
        return found
    shape = tuple(_merged_dim(new, old) for new, old in zip(found.shape, declared.shape, strict=True))
    return replace(declared, shape=shape)


def completed(declared: Type | None, found: Type) -> Type:
    """What was declared, with what was found where it left extents open."""
    found = without_generated(found)
    if declared is None:
        return found
    if not isinstance(found, _Arrays) or not isinstance(declared, _Arrays) or found.shape is None:
        return declared
    if declared.shape is None:
        return replace(declared, shape=found.shape)
    if len(found.shape) != len(declared.shape):
        return declared
    shape = tuple(new if old is None else old for new, old in zip(found.shape, declared.shape, strict=True))
    return replace(declared, shape=shape)


def without_generated(known: Type) -> Type:
    """A type whose generated symbols are None."""
    if not isinstance(known, _Arrays) or known.shape is None:
        return known
    return replace(known, shape=tuple(None if _is_open(dim) else dim for dim in known.shape))


def same_type(first: Type | None, second: Type | None) -> bool:
    """Equality that takes all generated symbols for the same."""
    if first is None or second is None:
        return first is second
    return without_generated(first) == without_generated(second)


def _merged_dim(found: Dim, declared: Dim) -> Dim:
    if isinstance(found, int) or _is_open(declared):
        return found
    return declared if _is_open(found) or isinstance(declared, int) else found


def _is_open(dim: Dim) -> bool:
    return dim is None or (isinstance(dim, str) and _GENERATED.fullmatch(dim) is not None)
