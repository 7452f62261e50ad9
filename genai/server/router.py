"""A router: several models behind one address, loaded when a request needs them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from ..embed.embedder import Embedder
from ..embed.reranker import Reranker
from ..errors import CacheCapacityError, DeadlineError, GenaiError, OptionError, RequestError, did_you_mean
from ..llm.llm import LLM
from .admission import stopping
from .cards import capabilities, folder_capabilities
from .encoders import Encoders
from .metrics import Metrics, escaped, metric
from .request_log import RequestLog
from .residency import LoadFailed, Residency, Resident, State
from .routed import RoutedModel
from .routing import Wanted
from .serving import Server, ServerOptions
from .traces import Traces

_VERBS = {"completion": "generates text", "embedding": "computes embeddings", "rerank": "scores documents"}


class Router(Server):
    """A server of several models, each of which has a server of its own while it is loaded.

    Args:
        models: the models. Requests that name no model use the first one of the kind that they need.
        memory: maximum bytes of all loaded models together.
        options: the options, which apply to every model.
        log: the request log; None = requests are not logged. The caller closes it.
        traces: records requests as spans; None = there are no traces. The caller closes it.

    Raises:
        OptionError: two models or adapters have the same name, or an option does not apply to several models.
    """

    def __init__(
        self,
        models: Sequence[RoutedModel],
        memory: int,
        options: ServerOptions | None = None,
        *,
        log: RequestLog | None = None,
        traces: Traces | None = None,
    ) -> None:
        _check(models, options or ServerOptions())
        super().__init__(None, options, name="router", log=log, traces=traces)
        self._models = {one.name: one for one in models}
        self._metrics_of = {name: Metrics() for name in self._models}
        self._facts: dict[str, list[str]] = {}
        self._residents = {
            one.name: Resident(
                one.name, one.measure, self._loader(one), _close, is_pinned=one.is_pinned, keep=one.keep
            )
            for one in models
        }  # fmt: skip
        self._residency = Residency([*self._residents.values()], memory)

    def _loader(self, model: RoutedModel) -> _Loader:
        return _Loader(self, model)

    @property
    def title(self) -> str:
        """The models in messages."""
        return f"{len(self._models)} model{'s' * (len(self._models) != 1)} ({', '.join(self._models)})"

    @property
    def models(self) -> Mapping[str, RoutedModel]:
        """The models by name."""
        return self._models

    @property
    def residency(self) -> Residency[LoadedModel]:
        """The state of the models' memory."""
        return self._residency

    def state_of(self, name: str) -> State:
        """Return the state of a model: "unloaded", "loading", "loaded" or "failed"."""
        return self._residents[name].state

    def server_of(self, name: str) -> Server | None:
        """Return the server of a model; None if the model is not loaded."""
        loaded = self._residents[name].value
        return None if loaded is None else loaded.server

    @property
    def loaded(self) -> Sequence[Server]:
        """The servers of the loaded models."""
        return [one.value.server for one in self._residents.values() if one.value is not None]

    @property
    def max_sequences(self) -> int:
        """The maximum number of sequences that one model generates concurrently."""
        return max(one.max_sequences for one in self._models.values())

    def watch_loads(self, note: Callable[[Sequence[str]], object]) -> None:
        """Call a function with the names of the loaded models whenever a model is loaded or unloaded."""
        residents = self._residents.values()
        self._residency.on_change = lambda: note([one.name for one in residents if one.state == "loaded"])

    @property
    def hidden(self) -> Mapping[str, str]:
        """Texts that no reply may contain, with their replacements."""
        folders = {str(one.folder.absolute()): one.name for one in self._models.values()}
        return {**super().hidden, **{path: name for path, name in folders.items() if len(Path(path).parts) > 1}}

    @property
    def model_names(self) -> list[str]:
        """The names of all models and their adapters."""
        return [name for one in self._models.values() for name in (one.name, *one.adapters)]

    def metric_lines(self) -> Iterator[str]:
        """Yield the metrics of the models' memory."""
        for name, kind, said, attribute in (
            ("model_loads_total", "counter", "Loads of the model.", "loads"),
            ("model_load_failures_total", "counter", "Failed loads of the model.", "failures"),
            ("model_requests", "gauge", "Requests that use the model.", "users"),
        ):
            samples = [f'{{model="{escaped(n)}"}} {getattr(one, attribute)}' for n, one in self._residents.items()]
            yield from metric(f"genai_{name}", kind, said, samples)
        states = [f'{{model="{escaped(name)}",state="{one.state}"}} 1' for name, one in self._residents.items()]
        yield from metric("genai_model_state", "gauge", "The state of the model.", states)
        queued = [f'{{model="{escaped(name)}"}} {len(one.waiting)}' for name, one in self._residents.items()]
        yield from metric("genai_model_requests_waiting", "gauge", "Requests that wait for the model's load.", queued)
        yield from metric("genai_models_bytes", "gauge", "Memory of the loaded models.", [f" {self._residency.used}"])
        limit = [f" {self._residency.memory}"]
        yield from metric("genai_models_bytes_limit", "gauge", "Memory that the models may use.", limit)

    def start(self) -> None:
        """Start to load the pinned models, inside the running event loop."""
        super().start()
        self._residency.start()

    def drain(self) -> None:
        """Refuse new requests, and those that wait for their model."""
        super().drain()
        self._residency.refuse_waiting(stopping())

    # --- the model of a request --------------------------------------------------------------------------------------

    def find(self, wanted: Wanted) -> RoutedModel:
        """Return the model that a request needs.

        Raises:
            RequestError: there is no such model, or it is of another kind.
        """
        of_kind = [one for one in self._models.values() if one.kind == wanted.kind]
        if not wanted.model:
            if of_kind:
                return of_kind[0]
            raise RequestError(
                404, f"no model of this server {_VERBS[wanted.kind]}", f"it has {', '.join(self._models)}"[:500],
                "start the server with such a model", code="model_not_found", param="model",
            )  # fmt: skip
        found = self.named(wanted.model)
        if found.kind != wanted.kind:
            raise RequestError(
                400, f"the model {found.name} {_VERBS[found.kind]}", f"this endpoint needs one that "
                f"{_VERBS[wanted.kind]}: {', '.join(one.name for one in of_kind) or 'this server has none'}"[:500],
                "use another model or endpoint", code="model_not_supported", param="model",
            )  # fmt: skip
        return found

    def named(self, name: str) -> RoutedModel:
        """Return the model that a name in a request selects: MODEL, MODEL+ADAPTER or ADAPTER.

        Raises:
            RequestError: there is no such model.
        """
        name = name.removesuffix(":latest")  # a tag that clients of Ollama's API add
        base, plus, adapter = name.partition("+")
        if (found := self._models.get(base)) is not None and (not plus or adapter in found.adapters):
            return found
        owner = next((one for one in self._models.values() if name in one.adapters), None)
        if owner is not None:
            return owner
        known = self.model_names
        raise RequestError(
            404, f"the model {name!r:.200} does not exist", f"this server has {', '.join(known)}"[:500],
            did_you_mean(name, known, "use one of these names"), code="model_not_found", param="model",
        )  # fmt: skip

    def is_ready(self, wanted: Wanted) -> bool:
        """Return True if the model that a request needs is loaded."""
        return self._residency.is_ready(self._residents[self.find(wanted).name])

    @asynccontextmanager
    async def serving(self, wanted: Wanted) -> AsyncIterator[Server]:
        """Hold the server of the model that a request needs; see Server.serving."""
        model = self.find(wanted)
        resident = self._residents[model.name]
        using = self._residency.use(resident)
        try:
            if self._residency.is_ready(resident):
                loaded = await using.__aenter__()
            else:
                with self.admission.seat(wanted.key.name):
                    async with asyncio.timeout(wanted.timeout):
                        loaded = await using.__aenter__()
        except TimeoutError:
            raise DeadlineError(
                "the request's timeout expired while its model was loaded", f"{model.name} was not in memory",
                "send the request again later, or raise the timeout",
            ) from None  # fmt: skip
        except LoadFailed as failed:
            raise _refused(model, failed.error) from failed
        try:
            yield loaded.server
        finally:
            await using.__aexit__(None, None, None)

    def capabilities_of(self, name: str) -> list[str]:
        """Return the abilities of a model. If it was not loaded yet, its files determine them."""
        if name not in self._facts:
            model = self._models[name]
            self._facts[name] = folder_capabilities(model.folder) if model.kind == "completion" else [model.kind]
        return self._facts[name]

    def new_server(self, model: RoutedModel, loaded: LLM | Embedder | Reranker) -> Server:
        """Return the server of a loaded model."""
        if isinstance(loaded, LLM):
            made = Server(loaded, self.options, name=model.name, parent=self)
            self._facts[model.name] = capabilities(made)
        elif isinstance(loaded, Embedder):
            encoders = Encoders(loaded, embedder_name=model.name)
            made = Server(None, self.options, name=model.name, encoders=encoders, parent=self)
        else:
            encoders = Encoders(None, loaded, reranker_name=model.name)
            made = Server(None, self.options, name=model.name, encoders=encoders, parent=self)
        made.retain = partial(self._residency.retain, self._residents[model.name])
        made.metrics, made.created = self._metrics_of[model.name], self.created
        return made

    def close(self) -> None:
        """Stop the threads, and unload all models."""
        super().close()
        self._residency.close()


class LoadedModel:
    """A loaded model and its server."""

    def __init__(self, server: Server, model: LLM | Embedder | Reranker) -> None:
        self.server, self.model = server, model


class _Loader:
    """Loads a model and makes its server."""

    def __init__(self, router: Router, model: RoutedModel) -> None:
        self._router, self._model = router, model

    def __call__(self) -> LoadedModel:
        loaded = self._model.load()
        try:
            return LoadedModel(self._router.new_server(self._model, loaded), loaded)
        except BaseException:
            loaded.close()
            raise


def _close(loaded: LoadedModel) -> None:
    loaded.server.close()
    loaded.model.close()


def _refused(model: RoutedModel, error: Exception) -> RequestError:
    """Return the error of a request whose model cannot be loaded."""
    why = error.what if isinstance(error, GenaiError) else "an error in the server; its log has the details"
    if isinstance(error, CacheCapacityError):
        why = f"{error.what}, but {error.why}" if error.why else error.what
    return RequestError(
        503, f"the model {model.name} cannot be loaded", why, "use another model, or correct this one and try again",
        code="model_not_loaded", param="model", headers={"retry-after": "30"},
    )  # fmt: skip


def _check(models: Sequence[RoutedModel], options: ServerOptions) -> None:
    if not models:
        raise OptionError("models is empty", "a router needs at least one model", "pass a model")
    seen: set[str] = set()
    for name in [name for one in models for name in (one.name, *one.adapters)]:
        if name in seen:
            raise OptionError(
                f"two models or adapters have the name {name!r:.80}", "requests select a model by its name",
                "give one of them another name",
            )  # fmt: skip
        seen.add(name)
    if options.adapter_dir is not None:
        raise OptionError(
            "adapter_dir cannot be used with several models", "requests do not name the model of an adapter",
            "name the adapters at the start: MODEL+ADAPTER, or lora in the file of --models",
        )  # fmt: skip
