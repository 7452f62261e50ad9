"""Where compiled kernels are kept: a private folder on disk whose name covers all that could change the code.

Numba's own cache looks only at the file of the function that is compiled, so an edited helper would go unnoticed.
Here the folder's name is a hash over every source of `genai.kernels`, the versions of Python, Numba and llvmlite, the
processor and Numba's code-generation switches: a changed key is a new folder, and nothing in a folder is ever stale.

The files hold machine code, so folders and files are this user's, and nobody else can write them; nor can anybody
else put other folders in their places, from the one that the environment names downwards.
Trouble with the disk never stops a run: kernels are then compiled in memory, and the log says so once.
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
from typing import Any

from genai.common.log import logger

from .isa import isa, processor

_log = logger(__name__)
_DIGEST_BYTES = 32
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
# A link in a file's place is not followed, and a pipe there is not waited for.
_AS_IT_IS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
# What kernels were for of which this process has logged that they are not kept.
_told: dict[str, object] = {}
_NEVER_COMPILED = frozenset({"reference"})
# Of Numba, which reads them from variables and from a file in the working folder.
_SWITCHES = ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "BOUNDSCHECK", "DEBUGINFO", "ENABLE_AVX", "DISABLE_JIT")
_SWITCHES_FILE = ".numba_config.yaml"


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
    """Everything outside our sources that changes the machine code. Numba itself is not imported."""
    switches = tuple(os.environ.get(f"NUMBA_{name}") for name in _SWITCHES)
    file = Path(_SWITCHES_FILE)
    written = file.read_bytes() if file.is_file() else b""
    python = (platform.python_implementation(), platform.python_version())
    return (*python, version("numba"), version("llvmlite"), processor(), isa(), switches, written)


def _create(file: Path) -> None:
    if sys.platform == "linux":
        os.mknod(file, 0o600)  # opens nothing, which an interrupt would leave open
    else:
        file.touch(0o600, exist_ok=False)


class CacheFolder:
    """A folder of compiled kernels. Unusable folders are named in the log once; loads then miss and saves do nothing.

    Args:
        root: the user's cache folder, see `cache_root`; None if there is none.
        key: name of the folder inside it, see `source_key`.
        what: the kernels are for. cost: how long it takes to compile them.

    Attributes:
        path: the folder, or None if kernels are compiled in memory only.
    """

    def __init__(self, root: Path | None, key: str, what: str = "CPU", cost: str = "10 to 30 seconds") -> None:
        self._what, self._cost = what, cost
        self.path = None if root is None else root / "kernels" / key
        reason = "there is no home folder" if self.path is None else _make(self.path)
        if reason:
            self.path = None
            self._warn(reason)

    def _warn(self, reason: str) -> None:
        mine = object()
        if _told.setdefault(self._what, mine) is not mine:
            return
        _log.warning(
            "compiled %s kernels are not kept on disk: %s. Every process compiles them again (%s) until that folder is "
            "repaired, or GENAI_CACHE_DIR names one that you own and only you can write.",
            self._what, reason, self._cost,
        )  # fmt: skip

    def holds(self, name: str) -> bool:
        """Whether a file of that name is there (it may still turn out to be damaged)."""
        return self.path is not None and (self.path / name).is_file()

    def load(self, name: str) -> bytes | None:
        """The payload of a file, or None if it is absent or damaged, or may have been written by somebody else."""
        if self.path is None:
            return None
        try:
            content = _trusted(self.path / name)
            payload = content[_DIGEST_BYTES:]
            # The digest finds truncated files; what may be trusted is decided by owners and modes.
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
        """Write atomically, so that concurrent processes see whole files only."""
        if self.path is None:
            return
        temporary = self.path / f"{name}.{os.getpid()}.{uuid.uuid4().hex}.tmp"
        try:
            _create(temporary)  # which others may not write, whatever they may do with this user's new files
            temporary.write_bytes(hashlib.sha256(payload).digest() + payload)
            temporary.replace(self.path / name)
        except OSError as error:
            self._warn(f"{self.path}: {error.strerror}")
        finally:  # an interrupt leaves nothing either
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def _trusted(file: Path) -> bytes:
    """The content of a file; b"" if others may have written it: its folder may have been open to them in the past."""
    with open(file, "rb", opener=lambda path, flags: os.open(path, flags | _AS_IT_IS)) as content:
        status = os.fstat(content.fileno())
        if not stat.S_ISREG(status.st_mode):
            return b""
        if _has_modes() and (status.st_uid not in (os.getuid(), 0) or status.st_mode & _OTHERS_WRITE):
            return b""
        return content.read()


def _make(path: Path) -> str | None:
    """Make a folder, and those above it; why it cannot be used, or None."""
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
    """Why code is not loaded from a cache's folder, which lies three levels below the one that the environment names;
    None if it is. Folders that do not exist yet are passed over."""
    base, *levels = (path.parents[2], path.parents[1], path.parent, path)
    return next(filter(None, (_reason(base, is_base=True), *map(_reason, levels))), None)


def reason_to_distrust(path: Path) -> str | None:
    """Why others could write into a folder, or put another one in its place; None if they cannot. It need not exist."""
    whole = Path(os.path.abspath(path))  # noqa: PTH100 - links are looked at, too
    return _reason(whole) or _reason(whole.parent, is_base=True)


def _reason(path: Path, *, is_base: bool = False) -> str | None:
    """Why a folder is no place for code, if it exists. The base may be root's, and everybody may write to it if it is
    sticky: there nobody renames what belongs to others."""
    try:
        owners, status = {path.lstat().st_uid, path.stat().st_uid}, path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not _has_modes():
        return None
    if owners - {os.getuid(), *([0] if is_base else [])}:
        return f"{path} belongs to another user, and compiled code is loaded from it"
    is_open = status.st_mode & (stat.S_IWOTH if _is_own_group(status.st_gid) else _OTHERS_WRITE)
    if is_open and not (is_base and status.st_mode & stat.S_ISVTX):
        return f"{path} can be written by others, and compiled code is loaded from it"
    return None


@cache
def _is_own_group(group: int) -> bool:
    """Whether a group is this user's alone, as many systems make one for each user, whose folders it may then write."""
    import grp
    import pwd

    try:
        user, found = pwd.getpwuid(os.getuid()), grp.getgrgid(group)
    except KeyError:  # of a container, where nobody has a name
        return False
    return group == user.pw_gid and found.gr_name == user.pw_name and {*found.gr_mem} <= {user.pw_name}


def _has_modes() -> bool:
    """Not on Windows: the user's profile folder is private by its access list, and mode bits say nothing there."""
    return hasattr(os, "getuid")
