"""The user's running servers: each one describes itself in a file of a private folder while it runs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..common.atomic_files import replacing
from ..common.log import logger
from ..errors import StateError

_log = logger(__name__)
_MOST_BYTES = 2**20


@dataclass(frozen=True)
class RunningServer:
    """A running server of the user.

    Attributes:
        pid: the process.
        url: the address, such as "http://127.0.0.1:8000".
        models: the names of its models and adapters.
        started: the time of its start in ISO 8601 form.
        ticks: the system's start time of the process, which tells it from a later process with the same number; None =
            unknown.
        encoders: the names in `models` that do not generate text.
        loaded: the names of the models that are in memory; None = all.
        needs_key: True if requests need an API key.
    """

    pid: int
    url: str
    models: Sequence[str]
    started: str
    ticks: int | None = None
    encoders: Sequence[str] = ()
    loaded: Sequence[str] | None = None
    needs_key: bool = False

    @property
    def chat_models(self) -> list[str]:
        """The names of the models and adapters that generate text."""
        return [name for name in self.models if name not in self.encoders]

    @property
    def port(self) -> str:
        """The port."""
        return self.url.rpartition(":")[2]

    @property
    def is_alive(self) -> bool:
        """True if the process runs."""
        try:
            os.kill(self.pid, 0)
        except (OSError, OverflowError):
            return False
        return _ticks(self.pid) == self.ticks

    def stop(self) -> None:
        """Send SIGTERM: the server finishes its running requests and ends."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)


def runtime_folder() -> Path:
    """Return the private folder of the user's running servers, which is created if it does not exist.

    Raises:
        StateError: the folder cannot be created, belongs to another user, or others can use it.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    path = (
        Path(base) / "genai" if base else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "genai/run"
    )
    fix = f"delete {path}, or set XDG_RUNTIME_DIR to a folder that only you can use"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise StateError(f"{path}: the folder cannot be used", str(error.strerror), fix) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077 or found.st_uid != os.getuid():
        raise StateError(f"{path}: the folder is not private", "other users could name servers to stop in it", fix)
    return path


def servers() -> list[RunningServer]:
    """Return the user's running servers, the oldest first. The files of ended servers are removed.

    Raises:
        StateError: see runtime_folder.
    """
    found: list[RunningServer] = []
    for path in sorted(runtime_folder().glob("*.json")):
        server = _read(path)
        if server is not None and server.is_alive:
            found.append(server)
        else:
            path.unlink(missing_ok=True)
    return sorted(found, key=lambda one: one.started)


@contextlib.contextmanager
def registered(
    url: str,
    models: Sequence[str],
    encoders: Sequence[str] = (),
    loaded: Sequence[str] | None = None,
    *,
    needs_key: bool = False,
) -> Iterator[Callable[[Sequence[str]], None]]:
    """Describe this process as a server while the block runs. Without a usable folder, the server runs all the same.

    Yields:
        A function that replaces `loaded`.
    """
    pid = os.getpid()
    started = datetime.now(UTC).isoformat(timespec="seconds")
    described = RunningServer(pid, url, [*models], started, _ticks(pid), [*encoders], loaded, needs_key)
    path: Path | None = None
    try:
        path = runtime_folder() / f"{pid}.json"
        _write(path, described)
    except (OSError, StateError) as error:
        _log.warning("`genai ps` does not list this server: %s", error)

    def note_loaded(names: Sequence[str]) -> None:
        if path is not None:
            with contextlib.suppress(OSError):  # `genai ps` then shows the earlier state
                _write(path, replace(described, loaded=[*names]))

    try:
        yield note_loaded
    finally:
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _write(path: Path, described: RunningServer) -> None:
    with replacing(path) as file:
        file.write(json.dumps(asdict(described)).encode())


def _read(path: Path) -> RunningServer | None:
    try:
        if path.stat().st_uid != os.getuid() or path.stat().st_size > _MOST_BYTES:
            return None
        content: Any = json.loads(path.read_bytes())
        pid, models, ticks = content["pid"], content["models"], content["ticks"]
        if not isinstance(pid, int) or pid < 2 or path.stem != str(pid) or not isinstance(models, list):
            return None
        encoders, loaded = content.get("encoders", []), content.get("loaded")  # earlier versions write neither
        return RunningServer(
            pid, str(content["url"]), [*map(str, models)], str(content["started"]), ticks, [*map(str, encoders)],
            None if loaded is None else [*map(str, loaded)], content.get("needs_key") is True,
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _ticks(pid: int) -> int | None:
    """Return the start time of a process in ticks since the system's start; None if it ended or is not shown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return None if fields[0] == b"Z" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None
