"""The whole decoder on a host that emulates a GPU: the bundled model answers, and as the reference does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genai
from genai.doctor import model_info as info
from genai.engine.decoder import compute
from genai.engine.scheduler import Pending, plan_step
from genai.errors import CacheCapacityError, DeviceError, UnsupportedModelError
from genai.kernels.cuda import executor
from genai.kernels.cuda.attention import check_attention
from genai.kernels.cuda.driver import CudaError
from genai.kernels.cuda.executor import CudaExecutor
from genai.kernels.cuda.weights import DeviceMatrix
from genai.kernels.ir import Attention, Linear, weights_of
from genai.models import loading
from genai.models.folders import bundled_adapter

from ...drawing import Draw
from .host_driver import HostDriver
from .programs import Load

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("accuracy", ["fp32", "int8"])
def test_the_bundled_model_answers(load: Load, driver: HostDriver, accuracy: str) -> None:
    with load(accuracy=accuracy) as model, genai.LLM(model) as llm:
        assert model.device_type == "CUDA"
        questions = [llm.render(text) for text in ("What is 12 + 7?", "What is 47 + 38?")]
        assert [completion.text for completion in llm.generate(questions, temperature=0)] == ["19", "85"]
    driver.check()
    assert any(("product_exact" if accuracy == "fp32" else "decode_") in name for name in driver.launched)


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


@pytest.mark.parametrize(("multiprocessors", "fast"), [(4, 256), (24, 256), (72, 1024), (132, 2048), (160, 2048)])
def test_steps_that_read_prompts_grow_with_the_gpu(driver: HostDriver, multiprocessors: int, fast: int) -> None:
    driver.multiprocessors = multiprocessors
    assert CudaExecutor(driver, 1).step_sizes.fast == fast < CudaExecutor(driver, 1).step_sizes.most


def test_a_decoder_reads_prompts_in_steps_of_its_gpu_s_size(load: Load, driver: HostDriver) -> None:
    driver.multiprocessors = 72
    with load() as model:
        assert model.decoder.token_budget == 1024 and model.decoder.most_tokens == 8192
        (run,) = plan_step([Pending(5000, True)], model.decoder.token_budget)
        assert run.num_tokens == 1024


def test_no_step_has_more_tokens_than_a_grid_can_have(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was asked for; the bits do not depend on it."""
    tokens = np.random.default_rng(0).integers(5, 200, 90).tolist()

    def computed(most: int) -> tuple[Any, list[int]]:
        monkeypatch.setattr(executor, "_MOST_TOKENS", most)
        sizes = []
        with load() as model:
            sequence, step = model.decoder.open(), model.decoder.step

            def counted(sequences: Any, plan: Any, **options: Any) -> Any:
                sizes.extend(part.num_tokens for part in plan)
                return step(sequences, plan, **options)

            monkeypatch.setattr(model.decoder, "step", counted)
            sequence.append(tokens)
            (rows,) = compute(model.decoder, [sequence], all_rows=True, token_budget=1_000_000)
            return np.asarray(rows), sizes

    (whole, once), (parts, sizes) = computed(8192), computed(40)
    assert (once, sizes) == ([90], [40, 40, 10]) and len(whole) == 90 and np.array_equal(whole, parts)


PROMPTS = (
    "What is 12 + 7?", "What is 47 + 38?", "What is 9 times 6?", "What is the capital of France?", "Count to five.",
    "Say hello.", "My name is Nora.", "What colour is the sky?", "Write a short poem about the sea.", "Who are you?",
    "What day comes after Monday?", "Tell me a joke.", "How many legs has a spider?", "Spell the word cat.",
    "Which is larger, 17 or 71?", "Thank you!", "Name three fruits.", "What is the opposite of hot?", "Good night.",
    "Repeat after me: one two three.",
)  # fmt: skip


@pytest.mark.slow
def test_twenty_prompts_give_the_reference_s_tokens(load: Load, bundled_folder: Path, draw: Draw) -> None:
    """32 tokens each, also behind the ends of answers; the sequences of a run are computed together."""
    prompts = [prompt for prompt in PROMPTS if prompt in draw.part(PROMPTS, 10)]
    options = {"max_tokens": 32, "temperature": 0, "ignore_eos": True}
    with genai.LLM(bundled_folder, device="reference", context_size=256) as llm:
        expected = llm.generate([llm.render(prompt) for prompt in prompts], **options)
    with load(accuracy="fp32") as model, genai.LLM(model) as llm:
        found = llm.generate([llm.render(prompt) for prompt in prompts], **options)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert {len(one.token_ids) for one in found} == {32}


def test_every_record_is_launched_once_a_step(load: Load, driver: HostDriver) -> None:
    """What a step starts is what the program says: nothing is left out, nothing is computed twice."""
    with load(accuracy="fp32") as model:
        decoder = model.decoder
        sequence = decoder.open()
        sequence.append([1, 2, 3])
        decoder.step([sequence], plan_step([sequence.pending()], 512))
        kinds = [type(op).__name__ for op in decoder.program.ops]
        products = sum("gemv" in name for name in driver.launched)
        assert products == kinds.count("Linear") == sum(isinstance(r, Linear) for r in decoder.program.ops)
        for kind, kernel in (("Norm", "norm_"), ("Attention", "attend_split"),
                             ("Attention", "store_heads"), ("Gate", "apply_"), ("Embedding", "embed_blocks"),
                             ("LogitsRows", "embed_dense")):  # fmt: skip
            assert sum(kernel in name for name in driver.launched) == kinds.count(kind), kernel


@pytest.mark.parametrize("kind", ["fp16", "bf16", "fp8", "int8", "int4"])
def test_tokens_over_small_caches_are_the_reference_s(load: Load, bundled_folder: Path, kind: str) -> None:
    """Prompts in tiles, then tokens one by one."""
    cache = {"kv_dtype": kind, "kv_dtype_force": kind == "int4"}
    prompts = ["What is 12 + 7?", "My name is Nora."]
    options = {"max_tokens": 5, "temperature": 0}
    with genai.LLM(bundled_folder, device="reference", context_size=256, **cache) as llm:
        expected = llm.generate([llm.render(prompt) for prompt in prompts], **options)
    with load(accuracy="fp32", device="cuda", **cache) as model, genai.LLM(model) as llm:
        assert model.info.kv_dtype == kind
        found = llm.generate([llm.render(prompt) for prompt in prompts], **options)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]


def test_what_it_cannot_do_is_refused_by_name(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(op: Attention, layer: object) -> None:
        check_attention(replace(op, head_size=260), layer)  # type: ignore[arg-type]

    monkeypatch.setattr(executor, "check_attention", refused)
    with pytest.raises(UnsupportedModelError) as raised:
        load()
    assert "heads of 260" in raised.value.why and 'device="cpu"' in raised.value.fix


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
            with pytest.raises(CacheCapacityError, match="adapter 'words' needs"):
                llm.load_adapter(bundled_adapter("words"), "words")
        with monkeypatch.context() as patch:
            patch.setattr(driver, "free_bytes", lambda: 100)
            with pytest.raises(CacheCapacityError, match="100 B is free"):
                llm.load_adapter(bundled_adapter("words"), "words")
        assert llm.chat(question, temperature=0).text == "19"
        llm.load_adapter(bundled_adapter("words"), "words")
        assert llm.chat(question, temperature=0, adapter="words").text == "19, nineteen"


def test_what_a_model_needs_on_a_device_is_said_before_it_is_loaded(
    load: Load, driver: HostDriver, bundled_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not isinstance(driver, HostDriver):
        pytest.skip("a GPU's memory is not counted so")
    monkeypatch.setattr(loading, "open_executor", lambda device, threads: CudaExecutor(driver, 1))
    memory = info.describe(bundled_folder, context_size=256, device="cuda")["memory"]
    assert memory["device"] == "cuda" and memory["available_bytes"] == driver.free_bytes()
    assert memory["mapped_weight_bytes"] == 0 and memory["fits"]
    with load(cache_bytes=memory["cache_bytes"]) as model:
        assert driver.allocated - memory["cache_bytes"] <= memory["loaded_weight_bytes"] + memory["activation_bytes"]
        held = sum(matrix.nbytes for matrix in matrices_of(model))
        # The others are constants: norms, rotary tables.
        assert 0.8 * memory["loaded_weight_bytes"] < held <= memory["loaded_weight_bytes"]


def matrices_of(model: genai.Model) -> list[DeviceMatrix]:
    """The weights in device memory."""
    executor, program = model.decoder.executor, model.decoder.program
    assert isinstance(executor, CudaExecutor)
    weights = {weight for op in program.ops for weight in weights_of(op)}
    return [executor._weights.matrix(weight, program.constants) for weight in weights]


def test_a_kernel_that_does_not_compile_is_no_fault_of_the_model(
    load: Load, driver: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(kernels: object) -> None:
        raise CudaError("kernels cannot be compiled on GPU 0: nvrtc: error: invalid value for --gpu-architecture")

    monkeypatch.setattr(driver, "load", refused)
    with pytest.raises(DeviceError, match="gpu-architecture") as raised:
        load()
    assert "while the model was loaded" in raised.value.what
