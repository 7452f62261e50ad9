"""Malicious files: GGUF models, checkpoints, adapters and saved states with false sizes and offsets."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.gguf_models import SHAPES, metadata, write_model

from .folders import BIG_TEMPLATES, TEMPLATE_USES
from .odd import ODD_NUMBERS, break_anywhere, break_bytes, break_json

# --- GGUF ------------------------------------------------------------------------------------------------------------


def _text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def _key(name: bytes, kind: int, value: bytes) -> bytes:
    return _text(name) + struct.pack("<I", kind) + value


def _gguf(keys: bytes = b"", num_keys: int = 1, tensors: bytes = b"", num_tensors: int = 0, rest: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + keys + tensors + bytes(rest)


_NO_TEXTS = struct.pack("<IQ", 8, 2**22) + bytes(2**25)
_MANY_KEYS = b"".join(_key(b"%d" % number, 0, b"\0") for number in range(60_000))
_ONE_TENSOR = struct.pack("<I", 1) + struct.pack("<QIQ", 2**60, 0, 0)
_HANDMADE: dict[str, Callable[[], bytes]] = {
    "counts of 2^62": lambda: _gguf(num_keys=2**62, num_tensors=2**62, rest=2**20),
    "arrays of arrays": lambda: _gguf(_key(b"k", 9, struct.pack("<IQ", 9, 1) * 100_000)),
    "millions of empty texts": lambda: _gguf(_key(b"k", 9, _NO_TEXTS)),
    "millions of empty texts, many times": lambda: _gguf(_key(b"k", 9, _NO_TEXTS) + _key(b"l", 9, _NO_TEXTS), 2),
    "a text of 2^63": lambda: _gguf(_key(b"k", 8, struct.pack("<Q", 2**63)), rest=100),
    "a long text": lambda: _gguf(_key(b"general.architecture", 8, _text(b"x" * 2**26))),
    "many keys": lambda: _gguf(_MANY_KEYS, 60_000),
    "many tensors": lambda: _gguf(
        b"", 0, b"".join(_text(b"%d" % n) + struct.pack("<IQIQ", 1, 8, 0, 32 * n) for n in range(100_000)), 100_000,
    ),
    "a tensor of 2^60": lambda: _gguf(b"", 0, _text(b"t") + _ONE_TENSOR, 1, 2**16),
}  # fmt: skip
_LISTS = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type")


def gguf_bomb(folder: Path, rng: random.Random) -> str:
    """Break a GGUF model: counts, texts and nesting, sizes of the model, vocabularies, or bytes."""
    path = folder / "model.gguf"
    match rng.randrange(4):
        case 0:
            name = rng.choice(list(_HANDMADE))
            path.write_bytes(_HANDMADE[name]())
            return name
        case 1:
            path.write_bytes(break_bytes(path.read_bytes(), rng, rng.choice((400, 20_000, 10**9))))
            return "other bytes"
    shape = SHAPES[rng.choice(list(SHAPES))]
    changes = _other_numbers(metadata(shape), rng) if rng.random() < 0.5 else _other_vocabulary(metadata(shape), rng)
    path.unlink()
    write_model(path, shape, rng.choice(("F32", "Q4_K", "Q8_0")), **changes)
    return f"{shape.arch}: {str(changes)[:150]}"


def _other_numbers(keys: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    names = [name for name, value in keys.items() if isinstance(value, (int, float)) and not isinstance(value, bool)]
    return {
        name: rng.choice(
            [None, *(n for n in ODD_NUMBERS if 0 <= n < 2**32), 2**32 - 1, float("nan"), float("inf"), "x"]
        )
        for name in rng.sample(names, rng.choice((1, 1, 2)))
    }


def _other_vocabulary(keys: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    tokens = keys["tokenizer.ggml.tokens"]
    name = rng.choice(_LISTS)
    return rng.choice((
        {name: keys[name][: len(keys[name]) // 2]},
        {name: keys[name] * 500},
        {name: None},
        {name: "x"},
        {"tokenizer.ggml.tokens": ["a"] * len(tokens)},
        {"tokenizer.ggml.tokens": [token * 3000 for token in tokens]},
        {"tokenizer.ggml.merges": ["a a"] * 100_000},
        {"tokenizer.ggml.merges": ["x" * 10**6] * 8},
        {"tokenizer.ggml.token_type": [rng.choice((0, 6, 99)) for _ in tokens]},
        {"tokenizer.ggml.model": rng.choice(("llama", "bert", "t5", "x" * 10**6))},
        {"tokenizer.ggml.pre": rng.choice(("llama-bpe", "deepseek-coder", "x" * 10**6))},
        {"tokenizer.chat_template": rng.choice(BIG_TEMPLATES) + rng.choice(TEMPLATE_USES)},
        {"tokenizer.chat_template": "{{ a }}" * 200_000},
        {"tokenizer.ggml.eos_token_id": 2**32 - 1, "tokenizer.ggml.bos_token_id": 2**31},
        {"split.count": 65535},
    ))  # fmt: skip


# --- safetensors, checkpoints, adapters ------------------------------------------------------------------------------


def break_safetensors(path: Path, rng: random.Random) -> str:
    """Change a file's header, the length of its header, or its bytes."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, rest = data[8 : 8 + length].decode(), data[8 + length :]
    match rng.randrange(5):
        case 0:
            path.write_bytes(struct.pack("<Q", rng.choice((0, 2**20, 2**40, 2**63, 2**64 - 1))) + data[8:])
            return "length of the header"
        case 1:
            path.write_bytes(break_bytes(data, rng, length + 8))
            return "other bytes"
        case 2:
            tensors = {f"t{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(300_000)}
            header = json.dumps(tensors)
        case _:
            header = break_json(header, rng)
    raw = header.encode("utf-8", "surrogatepass")
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + rest)
    return f"header {header[:100]}"


_INDEX = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": "model.safetensors"}}
_SHARDS: tuple[Any, ...] = ("../../../etc/passwd", "/dev/zero", "", "x" * 5000, 7, "model.safetensors", "\0")


def checkpoint_bomb(folder: Path, rng: random.Random) -> str:
    """Break a Hugging Face folder: sizes in config.json, paths of shards, or tensors."""
    match rng.randrange(4):
        case 0:
            return "model.safetensors: " + break_safetensors(folder / "model.safetensors", rng)
        case 1:
            index: dict[str, Any] = json.loads(json.dumps(_INDEX))
            index["weight_map"]["model.embed_tokens.weight"] = rng.choice(_SHARDS)
            if rng.random() < 0.3:
                index["weight_map"] |= {f"{n}": f"model-{n}.safetensors" for n in range(200_000)}
            if rng.random() < 0.3:
                break_anywhere(index, rng)
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
            return f"index: {str(index)[:100]}"
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for _ in range(rng.choice((0, 1, 1, 2))):
        config[rng.choice([*config, "rope_scaling", "quantization_config", "num_experts"])] = rng.choice(
            (*ODD_NUMBERS, {"rope_type": "yarn", "factor": rng.choice(ODD_NUMBERS)}, {"quant_method": "gptq"}, None, [])
        )
    text = json.dumps(config) if rng.random() < 0.7 else break_json(json.dumps(config), rng)
    path.write_text(text)
    return f"config.json: {text[:300]}"


_PATTERNS = ("(a+)+$", "(.*)*x", "([a-z]+)*y", ".*" * 500, "(" * 5000, "q_proj|" * 20_000, "(?=(a+)+c)a")


def adapter_bomb(folder: Path, rng: random.Random) -> str:
    """Break an adapter in one of its three formats."""
    form = rng.choice(("peft", "peft", "a.onnx_adapter", "a.onnx_adapter", "a.gguf"))
    path = folder / "adapters" / form
    (folder / "which").write_text(form)
    if form != "peft":
        path.write_bytes(break_bytes(path.read_bytes(), rng, rng.choice((64, 600, 10**9))))
        return f"{form}: other bytes"
    if rng.random() < 0.4:
        return "adapter_model.safetensors: " + break_safetensors(path / "adapter_model.safetensors", rng)
    config = json.loads((path / "adapter_config.json").read_text())
    name = rng.choice([*config, "rank_pattern", "alpha_pattern", "layers_to_transform", "use_rslora"])
    patterns = {rng.choice(_PATTERNS): rng.choice(ODD_NUMBERS) for _ in range(3)}
    config[name] = rng.choice((*ODD_NUMBERS, *_PATTERNS, patterns, patterns, [], None, True, {"x": patterns}))
    text = json.dumps(config) if rng.random() < 0.8 else break_json(json.dumps(config), rng)
    (path / "adapter_config.json").write_text(text)
    return f"adapter_config.json: {text[:200]}"


# --- states ----------------------------------------------------------------------------------------------------------


def state_bomb(folder: Path, rng: random.Random) -> str:
    """Break a saved state: change its header, with a matching digest, or its bytes."""
    path = folder / "a.state"
    data = path.read_bytes()
    if rng.random() < 0.2:
        path.write_bytes(break_bytes(data, rng))
        return "other bytes"
    (length,) = struct.unpack("<Q", data[8:16])
    header, rest = json.loads(data[16 : 16 + length]), data[16 + length : -hashlib.sha256().digest_size]
    if rng.random() < 0.5:
        name = rng.choice(("tokens", "stored", "sampler", "sampler", "notes", "arrays", "adapter"))
        if isinstance(header[name], (dict, list)):
            break_anywhere(header[name], rng)
        else:
            header[name] = rng.choice(ODD_NUMBERS)
    if rng.random() < 0.4:
        rest = break_bytes(rest, rng, len(rest))
    text = json.dumps(header)
    if rng.random() < 0.3:
        text = break_json(text, rng)
    raw = text.encode("utf-8", "surrogatepass")
    beginning = data[:8] + struct.pack("<Q", rng.choice((len(raw), len(raw), len(raw), 2**62))) + raw + rest
    path.write_bytes(beginning + hashlib.sha256(beginning).digest())
    return f"header {text[:200]}"
