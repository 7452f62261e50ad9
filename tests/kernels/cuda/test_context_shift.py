"""Contexts that shift on an emulated GPU: the bundled model says what it says on the reference device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genai
from genai.engine.decoder import compute
from genai.engine.sequence import ContextShift
from genai.errors import DeviceError
from genai.kernels.cuda.driver import CudaError
from genai.kernels.cuda.executor import CudaExecutor
from genai.models import loading

from .host_driver import HostDriver
from .late_driver import LateDriver
from .programs import Load, opener

STORY = "Tell me a story about Luna and Tom. " * 12
CONTEXT = 128


def asked(llm: genai.LLM) -> list[tuple[list[int], int, int]]:
    """Two requests of different lengths side by side, which share blocks that were read before and shift three times
    each: tokens, how many were forgotten, how many of the prompt were found.
    """
    text = llm.encode(STORY)
    llm.generate([text[:118]], temperature=0, max_tokens=1)
    options: dict[str, Any] = {"ignore_eos": True, "max_tokens": 84}
    params = [genai.SamplingParams(temperature=0.9, seed=5, **options), genai.SamplingParams(temperature=0, **options)]
    found = llm.generate([text[:118], text[:110]], params, ctx_shift=20)
    return [(one.token_ids, one.forgotten_tokens, one.cached_tokens) for one in found]


def test_tokens_are_the_reference_s_over_three_shifts(
    bundled_folder: Path, driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU that does everything late: a step was started ahead whenever a context is full."""
    with genai.LLM(bundled_folder, device="reference", context_size=CONTEXT, cache_bytes=8 << 20) as llm:
        expected = asked(llm)
    assert [one[1:] for one in expected] == [(96, 96)] * 2
    late, copied = LateDriver(), list[Any]()
    copy = late.copy_row
    monkeypatch.setattr(late, "copy_row", lambda rows, *which: (copied.append(which), copy(rows, *which)))
    monkeypatch.setattr(loading, "open_executor", opener(late))
    sizes: dict[str, Any] = {"context_size": CONTEXT, "cache_bytes": 8 << 20}
    with genai.Model(bundled_folder, quiet=True, accuracy="fp32", **sizes) as model, genai.LLM(model) as llm:
        assert asked(llm) == expected
        layers = len(model.decoder.storage.layers)  # type: ignore[attr-defined]
    assert sum("rotate_keys" in name for name in late.launched) == 6 * layers
    assert any("take_chosen" in name for name in late.launched) and late.graphs_launched
    assert len(copied) >= 2
    late.check()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fp32", "fp16", "bf16", "fp8", "int8", "int4"])
def test_logits_behind_a_shift_are_near_the_reference_s(load: Load, bundled_folder: Path, kind: str) -> None:
    """Of blocks that another sequence shares, which goes on as if nothing had happened."""
    cache: dict[str, Any] = {"kv_dtype": kind, "context_size": CONTEXT}
    cache |= {"kv_dtype_force": True} if kind == "int4" else {}
    with genai.Model(bundled_folder, device="reference", **cache) as model:
        pages = read_context(model)
        (shifted, other), (unturned, _) = (behind_a_shift(model, pages, turns=turns) for turns in (True, False))
    with load(accuracy="fp32", device="cuda", **cache) as model:
        found = behind_a_shift(model, pages)
    far = np.abs(shifted - unturned).max()
    assert far > 1 and np.abs(found[0] - shifted).max() < far / 8 and np.abs(found[1] - other).max() < far / 8


def read_context(model: genai.Model) -> list[Any]:
    """What the blocks of a full context hold."""
    decoder, sequence = model.decoder, opened(model)
    compute(decoder, [sequence])
    return [np.array(decoder.storage.blocks[block]) for block in sequence.cache.tables[0].blocks]  # type: ignore[attr-defined]


def opened(model: genai.Model) -> Any:
    sequence = model.decoder.open()
    sequence.append([5 + 7 * i % 900 for i in range(CONTEXT)])
    return sequence


def full(model: genai.Model) -> Any:
    """A sequence with a token more than its context holds; its blocks hold zeros, or what they held before."""
    sequence = opened(model)
    sequence.cache.append(CONTEXT)
    sequence.shift = ContextShift(20, CONTEXT)
    sequence.append([77])
    return sequence


def behind_a_shift(model: genai.Model, pages: list[Any], *, turns: bool = True) -> tuple[Any, Any]:
    """Logits of the token behind a shift, and those of a fork that has none.

    Args:
        turns: False leaves keys as they are: a test that cannot tell proves nothing.
    """
    decoder, sequence = model.decoder, full(model)
    for block, page in zip(sequence.cache.tables[0].blocks, pages, strict=True):
        place = decoder.storage.blocks[block]  # type: ignore[attr-defined]
        if isinstance(decoder.executor, CudaExecutor):
            decoder.executor.driver.write(place, page)
        else:
            place[:] = page
    other = sequence.fork()
    with pytest.MonkeyPatch.context() as patch:
        if not turns:
            patch.setattr(decoder.executor, "rotate_keys", lambda *_: None)
        sequence.forget()
    logits = compute(decoder, [sequence, other])
    first, second = (np.array(decoder.executor.host(one[-1:])) for one in logits)
    return first, second


# --- what goes wrong -------------------------------------------------------------------------------------------------


def test_without_room_for_the_list_of_blocks_what_is_left_is_computed_anew(load: Load, driver: HostDriver) -> None:
    with load(accuracy="fp32", context_size=CONTEXT) as model:
        decoder, sequence = model.decoder, full(model)
        decoder.check_shift(sequence.shift)
        driver.room = 16
        sequence.forget()
        driver.room = None
        # The first block stays as it is; what is behind the forgotten one is gone.
        assert sequence.cache.length == 32 and sequence.forgotten == 32 and not sequence.is_full
        sequence.close()
        assert decoder.pool.num_free == decoder.pool.num_blocks  # type: ignore[attr-defined]


def test_a_lost_gpu_is_a_typed_error(load: Load, driver: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> None:
        raise CudaError("GPU 0: CUDARuntimeError: cudaErrorIllegalAddress")

    with load(accuracy="fp32", context_size=CONTEXT) as model, genai.LLM(model) as llm:
        sequence = full(model)
        with monkeypatch.context() as patch:
            patch.setattr(driver, "load", lost)
            with pytest.raises(DeviceError, match="cudaErrorIllegalAddress"):  # before a token is computed
                llm.generate("Hello", ctx_shift=True, max_tokens=4)
        model.decoder.check_shift(sequence.shift)
        monkeypatch.setattr(driver, "launch", lost)
        with pytest.raises(DeviceError, match="cudaErrorIllegalAddress") as raised:
            sequence.forget()
        assert "failed while moving keys" in raised.value.what and "genai doctor" in raised.value.fix
        assert sequence.num_computed == 0
