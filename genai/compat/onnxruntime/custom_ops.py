"""Custom operators: `genai.session.custom_ops` with typed errors."""

from __future__ import annotations

from ...session import custom_ops
from .errors import typed

register_op = typed(custom_ops.register_op)
