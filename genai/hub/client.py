"""Requests to a hub, through huggingface_hub: its session and its token; and what a refusal means.

A request that fails for a moment (broken connections, 5xx, 429) is tried again a few times; what is said about waiting
is obeyed, up to a minute.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar
from urllib.parse import urljoin

from ..errors import AccessError, DownloadError, GenaiError
from .references import HUB, endpoint, offline

_TIMEOUT = 20.0  # seconds without a byte
_WAITS = (1.0, 2.0, 4.0, 8.0)  # seconds before another try
_LONGEST_WAIT = 60.0
_ANSWERS = {200, 206, 416}  # with a file, a part of it, or nothing because that part is not there
_REDIRECTIONS, _MOST_REDIRECTIONS = {301, 302, 303, 307, 308}, 20
# Errors of httpx: those that come again at every try, and that of an address which is none.
_HOPELESS, _NO_ADDRESS = {"UnsupportedProtocol"}, "InvalidURL"
_MOST_ANSWERS, _LONGEST_ANSWER = 64 << 20, 300.0  # bytes and seconds of an answer that is read whole
_TOKENS = "https://huggingface.co/settings/tokens"

T = TypeVar("T")
Notice = Callable[[str], None]
"""Told in a few words what is being waited for."""


class Response(Protocol):
    """What is used of an answer of httpx, whose version huggingface_hub chooses."""

    status_code: int

    @property
    def headers(self) -> Mapping[str, str]:
        """By name, in any case."""
        ...

    def iter_bytes(self) -> Iterator[bytes]:
        """The body, in pieces as they come."""
        ...


class TransientError(Exception):
    """A try failed in a way that may not happen again; `wait` is how long the server asks to wait, in seconds."""

    def __init__(self, why: str, wait: float | None = None) -> None:
        super().__init__(why)
        self.wait = wait


class Client:
    """Asks a hub, or any server, for files.

    Args:
        page: the model's page, for messages.
        notice: told what is being waited for.
    """

    def __init__(self, page: str = "", notice: Notice = lambda text: None) -> None:
        self._page, self._notice = page, notice

    def read(self, url: str) -> bytes:
        """A whole answer of at most 64 MiB and five minutes. Raises DownloadError, AccessError."""
        end = time.monotonic() + _LONGEST_ANSWER

        def once() -> bytes:
            body = bytearray()
            with self.open(url) as response:
                for piece in response.iter_bytes():
                    body += piece
                    if len(body) > _MOST_ANSWERS:
                        raise DownloadError(
                            f"{url:.200}: the answer has more than {_MOST_ANSWERS >> 20} MiB",
                            "that much is not read into memory",
                            "check that it is a hub's address (HF_ENDPOINT)",
                        )
                    if time.monotonic() > end:
                        raise DownloadError(
                            f"{url:.200}: the answer has not come to its end in {_LONGEST_ANSWER:.0f} seconds",
                            f"{len(body):,} bytes of it came",
                            "check the connection (and HF_ENDPOINT, proxies), and run the command again",
                        )
            return bytes(body)

        return self.patiently(once)

    def patiently(self, attempt: Callable[[], T], reached: Callable[[], int] = lambda: 0) -> T:
        """What `attempt` returns. Where it raises Broken it is called again: a few times, counted anew whenever it came
        further than ever before, which `reached` says in bytes."""
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
                    self._notice(f"the server asks to wait {wait:.0f} s")
                time.sleep(wait)

    @contextmanager
    def open(self, url: str, headers: Mapping[str, str] | None = None) -> Iterator[Response]:
        """An answer whose body is read piece by piece; redirections are followed, and only the hub sees the token.

        Raises:
            Broken: it is worth another try. AccessError: a token or a consent is missing.
            DownloadError: anything else than a file came back, or the network is forbidden.
        """
        if offline():
            raise DownloadError(
                f"{url:.200}: not fetched", "HF_HUB_OFFLINE forbids the network", "unset it, and run the command again"
            )
        session, failed = _session()
        address = url
        try:
            # Not left to the session, which would read whatever comes with a redirection.
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
                f"{url:.200}: not fetched", f"it leads on more than {_MOST_REDIRECTIONS} times", "check the address"
            )
        except GenaiError:
            raise
        except failed as error:
            if type(error).__name__ in _HOPELESS:
                raise DownloadError(f"{url:.200}: not fetched", str(error), "check the address") from error
            if _is_unknown_host(error):
                raise DownloadError(
                    f"{url:.200}: not fetched",
                    f"no host of that name is known here ({error})",
                    "check the connection, the name, HF_ENDPOINT and proxies; or use a model of `genai list`",
                ) from error
            raise TransientError(f"{type(error).__name__}: {error}") from error
        except Exception as error:
            if isinstance(error, ValueError) or type(error).__name__ == _NO_ADDRESS:  # that a redirection made up
                raise DownloadError(f"{url:.200}: not fetched", str(error), "check the address") from error
            raise

    def _given_up(self, error: TransientError) -> DownloadError:
        if error.wait is not None and error.wait > _LONGEST_WAIT:
            return DownloadError(
                "the server takes no more requests for now",
                f"{error}; it asks to wait {error.wait:.0f} s",
                "run the command again then: what has come is kept; with a token (HF_TOKEN) the limits are higher",
            )
        return DownloadError(
            f"the download broke off {len(_WAITS) + 1} times",
            str(error),
            "check the connection (and HF_ENDPOINT, proxies), and run the command again: what has come is kept",
        )

    def _refused(self, url: str, response: Any, *, with_token: bool) -> Exception:
        status, code = response.status_code, response.headers.get("x-error-code", "")
        said = "".join(filter(str.isprintable, response.headers.get("x-error-message", "")[:300]))
        if status == 429 or status >= 500:
            return TransientError(f"{status} from {url:.200}", _asked_to_wait(response.headers))
        if code == "RevisionNotFound":
            return DownloadError(
                f"{url:.200}: no such revision",
                "the repository has none of this name",
                f"choose one of the branches and tags on its page ({self._page}), or its default branch: "
                f"`genai pull {self._page.removeprefix(endpoint()).strip('/')}`",
            )
        at_hub = bool(self._page)
        if at_hub and (code == "GatedRepo" or (status == 403 and code != "RepoNotFound")):
            return gated(self._page, said, with_token=with_token)
        if at_hub and (status == 401 or code == "RepoNotFound"):
            why = "there is no such repository, or it is private"
            fix = f"check the name; for a private one set HF_TOKEN to a token from {_TOKENS}, or run `hf auth login`"
            if with_token:
                why = f"there is no such repository, or the token in use may not see it{f' ({said})' if said else ''}"
                fix = "check the name and the token (HF_TOKEN, or `hf auth login`)"
            return AccessError(f"{self._page}: not found", why, fix)
        return DownloadError(
            f"{url:.200}: the server answers {status}", said or "it has no such file", "check the address"
        )


def _session() -> tuple[Any, type[Exception]]:
    """The library's session, and what its requests raise: httpx's own error, of whichever version that is.

    Raises DownloadError: the environment's variables let it make none.
    """
    try:
        from huggingface_hub import errors, get_session

        return get_session(), vars(errors)["HTTPError"]
    except (ImportError, OSError, ValueError) as error:
        raise DownloadError(
            "no request can be made",
            str(error),
            "correct or unset the variable that says so: HTTPS_PROXY, HTTP_PROXY, ALL_PROXY (for SOCKS also `pip "
            "install socksio`), SSL_CERT_FILE, or one that begins with HF_",
        ) from error


def _token_for(url: str) -> str | None:
    """The token, for the hub alone. Raises AccessError: it is none."""
    from huggingface_hub import get_token

    token = get_token() if url.startswith(endpoint() + "/") else None
    if token and not (token.isascii() and token.isprintable()):
        raise AccessError(
            "the token cannot be sent",
            "it has other characters than a token's",
            f"copy it again from {_TOKENS} (HF_TOKEN, or `hf auth login`)",
        )
    return token


def gated(page: str, said: str, *, with_token: bool) -> AccessError:
    """The error of a model whose authors want an agreement first."""
    if with_token:
        return AccessError(
            f"{page}: access is refused to this token",
            said or "its account has not been let in, or the token may not read gated repositories",
            f"accept the licence (or ask for access) at {page}, signed in as the token's owner; then run this again",
        )
    return AccessError(
        f"{page}: the model is gated",
        said or "its authors want their licence accepted first, and to know by whom",
        f"accept it at {page}, make a token at {_TOKENS}, set HF_TOKEN to it (or `hf auth login`), and run this again",
    )


def page_of(repo: str) -> str:
    """The page of a repository, for people."""
    return f"{HUB if endpoint() == HUB else endpoint()}/{repo}"


def _asked_to_wait(headers: Mapping[str, str]) -> float | None:
    """Seconds, from Retry-After or the hub's RateLimit ("api";r=0;t=55)."""
    with suppress(ValueError):
        if (seconds := float(headers.get("retry-after", ""))) >= 0:
            return min(seconds, 1e6)
    match = re.search(r"r=0\b.*?t=(\d{1,6})\b", headers.get("ratelimit", ""))
    return float(match[1]) if match else None


def _is_unknown_host(error: BaseException | None) -> bool:
    """Whether a name was looked up and is not there: who answers otherwise, or not at all, may do better later."""
    while error is not None:
        if isinstance(error, socket.gaierror):
            return error.errno == socket.EAI_NONAME
        error = error.__cause__ or error.__context__
    return False
