"""Golden architectures with experts on a host that emulates a GPU: a prompt and steps, as the reference does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genai
from genai.engine.decoder import compute as compute_pending
from genai.kernels.cuda.executor import CudaExecutor
from genai.models import loading
from tests.kernels.cuda.devices import IS_THERE, open_device

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_THERE, reason="kernels run on Linux through g++")]
PROMPT, STEPS = 17, 4


def logits(model: genai.Model, tokens: list[int]) -> np.ndarray:
    """Of a prompt at once, then token by token."""
    sequence, rows = model.decoder.open(), []
    for part in (tokens[:PROMPT], *([token] for token in tokens[PROMPT : PROMPT + STEPS])):
        sequence.append([int(token) for token in part])
        rows.append(compute_pending(model.decoder, [sequence], all_rows=True)[0][-len(part) :])
    sequence.close()
    return np.concatenate(rows)


NAMES = ("mixtral", "qwen2_moe", "qwen2_moe_windows", "qwen3_moe", "phimoe", "granitemoe", "gpt_oss")
# In every run: biases and limits.
ALWAYS = "gpt_oss"
DRAWN = (pytest.mark.slow, pytest.mark.drawn(3))
CASES = [pytest.param(name, marks=() if name == ALWAYS else DRAWN) for name in NAMES]


@pytest.mark.parametrize("name", CASES)
def test_as_the_reference(
    name: str, golden: Any, golden_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, though weights have 4 bits; test_on_cuda.py has those of float32."""
    folder, tokens = golden_folder(name, precision="int4"), golden(name).tokens
    with genai.Model(folder, device="reference") as model:
        expected = logits(model, tokens)
    driver = open_device()
    with monkeypatch.context() as patch:
        patch.setattr(loading, "open_executor", lambda device, threads: CudaExecutor(driver, threads))
        with genai.Model(folder, accuracy="fp32", quiet=True) as model:
            found = logits(model, tokens)
    driver.check()
    assert any("expert_product" in kernel for kernel in driver.launched)
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
