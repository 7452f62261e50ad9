"""Encoders that are served: models for embeddings and for reranking, their threads, and the limits of their requests.

The requests of many clients run on separate threads, and the encoder computes the texts of all threads in shared steps.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..embed.embedder import Embedder
from ..embed.reranker import Reranker
from ..errors import DeadlineError, RequestError, StateError, did_you_mean
from .admission import Admission
from .keys import Key

T = TypeVar("T")
# Requests that are computed concurrently. Each occupies a thread, which waits for a shared step most of the time.
_MOST_RUNNING = 32
# A request is computed in parts, so that it ends soon after its client has closed the connection.
_TEXTS_OF_A_PART, _CHARACTERS_OF_A_PART, _CHARACTERS_PER_TOKEN = 256, 2**15, 4


@dataclass(frozen=True)
class ServedEncoder:
    """A model and its name in requests."""

    name: str
    model: Embedder | Reranker


class Encoders:
    """The encoders of a server. The caller closes the models.

    Args:
        embedder: the model of /v1/embeddings.
        reranker: the model of /v1/rerank.
        embedder_name, reranker_name: names in requests [default: the names of the models' folders].
    """

    def __init__(
        self,
        embedder: Embedder | None = None,
        reranker: Reranker | None = None,
        *,
        embedder_name: str | None = None,
        reranker_name: str | None = None,
    ) -> None:
        self._embedder, self._reranker = embedder, reranker
        self._names = {
            "embedding": embedder_name or (embedder.folder.name if embedder is not None else ""),
            "rerank": reranker_name or (reranker.folder.name if reranker is not None else ""),
        }
        self._threads = ThreadPoolExecutor(_MOST_RUNNING, "genai-encode")
        self.admission = Admission(_MOST_RUNNING, 0)

    def share_limits(self, admission: Admission) -> None:
        """Obey the limits of a server."""
        self.admission = admission.lane(_MOST_RUNNING)

    @property
    def served(self) -> Mapping[str, ServedEncoder]:
        """The models by their capability: "embedding" or "rerank"."""
        found = {"embedding": self._embedder, "rerank": self._reranker}
        return {kind: ServedEncoder(self._names[kind], model) for kind, model in found.items() if model is not None}

    @property
    def names(self) -> list[str]:
        """The names of the models."""
        return [one.name for one in self.served.values()]

    @property
    def hidden(self) -> Mapping[str, str]:
        """Texts that no reply may contain, with their replacements: the paths of the models."""
        return {str(Path(one.model.folder).absolute()): one.name for one in self.served.values()}

    def embedder(self, name: str | None) -> tuple[str, Embedder]:
        """Return the model for embeddings, and its name. Raise RequestError if there is no such model."""
        if self._embedder is None:
            raise _missing("embeddings", "--embedder")
        return self._checked_name("embedding", name), self._embedder

    def reranker(self, name: str | None) -> tuple[str, Reranker]:
        """Return the model for reranking, and its name. Raise RequestError if there is no such model."""
        if self._reranker is None:
            raise _missing("reranking", "--reranker")
        return self._checked_name("rerank", name), self._reranker

    def _checked_name(self, kind: str, name: str | None) -> str:
        known = self._names[kind]
        if name is None or name in ("", known):
            return known
        raise RequestError(
            404, f"the model {name!r:.200} does not exist", f"the model of this endpoint is {known}"[:500],
            did_you_mean(name, [known], f"use the name {known:.200}"), code="model_not_found", param="model",
        )  # fmt: skip

    async def run(self, key: Key, timeout: float | None, work: Callable[[Callable[[], None]], T]) -> T:
        """Call a function on another thread when the limits allow it.

        Args:
            key: the API key.
            timeout: maximum number of seconds; None = no limit.
            work: the function. It calls its argument between parts, which raises an error if the result is not needed
                any more.

        Raises:
            RequestError: the server is full or stops, or the key has too many requests.
            DeadlineError: the timeout expired.
        """
        unneeded = threading.Event()

        def check() -> None:
            if unneeded.is_set():
                raise StateError("the request was cancelled", "its client closed the connection", "send it again")

        with self.admission.seat(key.name) as seat:
            try:
                async with asyncio.timeout(timeout):
                    ticket = await self.admission.enter(seat, priority=key.priority)
                    try:
                        return await asyncio.get_running_loop().run_in_executor(self._threads, work, check)
                    finally:
                        unneeded.set()
                        ticket.release()
            except TimeoutError:
                raise DeadlineError(
                    "the request's timeout expired", "its texts were not computed in time",
                    "send fewer texts per request, or raise the timeout",
                ) from None  # fmt: skip

    def close(self) -> None:
        """Stop the threads. The models stay loaded."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _missing(what: str, option: str) -> RequestError:
    return RequestError(
        404, f"this server has no model for {what}", f"it was started without {option}",
        f"start the server with {option} MODEL", code="model_not_found", param="model",
    )  # fmt: skip


def parts(items: Sequence[Any]) -> Iterator[tuple[int, Sequence[Any]]]:
    """Yield texts, or token ids of texts, in parts: the index of the first text, and the texts."""
    begin = size = 0
    for index, item in enumerate(items):
        size += len(item) * (1 if isinstance(item, str) else _CHARACTERS_PER_TOKEN)
        if index + 1 - begin >= _TEXTS_OF_A_PART or size >= _CHARACTERS_OF_A_PART:
            yield begin, items[begin : index + 1]
            begin, size = index + 1, 0
    if begin < len(items):
        yield begin, items[begin:]
