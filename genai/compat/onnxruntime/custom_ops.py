"""Operators of the user's own: `genai.session.custom_ops`, whose errors are all ours."""

from __future__ import annotations

from ...session import custom_ops
from .errors import typed

register_op = typed(custom_ops.register_op)
