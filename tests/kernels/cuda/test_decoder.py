"""The whole decoder on a host that emulates a GPU: the bundled model answers, and as the reference does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import genai
from genai.errors import UnsupportedModelError
from genai.kernels.cuda.executor import CudaExecutor
from genai.kernels.records import Product
from genai.model import loading

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


@pytest.mark.parametrize("kind", ["fp16", "int8", "int4"])
def test_tokens_over_small_caches_are_the_reference_s(load: Load, bundled_folder: Path, kind: str) -> None:
    """Prompts in tiles, then tokens one by one."""
    cache = {"kv_dtype": kind, "kv_dtype_force": kind == "int4"}
    prompts = ["What is 12 + 7?", "My name is Nora."]
    options = {"max_tokens": 5, "temperature": 0}
    with genai.LLM(bundled_folder, device="reference", context_size=256, **cache) as llm:
        expected = llm.generate([llm.render(prompt) for prompt in prompts], **options)
    with load(accuracy="fp32", **cache) as model, genai.LLM(model) as llm:
        found = llm.generate([llm.render(prompt) for prompt in prompts], **options)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]


@pytest.mark.parametrize(("options", "text"), [({"lora": True}, "records of the kind LowRank")])
def test_what_it_cannot_do_is_refused_by_name(load: Load, options: dict[str, object], text: str) -> None:
    with pytest.raises(UnsupportedModelError) as raised:
        load(**options)
    assert text in raised.value.why and 'device="cpu"' in raised.value.fix


def test_an_adapter_is_refused_and_the_model_goes_on(load: Load) -> None:
    from genai.model.folders import bundled_adapter

    with load(accuracy="fp32") as model, genai.LLM(model) as llm:
        with pytest.raises(UnsupportedModelError, match="LowRank"):
            llm.load_adapter(bundled_adapter("words"), "words")
        assert llm.chat([{"role": "user", "content": "What is 12 + 7?"}], temperature=0).text == "19"
