"""Which models are in memory: they are loaded when a request needs them, and unloaded to make room for others.

One task loads one model at a time, for the request that has waited longest. A model that must leave first finishes its
running requests. Requests that arrive for it in the meantime wait, and all of them start when it is loaded again, so
that requests in random turns do not load a model each.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Literal, TypeVar

from ..common.log import logger
from ..common.memory_limits import format_bytes
from ..errors import CacheCapacityError

T = TypeVar("T")
Value = TypeVar("Value")
State = Literal["unloaded", "loading", "loaded", "failed"]
_log = logger(__name__)

FAILED_SECONDS = 30.0
"""The time after a failed load in which requests get its error at once."""

MOST_STAY_SECONDS = 30.0
"""The maximum time that a model stays after it was loaded although another model needs its memory."""


class LoadFailed(Exception):
    """A model cannot be loaded.

    Attributes:
        error: the reason.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(eq=False)
class Resident(Generic[Value]):
    """A model that can be in memory.

    Attributes:
        name: the name in messages and metrics.
        measure: returns the bytes that the loaded model needs; called on another thread before each load.
        load: loads the model; called on another thread.
        unload: frees the model; called on another thread.
        is_pinned: True if the model is never unloaded.
        keep: seconds after the last request until the model is unloaded; None = until another needs the memory.
        state: the state.
        value: the loaded model.
        size: bytes that the loaded model needs; 0 if unknown.
        users: number of requests that use the model.
        loads, failures: number of successful and of failed loads.
        error: the error of the last load, if it failed.
    """

    name: str
    measure: Callable[[], int]
    load: Callable[[], Value]
    unload: Callable[[Value], object]
    is_pinned: bool = False
    keep: float | None = None
    state: State = "unloaded"
    value: Value | None = None
    size: int = 0
    users: int = 0
    loads: int = 0
    failures: int = 0
    error: Exception | None = None
    waiting: list[asyncio.Future[None]] = field(default_factory=list)
    since: float = 0.0  # time of the last change of the state
    last_used: float = 0.0
    stay: float = 0.0
    arrived: float = 0.0  # time at which the oldest waiting request arrived


class Residency(Generic[Value]):
    """The models that share an amount of memory. Only the event loop's thread uses it.

    Args:
        residents: the models.
        memory: maximum bytes of all loaded models together.
        clock: returns the time in seconds.

    Attributes:
        on_change: called on another thread after a model was loaded or unloaded.
    """

    def __init__(
        self, residents: Sequence[Resident[Value]], memory: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.residents, self.memory = residents, memory
        self.on_change: Callable[[], object] = lambda: None
        self._clock = clock
        self._closing: set[Resident[Value]] = set()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads = ThreadPoolExecutor(1, "genai-load")

    @property
    def used(self) -> int:
        """The bytes of the models that are loaded or being loaded."""
        return sum(one.size for one in self.residents if one.state in ("loading", "loaded"))

    def is_ready(self, one: Resident[Value]) -> bool:
        """Return True if a request for a model starts at once."""
        return one.state == "loaded" and one not in self._closing

    def start(self) -> None:
        """Start to load models, inside the running event loop: first those that are pinned."""
        if self._task is None:
            self._loop = asyncio.get_running_loop()
            self._task = asyncio.create_task(self._run())

    def refuse_waiting(self, error: Exception) -> None:
        """Raise an error in the requests that wait for a model. Any thread may call it while the event loop runs."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._refuse_waiting, error)

    def _refuse_waiting(self, error: Exception) -> None:
        for one in self.residents:
            self._end_waiting(one, error)
        self._changed.set()

    @asynccontextmanager
    async def use(self, one: Resident[Value]) -> AsyncIterator[Value]:
        """Hold a model in memory while a request uses it, and load it first if necessary.

        Raises:
            LoadFailed: the load failed. For FAILED_SECONDS, the error is raised without another attempt.
        """
        self.start()
        await self._acquire(one)
        try:
            assert one.value is not None
            yield one.value
        finally:
            self._release(one)

    def retain(self, one: Resident[Value]) -> Callable[[], None]:
        """Hold a model that is in use, also after its request, until the returned function is called."""
        one.users += 1
        return partial(self._release, one)

    def _release(self, one: Resident[Value]) -> None:
        one.users -= 1
        one.last_used = self._clock()
        self._changed.set()

    async def _acquire(self, one: Resident[Value]) -> None:
        if self.is_ready(one):
            one.users += 1
            return
        if one.state == "failed" and one.error is not None and self._clock() < one.since + FAILED_SECONDS:
            raise LoadFailed(one.error)
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not one.waiting:
            one.arrived = self._clock()
        one.waiting.append(granted)
        self._changed.set()
        try:
            await granted
        except BaseException:
            if granted in one.waiting:
                one.waiting.remove(granted)
            elif granted.done() and not granted.cancelled() and granted.exception() is None:
                one.users -= 1
            self._changed.set()
            raise

    def _grant(self) -> None:
        """Start the waiting requests of the models that are loaded and stay."""
        for one in self.residents:
            if self.is_ready(one):
                for granted in one.waiting:
                    if not granted.done():
                        granted.set_result(None)
                        one.users += 1
                one.waiting.clear()

    # --- the task that loads and unloads -----------------------------------------------------------------------------

    async def _run(self) -> None:
        for one in self.residents:
            if one.is_pinned and one.state == "unloaded":
                await self._bring(one, is_needed=True)
        while True:
            self._changed.clear()
            self._grant()
            wanted = [one for one in self.residents if one.waiting and one.state != "loaded"]
            expired = next((one for one in self.residents if self._expiry(one) <= self._clock()), None)
            if expired is not None:
                await self._drop(expired)
            elif wanted:
                await self._bring(min(wanted, key=lambda one: one.arrived))
            else:
                await self._wait(min((self._expiry(one) for one in self.residents), default=float("inf")))

    def _expiry(self, one: Resident[Value]) -> float:
        """Return the time at which an unused model is unloaded."""
        if one.state != "loaded" or one.users or one.is_pinned or one.keep is None:
            return float("inf")
        return one.last_used + one.keep

    async def _wait(self, until: float) -> None:
        """Wait for a change, or until a time."""
        seconds = max(0.0, until - self._clock())
        try:
            async with asyncio.timeout(None if seconds == float("inf") else seconds):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _bring(self, one: Resident[Value], *, is_needed: bool = False) -> None:
        """Load a model, after others have left as far as necessary. Give up if no request waits for it any more."""
        try:
            size = await self._in_thread(one.measure)
            self._check_size(one, size)
            while victims := self._victims(size):
                self._changed.clear()
                if not (one.waiting or is_needed):
                    return
                now, leaving = self._clock(), {victim: victim.since + victim.stay for victim in victims}
                self._closing = {victim for victim in victims if leaving[victim] <= now}
                idle = next((victim for victim in victims if victim in self._closing and not victim.users), None)
                if idle is not None:
                    await self._drop(idle)
                    continue
                self._grant()
                await self._wait(min((moment for moment in leaving.values() if moment > now), default=float("inf")))
            self._closing = set()
            await self._load(one, size)
        except Exception as error:  # the requests that wait receive it
            self._fail(one, error)
        finally:
            self._closing = set()

    def _check_size(self, one: Resident[Value], size: int) -> None:
        """Raise CacheCapacityError if a model cannot fit beside the pinned models."""
        pinned = sum(other.size for other in self.residents if other.is_pinned and other is not one)
        if pinned + size > self.memory:
            beside = f"pinned models need {format_bytes(pinned)}" if pinned else "no other model needs to stay"
            raise CacheCapacityError(
                f"the model {one.name} needs {format_bytes(size)}",
                f"all models together may use {format_bytes(self.memory)}, and {beside}",
                "raise --memory, or give the model a smaller context or cache",
            )

    def _victims(self, size: int) -> list[Resident[Value]]:
        """Return the models to unload so that `size` bytes fit: unused ones first, the least recently used first."""
        missing = self.used + size - self.memory
        loaded = [one for one in self.residents if one.state == "loaded" and not one.is_pinned]
        found: list[Resident[Value]] = []
        for one in sorted(loaded, key=lambda one: (one.users > 0, one.since if one.users else one.last_used)):
            if missing > 0:
                found.append(one)
                missing -= one.size
        for one in found[:-1]:  # an earlier one is not needed if later ones are large enough
            if missing + one.size <= 0:
                found.remove(one)
                missing += one.size
        return found

    async def _load(self, one: Resident[Value], size: int) -> None:
        one.state, one.size, begin = "loading", size, self._clock()

        def load() -> None:  # stores the value also if the event loop ends in the meantime, so that `close` frees it
            one.value = one.load()

        await self._in_thread(load)
        now = self._clock()
        one.state, one.since, one.last_used, one.error = "loaded", now, now, None
        # At most half of the time is spent on loading, even if requests alternate between two models.
        one.stay = min(now - begin, MOST_STAY_SECONDS)
        one.loads += 1
        await self._in_thread(self.on_change)
        _log.info("loaded %s in %.1f s", one.name, now - begin)

    def _fail(self, one: Resident[Value], error: Exception) -> None:
        one.state, one.since, one.error, one.size = "failed", self._clock(), error, 0
        one.failures += 1
        _log.error("the model %s cannot be loaded: %s", one.name, error)
        self._end_waiting(one, LoadFailed(error))

    @staticmethod
    def _end_waiting(one: Resident[Value], error: Exception) -> None:
        for granted in one.waiting:
            if not granted.done():
                granted.set_exception(error)
        one.waiting.clear()

    async def _drop(self, one: Resident[Value]) -> None:
        """Unload a model that no request uses."""
        value, one.value = one.value, None
        one.state = "unloaded"
        self._closing.discard(one)
        _log.info("unloading %s", one.name)
        try:
            await self._in_thread(one.unload, value)
        except Exception as error:  # other models must not suffer
            _log.error("the model %s was not unloaded cleanly: %s", one.name, error)
        await self._in_thread(self.on_change)

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *arguments))

    def close(self) -> None:
        """Unload all models, after a load that is in progress. Call it when the event loop has ended."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        for one in self.residents:
            if one.value is not None:
                value, one.value, one.state = one.value, None, "unloaded"
                one.unload(value)
