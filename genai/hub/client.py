"""Requests to a hub with huggingface_hub's session and token, and the interpretation of error responses.

A request that fails transiently (broken connection, 5xx, 429) is retried a few times. If the server requests a wait,
the client waits, for at most a minute.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar
from urllib.parse import urljoin

from ..errors import AccessError, DownloadError, GenaiError, UnreachableError
from .references import HUB, endpoint, offline

_TIMEOUT = 20.0  # seconds without a byte
_WAITS = (1.0, 2.0, 4.0, 8.0)  # seconds before each retry
_LONGEST_WAIT = 60.0
_ANSWERS = {200, 206, 416}  # with a file, with a part of a file, or without content because the range does not exist
_REDIRECTIONS, _MOST_REDIRECTIONS = {301, 302, 303, 307, 308}, 20
# Names of httpx errors: the errors that recur at every retry, and the error for an invalid address.
_HOPELESS, _NO_ADDRESS = {"UnsupportedProtocol"}, "InvalidURL"
_MOST_ANSWERS, _LONGEST_ANSWER = 64 << 20, 300.0  # maximum bytes and seconds of a response that is read as a whole
AGAIN = "run the command again"
"""The end of a fix for errors that a later attempt may not meet."""
_TOKENS = "https://huggingface.co/settings/tokens"

T = TypeVar("T")
Notice = Callable[[str], None]
"""A callback that receives a short text about the cause of a wait."""


class Response(Protocol):
    """The parts of an httpx response that are used here. huggingface_hub chooses the version of httpx."""

    status_code: int

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers, by case-insensitive names."""
        ...

    def iter_bytes(self) -> Iterator[bytes]:
        """Yield the body in pieces as they arrive."""
        ...


class TransientError(Exception):
    """An attempt failed in a way that may not recur. `wait` is the wait that the server requests, in seconds."""

    def __init__(self, why: str, wait: float | None = None) -> None:
        super().__init__(why)
        self.wait = wait


class Client:
    """A client that reads files from a hub or any other server.

    Args:
        page: URL of the model's page, for messages.
        notice: called with the cause of a wait.
    """

    def __init__(self, page: str = "", notice: Notice = lambda text: None) -> None:
        self._page, self._notice = page, notice

    def read(self, url: str) -> bytes:
        """Return a whole response of at most 64 MiB and five minutes. Raises DownloadError and AccessError."""
        end = time.monotonic() + _LONGEST_ANSWER

        def once() -> bytes:
            body = bytearray()
            with self.open(url) as response:
                for piece in response.iter_bytes():
                    body += piece
                    if len(body) > _MOST_ANSWERS:
                        raise DownloadError(
                            f"{url:.200}: the response exceeds {_MOST_ANSWERS >> 20} MiB",
                            "larger responses are not read into memory",
                            "check that HF_ENDPOINT is the address of a hub",
                        )
                    if time.monotonic() > end:
                        raise DownloadError(
                            f"{url:.200}: the response did not end within {_LONGEST_ANSWER:.0f} seconds",
                            f"only {len(body):,} bytes arrived in that time",
                            "check the connection, HF_ENDPOINT and the proxy settings, and run the command again",
                        )
            return bytes(body)

        return self.patiently(once)

    def patiently(self, attempt: Callable[[], T], reached: Callable[[], int] = lambda: 0) -> T:
        """Call `attempt` and return its result, with a few retries after TransientError.

        The count of retries restarts when an attempt gets further than all earlier attempts, as measured by `reached`
        in bytes.
        """
        waits, furthest = iter(_WAITS), reached()
        while True:
            try:
                return attempt()
            except TransientError as error:
                if (now := reached()) > furthest:
                    waits, furthest = iter(_WAITS), now
                wait = next(waits, None)
                if wait is None or (error.wait or 0) > _LONGEST_WAIT:
                    raise self._given_up(error) from error
                if error.wait is not None:
                    wait = error.wait
                    self._notice(f"the server requests a wait of {wait:.0f} s")
                time.sleep(wait)

    @contextmanager
    def open(self, url: str, headers: Mapping[str, str] | None = None) -> Iterator[Response]:
        """Yield a response that is read in pieces. Redirections are followed, and only the hub receives the token.

        Raises:
            TransientError: if a retry may succeed.
            AccessError: if a token is missing, or the licence has not been accepted.
            DownloadError: if the response is not a file, or network access is disabled.
        """
        if offline():
            raise DownloadError(
                f"{url:.200}: the file was not downloaded",
                "HF_HUB_OFFLINE disables network access",
                "unset HF_HUB_OFFLINE, and run the command again",
            )
        session, failed = _session()
        address = url
        try:
            # The session does not follow redirections, because it would read the whole body of each.
            for _ in range(_MOST_REDIRECTIONS + 1):
                request_headers = {"accept-encoding": "identity", "user-agent": "onnx-genai-toolkit", **(headers or {})}
                if token := _token_for(address):
                    request_headers["authorization"] = f"Bearer {token}"
                with session.stream(
                    "GET", address, headers=request_headers, timeout=_TIMEOUT, follow_redirects=False
                ) as response:
                    if response.status_code in _REDIRECTIONS and "location" in response.headers:
                        address = urljoin(address, response.headers["location"])
                        continue
                    if response.status_code not in _ANSWERS:
                        raise self._refused(url, response, with_token=bool(token))
                    yield response
                    return
            raise DownloadError(
                f"{url:.200}: the file was not downloaded",
                f"the address redirects more than {_MOST_REDIRECTIONS} times",
                "check the address",
            )
        except GenaiError:
            raise
        except failed as error:
            if type(error).__name__ in _HOPELESS:
                raise DownloadError(
                    f"{url:.200}: the file was not downloaded", str(error), "check the address"
                ) from error
            if _is_unknown_host(error):
                raise UnreachableError(
                    f"{url:.200}: the file was not downloaded",
                    f"the host name cannot be resolved ({error})",
                    "check the connection, the host name, HF_ENDPOINT and proxies; or use a model from `genai list`",
                ) from error
            raise TransientError(f"{type(error).__name__}: {error}") from error
        except Exception as error:
            if isinstance(error, ValueError) or type(error).__name__ == _NO_ADDRESS:  # an invalid redirection
                raise DownloadError(
                    f"{url:.200}: the file was not downloaded", str(error), "check the address"
                ) from error
            raise

    def _given_up(self, error: TransientError) -> DownloadError:
        if error.wait is not None and error.wait > _LONGEST_WAIT:
            return DownloadError(
                "the server accepts no more requests at the moment",
                f"{error}; the server requests a wait of {error.wait:.0f} s",
                "run the command again after that time; a token in HF_TOKEN raises the limit",
            )
        # An error without a cause is a response of the server.
        kind = DownloadError if error.__cause__ is None else UnreachableError
        return kind(
            f"the download failed {len(_WAITS) + 1} times",
            str(error),
            f"check the connection, HF_ENDPOINT and proxies, and {AGAIN}",
        )

    def _refused(self, url: str, response: Any, *, with_token: bool) -> Exception:
        status, code = response.status_code, response.headers.get("x-error-code", "")
        said = "".join(filter(str.isprintable, response.headers.get("x-error-message", "")[:300]))
        if status == 429 or status >= 500:
            return TransientError(f"{status} from {url:.200}", _asked_to_wait(response.headers))
        if code == "RevisionNotFound":
            return DownloadError(
                f"{url:.200}: the revision does not exist",
                "the repository has no revision with this name",
                f"choose a branch or tag on its page ({self._page}), or use its default branch: "
                f"`genai pull {self._page.removeprefix(endpoint()).strip('/')}`",
            )
        at_hub = bool(self._page)
        if at_hub and (code == "GatedRepo" or (status == 403 and code != "RepoNotFound")):
            return gated(self._page, said, with_token=with_token)
        if at_hub and (status == 401 or code == "RepoNotFound"):
            why = "the repository does not exist, or it is private"
            fix = f"check the name; for a private model, set HF_TOKEN to a token from {_TOKENS}, or run `hf auth login`"
            if with_token:
                why = f"the repository does not exist, or the token has no access to it{f' ({said})' if said else ''}"
                fix = "check the name and the token (HF_TOKEN, or `hf auth login`)"
            return AccessError(f"{self._page}: the repository was not found", why, fix)
        return DownloadError(
            f"{url:.200}: the server returned {status}", said or "the server has no such file", "check the address"
        )


def _session() -> tuple[Any, type[Exception]]:
    """Return the library's session and the base class of its errors, which is httpx's own.

    Raises DownloadError if environment variables prevent a session.
    """
    try:
        from huggingface_hub import errors, get_session

        return get_session(), vars(errors)["HTTPError"]
    except (ImportError, OSError, ValueError) as error:
        raise DownloadError(
            "no request can be sent",
            str(error),
            "correct or unset the environment variable that causes the error: HTTPS_PROXY, HTTP_PROXY, ALL_PROXY (for "
            "SOCKS, run `pip install socksio`), SSL_CERT_FILE, or a variable that begins with HF_",
        ) from error


def _token_for(url: str) -> str | None:
    """Return the token if the URL belongs to the hub. Raises AccessError if the token is malformed."""
    from huggingface_hub import get_token

    token = get_token() if url.startswith(endpoint() + "/") else None
    if token and not (token.isascii() and token.isprintable()):
        raise AccessError(
            "the Hugging Face token cannot be sent",
            "a token may contain only printable ASCII characters, but this one contains others",
            f"copy the token again from {_TOKENS}, and set HF_TOKEN to it or run `hf auth login`",
        )
    return token


def gated(page: str, said: str, *, with_token: bool) -> AccessError:
    """Return the error for a model whose licence must be accepted first."""
    if with_token:
        return AccessError(
            f"{page}: access is denied to this token",
            said or "the token's account has no access, or the token does not permit reading gated repositories",
            f"sign in as the token's owner, accept the licence (or request access) at {page}, and try again",
        )
    return AccessError(
        f"{page}: the model is gated",
        said or "its authors require you to sign in and accept their licence",
        f"accept the licence at {page}, create a token at {_TOKENS}, and run `hf auth login`, or set HF_TOKEN",
    )


def page_of(repo: str) -> str:
    """Return the web page of a repository."""
    return f"{HUB if endpoint() == HUB else endpoint()}/{repo}"


def _asked_to_wait(headers: Mapping[str, str]) -> float | None:
    """Return the seconds to wait, from Retry-After or the hub's RateLimit ("api";r=0;t=55), or None."""
    with suppress(ValueError):
        if (seconds := float(headers.get("retry-after", ""))) >= 0:
            return min(seconds, 1e6)
    match = re.search(r"r=0\b.*?t=(\d{1,6})\b", headers.get("ratelimit", ""))
    return float(match[1]) if match else None


def _is_unknown_host(error: BaseException | None) -> bool:
    """Return True if a host name does not exist. Other failures of a name lookup may be transient."""
    while error is not None:
        if isinstance(error, socket.gaierror):
            return error.errno == socket.EAI_NONAME
        error = error.__cause__ or error.__context__
    return False
