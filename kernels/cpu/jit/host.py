"""The processor of this machine in LLVM's terms. It is stored on disk, because loading LLVM takes 40 MB and 0.1 s."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it imports `isa`, which imports this module
    from .kernel_cache import CacheFolder

_PROCESSORS = Path("/proc/cpuinfo")
# Lines of a processor that change while the machine runs.
_CHANGING = ("processor", "cpu MHz", "bogomips", "core id", "apicid", "initial apicid", "physical id", "siblings")
_NAME = "processor.json"


@cache
def host() -> tuple[str, str, str]:
    """Return LLVM's triple, the name of the processor and its features, such as "+avx2,-avx512f"."""
    folder = _folder()
    stored = None if folder is None else folder.load(_NAME)
    if stored is not None:
        triple, name, features = map(str, json.loads(stored))
        return triple, name, features
    from llvmlite import binding

    try:
        features = binding.get_host_cpu_features().flatten()
    except RuntimeError:
        features = ""
    found = binding.get_process_triple(), binding.get_host_cpu_name(), features
    if folder is not None:
        folder.save(_NAME, json.dumps(found).encode())
    return found


def _folder() -> CacheFolder | None:
    """Return the folder for a processor of this description; None if it is unknown or no kernels are stored yet."""
    from .kernel_cache import CacheFolder, cache_root  # imported here because it imports this module

    description = _description()
    try:
        root = cache_root(os.environ)
    except RuntimeError:  # there is no home folder
        return None
    if description is None or not (root / "kernels").is_dir():
        return None
    key = hashlib.sha256(f"{version('llvmlite')}\0{sys.maxsize}\0{description}".encode()).hexdigest()[:32]
    return CacheFolder(root, f"host-{key}")


def _description() -> str | None:
    """Return the kernel's description of the first processor, which includes the instructions that may be used."""
    try:
        first = _PROCESSORS.read_text(encoding="utf-8").split("\n\n", 1)[0]
    except (OSError, UnicodeDecodeError):  # not Linux
        return None
    lines = [line for line in first.splitlines() if line.split("\t", 1)[0].strip() not in _CHANGING]
    return "\n".join(lines) if any(line.startswith(("flags", "Features")) for line in lines) else None
