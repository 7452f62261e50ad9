"""Where compiled kernels are kept: a private folder on disk whose name covers all that could change the code.

Numba's own cache looks only at the file of the function that is compiled, so an edited helper would go unnoticed.
Here the folder's name is a hash over every source of `genai.kernels`, the versions of Python, Numba and llvmlite, the
processor and Numba's code-generation switches: a changed key is a new folder, and nothing in a folder is ever stale.

The files are pickles, so they are read only from folders that belong to this user and that nobody else can write.
Trouble with the disk never stops a run: kernels are then compiled in memory, and stderr says so once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import platform
import stat
import sys
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from numba.core.caching import _Cache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

_DIGEST_BYTES = 32
_NEVER_COMPILED = frozenset({"ops", "reference"})
_CODEGEN_SWITCHES = ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "BOUNDSCHECK", "DEBUGINFO_DEFAULT", "ENABLE_AVX")


def cache_root(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder for everything we cache: $GENAI_CACHE_DIR, $XDG_CACHE_HOME or ~/.cache, then `genai`.

    Raises:
        RuntimeError: there is no home folder.
    """
    base = environment.get("GENAI_CACHE_DIR") or environment.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "genai"


def source_key(sources: Path, target: Iterable[Any]) -> str:
    """Hash of every Python file below `sources` (names and contents) and of what the code is compiled for.

    Folders of plain array code are left out: kernels never import them.
    """
    digest = hashlib.sha256(repr(tuple(target)).encode())
    compiled = (path for path in sources.rglob("*.py") if path.relative_to(sources).parts[0] not in _NEVER_COMPILED)
    for path in sorted(compiled):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(sources).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:32]


def compile_target() -> tuple[Any, ...]:
    """Everything outside our sources that changes the machine code."""
    import llvmlite
    import numba
    from numba.core import config
    from numba.core.registry import cpu_target

    from .isa import isa

    switches = (isa(), *(str(getattr(config, name, None)) for name in _CODEGEN_SWITCHES))
    processor = cpu_target.target_context.codegen().magic_tuple()
    python = (platform.python_implementation(), platform.python_version())
    return (*python, numba.__version__, llvmlite.__version__, processor, switches)


class CacheFolder:
    """A folder of compiled kernels. Unusable folders are named on stderr once; loads then miss and saves do nothing.

    Args:
        root: the user's cache folder, see `cache_root`; None if there is none.
        key: name of the folder inside it, see `source_key`.
    """

    def __init__(self, root: Path | None, key: str) -> None:
        self._path = None if root is None else root / "kernels" / key
        self._warned = False
        if self._path is None:
            self._warn("there is no home folder")
        else:
            self._prepare(self._path)

    @property
    def path(self) -> Path | None:
        """The folder, or None if kernels are compiled in memory only."""
        return self._path

    def _prepare(self, path: Path) -> None:
        levels = (path.parent.parent, path.parent, path)
        try:
            levels[0].parent.mkdir(parents=True, exist_ok=True)
            for level in levels:
                level.mkdir(mode=0o700, exist_ok=True)
                reason = reason_to_refuse(level)
                if reason:
                    self._refuse(reason)
                    return
        except OSError as error:
            self._refuse(f"{error.filename or path}: {error.strerror}")

    def _refuse(self, reason: str) -> None:
        self._path = None
        self._warn(reason)

    def _warn(self, reason: str) -> None:
        if self._warned or sys.stderr is None:
            return
        self._warned = True
        print(
            f"genai: compiled CPU kernels are not kept on disk: {reason}. Until then each process compiles them again "
            "(some seconds). Repair that folder, or set GENAI_CACHE_DIR to one that you own and only you can write.",
            file=sys.stderr,
        )

    def holds(self, name: str) -> bool:
        """Whether a file of that name is there (it may still turn out to be damaged)."""
        return self._path is not None and (self._path / name).is_file()

    def load(self, name: str) -> Any | None:
        """The unpickled payload, or None if it is absent or damaged."""
        if self._path is None:
            return None
        try:
            content = (self._path / name).read_bytes()
            payload = content[_DIGEST_BYTES:]
            # The digest finds truncated files; what may be trusted is decided by the folder's owner and mode.
            if hashlib.sha256(payload).digest() != content[:_DIGEST_BYTES]:
                return None
            return pickle.loads(payload)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(f"{self._path / name}: {error.strerror}")
            return None
        except Exception:
            # A damaged pickle can raise anything; the file is compiled and written anew.
            return None

    def save(self, name: str, payload: bytes) -> None:
        """Write atomically, so that concurrent processes see whole files only."""
        if self._path is None:
            return
        temporary = self._path / f"{name}.{os.getpid()}.{uuid.uuid4().hex}.tmp"
        try:
            temporary.write_bytes(hashlib.sha256(payload).digest() + payload)
            temporary.replace(self._path / name)
        except OSError as error:
            self._warn(f"{self._path}: {error.strerror}")
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def reason_to_refuse(path: Path) -> str | None:
    """Why code is not loaded from a folder that exists; None if it is."""
    if sys.platform == "win32":
        return None  # the user's profile folder is private by its access list; mode bits say nothing there
    status = path.stat()
    if status.st_uid != os.getuid():
        return f"{path} belongs to another user, and compiled code is loaded from it"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path} can be written by others, and compiled code is loaded from it"
    return None


class KernelCache(_Cache):  # type: ignore[misc]
    """Numba's view of a CacheFolder, for one dispatcher."""

    def __init__(self, folder: CacheFolder, name: str) -> None:
        self._folder = folder
        self._name = name
        self.loaded = False

    @property
    def cache_path(self) -> str | None:
        """The folder, for Numba's statistics."""
        return None if self._folder.path is None else str(self._folder.path)

    def file_name(self, signature: Any) -> str:
        """File of one signature."""
        return f"{self._name}-{hashlib.sha256(str(signature).encode()).hexdigest()[:16]}.nbc"

    def load_overload(self, sig: Any, target_context: Any) -> Any | None:
        """The compiled function from disk, or None."""
        target_context.refresh()
        payload = self._folder.load(self.file_name(sig))
        if payload is None:
            return None
        try:
            result = CompileResult._rebuild(target_context, *payload)
        except Exception:
            return None  # written by something else under our name: compile it anew
        self.loaded = True
        return result

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep a compiled function."""
        self._folder.save(self.file_name(sig), dumps(data._reduce()))

    def enable(self) -> None:
        """Always on; a folder that cannot be used misses."""

    def disable(self) -> None:
        """Always on; a folder that cannot be used misses."""

    def flush(self) -> None:
        """Nothing in a folder is ever stale."""
