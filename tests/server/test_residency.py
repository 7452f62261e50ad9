"""Which models are in memory: grouping of requests, pinned models, failed loads, cancelled waits, and expiry."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from genai.errors import CacheCapacityError, ModelFolderError
from genai.server.residency import FAILED_SECONDS, LoadFailed, Residency, Resident

Models = dict[str, Resident[str]]


class Fake:
    """Models without content, and a clock that the test sets."""

    def __init__(self, memory: int, **sizes: int) -> None:
        self.events: list[str] = []
        self.now, self.broken, self.load_seconds = 0.0, "", 0.0
        self.models: Models = {name: self._made(name, size) for name, size in sizes.items()}
        self.residency = Residency([*self.models.values()], memory, clock=lambda: self.now)

    def _made(self, name: str, size: int) -> Resident[str]:
        def load() -> str:
            if name == self.broken:
                raise ModelFolderError("the folder is damaged", "a file is missing", "restore it")
            self.now += self.load_seconds
            self.events.append(f"+{name}")
            return name

        return Resident(name, lambda: size, load, lambda value: self.events.append(f"-{value}"))

    async def ask(self, name: str, while_used: Callable[[], Coroutine[Any, Any, object]] | None = None) -> None:
        async with self.residency.use(self.models[name]) as value:
            assert value == name
            assert self.residency.used <= self.residency.memory
            if while_used is not None:
                await while_used()

    def run(self, test: Callable[[], Coroutine[Any, Any, None]]) -> None:
        asyncio.run(test())
        self.residency.close()


async def settled(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("seed", range(3))
def test_requests_in_random_turns_do_not_thrash(seed: int) -> None:
    fake, random_ = Fake(150, a=100, b=100, c=100, pinned=40), random.Random(seed)
    fake.models["pinned"].is_pinned = True

    async def test() -> None:
        await asyncio.gather(*(fake.ask(random_.choice(("a", "b", "c", "pinned"))) for _ in range(200)))

    fake.run(test)
    assert [one.loads for one in fake.models.values()] == [1, 1, 1, 1]
    assert fake.events[-1] == "-pinned" and len(fake.events) == 8  # the pinned model stays until the end


def test_a_model_is_unloaded_after_its_running_requests_and_not_for_waiting_ones() -> None:
    fake, events = Fake(100, a=100, b=100), []

    async def test() -> None:
        release = asyncio.Event()
        running = asyncio.create_task(fake.ask("a", release.wait))
        await settled(lambda: fake.models["a"].users)
        other = asyncio.create_task(fake.ask("b"))
        await settled(lambda: not fake.residency.is_ready(fake.models["a"]))
        late = [asyncio.create_task(fake.ask("a")) for _ in range(3)]  # wait, so that b gets its turn
        await settled(lambda: len(fake.models["a"].waiting) == 3)
        events.append([*fake.events])
        release.set()
        await asyncio.gather(running, other, *late)

    fake.run(test)
    assert events == [["+a"]] and fake.events == ["+a", "-a", "+b", "-b", "+a", "-a"]


def test_a_model_stays_as_long_as_its_load_took() -> None:
    fake = Fake(100, a=100, b=100)
    fake.load_seconds = 5.0

    async def test() -> None:
        await fake.ask("a")
        other = asyncio.create_task(fake.ask("b"))
        await settled(lambda: fake.models["b"].waiting)
        await asyncio.sleep(0.02)
        await fake.ask("a")  # still loaded
        assert fake.events == ["+a"]
        fake.now += 5.0
        fake.residency._changed.set()
        await other

    fake.run(test)
    assert fake.events == ["+a", "-a", "+b", "-b"]


def test_cancelled_waits_leave() -> None:
    fake = Fake(100, a=100, b=100)

    async def test() -> None:
        release = asyncio.Event()
        running = asyncio.create_task(fake.ask("a", release.wait))
        await settled(lambda: fake.models["a"].users)
        other = asyncio.create_task(fake.ask("b"))
        await settled(lambda: not fake.residency.is_ready(fake.models["a"]))
        other.cancel()
        await settled(lambda: fake.residency.is_ready(fake.models["a"]))
        await fake.ask("a")
        release.set()
        await running
        assert fake.events == ["+a"] and not fake.models["b"].waiting and not fake.models["a"].users

    fake.run(test)


def test_a_failed_load_harms_no_other_model(caplog: pytest.LogCaptureFixture) -> None:
    fake = Fake(100, a=100, b=60)
    fake.broken = "b"

    async def test() -> None:
        await fake.ask("a")
        failures = await asyncio.gather(fake.ask("b"), fake.ask("b"), fake.ask("a"), return_exceptions=True)
        assert [type(one) for one in failures] == [LoadFailed, LoadFailed, type(None)]
        with pytest.raises(LoadFailed, match="damaged"):
            await fake.ask("b")
        assert fake.models["b"].failures == 1  # the error is known for some time
        fake.broken, fake.now = "", FAILED_SECONDS
        await fake.ask("b")

    fake.run(test)
    assert fake.models["b"].loads == 1 and "the model b cannot be loaded" in caplog.text


def test_a_model_that_cannot_fit_unloads_none() -> None:
    fake = Fake(100, a=60, big=101)

    async def test() -> None:
        await fake.ask("a")
        with pytest.raises(LoadFailed) as raised:
            await fake.ask("big")
        assert isinstance(raised.value.error, CacheCapacityError)
        assert fake.residency.is_ready(fake.models["a"])

    fake.run(test)


def test_the_least_recently_used_leave_and_as_few_as_possible() -> None:
    fake = Fake(100, a=20, b=30, c=30, d=60)
    states: list[str] = []
    fake.residency.on_change = lambda: states.append(
        "".join(n for n in fake.models if fake.models[n].state == "loaded")
    )

    async def test() -> None:
        for name in "abca":
            fake.now += 1
            await fake.ask(name)
        await fake.ask("d")  # b and c are older than a, and suffice

    fake.run(test)
    assert fake.events[:6] == ["+a", "+b", "+c", "-b", "-c", "+d"]
    assert states == ["a", "ab", "abc", "ac", "a", "ad"]


def test_unused_models_expire() -> None:
    fake = Fake(100, a=50, b=50)
    fake.models["a"].keep = 60.0

    async def test() -> None:
        await fake.ask("a")
        await fake.ask("b")
        fake.now = 59.0
        await fake.ask("a")
        fake.now = 100.0
        fake.residency._changed.set()
        await asyncio.sleep(0.01)
        assert fake.models["a"].state == "loaded"
        fake.now = 119.0
        fake.residency._changed.set()
        await settled(lambda: fake.events[-1] == "-a")

    fake.run(test)
    assert fake.events == ["+a", "+b", "-a", "-b"]
