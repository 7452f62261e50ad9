"""Errors that only evaluations raise."""

from __future__ import annotations

from ..errors import GenaiError, InputError


class VocabularyMismatchError(InputError):
    """Two models whose probabilities are compared do not have the same tokens."""


class ModelOutputError(GenaiError):
    """A model computed something that is no distribution: NaN, infinity, or nothing but -inf."""


class MissingPackageError(GenaiError):
    """A comparison needs a package that is not installed."""
