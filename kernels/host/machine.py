"""The host's processor and kernel cache. Nothing here needs NumPy, so that `genai doctor` can say that it is broken."""

from __future__ import annotations

from ..cpu.cache import cache_root, compile_target, reason_to_refuse, source_key
from ..cpu.cores import allowed_processors, default_threads, group_quota, physical_cores

__all__ = [
    "allowed_processors", "cache_root", "compile_target", "default_threads", "group_quota", "physical_cores",
    "reason_to_refuse", "source_key",
]  # fmt: skip
