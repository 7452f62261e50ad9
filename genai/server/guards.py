"""Checks of the headers host and origin, which keep web pages of others away from the server.

A web page can make a browser send requests to an address of the local machine. By DNS rebinding, its own name can
lead to the server, so the name in the header `host` is checked. Otherwise, the browser sends the header `origin`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import RequestError

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:@/\s]+)(?::[0-9]{1,5})?")
LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")


def check_host(scope: Any, headers: Mapping[str, str], allowed: Sequence[str]) -> None:
    """Raise RequestError unless the header `host` has one of the allowed names; with no names, all are allowed."""
    hosts = [value.decode("latin-1") for name, value in scope["headers"] if name.lower() == b"host"]
    name = host_name(hosts[0]) if len(hosts) == 1 else ""
    if allowed and name not in allowed:
        raise RequestError(
            403, f"the host {', '.join(hosts)!r:.200} is not allowed",
            "requests to an unknown name can come from a web page that was redirected to this server",
            "use the address that the server printed, or add the name with --allow-host",
            code="host_not_allowed",
        )  # fmt: skip


def host_name(host: str) -> str:
    """Return the name in a value of the header `host`, without the port, in lower case; "" if it is malformed."""
    found = _HOST.fullmatch(host.strip().lower())
    return found[1] if found else ""


def check_framing(headers: Mapping[str, str]) -> None:
    """Raise RequestError if proxies could see another end of the body than this server, or if it is compressed."""
    if "transfer-encoding" in headers and "content-length" in headers:
        raise RequestError(
            400, "the request has content-length and transfer-encoding",
            "a proxy can read such a request as two requests", "send one of the two headers",
            headers={"connection": "close"},
        )  # fmt: skip
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise RequestError(
            415, f"the content-encoding is {encoding!r:.40}", "compressed bodies are not read",
            "send the body without compression", headers={"connection": "close"},
        )  # fmt: skip


def check_origin(headers: Mapping[str, str], allowed: Sequence[str]) -> None:
    """Raise RequestError if the header `origin` names a web page of another server that is not allowed."""
    origin = headers.get("origin")
    if origin is None or origin in allowed or "*" in allowed:
        return
    scheme, _, host = origin.partition("://")
    if scheme in ("http", "https") and host == headers.get("host"):
        return
    raise RequestError(
        403, f"the origin {origin!r:.200} is not allowed", "web pages of other servers cannot use this server",
        f"start the server with --allow-origin {origin:.200}", code="origin_not_allowed",
    )  # fmt: skip


FORM = "application/x-www-form-urlencoded"
"""The content type of `curl -d` without another one. Web pages can send it to other servers without asking them."""


def is_from_program(headers: Mapping[str, str]) -> bool:
    """Return True if no browser sent a request.

    Each of the headers shows a browser, and a web page cannot remove or change any of them: since 2020, all browsers
    send `origin` with each POST of a page to another server.
    """
    is_browser = any(name in headers for name in ("origin", "referer", "cookie", "sec-fetch-site", "sec-fetch-mode"))
    return not is_browser and not headers.get("user-agent", "").lower().startswith("mozilla/")


def cors_headers(headers: Mapping[str, str], allowed: Sequence[str]) -> dict[str, str]:
    """Return the headers that let a browser's page of an allowed origin read the response."""
    origin = headers.get("origin")
    if origin is None or not (origin in allowed or "*" in allowed):
        return {}
    return {
        "access-control-allow-origin": origin,
        "vary": "origin",
        "access-control-allow-methods": "GET, POST, DELETE, OPTIONS",
        "access-control-allow-headers": headers.get("access-control-request-headers", "authorization, content-type"),
        "access-control-expose-headers": "x-request-id, x-ignored-fields, retry-after",
        "access-control-max-age": "600",
    }


def is_loopback(address: str) -> bool:
    """Return True if an address can be reached only from this machine."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return False
