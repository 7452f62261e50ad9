"""Models to evaluate: the bundled one in its two accuracies, and small random ones with the bundled tokenizer."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from genai import Model
from genai.convert import DecoderSpec, ExportOptions, LongRope, write_model_folder
from tools.random_weights import RandomWeights

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 1536,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_size": 16,
    "context_length": 256,
}
LONG_ROPE = LongRope(
    short_factor=tuple(1.0 + 0.05 * i for i in range(8)),
    long_factor=tuple(1.0 + 1.5 * i for i in range(8)),
    original_max_position_embeddings=100,
)
# name -> (spec changes, export options)
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32": ({}, {"precision": "fp32"}),
    "int4": ({}, {"precision": "int4", "accuracy_level": 1}),
    "int8-activations": ({}, {"precision": "int4", "accuracy_level": 4}),
    "biases": ({"qkv_bias": True, "mlp_bias": True, "model_type": "qwen2"}, {"precision": "int4", "accuracy_level": 1}),
    "qk-norm": ({"qk_norm": True, "model_type": "qwen3"}, {"precision": "fp32"}),
    "prune-head": ({}, {"precision": "int4", "accuracy_level": 1, "prune_lm_head": True}),
    "window": ({"sliding_window": 7, "model_type": "mistral"}, {"precision": "fp32"}),
    "long-rope": ({"rope_scaling": LONG_ROPE, "model_type": "phi3"}, {"precision": "fp32"}),
    "three-layers": ({"num_layers": 3}, {"precision": "fp32"}),
    "small-vocabulary": ({"vocab_size": 800}, {"precision": "fp32"}),
}
TEXT = "What is 12 + 7? It is 19. Count from 3 to 7: 3, 4, 5, 6, 7. Grüße, 你好! " * 12


@pytest.fixture(scope="session")
def text() -> str:
    """A text of several windows, with multi-byte characters."""
    return TEXT


@pytest.fixture(scope="session")
def exact(bundled_folder: Path) -> Iterator[Model]:
    """The bundled model with fp32 activations and cache."""
    with Model(bundled_folder, threads=2, accuracy="fp32") as model:
        yield model


@pytest.fixture(scope="session")
def form_folder(tmp_path_factory: pytest.TempPathFactory, bundled_folder: Path) -> Callable[[str], Path]:
    """form_folder(name) -> the folder of that form, with random weights and the bundled tokenizer."""
    root = tmp_path_factory.mktemp("evaluated")

    def build(name: str) -> Path:
        folder = root / name
        if not folder.exists():
            changes, options = FORMS[name]
            spec = DecoderSpec(**{**SMALL, **changes})
            write_model_folder(folder, spec, ExportOptions(**options), RandomWeights(spec, seed=1))
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(bundled_folder / file, folder / file)
        return folder

    return build


@pytest.fixture
def form_model(form_folder: Callable[[str], Path]) -> Iterator[Callable[..., Model]]:
    """form_model(name, **options) -> that form, loaded; closed after the test."""
    models: list[Model] = []

    def load(name: str, **options: Any) -> Model:
        models.append(Model(form_folder(name), threads=2, **options))
        return models[-1]

    yield load
    for model in models:
        model.close()


@pytest.fixture
def altered(tmp_path: Path) -> Callable[..., Path]:
    """altered(folder, change) -> a copy of the folder whose ONNX model was edited by `change`."""

    def copy(folder: Path, change: Callable[[onnx.ModelProto], None], *, embed: bool = False) -> Path:
        target = Path(shutil.copytree(folder, tmp_path / f"{folder.name}-altered"))
        model = onnx.load(target / "model.onnx", load_external_data=embed)
        change(model)
        if embed:
            (target / "model.onnx.data").unlink()
        (target / "model.onnx").write_bytes(model.SerializeToString())
        return target

    return copy


@pytest.fixture(scope="session")
def reference_logprobs() -> Callable[[Model, list[int]], np.ndarray]:
    """Log-probabilities float64 [n - 1, vocab] that a window of n tokens gives, computed token by token.

    Each prefix is computed separately with a Generator, and normalised by log(sum(exp)) in extended precision.
    """
    import genai as og

    def compute(model: Model, tokens: list[int]) -> np.ndarray:
        params = og.GeneratorParams(model)
        params.set_search_options(max_length=len(tokens) + 1)
        rows = []
        with og.Generator(model, params) as generator:
            for token in tokens[:-1]:
                generator.append_tokens([token])
                logits = generator.get_logits()[0, 0].astype(np.longdouble)
                rows.append(logits - np.log(np.exp(logits).sum()))
        return np.asarray(rows, np.float64)

    return compute
