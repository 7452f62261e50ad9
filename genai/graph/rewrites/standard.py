"""The rules for general graphs, in the order that they run."""

from __future__ import annotations

from .base import Rewrite
from .constant_folding import FoldConstants
from .dead_code import RemoveDeadCode
from .identity import RemoveIdentities

SESSION_RULES: tuple[Rewrite, ...] = (RemoveIdentities(), FoldConstants(), RemoveDeadCode())
