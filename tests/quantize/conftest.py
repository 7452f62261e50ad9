"""Float models to quantise: the bundled model's checkpoint, and small random ones in every form."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genai.convert import DecoderSpec, ExportOptions, write_model_folder
from genai.convert.build import build_model
from genai.quantize import QuantizeOptions
from genai.quantize.source import FloatModel
from genai.quantize.streaming import StreamedDecoder
from tools.random_weights import RandomWeights

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "tools" / "bundled_model" / "checkpoint"
SMALL: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 1536, "hidden_size": 96, "intermediate_size": 160, "num_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_size": 16, "context_length": 128,
}  # fmt: skip
# Little, so that a test takes a second or two.
QUICK = {"samples": 8, "length": 32, "eval_samples": 4, "threads": 1}


def quick(**options: Any) -> QuantizeOptions:
    """Options of a short run."""
    if "recipe" not in options:
        options.setdefault("method", "search")  # None, the default method, needs a calibration text
    return QuantizeOptions(**{**QUICK, **options})


def small_folder(path: Path, *, precision: str = "fp32", **changes: Any) -> Path:
    """A decoder with random weights and the bundled tokenizer."""
    spec = DecoderSpec(**{**SMALL, **changes})
    options = ExportOptions(precision=precision)  # type: ignore[arg-type]
    return write_model_folder(path, spec, options, RandomWeights(spec, seed=3), tokenizer_dir=CHECKPOINT)


@pytest.fixture(scope="session")
def float_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model in float32."""
    path = tmp_path_factory.mktemp("float") / "model"
    return build_model(CHECKPOINT, path, ExportOptions(precision="fp32"))


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model with an untied head."""
    return small_folder(tmp_path_factory.mktemp("small") / "model")


@pytest.fixture(scope="session")
def decoder() -> Iterator[StreamedDecoder]:
    """The bundled model's checkpoint as stages."""
    with FloatModel(CHECKPOINT) as source:
        yield StreamedDecoder(source, 1)


@pytest.fixture(scope="session")
def tokens() -> np.ndarray:
    """Some sequences."""
    return np.random.default_rng(0).integers(3, 1500, (3, 40))
