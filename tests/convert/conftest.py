"""A decoder in float64 NumPy, written from the papers alone, and onnxruntime-genai fed with the same tokens."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from genai.convert.options import BITS, ExportOptions
from genai.convert.rope_scaling import Llama3Scaling, LongRope
from genai.convert.spec import DecoderSpec
from genai.convert.tensors import EXACT
from genai.quant.methods.rtn import quantize_blocks
from tools.random_weights import random_tensor

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

Array = NDArray[np.float64]


def _norm(x: Array, weight: Array, spec: DecoderSpec) -> Array:
    scale = np.sqrt((x * x).mean(axis=-1, keepdims=True) + spec.rms_norm_eps)
    return x / scale * (weight + spec.norm_weight_offset)


def _angles(spec: DecoderSpec, length: int) -> tuple[Array, float]:
    """Rotation angles [length, pairs], and the factor of cosines and sines."""
    frequencies = spec.rope_theta ** (-np.arange(0, spec.rotary_size, 2) / spec.rotary_size)
    factor = 1.0
    if isinstance(scaling := spec.rope_scaling, Llama3Scaling):
        original = scaling.original_max_position_embeddings
        for i, frequency in enumerate(frequencies):
            wavelength = 2 * math.pi / frequency
            if wavelength > original / scaling.low_freq_factor:
                frequencies[i] = frequency / scaling.factor
            elif wavelength > original / scaling.high_freq_factor:
                smooth = (original / wavelength - scaling.low_freq_factor) / (
                    scaling.high_freq_factor - scaling.low_freq_factor
                )
                frequencies[i] = (1 - smooth) * frequency / scaling.factor + smooth * frequency
    elif isinstance(scaling, LongRope):
        original = scaling.original_max_position_embeddings
        frequencies = frequencies / (scaling.long_factor if length > original else scaling.short_factor)
        stretch = math.log(spec.context_length / original) / math.log(original)
        factor = scaling.attention_factor or math.sqrt(1 + stretch)
    return np.outer(np.arange(length), frequencies), factor


def _rotate(x: Array, spec: DecoderSpec) -> Array:
    """Rotate heads [length, heads, head_size] by their positions."""
    angles, factor = _angles(spec, len(x))
    size, rotated = spec.rotary_size, x.copy()
    first = np.s_[..., 0:size:2] if spec.rope_interleaved else np.s_[..., 0 : size // 2]
    second = np.s_[..., 1:size:2] if spec.rope_interleaved else np.s_[..., size // 2 : size]
    cos, sin = np.cos(angles)[:, None] * factor, np.sin(angles)[:, None] * factor
    rotated[first] = x[first] * cos - x[second] * sin
    rotated[second] = x[second] * cos + x[first] * sin
    return rotated


def _attend(q: Array, k: Array, v: Array, spec: DecoderSpec, window: int | None) -> Array:
    """One head: [length, head_size] each."""
    scores = q @ k.T * (spec.attention_scale or 1 / math.sqrt(spec.head_size))
    if spec.attention_softcap:
        scores = spec.attention_softcap * np.tanh(scores / spec.attention_softcap)
    age = np.arange(len(q))[:, None] - np.arange(len(k))
    scores[(age < 0) | (age >= (window or len(k)))] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ v


def _activate(x: Array, spec: DecoderSpec) -> Array:
    if spec.hidden_activation == "silu":
        return x / (1 + np.exp(-x))
    if spec.hidden_activation == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def _reference_logits(spec: DecoderSpec, weights: Mapping[str, NDArray[Any]], tokens: list[int]) -> Array:
    """Logits [length, vocab] of one sequence, in float64."""

    def tensor(name: str) -> Array:
        return np.asarray(weights[name], np.float64)

    def linear(x: Array, name: str, bias: bool) -> Array:
        return x @ tensor(f"{name}.weight").T + (tensor(f"{name}.bias") if bias else 0)

    x = tensor("model.embed_tokens.weight")[tokens] * spec.embedding_scale
    for layer in range(spec.num_layers):
        path = f"model.layers.{layer}"

        def norm(x: Array, which: str, path: str = path) -> Array:
            return _norm(x, tensor(f"{path}.{which}_layernorm.weight"), spec)

        def heads(which: str, x: Array, path: str = path) -> Array:
            return linear(x, f"{path}.self_attn.{which}_proj", spec.qkv_bias).reshape(len(x), -1, spec.head_size)

        normed = norm(x, "input")
        q, k, v = (heads(which, normed) for which in "qkv")
        if spec.qk_norm:
            q, k = (_norm(y, tensor(f"{path}.self_attn.{n}_norm.weight"), spec) for y, n in ((q, "q"), (k, "k")))
        q, k = _rotate(q, spec), _rotate(k, spec)
        group = spec.num_attention_heads // spec.num_key_value_heads
        k, v = (y.repeat(group, axis=1) for y in (k, v))
        mixed = [_attend(q[:, h], k[:, h], v[:, h], spec, spec.window(layer)) for h in range(q.shape[1])]
        update = linear(np.concatenate(mixed, axis=-1), f"{path}.self_attn.o_proj", spec.o_bias)
        x = x + (norm(update, "post_attention") if spec.post_norms else update)
        normed = norm(x, "pre_feedforward" if spec.post_norms else "post_attention")
        gate, up = (linear(normed, f"{path}.mlp.{n}_proj", spec.mlp_bias) for n in ("gate", "up"))
        update = linear(_activate(gate, spec) * up, f"{path}.mlp.down_proj", spec.mlp_bias)
        x = x + (norm(update, "post_feedforward") if spec.post_norms else update)
    head = "lm_head" if "lm_head.weight" in weights else "model.embed_tokens"
    logits = linear(_norm(x, tensor("model.norm.weight"), spec), head, False)
    return spec.logit_softcap * np.tanh(logits / spec.logit_softcap) if spec.logit_softcap else logits


def _rounded_weights(
    spec: DecoderSpec, options: ExportOptions, weights: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """The weights as a folder written with these options holds them; a tied head gets a matrix of its own."""
    table = "model.embed_tokens.weight"
    rounded = {"lm_head.weight": weights[table], **weights}
    for name, matrix in rounded.items():
        precision = {"lm_head.weight": options.head, table: options.embedding(tied=spec.tie_word_embeddings)}.get(
            name, options.precision
        )
        stays = name.endswith((*EXACT, "shared_expert_gate.weight", "embed_positions.weight"))
        if matrix.ndim == 2 and precision != "fp32" and not stays:
            form = {"bits": BITS[precision], "block_size": options.block_size}
            factor = _expert_factor(weights, name)  # part of the matrix that is quantised
            blocks = quantize_blocks(matrix * factor, **form, symmetric=options.symmetric)
            rounded[name] = blocks.dequantize() / factor
    return rounded


def _expert_factor(weights: Mapping[str, NDArray[Any]], name: str) -> np.float32:
    """The learned factor of the output of the expert whose matrix has this name; 1 if it has none."""
    found = re.fullmatch(r"(.*\.experts)\.(\d+)\.down_proj\.weight", name)
    factors = weights.get(f"{found[1]}.scale") if found else None
    return np.float32(1.0) if found is None or factors is None else np.float32(factors[int(found[2])])


def _og_logits(folder: Path, tokens: list[int], prompt: int) -> NDArray[np.float32]:
    """Logits of onnxruntime-genai: for a prompt of this length at once, then token by token.

    Returns [n, vocab]: one row per position, or with a pruned head the prompt's last position and those after it.
    """
    og = pytest.importorskip("onnxruntime_genai")
    model = og.Model(str(folder))
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=len(tokens) + 1)
    generator = og.Generator(model, params)
    generator.append_tokens(np.array([tokens[:prompt]], np.int32))
    rows = [np.array(generator.get_output("logits"))[0]]
    for token in tokens[prompt:]:
        generator.append_tokens(np.array([[token]], np.int32))
        rows.append(np.array(generator.get_output("logits"))[0, -1:])
    return np.concatenate(rows)


@pytest.fixture(scope="session")
def reference_logits() -> Callable[[DecoderSpec, Mapping[str, NDArray[Any]], list[int]], Array]:
    return _reference_logits


@pytest.fixture(scope="session")
def rounded_weights() -> Callable[[DecoderSpec, ExportOptions, Mapping[str, NDArray[Any]]], dict[str, NDArray[Any]]]:
    return _rounded_weights


@pytest.fixture(scope="session")
def og_logits() -> Callable[[Path, list[int], int], NDArray[np.float32]]:
    return _og_logits


@pytest.fixture(scope="session")
def byte_tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with one token per byte behind <pad>, <s> and </s>, as Hugging Face stores it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<s>", "</s>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(special + letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    folder = tmp_path_factory.mktemp("byte_tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": 256,
        "chat_template": "{% for message in messages %}{{ message.content }}\n{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture
def tiny() -> DecoderSpec:
    """A decoder of the smallest sizes that still differ from each other."""
    return DecoderSpec(
        model_type="llama",
        vocab_size=48,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_size=16,
        context_length=40,
    )


GOLDENS = Path(__file__).parent / "goldens"


@dataclass(frozen=True)
class Golden:
    """What transformers computed for one checkpoint; the weights are made from the seed."""

    path: Path
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    seed: int
    tokens: list[int]
    greedy: list[int]
    logits: NDArray[np.float32]
    stepped: NDArray[np.float32]

    def expected(self, length: int) -> NDArray[np.float32]:
        """Logits per position, for a sequence that is `length` tokens long when they are computed.

        Dynamic scaling: what was cached keeps its rotation. LongRoPE: all of it changes when the original length is
        exceeded.
        """
        rope = self.config.get("rope_parameters") or {}
        within = length <= rope.get("original_max_position_embeddings", length)
        return self.stepped if rope.get("rope_type") == "dynamic" or within else self.logits

    def write_checkpoint(self, folder: Path, tokenizer: Path) -> Path:
        """A Hugging Face folder."""
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
        tensors = {name: random_tensor(name, shape, self.seed) for name, shape in self.shapes.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder


@pytest.fixture(scope="session")
def golden_names() -> list[str]:
    return sorted(path.stem for path in GOLDENS.glob("*.safetensors"))


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Golden]:
    def read(name: str) -> Golden:
        path = GOLDENS / f"{name}.safetensors"
        with safe_open(path, "np") as file:
            metadata, arrays = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        return Golden(
            path,
            json.loads(metadata["config"]),
            {key: tuple(shape) for key, shape in json.loads(metadata["tensors"]).items()},
            int(metadata["seed"]),
            arrays["input_ids"].tolist(),
            arrays["greedy"].tolist(),
            arrays["logits"],
            arrays.get("stepped_logits", arrays["logits"]),
        )

    return read


@pytest.fixture(scope="session")
def letter_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json whose ids fit the goldens' vocabulary."""
    from tokenizers import Tokenizer, models

    tokens = ["<pad>", "<s>", "</s>", *(chr(code) for code in range(33, 127))]
    path = tmp_path_factory.mktemp("letters") / "tokenizer.json"
    Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [])).save(str(path))
    return path


@pytest.fixture(scope="session")
def golden_folder(
    golden: Callable[[str], Golden], letter_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """golden_folder(name, **options) -> a model folder built from that golden's checkpoint, fp32 unless said."""
    from genai.convert import build_model

    root = tmp_path_factory.mktemp("goldens")
    built: dict[tuple[Any, ...], Path] = {}

    def build(name: str, **options: Any) -> Path:
        key = (name, *sorted(options.items()))
        if key not in built:
            checkpoint = root / name
            if not checkpoint.exists():
                golden(name).write_checkpoint(checkpoint, letter_tokenizer)
            output = root / f"{name}-{len(built)}"
            built[key] = build_model(checkpoint, output, ExportOptions(**{"precision": "fp32", **options}))
        return built[key]

    return build
