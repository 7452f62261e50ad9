"""Steps that come again are captured: nothing but launches happens in them, and they compute what others do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genai
from genai.engine.decoder import compute
from genai.errors import CacheCapacityError, DeviceError
from genai.kernels.cuda.driver import CudaError
from genai.kernels.cuda.graphs import GraphCache

from .host_driver import HostDriver
from .programs import Load

pytestmark = pytest.mark.gpu


def test_the_second_time_is_captured_and_then_launched_as_a_graph(driver: HostDriver) -> None:
    done: list[str] = []

    class Recorder:
        def capture(self, work: Any) -> str:
            work()
            return f"graph {len(done)}"

        def launch_graph(self, captured: str) -> None:
            done.append(captured)

    graphs = GraphCache(Recorder(), most=2)  # type: ignore[arg-type]
    for key in "aaabab":
        graphs.start(key, lambda key=key: done.append(key))  # type: ignore[misc]
    assert done == ["a", "a", "graph 2", "graph 2", "b", "graph 2", "b", "graph 7"]
    for key in "ccdd":  # two graphs are kept
        graphs.start(key, lambda: None)
    assert list(graphs.graphs) == ["c", "d"]
    graphs.start("a", lambda: done.append("anew"))
    assert done[-1] == "anew"


def test_a_capture_that_somebody_else_ends(driver: HostDriver) -> None:
    """As by waiting for the whole device in another thread: work is started as it is, and captured another time."""
    done, fails = list[str](), [True, False, *[True] * 3]

    class Disturbed:
        def capture(self, work: Any) -> str:
            if fails.pop(0):
                raise CudaError("cudaErrorStreamCaptureInvalidated")
            return "graph"

        def launch_graph(self, captured: str) -> None:
            done.append(captured)

    graphs = GraphCache(Disturbed())  # type: ignore[arg-type]
    for _ in range(4):
        graphs.start("a", lambda: done.append("a"))
    assert done == ["a", "a", "a", "graph"]
    for _ in range(20):  # until it is not tried any more
        graphs.start("b", lambda: None)
    assert not fails and done[-1] == "graph" and list(graphs.graphs) == ["a"]


def test_tokens_of_captured_steps_are_the_reference_s(load: Load, driver: HostDriver, bundled_folder: Path) -> None:
    """Sequences that come and go, and pages that are shared: all that changes between steps lies in device memory."""
    prompts, options = ["Count to five.", "Say hello."], {"temperature": 0, "ignore_eos": True}
    with genai.LLM(bundled_folder, device="reference", context_size=128) as llm:
        expected = [llm.generate([llm.render(text)], max_tokens=5, **options)[0].token_ids for text in prompts]
    with load(accuracy="fp32") as model, genai.LLM(model) as llm:
        together = llm.generate([llm.render(text) for text in prompts], max_tokens=5, **options)
        assert driver.graphs_launched >= 2
        alone = [llm.generate([llm.render(text)], max_tokens=5, **options)[0] for text in prompts]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone] == expected


def test_a_step_that_has_no_room_is_a_typed_error_and_smaller_ones_go_on(load: Load, driver: HostDriver) -> None:
    with load(accuracy="fp32") as model:
        before, prompt = logits(model, [1, 2, 3]), [1] * 33
        driver.room = 4096
        with pytest.raises(CacheCapacityError) as raised:
            compute(model.decoder, [opened(model, prompt)])
        assert (
            "no memory left for computing a step of 33 tokens" in raised.value.what
            and "context_size" in raised.value.fix
        )
        driver.room = None
        assert np.array_equal(logits(model, [1, 2, 3]), before)
        assert len(compute(model.decoder, [opened(model, prompt)])) == 1


def test_a_lost_gpu_ends_requests_with_a_typed_error(
    load: Load, driver: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object) -> None:
        raise CudaError("GPU 0: CUDARuntimeError: cudaErrorIllegalAddress")

    with load(accuracy="fp32") as model, genai.LLM(model) as llm:
        monkeypatch.setattr(driver, "launch", lost)
        with pytest.raises(DeviceError, match="cudaErrorIllegalAddress") as raised:
            llm.generate("Hello", max_tokens=4)
        assert "genai doctor" in raised.value.fix
        monkeypatch.undo()


def logits(model: genai.Model, tokens: list[int]) -> Any:
    return model.decoder.executor.host(compute(model.decoder, [opened(model, tokens)])[0])


def opened(model: genai.Model, tokens: list[int]) -> Any:
    sequence = model.decoder.open()
    sequence.append(tokens)
    return sequence
