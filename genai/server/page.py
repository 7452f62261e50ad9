"""The chat page at /: its files, which are served as they are in the folder `page`."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

from ..errors import RequestError
from .calls import Call, TextReply

FOLDER = Path(__file__).with_name("page")

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
}
# The page loads nothing from other servers, and runs no scripts except its files. Trusted types ensure that only
# DOMPurify produces HTML from text. The other policy, genai, is for the address of worker.js.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "worker-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify genai"
)
_HEADERS = {
    "cache-control": "no-cache",  # browsers ask with the entity tag whether their copy is current
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


async def show_page(call: Call) -> TextReply:
    """Return the page."""
    return _reply(call, "index.html")


async def show_file(call: Call) -> TextReply:
    """Return a file of the page.

    Raises:
        RequestError: there is no such file.
    """
    return _reply(call, call.path["name"])


def _reply(call: Call, name: str) -> TextReply:
    text, tag = _file(name)
    headers = {**_HEADERS, "etag": tag}
    if name == "worker.js":  # the worker also answers for the address of the page, which is outside of its folder
        headers["service-worker-allowed"] = "/"
    content_type = _TYPES.get(Path(name).suffix, "text/plain; charset=utf-8")
    if call.headers.get("if-none-match") == tag:
        return TextReply("", content_type, 304, headers)
    return TextReply(text, content_type, 200, headers)


@lru_cache(maxsize=128)
def _file(name: str) -> tuple[str, str]:
    """Return a file's text and its entity tag."""
    if name not in _names():
        raise RequestError(
            404, f"the page has no file {name!r:.200}", "its files are part of the package", "open the address /",
            code="unknown_path",
        )  # fmt: skip
    data = (FOLDER / name).read_bytes()
    return data.decode(), f'"{hashlib.sha256(data).hexdigest()[:32]}"'


@lru_cache(maxsize=1)
def _names() -> frozenset[str]:
    return frozenset(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file())


ROUTES = (
    ("GET", "/", show_page, True),
    ("GET", "/page/{name:path}", show_file, True),
)
