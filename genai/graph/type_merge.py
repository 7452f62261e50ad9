"""Joining what is declared of a value's type with what inference found."""

from __future__ import annotations

from dataclasses import replace

from .types import ArrayTypes, Dim, Type


def merged(found: Type, declared: Type | None) -> Type:
    """What was found, with declared extents and symbols where it left them open."""
    if not isinstance(found, ArrayTypes) or not isinstance(declared, ArrayTypes) or type(found) is not type(declared):
        return found
    if declared.dtype is not found.dtype or declared.shape is None:
        return found
    if found.shape is None:
        return declared
    if len(found.shape) != len(declared.shape):
        return found
    shape = tuple(_merged_dim(new, old) for new, old in zip(found.shape, declared.shape, strict=True))
    return replace(declared, shape=shape)


def completed(declared: Type | None, found: Type) -> Type:
    """What was declared, with what was found where it left extents open."""
    if declared is None:
        return found
    if not isinstance(found, ArrayTypes) or not isinstance(declared, ArrayTypes) or found.shape is None:
        return declared
    if declared.shape is None:
        return replace(declared, shape=found.shape)
    if len(found.shape) != len(declared.shape):
        return declared
    shape = tuple(new if old is None else old for new, old in zip(found.shape, declared.shape, strict=True))
    return replace(declared, shape=shape)


def _merged_dim(found: Dim, declared: Dim) -> Dim:
    """A number beats a symbol, a symbol beats nothing, and of two alike the one found stays."""
    if found is None or (isinstance(found, str) and isinstance(declared, int)):
        return declared
    return found
