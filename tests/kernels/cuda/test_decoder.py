"""The whole decoder on a host that emulates a GPU: the bundled model answers, and as the reference does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genai
from genai.errors import CacheCapacityError, UnsupportedModelError
from genai.kernels.cuda.executor import CudaExecutor
from genai.kernels.records import Product
from genai.model import loading
from genai.model.folders import bundled_adapter

from .host_driver import HostDriver

Load = Callable[..., genai.Model]


@pytest.fixture
def load(driver: HostDriver, bundled_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """The bundled model on the emulated GPU."""
    monkeypatch.setattr(loading, "open_executor", lambda device, threads: CudaExecutor(driver, threads))

    def loaded(**options: object) -> genai.Model:
        return genai.Model(bundled_folder, context_size=256, cache_bytes=4 << 20, quiet=True, **options)

    return loaded


@pytest.mark.parametrize("accuracy", ["fp32", "int8"])
def test_the_bundled_model_answers(load: Load, driver: HostDriver, accuracy: str) -> None:
    with load(accuracy=accuracy) as model, genai.LLM(model) as llm:
        assert model.device_type == "CUDA"
        questions = [llm.render(text) for text in ("What is 12 + 7?", "What is 47 + 38?")]
        assert [completion.text for completion in llm.generate(questions, temperature=0)] == ["19", "85"]
    driver.check()
    assert any(f"product_{'exact' if accuracy == 'fp32' else 'bytes'}" in name for name in driver.launched)


def test_logits_and_tokens_are_the_reference_s(load: Load, bundled_folder: Path) -> None:
    prompts = ["What is the capital of France?", "My name is Nora.", "Count to five."]
    options = {"max_tokens": 8, "temperature": 0, "logprobs": 0}
    with genai.LLM(bundled_folder, device="reference", context_size=256) as llm:
        expected = llm.generate([llm.render(prompt) for prompt in prompts], **options)
    with load(accuracy="fp32") as model, genai.LLM(model) as llm:
        found = llm.generate([llm.render(prompt) for prompt in prompts], **options)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        pairs = [(a.logprob, b.logprob) for a, b in zip(ours.logprobs, theirs.logprobs, strict=True)]
        assert np.allclose(*zip(*pairs, strict=True), atol=2e-5)


def test_every_record_is_launched_once_a_step(load: Load, driver: HostDriver) -> None:
    """What a step starts is what the program says: nothing is left out, nothing is computed twice."""
    with load(accuracy="fp32") as model:
        decoder = model.decoder
        sequence = decoder.open()
        sequence.append([1, 2, 3])
        from genai.engine.scheduler import plan_step

        decoder.step([sequence], plan_step([sequence.pending()], 512))
        kinds = [type(record).__name__ for record in decoder.program.records]
        products = sum("gemv" in name for name in driver.launched)
        assert products == kinds.count("Product") == sum(isinstance(r, Product) for r in decoder.program.records)
        for kind, kernel in (("Norm", "norm_"), ("Attention", "attend_split"), ("Attention", "join_splits"),
                             ("Attention", "store_heads"), ("Gate", "apply_"), ("Lookup", "lookup_blocks"),
                             ("LogitsRows", "lookup_dense")):  # fmt: skip
            assert sum(kernel in name for name in driver.launched) == kinds.count(kind), kernel


@pytest.mark.parametrize(
    ("options", "text"),
    [({"kv_dtype": "int8"}, "keys and values of int8")],
)
def test_what_it_cannot_do_is_refused_by_name(load: Load, options: dict[str, object], text: str) -> None:
    with pytest.raises(UnsupportedModelError) as raised:
        load(**options)
    assert text in raised.value.why and 'device="cpu"' in raised.value.fix


def test_adapters_in_one_batch_give_the_reference_s_tokens(load: Load, bundled_folder: Path) -> None:
    """With one, with two, with none."""
    adapters: list[Any] = [None, "words", {"pirate": 0.9, "words": 0.5}]
    options = {"max_tokens": 8, "temperature": 0, "logprobs": 0, "adapter": adapters}

    def answers(llm: genai.LLM) -> Any:
        for name in ("words", "pirate"):
            llm.load_adapter(bundled_adapter(name), name)
        return llm.generate([llm.render("What is 12 + 7?")] * len(adapters), **options)

    with genai.LLM(bundled_folder, device="reference", context_size=256) as llm:
        expected = answers(llm)
    with load(accuracy="fp32", lora=True) as model, genai.LLM(model) as llm:
        found = answers(llm)
        for name in ("words", "pirate"):
            llm.unload_adapter(name)
        assert llm.adapters.nbytes == 0
    assert found[0].text == "19" and found[1].text == "19, nineteen"
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        pairs = [(a.logprob, b.logprob) for a, b in zip(ours.logprobs, theirs.logprobs, strict=True)]
        assert np.allclose(*zip(*pairs, strict=True), atol=5e-5)


def test_an_adapter_that_does_not_fit_is_refused_and_the_model_goes_on(
    load: Load, driver: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(array: Any) -> Any:
        raise MemoryError(f"out of memory allocating {array.nbytes} bytes")

    question = [{"role": "user", "content": "What is 12 + 7?"}]
    with load(accuracy="int8") as model, genai.LLM(model) as llm:
        assert llm.chat(question, temperature=0).text == "19"
        llm.load_adapter(bundled_adapter("pirate"), "pirate")  # now the program has places
        with monkeypatch.context() as patch:
            patch.setattr(driver, "upload", full)
            with pytest.raises(CacheCapacityError, match="adapter 'words' takes"):
                llm.load_adapter(bundled_adapter("words"), "words")
        with monkeypatch.context() as patch:
            patch.setattr(driver, "free_bytes", lambda: 100)
            with pytest.raises(CacheCapacityError, match="100 B are free"):
                llm.load_adapter(bundled_adapter("words"), "words")
        assert llm.chat(question, temperature=0).text == "19"
        llm.load_adapter(bundled_adapter("words"), "words")
        assert llm.chat(question, temperature=0, adapter="words").text == "19, nineteen"
