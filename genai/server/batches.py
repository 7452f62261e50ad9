"""Batches: files of requests that the server processes while it has capacity, each request exactly once.

A line runs through the handler of its endpoint, as if a client had sent it, with a lower priority. The journal of
`genai batch` stores the responses, so that a batch continues after a restart of the server.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from ..common.locks import locked
from ..common.log import logger
from ..errors import GenaiError, RequestError, StateError
from ..llm.batch.journal import Answered, Journal, LineId, digest
from ..llm.batch.lines import Line, Lines, open_lines
from .calls import Call, JsonReply
from .file_store import Entries, Entry, FileStore, open_folder, owner_of
from .keys import ANYONE, Key
from .replies import error_reply
from .routing import wanted_by

if TYPE_CHECKING:  # a circular import: the server runs batches, whose requests and errors refer to the server
    from .serving import Server

_log = logger(__name__)
Handler = Callable[[Call], Awaitable[Any]]
MOST_LINES = 50_000
"""The maximum number of requests in a batch, as in OpenAI's API."""
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
_PRIORITY = -10
_MOST_ERRORS = 20
# Batches of a key that have not ended, and that have ended and are still listed.
_MOST_OPEN, _MOST_ENDED = 100, 1000
# A request is repeated if other requests have all places, and a few times if the server cannot run it.
_SECONDS_UNTIL_RETRY, _MOST_TRIES = 0.5, 5


@dataclass
class _Progress:
    """The state of the batch that runs.

    Attributes:
        total, completed, failed: numbers of requests.
        is_cancelled: True after a request to cancel the batch.
    """

    total: int = 0
    completed: int = 0
    failed: int = 0
    is_cancelled: bool = False


class _Stopping(Exception):
    """The server stops. The batch continues after its next start."""


class Batches:
    """The batches of all keys, and the task that runs them, one after the other.

    Args:
        server: the server.
        folder: the folder of files and batches.

    Raises:
        OptionError: the folder cannot be used, or others can read it.
        StateError: another server uses the folder.
    """

    def __init__(self, server: Server, folder: Path) -> None:
        self._server = server
        self._lock = ExitStack()
        if self._lock.enter_context(locked(open_folder(folder), wait=False)) is False:
            raise StateError(
                f"{folder} is used by another server", "each server needs a folder for its batches",
                "stop the other server, or choose another folder",
            )  # fmt: skip
        self.files = FileStore(folder / "files")
        self._folder = folder / "batches"
        self.entries = Entries(self._folder, "batch")
        self.handlers: Mapping[str, Handler] = {}
        self._task: asyncio.Task[None] | None = None
        self._more = asyncio.Event()
        self._running: tuple[str, _Progress] | None = None

    # --- for the endpoints -------------------------------------------------------------------------------------------

    def create(self, key: Key, file: Entry, endpoint: str, hours: int, metadata: Any) -> Entry:
        """Queue a batch. Raise RequestError if the key has too many batches that have not ended."""
        owner = owner_of(key)
        known = self.entries.all(lambda entry: entry["owner"] == owner, newest_first=False)
        if sum(entry["status"] in OPEN for entry in known) >= _MOST_OPEN:
            raise RequestError(
                400, f"there are {_MOST_OPEN} batches that have not ended", "this is the limit",
                "wait for a batch, or cancel one", code="too_many_batches",
            )  # fmt: skip
        for old in [entry for entry in known if entry["status"] not in OPEN][:-_MOST_ENDED]:
            self.entries.delete(old["id"])
        now = int(time.time())
        entry: Entry = {
            "id": f"batch_{secrets.token_hex(12)}", "object": "batch", "endpoint": endpoint, "errors": None,
            "input_file_id": file["id"], "completion_window": f"{hours}h", "status": "validating",
            "output_file_id": None, "error_file_id": None, "created_at": now, "expires_at": now + hours * 3600,
            "request_counts": {"total": 0, "completed": 0, "failed": 0}, "metadata": metadata,
            "owner": owner,
        }  # fmt: skip
        self.entries.write(entry)
        self._more.set()
        return entry

    def cancel(self, entry: Entry) -> Entry:
        """Cancel a batch. The requests that are running end, and the responses so far become the output."""
        if entry["status"] not in OPEN:
            raise RequestError(
                409, f"the batch is {entry['status']}", "only a batch that has not ended can be cancelled",
                "leave it as it is",
            )  # fmt: skip
        self._set(entry, "cancelling")
        if self._running is not None and self._running[0] == entry["id"]:
            self._running[1].is_cancelled = True
        self._more.set()
        return entry

    def shown(self, entry: Entry) -> dict[str, Any]:
        """Return a batch as clients see it."""
        if self._running is not None and self._running[0] == entry["id"]:
            entry = {**entry, "request_counts": _counts(self._running[1])}
        return {name: value for name, value in entry.items() if name not in ("owner", "num_lines")}

    def uses(self, file: str) -> bool:
        """Return True if a batch that has not ended reads a file."""
        return bool(self.entries.all(lambda entry: entry["input_file_id"] == file and entry["status"] in OPEN))

    # --- the task ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the task that runs batches, inside the running event loop, unless it runs."""
        if self._task is None or self._task.done():
            self._more = asyncio.Event()
            self._task = asyncio.create_task(self._work())

    def close(self) -> None:
        """Release the folder. Batches that have not ended continue after the next start."""
        self._lock.close()

    async def _work(self) -> None:
        while True:
            self._more.clear()
            for entry in self.entries.all(lambda entry: entry["status"] in OPEN, newest_first=False):
                try:
                    await self._run(entry)
                except _Stopping:
                    return
                except Exception as error:
                    _log.exception("batch %s failed", entry["id"], exc_info=error)
                    said = "the batch failed because of an error in the server; the server's log has the details"
                    self._fail(entry, [{"code": "internal_error", "message": said, "line": None, "param": None}])
                finally:
                    self._running = None
            await self._more.wait()

    async def _run(self, entry: Entry) -> None:
        progress = _Progress(is_cancelled=entry["status"] == "cancelling")
        self._running = entry["id"], progress
        key = self._key_of(entry)
        if key is None:
            said = "the key that created the batch was removed from the server"
            self._fail(entry, [{"code": "key_removed", "message": said, "line": None, "param": None}])
            return
        path = self.files.path(entry["input_file_id"])
        if entry["status"] == "validating":
            errors, entry["num_lines"] = await asyncio.to_thread(_checked, path, entry["endpoint"])
            if errors:
                self._fail(entry, errors)
                return
            if not progress.is_cancelled:
                self._set(entry, "in_progress")
        progress.total = entry.get("num_lines", 0)
        journal_path = self._folder / f"{entry['id']}.jsonl"
        with await asyncio.to_thread(Journal, journal_path, _settings(entry), 2**60, "resume") as journal:
            progress.failed = journal.answered.failed
            progress.completed = journal.answered.count - progress.failed
            reason = await _BatchRun(self._server, self.handlers, entry, key, journal, progress).finish(path)
            await asyncio.to_thread(journal.sync)
        if reason == "completed":
            self._set(entry, "finalizing")
        entry["request_counts"] = _counts(progress)
        await asyncio.to_thread(self._finalize, entry, journal_path, reason)
        self._set(entry, reason)
        journal_path.unlink(missing_ok=True)

    def _key_of(self, entry: Entry) -> Key | None:
        """Return the key of the requests of a batch; None if its owner's key was removed.

        Requests of batches have a separate limit, so that a batch does not keep its owner from other requests.
        """
        keys = self._server.options.keys or [ANYONE]
        own = next((key for key in keys if owner_of(key) == entry["owner"]), None)
        return None if own is None else replace(own, name=f"{own.name} (batches)", priority=_PRIORITY)

    def _finalize(self, entry: Entry, journal: Path, reason: str) -> None:
        """Divide the responses into the output and the errors. A second call writes the same files."""
        is_expired = reason == "expired"
        for part, failed in (("output", False), ("error", True)):
            count = entry["request_counts"]["failed" if failed else "completed"]
            if not count and not (failed and is_expired):
                continue
            name = hashlib.sha256(f"{entry['id']} {part}".encode()).hexdigest()[:24]
            unanswered = _unanswered(self.files.path(entry["input_file_id"]), journal) if failed and is_expired else ()

            def write(file: BinaryIO, failed: bool = failed, unanswered: Any = unanswered) -> None:
                file.writelines(_answered(journal, failed))
                file.writelines(unanswered)

            made = self.files.add(
                entry["owner"], f"{entry['id']}_{part}.jsonl", "batch_output", write, identifier=f"file-{name}"
            )
            entry[f"{part}_file_id"] = made["id"]

    def _set(self, entry: Entry, status: str) -> None:
        entry["status"] = status
        entry[f"{status}_at"] = int(time.time())
        self.entries.write(entry)

    def _fail(self, entry: Entry, errors: list[dict[str, Any]]) -> None:
        entry["errors"] = {"object": "list", "data": errors}
        self._set(entry, "failed")


class _BatchRun:
    """The requests of one batch while they run."""

    def __init__(
        self,
        server: Server,
        handlers: Mapping[str, Handler],
        entry: Entry,
        key: Key,
        journal: Journal,
        progress: _Progress,
    ) -> None:
        self._server, self._handle, self._entry, self._key = server, handlers[entry["endpoint"]], entry, key
        self._journal, self._progress, self._lock = journal, progress, asyncio.Lock()
        # Half of the places stay free, so that requests of people start at once.
        self._most = max(1, server.max_sequences // 2)

    async def finish(self, path: Path) -> str:
        """Process all lines that have no response. Return the reason of the end: a status of the batch."""
        lines = open_lines(path, "jsonl")
        pending = _by_beginning(lines, self._journal.answered)
        running: set[asyncio.Task[None]] = set()
        reason: str | None = None
        try:
            while True:
                while len(running) < self._most and (reason := self._end()) is None:
                    line = await asyncio.to_thread(next, pending, None)
                    if line is None:
                        reason = "completed"
                        break
                    task = asyncio.create_task(self._answer(lines, line))
                    self._server.note_running(task)
                    running.add(task)
                if not running:
                    if reason == "stopping":
                        raise _Stopping
                    return reason or "completed"
                timeout = None if reason == "completed" else _SECONDS_UNTIL_RETRY
                done, running = await asyncio.wait(running, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if task.cancelled():
                        raise _Stopping
                    task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _end(self) -> str | None:
        """Return the reason to start no further requests, or None."""
        if self._server.admission.is_draining:
            return "stopping"
        if self._progress.is_cancelled:
            return "cancelled"
        return "expired" if time.time() >= self._entry["expires_at"] else None

    async def _answer(self, lines: Lines, line: Line) -> None:
        identifier = str(LineId(_settings(self._entry), line.number, digest(line.content)))
        fields = lines.fields(line)
        response, error = await self._response(identifier, fields["body"])
        head = json.dumps({"id": identifier, "error": error, "custom_id": fields["custom_id"]}, ensure_ascii=False)
        written = head[:-1].encode("utf-8", "backslashreplace") + b', "response": ' + response + b"}\n"
        async with self._lock:
            await asyncio.to_thread(self._journal.write, written)
            self._progress.failed += error is not None
            self._progress.completed += error is None

    async def _response(self, identifier: str, body: Any) -> tuple[bytes, dict[str, str] | None]:
        """Return the response of a line as JSON, and its error."""
        num_tries = 0
        while True:
            num_tries += 1
            try:
                call = Call(self._server, self._key, identifier, {}, body=msgspec.json.encode(body))
                wanted, _ = wanted_by(
                    call, "embedding" if self._entry["endpoint"].endswith("embeddings") else "completion"
                )
                async with self._server.serving(wanted) as call.server:
                    reply = await self._handle(call)
                if not isinstance(reply, JsonReply):
                    raise RequestError(400, "stream cannot be used in a batch", "", "leave stream out", param="stream")
                return _response(identifier, reply.status, reply.body()), None
            except Exception as error:
                failed = error_reply(self._server, identifier, error)
                if failed.status == 503 and self._server.admission.is_draining:
                    raise asyncio.CancelledError from error
                if failed.status == 429 or (failed.status == 503 and num_tries < _MOST_TRIES):
                    await asyncio.sleep(_SECONDS_UNTIL_RETRY)
                    continue
                said = {"code": failed.code or failed.type, "message": failed.message}
                return _response(identifier, failed.status, msgspec.json.encode(failed.body())), said


def _response(identifier: str, status: int, body: bytes) -> bytes:
    return b'{"status_code": %d, "request_id": "%s", "body": %s}' % (status, identifier.encode(), body)


def _counts(progress: _Progress) -> dict[str, int]:
    return {"total": progress.total, "completed": progress.completed, "failed": progress.failed}


def _settings(entry: Entry) -> int:
    return digest(str(entry["id"]).encode(), 4)


def _is_failed(line: bytes) -> bool:
    return b'", "error": null' not in line[:100]


def _by_beginning(lines: Lines, answered: Answered) -> Iterator[Line]:
    """Yield the lines without a response. Prompts with the same beginning are adjacent, so they share cached blocks.

    All lines are in memory. A file is not larger than the body of a request.
    """
    pending = [line for line in lines if line.number not in answered]
    yield from sorted(pending, key=lambda line: _beginning(lines.fields(line)["body"]))


def _beginning(body: Mapping[str, Any]) -> str:
    """Return a text that is equal up to a point for requests whose prompts are equal up to a point."""
    names = ("model", "tools", "instructions", "messages", "prompt", "input")
    return json.dumps([body.get(name) for name in names], ensure_ascii=False)


def _answered(journal: Path, failed: bool) -> Iterator[bytes]:
    """Yield the responses in the order of the requests: those that failed, or the others."""
    places: list[tuple[int, int]] = []
    with journal.open("rb") as file:
        begin = 0
        for line in file:
            if _is_failed(line) == failed:
                places.append((_number_of(line), begin))
            begin += len(line)
        for _, begin in sorted(places):
            file.seek(begin)
            yield file.readline()


def _number_of(response: bytes) -> int:
    """Return the line number of a response's request."""
    return int(response[:100].split(b"_")[3])


def _unanswered(path: Path, journal: Path) -> Iterator[bytes]:
    """Yield a line with an error for each request without a response, because the batch has expired."""
    with journal.open("rb") as file:
        answered = {_number_of(line) for line in file}
    lines = open_lines(path, "jsonl")
    error = {"code": "batch_expired", "message": "This request could not be executed before the completion window"}
    for line in lines:
        if line.number not in answered:
            number = f"batch_req_expired_{line.number}"
            content = {"id": number, "error": error, "custom_id": lines.fields(line)["custom_id"], "response": None}
            yield json.dumps(content).encode() + b"\n"


def _checked(path: Path, endpoint: str) -> tuple[list[dict[str, Any]], int]:
    """Return the errors of an input, and the number of its lines."""
    errors: list[dict[str, Any]] = []
    seen: dict[str, int] = {}
    count = 0

    def note(line: int | None, code: str, message: str, param: str | None = None) -> None:
        errors.append({"code": code, "message": message, "line": line, "param": param})

    lines = open_lines(path, "jsonl")
    for line in lines:
        count += 1
        if count > MOST_LINES:
            note(line.number, "too_many_requests", f"the file has more than {MOST_LINES:,} requests")
        else:
            try:
                fields = lines.fields(line)
            except GenaiError as error:
                note(line.number, "invalid_json_line", f"{error.what}: {error.why}")
            else:
                for code, message, param in _problems(fields, line.number, endpoint, seen):
                    note(line.number, code, message, param)
        if len(errors) >= _MOST_ERRORS or count > MOST_LINES:
            break
    if not count:
        note(None, "empty_file", "the file has no requests")
    return errors[:_MOST_ERRORS], count


def _problems(
    fields: Mapping[str, Any], number: int, endpoint: str, seen: dict[str, int]
) -> Iterator[tuple[str, str, str]]:
    name = fields.get("custom_id")
    if not isinstance(name, str) or not name:
        yield "invalid_custom_id", "custom_id is not a text", "custom_id"
    elif name in seen:
        yield "duplicate_custom_id", f"custom_id {name!r:.80} is also the custom_id of line {seen[name]}", "custom_id"
    else:
        seen[name] = number
    if fields.get("method") != "POST":
        yield "invalid_method", "method is not POST", "method"
    if fields.get("url") != endpoint:
        yield "invalid_url", f"url is not {endpoint}, the endpoint of the batch", "url"
    if not isinstance(fields.get("body"), Mapping):
        yield "invalid_body", "body is not an object", "body"
