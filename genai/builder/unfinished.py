"""The hidden folder that a model is written into before it gets its name."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_SUFFIX = ".unfinished"


@contextlib.contextmanager
def unfinished_folder(target: Path) -> Iterator[Path]:
    """A new folder beside the target, so that the rename at the end cannot cross file systems.

    It is gone afterwards unless it was renamed. Builds that were killed could not remove theirs: this is done first.

    Raises:
        OSError: the folder cannot be made.
    """
    _remove_dead(target)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=_SUFFIX, dir=target.parent))
    try:
        with locked(folder):
            folder.chmod(0o755)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold a folder's lock, which ends with the process; False where another has it, or locks do not work there."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield _lock(descriptor, wait=wait)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, *, wait: bool) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def _remove_dead(target: Path) -> None:
    """Remove what killed builds of the same target left: folders whose lock nobody holds."""
    with contextlib.suppress(OSError):
        for folder in target.parent.iterdir():
            if folder.name.startswith(f".{target.name}.") and folder.name.endswith(_SUFFIX):
                with locked(folder, wait=False) as dead:
                    if dead:
                        shutil.rmtree(folder, ignore_errors=True)
