"""Every architecture on a host that emulates a GPU: a prompt and four steps give the reference's logits and tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genai
from genai.engine.decoder import compute
from genai.kernels.cuda.executor import CudaExecutor
from genai.models import loading

from ..kernels.cuda.devices import IS_THERE, open_device

GOLDENS = sorted(path.stem for path in (Path(__file__).parent / "goldens").glob("*.safetensors"))
TOLERANCE = 1e-4
STEPS = 4
pytestmark = pytest.mark.gpu
needs_a_compiler = pytest.mark.skipif(not IS_THERE, reason="kernels run on Linux through g++")


def outcome(model: genai.Model, prompt: list[int]) -> tuple[list[int], np.ndarray]:
    """The likeliest next tokens, one after the other, and the logits that they were taken from."""
    sequence, tokens, rows = model.decoder.open(), list[int](), list[np.ndarray]()
    sequence.append(prompt)
    for _ in range(1 + STEPS):
        (logits,) = compute(model.decoder, [sequence])
        rows.append(model.decoder.executor.host(logits)[-1])
        tokens.append(int(rows[-1].argmax()))
        sequence.append(tokens[-1:])
    sequence.close()
    return tokens, np.stack(rows)


def on_both(folder: Path, prompt: list[int], patch: pytest.MonkeyPatch, **options: Any) -> None:
    """Compare the emulated GPU with the reference."""
    with genai.Model(folder, device="reference", accuracy="fp32", **options) as model:
        expected, expected_rows = outcome(model, prompt)
    patch.setattr(loading, "open_executor", lambda device, threads: CudaExecutor(open_device(), threads))
    with genai.Model(folder, accuracy="fp32", cache_bytes=1 << 20, **options) as model:
        found, rows = outcome(model, prompt)
    assert np.abs(rows - expected_rows).max() <= TOLERANCE * np.abs(expected_rows).max()
    assert found == expected


# In every run: the usual one; routers that run on the host.
ALWAYS = ("llama", "phimoe")
DRAWN = (pytest.mark.slow, pytest.mark.drawn(4))


@needs_a_compiler
@pytest.mark.parametrize("name", [pytest.param(one, marks=() if one in ALWAYS else DRAWN) for one in GOLDENS])
def test_golden(name: str, golden: Any, golden_folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    on_both(golden_folder(name), golden(name).tokens[:20], monkeypatch, kv_dtype="fp32")
