"""Blocks that leave a GPU and come back, which does everything late: saved states, and the prefix cache in a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genai
from genai.convert import DecoderSpec, ExportOptions, write_model_folder
from genai.engine.paged import PagedDecoder
from genai.errors import DeviceError, StateMismatchError
from genai.kernels.cuda.driver import CudaError
from genai.kernels.cuda.executor import CudaExecutor
from genai.models import loading
from genai.models.kv_types import kv_types_on
from tools.random_weights import RandomWeights

from .devices import GPU, open_device
from .late_driver import LateDriver

TEXT = "The cat and the dog went to the park. " * 5
SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 5, "ignore_eos": True}
SIZES: dict[str, Any] = {"accuracy": "fp32", "context_size": 256, "cache_bytes": 4 << 20}
# Loads the bundled model on a device of its own.
Opened = Callable[..., Any]


@pytest.fixture
def opened(bundled_folder: Path, monkeypatch: pytest.MonkeyPatch, driver: Any) -> Opened:
    def load(on: Any = None, folder: Path = bundled_folder, **options: Any) -> genai.Model:
        device = on or (open_device() if GPU else LateDriver())
        with monkeypatch.context() as patch:
            patch.setattr(loading, "open_executor", lambda name, threads: CudaExecutor(device, threads))
            return genai.Model(folder, quiet=True, **SIZES, **options)

    return load


def pool_of(model: genai.Model) -> Any:
    pool = model.decoder.pool
    assert pool is not None
    return pool


def figures_of(llm: genai.LLM) -> dict[str, int]:
    figures = llm.stats().prefix_cache
    assert figures is not None
    return figures


# --- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", kv_types_on("cuda"))
def test_a_state_goes_on_in_another_model(opened: Opened, tmp_path: Path, kv_dtype: str) -> None:
    options = {"device": "cuda", "kv_dtype": kv_dtype, "kv_dtype_force": kv_dtype == "int4"}
    with opened(**options) as model, genai.LLM(model) as llm:
        first = llm.generate(TEXT, max_tokens=3, keep_state=True, **SAMPLED)[0]
        assert first.state.save_state(tmp_path / "a.state") > 32 * model.decoder.storage.layout.bytes_per_token
        tokens, rest = first.state.tokens, first.state.resume(max_tokens=5)
    with opened(**options) as model, genai.LLM(model) as llm:
        state = llm.load_state(tmp_path / "a.state")
        assert state.tokens == tokens
        assert state.resume(max_tokens=5).token_ids == rest.token_ids


@pytest.mark.gpu
def test_a_state_whose_first_blocks_no_token_sees_any_more(
    opened: Opened, bundled_folder: Path, tmp_path: Path
) -> None:
    spec = DecoderSpec(
        model_type="mistral", vocab_size=1536, hidden_size=64, intermediate_size=96, num_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_size=16, context_length=256, eos_token_ids=(2, 0),
        sliding_window=7,
    )  # fmt: skip
    folder, weights = tmp_path / "model", RandomWeights(spec, seed=1)
    write_model_folder(folder, spec, ExportOptions(precision="int4"), weights, tokenizer_dir=bundled_folder)
    with opened(folder=folder) as model, genai.LLM(model) as llm:
        first = llm.generate(TEXT * 2, max_tokens=3, keep_state=True, **SAMPLED)[0]
        assert first.state._sequence.cache.tables[0].num_gone > 0
        first.state.save_state(tmp_path / "a.state")
        rest = first.state.resume(max_tokens=5)
    with opened(folder=folder) as model, genai.LLM(model) as llm:
        assert llm.load_state(tmp_path / "a.state").resume(max_tokens=5).token_ids == rest.token_ids


@pytest.mark.gpu
def test_a_generator_is_saved_while_a_step_is_in_flight(opened: Opened, tmp_path: Path) -> None:
    """A step that computes the token after two whole blocks."""

    def generator(model: genai.Model) -> Any:
        params = genai.GeneratorParams(model)
        params.set_search_options(do_sample=True, top_k=20, random_seed=3, max_length=80, min_length=80)
        return genai.Generator(model, params)

    def tokens(of: Any, count: int) -> list[int]:
        for _ in range(count):
            of.generate_next_token()
        return [int(token) for token in of.get_sequence(0)]

    with opened() as model, generator(model) as one:
        one.append_tokens(list(range(5, 65)))
        assert len(tokens(one, 5)) == 65
        assert one._batch.sequences[0].ahead is not None
        assert one.save_state(tmp_path / "a.state") > 64 * model.decoder.storage.layout.bytes_per_token
        whole = tokens(one, 5)
    with opened() as model, generator(model) as other:
        other.append_tokens([7, 8])
        tokens(other, 3)
        assert other._batch.sequences[0].ahead is not None
        other.load_state(tmp_path / "a.state")
        assert tokens(other, 5) == whole


@pytest.mark.gpu
def test_states_of_other_devices_are_refused(opened: Opened, bundled_folder: Path, tmp_path: Path) -> None:
    """Blocks are alike, but what follows rounds differently."""
    paths = {name: tmp_path / f"{name}.state" for name in ("cuda", "cpu")}
    with opened() as model, genai.LLM(model) as llm:
        llm.read(TEXT).save_state(paths["cuda"])
    with genai.LLM(bundled_folder, **SIZES) as llm:
        llm.read(TEXT).save_state(paths["cpu"])
        with pytest.raises(StateMismatchError, match="numerics: the state has cuda sm_"):
            llm.load_state(paths["cuda"])
    with opened() as model, genai.LLM(model) as llm:
        with pytest.raises(StateMismatchError, match="numerics: the state has cpu"):
            llm.load_state(paths["cpu"])
        assert len(llm.load_state(paths["cuda"])) > 32
        model._identity, model.decoder.executor.driver.capability = None, 100  # it is asked for once
        with pytest.raises(StateMismatchError, match="but the loaded model has cuda sm_100"):
            llm.load_state(paths["cuda"])


def test_a_device_that_fails_is_said(opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any) -> None:
        raise CudaError("the GPU is lost")

    driver = LateDriver()
    with opened(driver) as model, genai.LLM(model) as llm:
        state = llm.read(TEXT)
        state.save_state(tmp_path / "a.state")
        before = (tmp_path / "a.state").read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(driver, "download", lost)
            with pytest.raises(DeviceError, match="failed while copying keys and values to the host"):
                state.save_state(tmp_path / "a.state")
        assert (tmp_path / "a.state").read_bytes() == before
        free = pool_of(model).num_free
        with monkeypatch.context() as patch:
            patch.setattr(driver, "write", lost)
            with pytest.raises(DeviceError, match="the GPU is lost"):
                llm.load_state(tmp_path / "a.state")
        assert pool_of(model).num_free == free
        assert len(llm.load_state(tmp_path / "a.state")) == len(state)


# --- the folder ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", ["fp16", "int8"])
def test_what_one_model_read_another_finds_in_the_folder(opened: Opened, tmp_path: Path, kv_dtype: str) -> None:
    asked: dict[str, Any] = {"max_tokens": 4, **SAMPLED}
    with opened(kv_dtype=kv_dtype) as model, genai.LLM(model, prefix_cache_dir=tmp_path) as llm:
        first = llm.generate(TEXT, **asked)[0]
    with opened(kv_dtype=kv_dtype) as model, genai.LLM(model, prefix_cache_dir=tmp_path) as llm:
        again = llm.generate(TEXT, **asked)[0]
        whole = (first.prompt_tokens - 1) // 32
        assert (again.token_ids, again.cached_tokens) == (first.token_ids, 32 * whole)
        assert figures_of(llm)["found"] == whole > 0


@pytest.mark.gpu
def test_blocks_come_and_go_while_steps_are_in_flight(opened: Opened, tmp_path: Path) -> None:
    """Blocks read from the folder are there before the step that needs them; those written hold the last step."""
    other = "Tom and Luna have a red ball and a blue kite. " * 3
    asked: dict[str, Any] = {"max_tokens": 3, **SAMPLED}
    with opened() as model, genai.LLM(model) as llm:
        texts = [llm.generate(text, **asked)[0] for text in (TEXT, other)]
        long = llm.generate("Once", max_tokens=24, **SAMPLED)[0]
    with opened() as model, genai.LLM(model, prefix_cache_dir=tmp_path) as llm:
        assert llm.generate(TEXT, **asked)[0].token_ids == texts[0].token_ids
    with opened() as model, genai.LLM(model, prefix_cache_dir=tmp_path) as llm:
        with llm.stream("Once", max_tokens=24, **SAMPLED) as stream:
            next(iter(stream))
            found = [llm.generate(text, **asked)[0] for text in (TEXT, other)]
            for _ in stream:
                pass
        assert stream.completion.token_ids == long.token_ids
        assert [one.token_ids for one in found] == [one.token_ids for one in texts]
        assert found[0].cached_tokens > 0 and not found[1].cached_tokens
        if not GPU:
            driver = model.decoder.executor.driver
            assert driver.ahead > 1 and any("take_chosen" in name for name in driver.launched)
    with opened() as model, genai.LLM(model, prefix_cache_dir=tmp_path) as llm:
        again = llm.generate(other, **asked)[0]
        assert again.token_ids == texts[1].token_ids and again.cached_tokens > 0


@pytest.mark.gpu
def test_blocks_of_the_cpu_are_not_found(opened: Opened, bundled_folder: Path, tmp_path: Path) -> None:
    with genai.LLM(bundled_folder, prefix_cache_dir=tmp_path, **SIZES) as llm:
        llm.generate(TEXT, max_tokens=2)
    with opened() as model, genai.LLM(model, prefix_cache_dir=tmp_path) as llm:
        assert llm.generate(TEXT, max_tokens=2)[0].cached_tokens == 0
        assert figures_of(llm)["found"] == 0


def test_a_block_that_the_device_does_not_give_is_not_kept(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: Any) -> None:
        raise CudaError("the GPU is lost")

    asked: dict[str, Any] = {"max_tokens": 2, **SAMPLED}
    driver = LateDriver()
    with opened(driver) as model, genai.LLM(model, prefix_cache_dir=tmp_path) as llm:
        decoder = model.decoder
        assert isinstance(decoder, PagedDecoder)
        with monkeypatch.context() as patch:
            patch.setattr(decoder.executor, "read_block", lost)
            first = llm.generate(TEXT, **asked)[0]
        figures = figures_of(llm)
        assert figures["dropped"] > 0 and not figures["written"]
        decoder.pool.backing.flush()  # type: ignore[union-attr]
    with opened() as model, genai.LLM(model, prefix_cache_dir=tmp_path) as llm:
        assert llm.generate(TEXT, **asked)[0].token_ids == first.token_ids
    with opened() as model, genai.LLM(model, prefix_cache_dir=tmp_path) as llm:
        pool, executor = pool_of(model), model.decoder.executor
        with monkeypatch.context() as patch:
            patch.setattr(executor, "write_block", lost)
            with pytest.raises(DeviceError, match="failed while loading blocks of the prefix cache"):
                llm.generate(TEXT, **asked)
        assert pool.num_free == pool.num_blocks
        found = llm.generate(TEXT, **asked)[0]
        assert found.token_ids == first.token_ids and found.cached_tokens > 0


# --- one block -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_block_is_read_behind_what_was_asked_for_before(driver: Any) -> None:
    executor = CudaExecutor(driver if GPU else LateDriver(), 1)
    blocks = executor.allocate(4 * 64).bytes.reshape(4, 64)
    content = np.arange(64, dtype=np.uint8)
    own = content.copy()
    executor.write_block(blocks, 1, own)
    own[:] = 0  # it has been read
    executor.copy_blocks(blocks, [(1, 3)])
    executor.write_block(blocks, 1, content[::-1])
    assert np.array_equal(executor.read_block(blocks, 3), content)
    assert np.array_equal(executor.read_block(blocks, 1), content[::-1])
    assert not executor.read_block(blocks, 0).any()
    with pytest.raises(ValueError, match="host memory is uint8"):
        executor.write_block(blocks, 0, content[:5])
