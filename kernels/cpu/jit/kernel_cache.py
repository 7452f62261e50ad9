"""The cache of compiled kernels: a private folder on disk, named after everything that could change the code.

Numba's own cache checks only the file of the function that is compiled, so it would miss an edited helper. This cache
names the folder after a hash of every source file of `genai.kernels`, the versions of Python, Numba and llvmlite, the
processor and Numba's code-generation switches. A change leads to a new folder, so nothing in a folder is ever stale.

The files hold machine code. So folders and files must belong to this user, no other user may write to them, and no
other user may be able to replace a folder, starting with the folder that the environment names. Problems with the disk
never stop a run: kernels are then compiled in memory, and a warning is logged once.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import platform
import stat
import sys
import uuid
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

from genai.common.log import logger

from .isa import isa, processor

_log = logger(__name__)
_DIGEST_BYTES = 32
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
# With these flags, opening a file does not follow a symbolic link and does not block on a pipe.
_AS_IT_IS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
# Kinds of kernels for which this process has logged the warning.
_told: dict[str, object] = {}
_NEVER_COMPILED = frozenset({"reference"})
# Options of Numba, which reads them from environment variables and from a file in the working folder.
_SWITCHES = ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "BOUNDSCHECK", "DEBUGINFO", "ENABLE_AVX", "DISABLE_JIT")
_SWITCHES_FILE = ".numba_config.yaml"


def cache_root(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder for all cached files: $GENAI_CACHE_DIR, $XDG_CACHE_HOME or ~/.cache, then `genai`.

    Raises:
        RuntimeError: there is no home folder.
    """
    base = environment.get("GENAI_CACHE_DIR") or environment.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "genai"


def source_key(sources: Path, target: Iterable[Any]) -> str:
    """Return a hash of every Python file below `sources` (names and contents) and of the compile target.

    Folders with plain array code are left out because kernels never import them.
    """
    digest = hashlib.sha256(repr(tuple(target)).encode())
    compiled = (path for path in sources.rglob("*.py") if path.relative_to(sources).parts[0] not in _NEVER_COMPILED)
    for path in sorted(compiled):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(sources).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:32]


def compile_target() -> tuple[Any, ...]:
    """Return everything that affects the machine code except the package's sources. Numba itself is not imported."""
    switches = tuple(os.environ.get(f"NUMBA_{name}") for name in _SWITCHES)
    file = Path(_SWITCHES_FILE)
    written = file.read_bytes() if file.is_file() else b""
    python = (platform.python_implementation(), platform.python_version())
    return (*python, version("numba"), version("llvmlite"), processor(), isa(), switches, written)


def _create(file: Path) -> None:
    if sys.platform == "linux":
        os.mknod(file, 0o600)  # opens no file that an interrupt could leave open
    else:
        file.touch(0o600, exist_ok=False)


class CacheFolder:
    """A folder of compiled kernels. If it is unusable, a warning is logged once, and loads and saves do nothing.

    Args:
        root: user's cache folder (see `cache_root`); None if there is none.
        key: name of the folder inside it (see `source_key`).
        what: device of the kernels, for the warning.
        cost: time that compiling them takes, for the warning.

    Attributes:
        path: folder, or None if kernels are compiled in memory only.
    """

    def __init__(self, root: Path | None, key: str, what: str = "CPU", cost: str = "10 to 30 seconds") -> None:
        self._what, self._cost = what, cost
        self.path = None if root is None else root / "kernels" / key
        reason = "the home folder is unknown" if self.path is None else _make(self.path)
        if reason:
            self.path = None
            self._warn(reason)

    def _warn(self, reason: str) -> None:
        mine = object()
        if _told.setdefault(self._what, mine) is not mine:
            return
        _log.warning(
            "compiled %s kernels are not stored on disk: %s. Each process compiles the kernels again (%s). To store "
            "them, repair the folder, or set GENAI_CACHE_DIR to a folder that only you own and can write.",
            self._what, reason, self._cost,
        )  # fmt: skip

    def holds(self, name: str) -> bool:
        """Return True if there is a file with that name. The file may still be damaged."""
        return self.path is not None and (self.path / name).is_file()

    def load(self, name: str) -> bytes | None:
        """Return the payload of a file, or None if it is absent, damaged, or may have been written by another user."""
        if self.path is None:
            return None
        try:
            content = _trusted(self.path / name)
            payload = content[_DIGEST_BYTES:]
            # The digest detects truncated files. Owners and modes decide whether a file is trusted.
            if hashlib.sha256(payload).digest() != content[:_DIGEST_BYTES]:
                return None
            return payload
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                return None
            self._warn(f"{self.path / name}: {error.strerror}")
            return None

    def save(self, name: str, payload: bytes) -> None:
        """Write a file atomically, so that concurrent processes see only whole files."""
        if self.path is None:
            return
        temporary = self.path / f"{name}.{os.getpid()}.{uuid.uuid4().hex}.tmp"
        try:
            _create(temporary)  # other users cannot write this file, whatever the umask allows
            temporary.write_bytes(hashlib.sha256(payload).digest() + payload)
            temporary.replace(self.path / name)
        except OSError as error:
            self._warn(f"{self.path}: {error.strerror}")
        finally:  # an interrupt must not leave the file behind either
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def _trusted(file: Path) -> bytes:
    """Return the content of a file, or b"" if another user may have written it while its folder was writable."""
    with open(file, "rb", opener=lambda path, flags: os.open(path, flags | _AS_IT_IS)) as content:
        status = os.fstat(content.fileno())
        if not stat.S_ISREG(status.st_mode):
            return b""
        if _has_modes() and (status.st_uid not in (os.getuid(), 0) or status.st_mode & _OTHERS_WRITE):
            return b""
        return content.read()


def _make(path: Path) -> str | None:
    """Create a folder and its parents. Return why it cannot be used, or None."""
    try:
        if reason := reason_to_refuse(path):
            return reason
        path.parents[2].mkdir(0o700, parents=True, exist_ok=True)
        for level in (path.parents[1], path.parent, path):
            level.mkdir(mode=0o700, exist_ok=True)
        return reason_to_refuse(path)
    except OSError as error:
        return f"{error.filename or path}: {error.strerror}"


def reason_to_refuse(path: Path) -> str | None:
    """Return why a cache folder must not be used for code, or None if it may be used.

    The folder is three levels below the folder that the environment names. Folders that do not exist yet are skipped.
    """
    base, *levels = (path.parents[2], path.parents[1], path.parent, path)
    return next(filter(None, (_reason(base, is_base=True), *map(_reason, levels))), None)


def reason_to_distrust(path: Path) -> str | None:
    """Return why other users could write to or replace a folder, or None if they cannot. The folder need not exist.

    Of the folders above its parent, only those that all users may write to are refused: their owners may be users of
    the host, which a container does not know.
    """
    whole = Path(os.path.abspath(path))  # noqa: PTH100 - symbolic links must be checked too, so they stay
    above = dict.fromkeys((*whole.parents, *Path(os.path.realpath(whole)).parents))
    return next(filter(None, (_reason(whole), _reason(whole.parent, is_base=True), *map(_open_to_all, above))), None)


def open_trusted(path: Path) -> BinaryIO | None:
    """Open a regular file; return None for a link or another kind of file, or if other users could have written it.

    Raises:
        OSError: the file cannot be opened; links are among these errors on some systems.
    """
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | _AS_IT_IS))  # noqa: SIM115 - returned
    status = os.fstat(file.fileno())
    foreign = _has_modes() and (status.st_uid not in (os.getuid(), 0) or _others_write(status))
    if foreign or not stat.S_ISREG(status.st_mode):
        file.close()
        return None
    return file


def _open_to_all(path: Path) -> str | None:
    """Return why all users could replace what a folder contains, or None if they cannot."""
    with contextlib.suppress(OSError):
        mode = path.stat().st_mode
        if _has_modes() and mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return f"{path} is writable by other users, but compiled code is loaded from this path"
    return None


def _others_write(status: os.stat_result) -> bool:
    """Return True if other users may write to a file or folder. The group may, if this user is its only member."""
    return bool(status.st_mode & (stat.S_IWOTH if _is_own_group(status.st_gid) else _OTHERS_WRITE))


def _reason(path: Path, *, is_base: bool = False) -> str | None:
    """Return why a folder must not be used for code, or None if it may be used or does not exist.

    The base may belong to root. It may also be writable by all users if it is sticky, because users cannot rename each
    other's files there.
    """
    try:
        owners, status = {path.lstat().st_uid, path.stat().st_uid}, path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not _has_modes():
        return None
    if owners - {os.getuid(), *([0] if is_base else [])}:
        return f"{path} belongs to another user, but compiled code is loaded from this path"
    if _others_write(status) and not (is_base and status.st_mode & stat.S_ISVTX):
        return f"{path} is writable by other users, but compiled code is loaded from this path"
    return None


@cache
def _is_own_group(group: int) -> bool:
    """Return True if this user is the only member of a group. Many systems create such a group for each user."""
    import grp
    import pwd

    try:
        user, found = pwd.getpwuid(os.getuid()), grp.getgrgid(group)
    except KeyError:  # in a container, users may have no names
        return False
    return group == user.pw_gid and found.gr_name == user.pw_name and {*found.gr_mem} <= {user.pw_name}


def _has_modes() -> bool:
    """Return True if mode bits have an effect. On Windows, an access list protects the profile folder instead."""
    return hasattr(os, "getuid")
