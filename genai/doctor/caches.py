"""The folder of compiled kernels: where it is, whether it serves, and what older versions left in it."""

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
# A compiled kernel, or what a process that was killed has left of one.
_KERNEL = re.compile(r"\w+\.o(?:\.\d+\.[0-9a-f]{32}\.tmp)?")


@dataclass(frozen=True)
class KernelCaches:
    """The kernel cache of this user.

    Attributes:
        folder: where kernels of this version are kept; None without a home folder.
        reason: why they are not kept on disk; empty if they are.
        num_files, num_bytes: kernels there now.
        stale: folders with kernels of another version of this toolkit, Python, Numba or processor, and their bytes.
        for_gpus: kernels that were compiled for GPUs, by any version; none where the folder is a link, or one that
            compilers refuse.
    """

    folder: Path | None
    reason: str
    num_files: int
    num_bytes: int
    stale: Mapping[Path, int]
    for_gpus: Sequence[CachedKernel] = ()

    @property
    def removable(self) -> dict[Path, int]:
        """What may go, with its bytes: `stale`, and kernels for GPUs that were not used for long."""
        return {**self.stale, **{one.path: one.nbytes for one in unused(self.for_gpus)}}


def inspect_caches(environment: Mapping[str, str] = os.environ, *, key: str | None = None) -> KernelCaches:
    """Look at the cache without making or changing anything; `key` names this version's folder, None computes it."""
    try:
        kernels = cache_root(environment) / "kernels"
    except RuntimeError:
        return KernelCaches(None, "there is no home folder", 0, 0, {})
    folder = kernels / (key or kernel_key())
    files = list(_files(folder))
    others = [path for path in sorted(kernels.glob("*")) if path.name != folder.name and _is_of_a_version(path)]
    stale = {path: sum(map(_size, ours)) for path in others if (ours := _compiled(path)) or _is_empty(path)}
    return KernelCaches(
        folder, _reason_unusable(folder), len(files), sum(map(_size, files)), stale, _for_gpus(kernels / "cuda")
    )


def kernel_key() -> str:
    """Name of the folder that this version's kernels are kept in."""
    import genai.kernels

    return source_key(Path(next(iter(genai.kernels.__path__))), compile_target())


def remove_stale(caches: KernelCaches) -> tuple[dict[Path, int], dict[Path, str]]:
    """Remove what may go; returns what was removed with its bytes, and what could not be with the reason."""
    removed, errors = {}, {}
    for path, num_bytes in caches.removable.items():
        try:
            if path in caches.stale:
                for file in _compiled(path):
                    file.unlink()
                if _is_empty(path):  # what others put there stays
                    path.rmdir()
            else:
                path.unlink()
            removed[path] = num_bytes
        except OSError as error:
            errors[path] = f"{error.strerror or error}"
    return removed, errors


def _reason_unusable(folder: Path) -> str:
    """Why the engine cannot keep kernels in a folder, which may not exist yet; empty if it can."""
    try:
        if reason := reason_to_refuse(folder):
            return reason
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        if not existing.is_dir():
            return f"{existing} is not a folder"
        if not os.access(existing, os.W_OK | os.X_OK):
            return f"{existing} cannot be written"
    except OSError as error:
        return f"{error.filename or folder}: {error.strerror}"
    return ""


def _for_gpus(folder: Path) -> Sequence[CachedKernel]:
    """What lies in a folder of ours; what a link leads to, or others may have put there, is not ours to remove."""
    try:
        return () if folder.is_symlink() or reason_to_refuse(folder) else cached_kernels(folder)
    except OSError:
        return ()


def _is_of_a_version(path: Path) -> bool:
    """Whether it is a folder that the engine made and would use: no link, and not open to others."""
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
    """The files of compiled kernels in it."""
    return [path for path in _files(folder) if _KERNEL.fullmatch(path.name) and stat.S_ISREG(path.lstat().st_mode)]


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.glob("*") if path.is_file())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
