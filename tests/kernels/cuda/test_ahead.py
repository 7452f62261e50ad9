"""Steps that run ahead on a GPU that does everything late: the tokens, and the order of calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import genai
from genai.models import loading
from tools.cuda_host_time import load as simulated
from tools.simulated_gpu import SimulatedGpu

from .late_driver import LateDriver
from .programs import opener

OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 7}, {"temperature": 0.9, "top_k": 20, "max_tokens": 9},
    {"temperature": 1.0, "repetition_penalty": 1.3, "max_tokens": 5}, {"temperature": 1.0, "regex": "[a-z ]{4,9}"},
]  # fmt: skip
TEXTS = ["Count to five.", "Say hello.", "Tell me a story.", "Name a city."]


@pytest.fixture
def late(bundled_folder: Path, monkeypatch: pytest.MonkeyPatch, driver: Any) -> Callable[..., genai.Model]:
    """Loads the bundled model on an emulated GPU that does everything late."""
    made = LateDriver()
    monkeypatch.setattr(loading, "open_executor", opener(made))

    def loaded() -> Any:
        sizes: dict[str, Any] = {"context_size": 128, "cache_bytes": 4 << 20}
        return genai.Model(bundled_folder, quiet=True, accuracy="fp32", **sizes), made

    return loaded


def test_tokens_are_the_reference_s(late: Callable[..., Any], bundled_folder: Path) -> None:
    """Requests that end one after the other."""
    params = [genai.SamplingParams(seed=3, min_tokens=3, **options) for options in OPTIONS]
    with genai.LLM(bundled_folder, device="reference", context_size=128) as llm:
        expected = llm.generate([llm.render(text) for text in TEXTS], params)
    model, driver = late()
    with model, genai.LLM(model) as llm:
        found = llm.generate([llm.render(text) for text in TEXTS], params)
    assert [(one.token_ids, one.finish_reason) for one in found] == [
        (one.token_ids, one.finish_reason) for one in expected
    ]
    assert any("take_chosen" in name for name in driver.launched)
    driver.check()


def test_a_generator_s_tokens_are_those_without_running_ahead(
    late: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokens() -> list[Any]:
        model, driver = late()
        driver.launched.clear()
        params = genai.GeneratorParams(model)
        params.set_search_options(do_sample=False, max_length=24, min_length=24, batch_size=2)
        with model, genai.Generator(model, params) as generator:
            generator.append_tokens([[5, 9, 31, 77], [41, 6, 900, 8]])
            for _ in range(6):
                generator.generate_next_token()
            generator.rewind_to(8)
            generator.append_tokens([[12], [13]])
            for _ in range(3):
                generator.generate_next_token()
            found = [generator.get_sequence(row).tolist() for row in range(2)], generator.get_logits().tobytes()
        ran.append(sum("take_chosen" in name for name in driver.launched))
        return [*found]

    ran: list[int] = []
    ahead = tokens()
    monkeypatch.setattr("genai.kernels.cuda.executor.CudaStep.takes_choices", False)
    assert tokens() == ahead
    assert ran[0] > 5 and ran[1] == 0


def test_the_next_step_is_asked_for_before_outcomes_are_waited_for(bundled_folder: Path) -> None:
    gpu = SimulatedGpu()
    with simulated(gpu, bundled_folder) as model:
        params = genai.GeneratorParams(model)
        params.set_search_options(do_sample=False, max_length=60, min_length=60)
        with genai.Generator(model, params) as generator:
            generator.append_tokens([5, 9, 31])
            for _ in range(4):
                generator.generate_next_token()
            gpu.log = []
            generator.generate_next_token()
            generator.generate_next_token()
        asked = [what for what in gpu.log if what != "event"]
        # Nothing else: no memory, no copies of logits, no waiting for everything.
        assert asked == ["write", "choice", "read", "write", "step"] * 2
        half = gpu.log[: len(gpu.log) // 2]
        assert half[-2:] == ["step", "event"] and "event" not in half[half.index("write") : half.index("read")]
        gpu.log = None
        with genai.LLM(model) as llm:
            gpu.log = []
            llm.generate([[5, 9, 31], [7, 8]], max_tokens=12, ignore_eos=True, temperature=0)
            steps = [what for what in gpu.log if what in ("choice", "step", "download", "copy", "wait")]
        assert steps[-11:] == ["choice", "step"] * 5 + ["choice"]  # the last tokens have none behind them
