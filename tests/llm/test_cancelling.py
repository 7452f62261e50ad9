"""A caller that stops waiting cancels the work: closing, dropping, Ctrl-C, cancelled tasks, close()."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

import genai
from genai.errors import StateError
from genai.llm.streaming import AsyncCompletionStream

LONG: dict[str, Any] = {"max_tokens": 900, "ignore_eos": True, "temperature": 1.0}
GivenBack = Callable[[genai.Model], None]


def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Return True if a condition becomes true. Counts checks: the clock runs on while this process is paused."""
    for _ in range(int(seconds / 0.005)):
        if condition():
            return True
        time.sleep(0.005)
    return condition()


def is_idle(llm: genai.LLM) -> bool:
    pool = llm.model.decoder.pool  # type: ignore[attr-defined]
    return bool(pool.num_free == pool.num_blocks)


def still_works(llm: genai.LLM) -> None:
    assert llm.chat("What is 12 + 7?", temperature=0).text == "19"


def test_closing_a_stream(llm: genai.LLM, assert_all_given_back: GivenBack) -> None:
    with llm.stream("Once", **LONG) as stream:
        first = next(stream)
    assert stream.completion.finish_reason == "cancelled"
    assert stream.completion.text.startswith(first)
    assert 1 <= len(stream.completion.token_ids) < 900
    assert next(stream, None) is None
    stream.close()  # again
    assert_all_given_back(llm.model)
    still_works(llm)


def test_closing_before_anything_came(llm: genai.LLM, assert_all_given_back: GivenBack) -> None:
    for _ in range(20):
        llm.stream("Once", **LONG).close()
    assert_all_given_back(llm.model)


def test_a_dropped_stream_is_cancelled(llm: genai.LLM) -> None:
    stream = llm.stream("Once", **LONG)
    next(stream)
    generation = stream._generation
    del stream
    gc.collect()
    assert eventually(lambda: is_idle(llm))
    assert generation.completion().finish_reason == "cancelled"
    still_works(llm)


def test_an_abandoned_stream_of_a_chat(llm: genai.LLM) -> None:
    events = llm.stream_chat("Tell me a story about Luna and Tom.", **LONG)
    next(events)
    events.close()  # type: ignore[attr-defined]
    assert eventually(lambda: is_idle(llm))


@pytest.mark.parametrize("delay", [0.0, 0.002, 0.02, 0.1, 0.25])
@pytest.mark.parametrize("call", ["generate", "stream", "chat"])
def test_control_c(llm: genai.LLM, delay: float, call: str, assert_all_given_back: GivenBack) -> None:
    main = threading.main_thread().ident
    assert main is not None
    begins: SimpleQueue[None] = SimpleQueue()

    def press() -> None:
        begins.get()
        time.sleep(delay)
        signal.pthread_kill(main, signal.SIGINT)

    # It runs before: `start` waits on an Event, in which an interrupt can end as "release unlocked lock".
    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        begins.put(None)
        while True:
            if call == "generate":
                llm.generate(["Once", "upon"], n=2, **LONG)
            elif call == "chat":
                llm.chat("Hello", **LONG)
            else:
                list(llm.stream("Once", **LONG))
    thread.join()
    gc.collect()
    assert eventually(lambda: is_idle(llm))
    assert_all_given_back(llm.model)
    still_works(llm)


def test_close_ends_what_runs(bundled: genai.Model, assert_all_given_back: GivenBack) -> None:
    llm = genai.LLM(bundled)
    stream = llm.stream("Once", **LONG)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(llm.generate(["A", "B"], **LONG)))
    thread.start()
    next(stream)
    assert eventually(lambda: not is_idle(llm))
    time.sleep(0.1)
    llm.close()
    thread.join(5)
    assert [one.finish_reason for one in results] == ["cancelled"] * 2
    list(stream)
    assert stream.completion.finish_reason == "cancelled"
    assert_all_given_back(bundled)
    llm.close()


def test_after_close(bundled_folder: Path, bundled: genai.Model) -> None:
    unused, used, shared = genai.LLM(bundled_folder), genai.LLM(bundled_folder), genai.LLM(bundled)
    used.generate("A", max_tokens=1)
    for llm in (unused, used, shared):
        llm.close()
        calls: list[Callable[[], Any]] = [
            lambda llm=llm: llm.generate("A"),
            lambda llm=llm: llm.chat("A"),
            lambda llm=llm: llm.stream("A"),
            lambda llm=llm: next(llm.stream_chat("A")),
            lambda llm=llm: asyncio.run(llm.agenerate("A")),
        ]
        for call in calls:
            with pytest.raises(StateError, match="closed"):
                call()
    assert bundled.decoder is not None  # a Model given by the caller stays loaded


def test_a_model_closed_under_its_llm(bundled_folder: Path) -> None:
    model = genai.Model(bundled_folder)
    with genai.LLM(model) as llm:
        llm.generate("A", max_tokens=1)
        model.close()
        with pytest.raises(StateError, match="closed"):
            llm.generate("A", max_tokens=1)


@pytest.mark.parametrize("pieces", [1, 20])
def test_a_model_closed_in_the_middle(bundled_folder: Path, pieces: int) -> None:
    model = genai.Model(bundled_folder)
    with genai.LLM(model) as llm, llm.stream("Once", **LONG) as stream:
        for _ in range(pieces):
            next(stream)
        model.close()
        with pytest.raises(StateError, match="closed"):
            list(stream)


def test_closing_and_submitting_at_once(bundled: genai.Model) -> None:
    """Every call ends, with completions or with StateError."""
    for _ in range(30):
        llm = genai.LLM(bundled)
        ends: list[str] = []

        def ask(llm: genai.LLM = llm, ends: list[str] = ends) -> None:
            try:
                while True:
                    ends.append(llm.generate("A", max_tokens=3)[0].finish_reason)
            except StateError:
                ends.append("closed")

        threads = [threading.Thread(target=ask, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.01)
        llm.close()
        for thread in threads:
            thread.join(5)
        assert not any(thread.is_alive() for thread in threads)
        assert ends.count("closed") == 3


def test_a_dropped_llm_leaves_no_thread(bundled: genai.Model) -> None:
    def workers() -> int:
        return sum(thread.name == "genai-worker" for thread in threading.enumerate())

    before = workers()
    llm = genai.LLM(bundled)
    llm.generate("A", max_tokens=2)
    assert workers() == before + 1
    del llm
    gc.collect()
    assert eventually(lambda: workers() == before)


# --- async -----------------------------------------------------------------------------------------------------------


def test_a_cancelled_task(llm: genai.LLM, assert_all_given_back: GivenBack) -> None:
    async def run() -> None:
        tasks = [
            asyncio.create_task(llm.agenerate(["Once", "A"], **LONG)),
            asyncio.create_task(llm.achat("Hello", **LONG)),
        ]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        for task in tasks:
            with pytest.raises(asyncio.CancelledError):
                await task
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(llm.agenerate("Once", **LONG), 0.05)

    asyncio.run(run())
    assert eventually(lambda: is_idle(llm))
    assert_all_given_back(llm.model)
    still_works(llm)


def test_async_streams_end_when_left(llm: genai.LLM) -> None:
    async def run() -> None:
        async with llm.astream("Once", **LONG) as stream:
            async for _ in stream:
                break
        assert stream.completion.finish_reason == "cancelled"
        assert is_idle(llm)

        async def read() -> None:
            async for _ in llm.astream("Once", **LONG):
                pass

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(read(), 0.05)
        async for _ in llm.astream_chat("Tell me a story.", **LONG):
            break

    asyncio.run(run())
    assert eventually(lambda: is_idle(llm))
    still_works(llm)


def test_a_loop_that_closes_in_the_middle(llm: genai.LLM) -> None:
    """The engine delivers to an event loop that was closed, and continues with the others."""

    async def begin() -> Any:
        stream = llm.astream("Once", **LONG)
        await anext(stream)
        return stream

    streams = [asyncio.run(begin()) for _ in range(3)]
    still_works(llm)
    del streams
    gc.collect()
    assert eventually(lambda: is_idle(llm))


def test_an_async_stream_needs_a_loop(llm: genai.LLM) -> None:
    with pytest.raises(StateError, match="event loop"):
        llm.astream("Once")


def test_tasks_that_share_a_stream_all_see_its_end(llm: genai.LLM) -> None:
    async def main() -> None:
        stream = llm.astream("Once", **LONG)
        await anext(stream)
        await asyncio.wait_for(asyncio.gather(stream.aclose(), stream.aclose()), 30)

        async def read(stream: AsyncCompletionStream) -> str:
            return "".join([piece async for piece in stream])

        stream = llm.astream("Once", max_tokens=50, ignore_eos=True)
        parts = await asyncio.wait_for(asyncio.gather(read(stream), read(stream)), 30)
        assert sum(map(len, parts)) == len(stream.completion.text)

    asyncio.run(main())


def test_a_stream_of_another_event_loop(llm: genai.LLM) -> None:
    async def make() -> AsyncCompletionStream:
        return llm.astream("Once", max_tokens=5)

    stream = asyncio.run(make())
    with pytest.raises(StateError, match="another event loop"):
        asyncio.run(asyncio.wait_for(anext(stream), 30))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", ["agenerate", "astream"])
def test_a_loop_that_is_closed_cancels_what_it_waits_for(bundled: genai.Model, kind: str) -> None:
    """The task, which is never resumed, is kept alive, so that its collection cannot cancel the request."""
    going = threading.Event()
    closed = threading.Event()

    def wait(tokens: Any, logits: Any) -> Any:
        going.set()
        assert closed.wait(30)
        return logits

    async def work(llm: genai.LLM) -> None:
        options: Any = {"max_tokens": 900, "ignore_eos": True, "logits_processors": [wait]}
        if kind == "agenerate":
            await llm.agenerate("Once", **options)
        else:
            async for _ in llm.astream("Once", **options):
                pass

    with genai.LLM(bundled) as llm:
        loop = asyncio.new_event_loop()
        task = loop.create_task(work(llm))
        while not going.is_set():
            loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()
        closed.set()
        llm.generate("x", max_tokens=1)  # the engine has been round since
        stats = llm.stats()
        assert not task.done() and (stats.running, stats.waiting, stats.cancelled) == (0, 0, 1)
        assert stats.generated_tokens < 20
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        del task, loop
        gc.collect()  # asyncio.Queue uses its closed loop, which asyncio reports as unraisable
