"""The folder of compiled kernels: its path, its usability, and leftovers of older versions."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from genai.kernels.cpu.jit.kernel_cache import cache_root, compile_target, reason_to_refuse, source_key
from genai.kernels.cuda.kernel_cache import CachedKernel, cached_kernels, unused

_KEY = re.compile(r"[0-9a-f]{32}")
# A compiled kernel, or the temporary file that a killed process left behind.
_KERNEL = re.compile(r"\w+\.o(?:\.\d+\.[0-9a-f]{32}\.tmp)?")


@dataclass(frozen=True)
class KernelCaches:
    """The kernel cache of this user.

    Attributes:
        folder: folder of this version's kernels; None if there is no home folder.
        reason: reason why kernels are not stored on disk; empty if they are stored.
        num_files: number of kernels in the folder.
        num_bytes: total size of these kernels.
        stale: folders with kernels for another version of this toolkit, Python or Numba, or for another processor, and
            their sizes in bytes.
        for_gpus: kernels that any version compiled for GPUs; empty if the folder is a link or has unsafe permissions.
    """

    folder: Path | None
    reason: str
    num_files: int
    num_bytes: int
    stale: Mapping[Path, int]
    for_gpus: Sequence[CachedKernel] = ()

    @property
    def removable(self) -> dict[Path, int]:
        """The paths that may be removed, with their sizes in bytes: `stale`, and GPU kernels unused for a long time."""
        return {**self.stale, **{one.path: one.nbytes for one in unused(self.for_gpus)}}


def inspect_caches(environment: Mapping[str, str] = os.environ, *, key: str | None = None) -> KernelCaches:
    """Inspect the cache without changing it. `key` is the name of this version's folder; None = compute the name."""
    try:
        kernels = cache_root(environment) / "kernels"
    except RuntimeError:
        return KernelCaches(None, "the home folder is unknown", 0, 0, {})
    folder = kernels / (key or kernel_key())
    files = list(_files(folder))
    others = [path for path in sorted(kernels.glob("*")) if path.name != folder.name and _is_of_a_version(path)]
    stale = {path: sum(map(_size, ours)) for path in others if (ours := _compiled(path)) or _is_empty(path)}
    return KernelCaches(
        folder, _reason_unusable(folder), len(files), sum(map(_size, files)), stale, _for_gpus(kernels / "cuda")
    )


def kernel_key() -> str:
    """Return the name of the folder that holds this version's kernels."""
    import genai.kernels

    return source_key(Path(next(iter(genai.kernels.__path__))), compile_target())


def remove_stale(caches: KernelCaches) -> tuple[dict[Path, int], dict[Path, str]]:
    """Remove the removable paths; return the removed paths with their bytes, and all others with the reason."""
    removed, errors = {}, {}
    for path, num_bytes in caches.removable.items():
        try:
            if path in caches.stale:
                for file in _compiled(path):
                    file.unlink()
                if _is_empty(path):  # files of other programs are kept
                    path.rmdir()
            else:
                path.unlink()
            removed[path] = num_bytes
        except OSError as error:
            errors[path] = f"{error.strerror or error}"
    return removed, errors


def _reason_unusable(folder: Path) -> str:
    """Return the reason why kernels cannot be stored in a folder, which need not exist; empty if they can be."""
    try:
        if reason := reason_to_refuse(folder):
            return reason
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        if not existing.is_dir():
            return f"{existing} is not a folder"
        if not os.access(existing, os.W_OK | os.X_OK):
            return f"{existing} is not writable"
    except OSError as error:
        return f"{error.filename or folder}: {error.strerror}"
    return ""


def _for_gpus(folder: Path) -> Sequence[CachedKernel]:
    """Return the cached GPU kernels; none if the folder is a link or is open to other users, who may own its files."""
    try:
        return () if folder.is_symlink() or reason_to_refuse(folder) else cached_kernels(folder)
    except OSError:
        return ()


def _is_of_a_version(path: Path) -> bool:
    """Return True if the path is a folder of this toolkit that is safe to use: not a link, not open to others."""
    try:
        return (
            bool(_KEY.fullmatch(path.name)) and path.is_dir() and not path.is_symlink() and not reason_to_refuse(path)
        )
    except OSError:
        return False


def _is_empty(folder: Path) -> bool:
    try:
        return not any(folder.iterdir())
    except PermissionError:
        return False


def _compiled(folder: Path) -> list[Path]:
    """Return the compiled kernels in a folder."""
    return [path for path in _files(folder) if _KERNEL.fullmatch(path.name) and stat.S_ISREG(path.lstat().st_mode)]


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.glob("*") if path.is_file())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
