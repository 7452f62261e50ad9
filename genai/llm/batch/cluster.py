"""A batch on several machines: an engine per node of a Ray cluster.

The driver reads the input and writes the output, so that each line comes once, as on one machine. Workers keep nothing:
what one had when it died is asked of another.
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
from ...models.identity import model_identity
from ...text.tokenizer import Tokenizer
from ..llm import LLM
from ..map_requests import attempt
from ..mapping import DEFAULT_WINDOW, Answer, MapFigures

# Items that a worker gets at a time, and how often: its engine is full while the next ones are on their way to it.
_ITEMS_AT_A_TIME, _GROUPS_PER_WORKER = 64, 2
_SECONDS_BETWEEN_LOOKS, _SECONDS_TO_CONNECT = 0.1, 5.0
# Items with which so many workers died are why they did.
_MOST_DEATHS = 3


class NodeEngine:
    """What runs on a node: an LLM that answers groups of items."""

    def __init__(self, folder: str, options: Mapping[str, Any]) -> None:
        self._llm = LLM(folder, **options)

    def process(self) -> int:
        """Its process on its node."""
        return os.getpid()

    def check(self, options: Mapping[str, Any]) -> SamplingParams:
        """See LLM.params."""
        return self._llm.params(**options)

    def answers(self, items: Sequence[Any], options: Mapping[str, Any]) -> list[Answer[None]]:
        """The answers to a group, in its order, without the items."""
        return [replace(answer, item=None) for answer in self._llm.map(items, _item_or_raise, **options)]


def _item_or_raise(item: Any) -> Any:
    if isinstance(item, GenaiError):
        raise item
    return item


@dataclass(eq=False)
class _Group:
    """Items that are asked together.

    Attributes:
        begin: the index of the first. items: as the caller has them. requests: the request of each, or what is wrong
            with it.
    """

    begin: int
    items: list[Any]
    requests: list[Any]


class Cluster(Single, AbstractContextManager["Cluster"]):
    """Answers items as LLM.map does, on the nodes of a Ray cluster.

    Args:
        folder: of the model, at the same place on each node.
        address: of the cluster: "auto" finds one, "local" makes one of this machine.
        workers: engines; None = one per node. Several on one node share its processor.
        options: of LLM, for each of them.

    Raises:
        MissingPackageError: ray is not installed.
        StateError: there is no such cluster.
        ModelFolderError, TokenizerError, …: as LLM.
    """

    def __init__(self, folder: Path, address: str = "auto", *, workers: int | None = None, **options: Any) -> None:
        self._ray = _imported()
        folder = folder.absolute()
        self.model = SimpleNamespace(folder=folder, identity=lambda: SimpleNamespace(model=model_identity(folder, {})))
        self.tokenizer = Tokenizer(folder)
        self._arguments = str(folder), options
        try:
            _check_listens(address)
            self._ray.init(address, log_to_driver=False, include_dashboard=False, logging_level="error")
            nodes = [node["NodeID"] for node in self._ray.nodes() if node["Alive"]]
        except Exception as error:  # Ray's own, and those of sockets
            raise StateError(
                f"Ray: no cluster at {address}", f"{error}"[:300], "start one (ray start --head), or check the address"
            ) from error
        self._workers = [self._started(nodes[index % len(nodes)]) for index in range(workers or len(nodes))]

    def _started(self, node: str) -> Any:
        """A worker on a node, or on another one if that is gone. Ray starts one that dies again, and asks it again."""
        where = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=True)
        kind = self._ray.remote(NodeEngine)
        return kind.options(
            scheduling_strategy=where, num_cpus=0, max_restarts=-1, max_task_retries=_MOST_DEATHS - 1
        ).remote(*self._arguments)

    @property
    def processes(self) -> list[int]:
        """The process of each worker, on its node."""
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
        **options: Unpack[SamplingOptions],
    ) -> Iterator[Answer[Any]]:
        """See LLM.map. The window is that of all workers together, and no smaller than what keeps them busy.

        Raises:
            StateError: workers died again and again with the same items.
        """
        groups = _grouped(iter(items), ask)
        most = max(window // _ITEMS_AT_A_TIME, _GROUPS_PER_WORKER * len(self._workers))
        running: dict[Any, tuple[int, _Group]] = {}
        broken: Exception | None = None
        held: dict[int, list[Answer[Any]]] = {}
        due, figures, begin = 0, MapFigures(), time.monotonic()
        while True:
            load = [sum(worker == index for worker, _ in running.values()) for index in range(len(self._workers))]
            while min(load) < _GROUPS_PER_WORKER and len(running) + len(held) < most:
                try:
                    group = next(groups, None)
                except Exception as error:  # of the items: what was read before is answered first
                    group, broken = None, error
                if group is None:
                    break
                index = load.index(min(load))
                load[index] += 1
                running[self._workers[index].answers.remote(group.requests, options)] = index, group
            if not running:
                if broken is not None:
                    raise broken
                return
            for done in self._ray.wait(list(running), timeout=_SECONDS_BETWEEN_LOOKS)[0]:
                _, group = running.pop(done)
                held[group.begin] = self._answers(done, group)
                for answer in held[group.begin]:
                    figures.add(answer)
            if progress is not None:
                progress(replace(figures, seconds=time.monotonic() - begin))
            while held and (due in held or not in_order):
                ready = held.pop(due if in_order else next(iter(held)))
                due += len(ready)
                yield from ready

    def _answers(self, done: Any, group: _Group) -> list[Answer[Any]]:
        """The answers of a group."""
        last = group.begin + len(group.items)
        (answers,) = self._get([done], f"{_MOST_DEATHS} workers died with items {group.begin + 1} to {last}")
        return [
            replace(answer, index=group.begin + index, item=item)
            for index, (answer, item) in enumerate(zip(answers, group.items, strict=True))
        ]

    def _get(self, results: Sequence[Any], dead: str = "a worker cannot be started") -> list[Any]:
        """What calls returned; an error of ours is raised as what it is. `dead` says what it means if workers are."""
        try:
            return list(self._ray.get(list(results)))
        except self._ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise cause if isinstance(cause, GenaiError) else error from None
        except self._ray.exceptions.RayActorError as error:
            raise StateError(
                dead, f"{error}".strip()[-500:], "see whether the nodes have the model, its memory, and this toolkit"
            ) from error

    def close(self) -> None:
        """End the workers, and leave the cluster; one that was made of this machine ends."""
        for worker in self._workers:
            self._ray.kill(worker)
        self._workers = []
        self._ray.shutdown()

    def __exit__(self, *_: object) -> None:
        self.close()


def _grouped(items: Iterator[Any], ask: Callable[[Any], Any]) -> Iterator[_Group]:
    """Items in groups. An error of theirs comes after the last group."""
    begin, broken = 0, None
    while broken is None:
        group_items: list[Any] = []
        try:
            group_items.extend(islice(items, _ITEMS_AT_A_TIME))
        except Exception as error:
            broken = error
        if not group_items:
            break
        yield _Group(begin, group_items, [attempt(ask, item) for item in group_items])
        begin += len(group_items)
    if broken is not None:
        raise broken


def _check_listens(address: str) -> None:
    """Raise OSError where nobody listens at HOST:PORT: Ray itself would try for minutes."""
    host, separator, port = address.rpartition(":")
    number = whole_number(port)
    if separator and number is not None and "/" not in host:
        socket.create_connection((host, number), _SECONDS_TO_CONNECT).close()


def _imported() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would send figures home
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError:
        raise MissingPackageError(
            "batches on several machines need Ray", "it is not installed", "pip install 'onnx-genai-toolkit[ray]'"
        ) from None
    return ray
