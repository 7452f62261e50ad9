"""The server's state: its model, its options, and the limits of its requests."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from ..errors import OptionError, RequestError, did_you_mean
from ..llm.llm import LLM
from .admission import Admission
from .batches import Batches
from .bodies import Bodies
from .encoders import Encoders
from .file_store import open_folder
from .keys import Key
from .metrics import Metrics
from .request_log import RequestLog
from .request_tasks import RequestTasks
from .response_store import ResponseStore
from .routing import Wanted
from .stream_store import StreamStore
from .token_texts import TokenTexts
from .traces import Traces

T = TypeVar("T")
# Templates, tokenizers and grammars are prepared on these threads, so that the event loop continues in the meantime.
_PREPARING_THREADS = 2


@dataclass(frozen=True)
class ServerOptions:
    """Options of a server.

    Attributes:
        keys: the accepted API keys; empty = every request is accepted.
        max_queue: maximum number of requests that wait; further requests are refused with status 429.
        max_per_key: maximum number of requests of one key that run and wait; None = no limit.
        timeout: maximum number of seconds for a request; None = no limit. Requests can set a shorter limit.
        max_body: maximum number of bytes in a request body.
        strict: True to refuse fields without effect.
        reuse_replies: True to reuse cached blocks of replies. The next turn of a conversation then starts sooner, but
            its tokens can differ from those of a server that did not generate the reply.
        allowed_hosts: accepted names in the header `host`; empty = every name is accepted.
        allowed_origins: origins of web pages that may use the server.
        keep_headers: True to keep the lines of agents that change with each request; see genai/server/agents.py.
        adapter_dir: folder from which requests may load adapters; None = requests cannot load or unload adapters.
        batch_dir: private folder for files and batches; None = there are none.
        page: True to serve the chat page at /.
        ollama: True to serve the endpoints of Ollama's API below /api.
        drain_seconds: maximum number of seconds that running requests may take after the server was told to stop.

    Raises:
        OptionError: a value is out of range.
    """

    keys: Sequence[Key] = ()
    max_queue: int = 256
    max_per_key: int | None = None
    timeout: float | None = None
    max_body: int = 16 * 2**20
    strict: bool = False
    reuse_replies: bool = False
    allowed_hosts: Sequence[str] = ()
    allowed_origins: Sequence[str] = ()
    keep_headers: bool = False
    adapter_dir: Path | None = None
    batch_dir: Path | None = None
    page: bool = True
    ollama: bool = False
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name, low in (("max_queue", 0), ("max_per_key", 1), ("max_body", 1)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < low):
                raise OptionError(
                    f"{name} = {value!r:.40}", f"a whole number of at least {low} is expected", f"leave {name} out"
                )
        if self.batch_dir is not None:
            open_folder(self.batch_dir)
        if self.adapter_dir is not None and not self.adapter_dir.is_dir():
            raise OptionError(
                f"adapter_dir = {str(self.adapter_dir)!r:.200}", "there is no such folder", "pass an existing folder"
            )
        for name in ("timeout", "drain_seconds"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int | float) or not 0 < value < 1e9):
                raise OptionError(
                    f"{name} = {value!r:.40}", "a number of seconds above 0 is expected", f"leave {name} out"
                )


class Server(RequestTasks):
    """A model that is served to many clients.

    Attributes:
        name: the name of the model in requests.
        admission: the requests that run and wait.
        fingerprint: equal fingerprints give equal replies to equal requests with the same seed.
        metrics: the counters of the server.
        bodies: the bodies of all requests.
        responses: the stored replies of the Responses API.
        chooses_seeds: True if requests without a seed get a random one; False if the model's files set a seed.
        created: the time of the start, in seconds since 1970.
        encoders: the models for embeddings and reranking.
        batches: the files and batches; None = there are none.
        streams: the streams that continue without their client.

    Args:
        llm: the model that generates text; the caller closes it. None = only encoders are served.
        options: the options.
        name: the name of the model in requests; None = the name of the model's folder.
        log: the request log; None = requests are not logged. The caller closes it.
        encoders: the models for embeddings and reranking; None = there are none.
        traces: records requests as spans; None = there are no traces. The caller closes it.
        parent: the router that this server belongs to, whose limits and stored replies it shares.
    """

    def __init__(
        self,
        llm: LLM | None,
        options: ServerOptions | None = None,
        *,
        name: str | None = None,
        log: RequestLog | None = None,
        encoders: Encoders | None = None,
        traces: Traces | None = None,
        parent: Server | None = None,
    ) -> None:
        super().__init__("server")
        self._llm, self.options, self.encoders = llm, options or ServerOptions(), encoders or Encoders()
        self.name = name or (llm.model.folder.name if llm is not None else next(iter(self.encoders.names), "none"))
        self.created = int(time.time())
        self.retain: Callable[[], Callable[[], None]] = lambda: _released
        # A few sequences more than the engine runs, so that the engine never waits for the event loop.
        most = 1 if llm is None else llm.max_sequences + max(2, llm.max_sequences // 8)
        self.admission: Admission = (
            Admission(most, self.options.max_queue, self.options.max_per_key)
            if parent is None
            else parent.admission.lane(most)
        )
        self.metrics, self.log, self.traces = Metrics(), log, traces
        self.bodies = Bodies(self.options.max_body)
        self.encoders.share_limits(self.admission)
        self.responses: ResponseStore = ResponseStore() if parent is None else parent.responses
        self.streams: StreamStore = StreamStore(self) if parent is None else parent.streams
        has_batches = self.options.batch_dir is not None and parent is None
        self.batches = Batches(self, self.options.batch_dir) if has_batches and self.options.batch_dir else None
        self._threads = ThreadPoolExecutor(_PREPARING_THREADS, "genai-prepare")
        self._long_thread = ThreadPoolExecutor(1, "genai-long")
        self.chooses_seeds = llm is not None and llm.params().seed is None
        self.fingerprint = f"fp_{_fingerprint(llm)}" if llm is not None else ""

    @property
    def title(self) -> str:
        """The models in messages."""
        return self.name

    @property
    def has_llm(self) -> bool:
        """True if there is a model that generates text."""
        return self._llm is not None

    @property
    def llm(self) -> LLM:
        """The model that generates text.

        Raises:
            RequestError: there is none, because only encoders are served.
        """
        if self._llm is None:
            raise RequestError(
                404, "this server has no model that generates text", f"it has {', '.join(self.encoders.names)}"[:500],
                "start a server with such a model", code="model_not_found", param="model",
            )  # fmt: skip
        return self._llm

    @cached_property
    def token_texts(self) -> TokenTexts:
        """The texts of single tokens."""
        return TokenTexts(self.llm)

    @property
    def context_size(self) -> int:
        """The maximum number of tokens in a sequence; 0 without a model that generates text."""
        return 0 if self._llm is None else self._llm.context_size

    @property
    def hidden(self) -> Mapping[str, str]:
        """Texts that no reply may contain, with their replacements: the paths of this machine."""
        hidden = {} if self._llm is None else {str(self._llm.model.folder.absolute()): self.name}
        if self.options.adapter_dir is not None:
            hidden[str(self.options.adapter_dir.resolve())] = "adapters"
        if self.options.batch_dir is not None:
            hidden[str(self.options.batch_dir.absolute())] = "batches"
        hidden |= self.encoders.hidden
        return {path: name for path, name in hidden.items() if len(Path(path).parts) > 1}

    @property
    def adapters(self) -> list[str]:
        """The names of the loaded adapters."""
        return [] if self._llm is None else self._llm.adapters.names

    @property
    def model_names(self) -> list[str]:
        """The names of the model that generates text and of its adapters."""
        return [self.name, *self.adapters] if self.has_llm else []

    def adapter_of(self, model: str | None) -> str | None:
        """Return the adapter that a model name in a request selects; None for the base model.

        Raises:
            RequestError: there is no such model.
        """
        if model is None or model in ("", self.name):
            return None
        name = model.removeprefix(f"{self.name}+")
        if name in self.adapters:
            return name
        raise RequestError(
            404, f"the model {model!r:.200} does not exist", f"this server has {', '.join(self.model_names)}"[:500],
            did_you_mean(model, self.model_names, "use one of these names"), code="model_not_found", param="model",
        )  # fmt: skip

    def start(self) -> None:
        """Start the work that does not belong to a request, inside the running event loop."""
        if self.batches is not None:
            self.batches.start()

    @property
    def max_sequences(self) -> int:
        """The maximum number of sequences that are generated concurrently."""
        return 2 if self._llm is None else self._llm.max_sequences

    @property
    def loaded(self) -> Sequence[Server]:
        """The servers of the loaded models: this server, or those of a router."""
        return [self]

    def metric_lines(self) -> Iterator[str]:
        """Yield further lines of the metrics."""
        return iter(())

    def is_ready(self, wanted: Wanted) -> bool:
        """Return True if the model that a request needs is loaded."""
        return True

    @asynccontextmanager
    async def serving(self, wanted: Wanted) -> AsyncIterator[Server]:
        """Hold the server of the model that a request needs, and load the model first if necessary.

        Raises:
            RequestError: there is no such model, or it cannot be loaded.
            DeadlineError: the model was not loaded within the time limit.
        """
        yield self

    async def in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Call a function on another thread, without blocking the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *arguments))

    async def at_length(self, work: Callable[..., T], *arguments: Any) -> T:
        """Call a function that can take seconds on another thread, one at a time. Other requests are still prepared."""
        return await asyncio.get_running_loop().run_in_executor(self._long_thread, partial(work, *arguments))

    @property
    def drain_seconds(self) -> float:
        """See ServerOptions."""
        return self.options.drain_seconds

    def drain(self) -> None:
        """Refuse new requests."""
        self.admission.is_draining = True

    def close(self) -> None:
        """Stop the threads. The model stays loaded."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._long_thread.shutdown(wait=False, cancel_futures=True)
        self.encoders.close()
        if self.batches is not None:
            self.batches.close()


def _released() -> None:
    """Release a model that is never unloaded."""


def _fingerprint(llm: LLM) -> str:
    """Return a hash of everything that the bytes of a reply depend on, except the request."""
    from .. import __version__

    facts = (__version__, llm.model.identity(), llm.tokenizer.content_key(), llm.tokenizer.templates_key())
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
