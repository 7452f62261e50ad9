"""The host's processor and kernel cache. Nothing here needs NumPy, so that `genai doctor` can say that it is broken."""

from __future__ import annotations

from ..cpu.cache import cache_root, compile_target, reason_to_distrust, reason_to_refuse, source_key
from ..cpu.cores import (
    allowed_processors,
    default_threads,
    group_quota,
    physical_cores,
    read_sysctl,
    request_tiles,
    system_file,
)

__all__ = [
    "allowed_processors", "cache_root", "compile_target", "default_threads", "group_quota", "physical_cores",
    "read_sysctl", "reason_to_distrust", "reason_to_refuse", "request_tiles", "source_key", "system_file",
]  # fmt: skip
