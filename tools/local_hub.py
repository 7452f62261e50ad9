"""A local server that speaks Hugging Face's hub protocol, for tests and examples. It can also simulate faults.

>>> hub = LocalHub()
>>> hub.add("org/name", {"config.json": b"{}"})
>>> with hub:
...     print(hub.url.rpartition(":")[0])
http://127.0.0.1

Set $HF_ENDPOINT to the server's URL. Requests for files larger than 1 KB are redirected to another origin, as on the
real hub.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

_LARGE = 1024


@dataclass
class Repository:
    """A repository. `facts` are merged into its description. If `token` is set, its files require this token."""

    files: dict[str, bytes]
    facts: dict[str, Any] = field(default_factory=dict)
    gated: bool = False
    token: str = ""
    revisions: tuple[str, ...] = ("main",)
    moved_from: str = ""

    @property
    def commit(self) -> str:
        """The commit hash, which changes with the files."""
        contents = hashlib.sha1()
        for path, data in sorted(self.files.items()):
            contents.update(f"{path}\0{len(data)}\0".encode() + data)
        return contents.hexdigest()

    def listing(self) -> list[dict[str, Any]]:
        """Return the files in the format of the hub's listing."""
        return [_listed(path, data) for path, data in self.files.items()]


@dataclass(frozen=True)
class Fault:
    """A simulated fault for one request.

    Attributes:
        status: status of the response; if set, the response consists only of `headers` and `body`.
        headers: headers of the response with `status`.
        body: bytes that replace the file's bytes.
        cut: number of bytes after which the connection is closed.
        pause: seconds to wait in the middle of the body.
        ignores_ranges: True to send the whole file even if a range was requested.
    """

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    cut: int | None = None
    pause: float = 0.0
    ignores_ranges: bool = False


def _listed(path: str, data: bytes) -> dict[str, Any]:
    git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    entry: dict[str, Any] = {"rfilename": path, "size": len(data), "blobId": git}
    if len(data) > _LARGE:
        entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return entry


class LocalHub:
    """A server that runs inside a `with` block.

    Attributes:
        repositories: repositories by name.
        faults: by part of a URL path: the faults for the next requests whose path contains this part, in order.
        requests: path and headers of every request received.
        plain_files: bytes by path, for URLs outside repositories.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.faults: dict[str, list[Fault]] = {}
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.plain_files: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.stop = threading.Event()
        hub = self

        class Handler(_Handler):
            def setup(self) -> None:
                self.hub = hub
                super().setup()

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        """The value for HF_ENDPOINT."""
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def elsewhere(self) -> str:
        """The URL of the same server under another host name, and therefore another origin."""
        return f"http://localhost:{self._server.server_port}"

    def add(self, name: str, files: Mapping[str, bytes], **options: Any) -> None:
        """Add a repository."""
        self.repositories[name] = Repository(dict(files), **options)

    def paths(self) -> list[str]:
        """Return the paths of all requests."""
        return [path for path, _ in self.requests]

    def __enter__(self) -> LocalHub:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnected."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: LocalHub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        """Answer a HEAD request, which the hub's own library sends before a download."""
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        with self.hub.lock:
            self.hub.requests.append((path, headers))
            queue = next((faults for part, faults in self.hub.faults.items() if part in path and faults), None)
            fault = queue.pop(0) if queue else Fault()
        if fault.status:
            self._answer(fault.status, fault.body or b"", dict(fault.headers))
        elif path.startswith("/api/models/"):
            self._describe(path.removeprefix("/api/models/"), headers, fault)
        elif found := re.fullmatch(r"/(.+?)/resolve/([^/]+)/(.+)", path):
            self._resolve(found[1], found[2], found[3], headers, fault)
        elif path.startswith("/cdn/"):
            self._send_blob(path.removeprefix("/cdn/"), headers, fault)
        elif path in self.hub.plain_files:
            data = self.hub.plain_files[path]
            self._send(data, headers, fault, {"etag": f'"{hashlib.sha256(data).hexdigest()}"'})
        else:
            self._answer(404, b"", {})

    def _describe(self, path: str, headers: Mapping[str, str], fault: Fault) -> None:
        name, _, revision = path.partition("/revision/")
        if new := self._moved_to(name):
            self._answer(307, b"", {"location": f"/api/models/{new}?blobs=true"})
            return
        found = self.hub.repositories.get(name)
        if found is None:
            self._answer(401, b"", {"x-error-code": "RepoNotFound", "x-error-message": "Repository not found"})
            return
        if revision and revision not in (*found.revisions, found.commit):
            self._answer(404, b"", {"x-error-code": "RevisionNotFound", "x-error-message": "Invalid rev id"})
            return
        facts = {"id": name, "sha": found.commit, "siblings": found.listing(), "gated": found.gated and "auto"}
        body = fault.body or json.dumps({**facts, **found.facts}).encode()
        self._answer(200, body, {"content-type": "application/json"}, fault.cut, fault.pause)

    def _resolve(self, name: str, commit: str, path: str, headers: Mapping[str, str], fault: Fault) -> None:
        if new := self._moved_to(name):
            self._answer(307, b"", {"location": f"/{new}/resolve/{commit}/{path}"})
            return
        found = self.hub.repositories.get(name)
        if found is None or path not in found.files or commit not in ("main", found.commit):
            self._answer(404, b"", {"x-error-code": "EntryNotFound"})
            return
        if found.token and headers.get("authorization") != f"Bearer {found.token}":
            status = 403 if "authorization" in headers else 401
            self._answer(
                status, b"", {"x-error-code": "GatedRepo", "x-error-message": f"Access to {name} is restricted"}
            )
            return
        data = found.files[path]
        listed = _listed(path, data)
        facts = {"x-repo-commit": found.commit, "etag": f'"{listed["blobId"]}"'}
        if "lfs" not in listed:
            self._send(data, headers, fault, facts)
            return
        digest = listed["lfs"]["sha256"]
        facts |= {"x-linked-size": str(len(data)), "x-linked-etag": f'"{digest}"'}
        self._answer(302, b"", {**facts, "location": f"{self.hub.elsewhere}/cdn/{digest}?signature=abc"})

    def _moved_to(self, name: str) -> str:
        found = (new for new, one in self.hub.repositories.items() if one.moved_from == name)
        return next(found, "")

    def _send_blob(self, digest: str, headers: Mapping[str, str], fault: Fault) -> None:
        for repository in self.hub.repositories.values():
            for data in repository.files.values():
                if hashlib.sha256(data).hexdigest() == digest:
                    self._send(data, headers, fault)
                    return
        self._answer(404, b"", {})

    def _send(
        self, data: bytes, headers: Mapping[str, str], fault: Fault, facts: Mapping[str, str] | None = None
    ) -> None:
        data = data if fault.body is None else fault.body
        asked = re.fullmatch(r"bytes=(\d+)-", headers.get("range", ""))
        others = headers.get("if-range", (facts or {}).get("etag")) != (facts or {}).get("etag")
        begin = int(asked[1]) if asked and not fault.ignores_ranges and not others else 0
        if begin >= len(data) > 0:
            self._answer(416, b"", {"content-range": f"bytes */{len(data)}"})
            return
        part = {"content-range": f"bytes {begin}-{len(data) - 1}/{len(data)}"} if begin else {}
        self._answer(
            206 if begin else 200,
            data[begin:],
            {"accept-ranges": "bytes", **part, **(facts or {})},
            fault.cut,
            fault.pause,
        )

    def _answer(
        self, status: int, body: bytes, headers: Mapping[str, str], cut: int | None = None, pause: float = 0.0
    ) -> None:
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        try:
            sent = b"" if self.command == "HEAD" else body if cut is None else body[:cut]
            half = len(sent) // 2 if pause else 0
            self.wfile.write(sent[:half])
            self.wfile.flush()
            self.hub.stop.wait(pause)
            self.wfile.write(sent[half:])
            self.wfile.flush()
        except OSError:
            cut = 0
        if cut is not None:
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
