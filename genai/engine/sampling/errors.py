"""What can go wrong when a token is chosen."""

from __future__ import annotations

from ...errors import GenaiError


class SamplingError(GenaiError):
    """No token can be chosen: the logits hold NaN or infinity, or every token is masked."""


class LogitsProcessorError(SamplingError):
    """A logits processor raised, or did not return logits."""
