"""The bundled model quantised to forms of every family answers on the emulated GPU as it does on the reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import genai
from genai.kernels.cuda.executor import CudaExecutor
from genai.models import loading
from genai.models.folders import bundled_model
from genai.quantize import quantize_model
from genai.quantize.options import QuantizeOptions

from .host_driver import HostDriver

pytestmark = pytest.mark.gpu

RECIPE = """
default: {form: q4_k, method: rtn}
rules:
  - {match: "lm_head*", form: q6_k}
  - {match: "*layers.0*down_proj*", form: mxfp4}
  - {match: "*layers.1*down_proj*", form: nf4}
  - {match: "*layers.2*down_proj*", form: nl4}
  - {match: "*layers.3*down_proj*", form: q5_k}
  - {match: "*layers.4*down_proj*", form: uniform, bits: 6, block_size: 16}
  - {match: "*layers.5*down_proj*", form: uniform, bits: 8, block_size: 0}
  - {match: "*layers.*o_proj*", form: uniform, bits: 5, block_size: 32, symmetric: false}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model's weights once more, in other forms."""
    target = tmp_path_factory.mktemp("quantised")
    (target / "recipe.yaml").write_text(RECIPE)
    options = QuantizeOptions(recipe=target / "recipe.yaml", evaluate=False, requantize=True)
    quantize_model(bundled_model(), target / "model", options, plain_roundings=False)
    return target / "model"


@pytest.mark.parametrize("accuracy", ["fp32", "int8"])
def test_tokens_and_logits_are_the_reference_s(
    folder: Path, driver: HostDriver, accuracy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = ["What is 12 + 7?", "What is the capital of France?"]
    options = {"max_tokens": 6, "temperature": 0, "logprobs": 0}
    with genai.LLM(folder, device="reference", context_size=256, quiet=True) as llm:
        expected = llm.generate([llm.render(prompt) for prompt in prompts], **options)
    monkeypatch.setattr(loading, "open_executor", lambda device, threads: CudaExecutor(driver, threads))
    with genai.Model(folder, context_size=256, cache_bytes=4 << 20, quiet=True, accuracy=accuracy) as model:
        with genai.LLM(model) as llm:
            found = llm.generate([llm.render(prompt) for prompt in prompts], **options)
    driver.check()
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        pairs = [(a.logprob, b.logprob) for a, b in zip(ours.logprobs, theirs.logprobs, strict=True)]
        assert np.allclose(*zip(*pairs, strict=True), atol=3e-5 if accuracy == "fp32" else 0.1)
    assert any("Minimum_Double" in name for name in driver.launched)
