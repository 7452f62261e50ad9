"""A batch on several machines: one engine per node of a Ray cluster.

The driver reads the input and writes the output, so each line is answered exactly once, as on a single machine. Workers
are stateless: if a worker dies, its items are sent to another worker.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Unpack

from ...common.single import Single
from ...engine.sampling.params import SamplingOptions, SamplingParams
from ...errors import GenaiError, MissingPackageError, StateError, whole_number
from ...text.tokenizer import Tokenizer
from ..llm import LLM
from ..map_requests import attempt
from ..mapping import DEFAULT_WINDOW, Answer, MapFigures
from ..request_options import LineOptions
from .settings import ModelSettings, settings_of

# Items per group, and groups in flight per worker. The next group arrives while the engine works on the current group.
_ITEMS_AT_A_TIME, _GROUPS_PER_WORKER = 64, 2
_SECONDS_BETWEEN_LOOKS, _SECONDS_TO_CONNECT = 0.1, 5.0
# If this number of workers died with the same items, these items are reported as the cause.
_MOST_DEATHS = 3


class NodeEngine:
    """The actor on a node: an LLM that answers groups of items."""

    def __init__(self, folder: str, options: Mapping[str, Any]) -> None:
        self._llm = LLM(folder, **options)
        self._settings: ModelSettings | None = None

    def process(self) -> int:
        """Return the process ID on the node."""
        return os.getpid()

    def settings(self) -> ModelSettings:
        """Return the settings of this engine's model at the first call; see settings_of."""
        if self._settings is None:
            self._settings = settings_of(self._llm)
        return self._settings

    def check(self, options: Mapping[str, Any]) -> SamplingParams:
        """See LLM.params."""
        return self._llm.params(**options)

    def answers(self, items: Sequence[Any], options: Mapping[str, Any], model: str = "") -> list[Answer[None]]:
        """Return the answers to a group's requests, in order, without the items.

        Args:
            items: the requests.
            options: fields of SamplingParams.
            model: the expected `ModelSettings.model`; "" = any.

        Raises:
            StateError: this engine has another model.
        """
        if model and self.settings().model != model:
            raise _other_model()
        return [replace(answer, item=None) for answer in self._llm.map(items, _item_or_raise, **options)]


def _item_or_raise(item: Any) -> Any:
    if isinstance(item, GenaiError):
        raise item
    return item


@dataclass(eq=False)
class _Group:
    """A group of items that the same worker answers together.

    Attributes:
        begin: index of the first item.
        items: the caller's items.
        requests: for each item, its request or the error that it caused.
    """

    begin: int
    items: list[Any]
    requests: list[Any]


class Cluster(Single, AbstractContextManager["Cluster"]):
    """Answers items on the nodes of a Ray cluster, in the same way as LLM.map.

    Args:
        folder: the model folder, at the same path on each node.
        address: address of the cluster. "auto" finds a running cluster; "local" starts a cluster on this machine.
        workers: number of engines; None = one per node. Engines on the same node share its processor.
        options: LLM options of each engine.

    Raises:
        MissingPackageError: ray is not installed.
        StateError: there is no cluster at the address.
        ModelFolderError, TokenizerError, …: as for LLM.
    """

    def __init__(self, folder: Path, address: str = "auto", *, workers: int | None = None, **options: Any) -> None:
        self._ray = _imported()
        folder = folder.absolute()
        self.model, self._expected = SimpleNamespace(folder=folder), ""
        self.tokenizer = Tokenizer(folder)
        self._arguments = str(folder), options
        try:
            check_listens(address)
            self._ray.init(address, log_to_driver=False, include_dashboard=False, logging_level="error")
            nodes = [node["NodeID"] for node in self._ray.nodes() if node["Alive"]]
        except Exception as error:  # exceptions from Ray and from sockets
            raise StateError(
                f"no Ray cluster at {address}",
                f"{error}"[:300],
                "start a cluster (ray start --head), or check the address",
            ) from error
        self._workers = [self._started(nodes[index % len(nodes)]) for index in range(workers or len(nodes))]

    def settings(self) -> ModelSettings:
        """Return the settings of all engines; see settings_of. From then on, an engine with another model is refused.

        Raises:
            StateError: the engines have different models.
        """
        found: list[ModelSettings] = self._get([worker.settings.remote() for worker in self._workers])
        if len({one.model for one in found}) > 1:
            raise _other_model()
        self._expected = found[0].model
        return ModelSettings(found[0].model, "; ".join(sorted({one.numerics for one in found})))

    def _started(self, node: str) -> Any:
        """Start a worker on a node, or on another node if that one is lost. Ray restarts dead workers and retries."""
        where = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=True)
        kind = self._ray.remote(NodeEngine)
        return kind.options(
            scheduling_strategy=where, num_cpus=0, max_restarts=-1, max_task_retries=_MOST_DEATHS - 1
        ).remote(*self._arguments)

    @property
    def processes(self) -> list[int]:
        """The process ID of each worker on the worker's node."""
        pids: list[int] = self._get([worker.process.remote() for worker in self._workers])
        return pids

    def params(self, **options: Unpack[SamplingOptions]) -> SamplingParams:
        """See LLM.params."""
        (checked,) = self._get([self._workers[0].check.remote(options)])
        return checked  # type: ignore[no-any-return]

    def map(
        self,
        items: Iterable[Any],
        ask: Callable[[Any], Any],
        *,
        in_order: bool = True,
        window: int = DEFAULT_WINDOW,
        progress: Callable[[MapFigures], object] | None = None,
        **options: Unpack[LineOptions],
    ) -> Iterator[Answer[Any]]:
        """Answer items; see LLM.map. The window is shared by all workers, and at least large enough to keep them busy.

        Raises:
            StateError: workers repeatedly died with the same items. It is raised after the answers to the other items
                that were sent to workers.
        """
        groups = _grouped(iter(items), ask)
        most = max(window // _ITEMS_AT_A_TIME, _GROUPS_PER_WORKER * len(self._workers))
        running: dict[Any, tuple[int, _Group]] = {}
        broken: Exception | None = None
        held: dict[int, list[Answer[Any]]] = {}
        due, figures, begin = 0, MapFigures(), time.monotonic()
        while True:
            load = [sum(worker == index for worker, _ in running.values()) for index in range(len(self._workers))]
            while broken is None and min(load) < _GROUPS_PER_WORKER and len(running) + len(held) < most:
                try:
                    group = next(groups, None)
                except Exception as error:  # raised by `items` or `ask`; the earlier items are answered first
                    group, broken = None, error
                if group is None:
                    break
                index = load.index(min(load))
                load[index] += 1
                running[self._workers[index].answers.remote(group.requests, options, self._expected)] = index, group
            if not running:
                yield from (answer for start in sorted(held) for answer in held[start])  # after items without an answer
                if broken is not None:
                    raise broken
                return
            for done in self._ray.wait(list(running), timeout=_SECONDS_BETWEEN_LOOKS)[0]:
                _, group = running.pop(done)
                try:
                    answers = self._answers(done, group)
                except Exception as error:  # a worker's; the groups of the other workers are answered first
                    broken = error
                    continue
                held[group.begin] = answers
                for answer in answers:
                    figures.add(answer)
            if progress is not None:
                progress(replace(figures, seconds=time.monotonic() - begin))
            while held and (due in held or not in_order):
                ready = held.pop(due if in_order else next(iter(held)))
                due += len(ready)
                yield from ready

    def _answers(self, done: Any, group: _Group) -> list[Answer[Any]]:
        """Return the answers of a finished group."""
        last = group.begin + len(group.items)
        (answers,) = self._get([done], f"{_MOST_DEATHS} workers died with items {group.begin + 1} to {last}")
        return [
            replace(answer, index=group.begin + index, item=item)
            for index, (answer, item) in enumerate(zip(answers, group.items, strict=True))
        ]

    def _get(self, results: Sequence[Any], dead: str = "a worker cannot be started") -> list[Any]:
        """Return the results of remote calls, or raise the GenaiError of a call. `dead` describes a worker's death."""
        try:
            return list(self._ray.get(list(results)))
        except self._ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise cause if isinstance(cause, GenaiError) else error from None
        except self._ray.exceptions.RayActorError as error:
            raise StateError(
                dead, f"{error}".strip()[-500:], "check that every node has the model, enough memory and this toolkit"
            ) from error

    def close(self) -> None:
        """Stop the workers and disconnect from the cluster. A cluster started by "local" is also stopped."""
        for worker in self._workers:
            self._ray.kill(worker)
        self._workers = []
        self._ray.shutdown()

    def __exit__(self, *_: object) -> None:
        self.close()


def _other_model() -> StateError:
    return StateError(
        "the engines of the cluster have different models",
        "the files, the tokenizer or the chat template differ between nodes, or were changed during the run",
        "copy the same model folder to all nodes, and start the run again",
    )


def _grouped(items: Iterator[Any], ask: Callable[[Any], Any]) -> Iterator[_Group]:
    """Yield items in groups. An exception from `items` or `ask` is raised after the last group."""
    begin, broken = 0, None
    while broken is None:
        group_items, requests = list[Any](), list[Any]()
        try:
            for item in islice(items, _ITEMS_AT_A_TIME):
                requests.append(attempt(ask, item))
                group_items.append(item)
        except Exception as error:
            broken = error
        if not group_items:
            break
        yield _Group(begin, group_items, requests)
        begin += len(group_items)
    if broken is not None:
        raise broken


def check_listens(address: str) -> None:
    """Raise OSError if nothing listens at HOST:PORT. Without this check, Ray would retry for minutes."""
    host, separator, port = address.rpartition(":")
    number = whole_number(port)
    if separator and number is not None and "/" not in host:
        socket.create_connection((host, number), _SECONDS_TO_CONNECT).close()


def _imported() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # otherwise Ray sends usage statistics to its developers
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError:
        raise MissingPackageError(
            "batches on a Ray cluster need ray",
            "the package is not installed",
            "run pip install ray",
        ) from None
    return ray
