"""Adapters in GGUF files: read with rows in the base's order, and refused if they contain more than factors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genai.cli.app import run
from genai.errors import InputError
from genai.lora.gguf import in_our_order, require_our_order
from genai.lora.read import read_adapter

gguf = pytest.importorskip("gguf")
from tools.gguf_models import HEAD, HEADS, SHAPES, add_value, close, write_adapter  # noqa: E402


def write(path: Path, tensors: dict[str, Any], arch: str = "llama", **keys: Any) -> Path:
    writer = gguf.GGUFWriter(str(path), arch)
    values = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 8.0, **keys}
    for key, value in values.items():
        add_value(writer, key, value)
    for name, array in tensors.items():
        writer.add_tensor(name, np.asarray(array))
    close(writer)
    return path


A, B = np.ones((2, 8), np.float32), np.arange(16, dtype=np.float32).reshape(8, 2)
PAIR = {"blk.0.ffn_up.weight.lora_a": A, "blk.0.ffn_up.weight.lora_b": B}


def test_what_is_read(tmp_path: Path) -> None:
    read = read_adapter(write_adapter(tmp_path / "a.gguf", SHAPES["llama"]))
    assert read.kind == "gguf" and read.ranks == [4] and len(read.pairs) == 8
    pair = read.pairs["model.layers.1.self_attn.q_proj"]
    assert pair.a.shape == (4, 256) and pair.b.shape == (HEADS * HEAD, 4) and pair.scale == 2.0
    ours = in_our_order(read, HEADS, 2)
    turned = ours.pairs["model.layers.1.self_attn.q_proj"].b
    for head in range(HEADS):
        own = pair.b[head * HEAD : (head + 1) * HEAD]
        np.testing.assert_array_equal(turned[head * HEAD : (head + 1) * HEAD], np.concatenate([own[::2], own[1::2]]))
    assert ours.pairs["model.layers.1.self_attn.v_proj"] is read.pairs["model.layers.1.self_attn.v_proj"]
    assert in_our_order(ours, HEADS, 2) is ours and require_our_order(ours) is ours


def test_names_of_packed_projections(tmp_path: Path) -> None:
    read = read_adapter(write(tmp_path / "a.gguf", PAIR, "phi3"))
    assert list(read.pairs) == ["model.layers.0.mlp.gate_up_proj"] and not read.permuted


def test_quantised_factors(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "a.gguf"), "qwen2")
    for key, value in {"general.type": "adapter", "adapter.type": "lora"}.items():
        add_value(writer, key, value)
    kind, values = gguf.GGMLQuantizationType.Q8_0, np.random.RandomState(0).standard_normal((2, 64)).astype(np.float32)
    blocks = gguf.quantize(values, kind)
    writer.add_tensor("blk.0.ffn_up.weight.lora_a", blocks, raw_dtype=kind)
    writer.add_tensor("blk.0.ffn_up.weight.lora_b", B)
    close(writer)
    pair = read_adapter(tmp_path / "a.gguf").pairs["model.layers.0.mlp.up_proj"]
    np.testing.assert_array_equal(pair.a, gguf.dequantize(blocks, kind))
    assert pair.scale == 1.0  # no alpha


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a model": (PAIR, {"general.type": "model"}, "general.type is 'model'"),
    "another kind": (PAIR, {"adapter.type": "ia3"}, "adapter.type is 'ia3'"),
    "alpha of text": (PAIR, {"adapter.lora.alpha": "8"}, "adapter.lora.alpha is '8'"),
    "activated": (PAIR, {"adapter.alora.invocation_tokens": [1, 2]}, "alora.invocation_tokens"),
    "a norm": ({**PAIR, "blk.0.attn_norm.weight": np.ones(8, np.float32)}, {}, "is not a factor of a linear layer"),
    "no B": ({"blk.0.ffn_up.weight.lora_a": A}, {}, "has no factor B"),
    "two ranks": (
        {**PAIR, "blk.0.ffn_up.weight.lora_b": np.ones((8, 3), np.float32)},
        {},
        r"A \[2, 8\] and B \[8, 3\]",
    ),
    "nothing": ({}, {}, "contains no factors"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused(name: str, tmp_path: Path) -> None:
    tensors, keys, message = BAD[name]
    with pytest.raises(InputError, match=message) as caught:
        read_adapter(write(tmp_path / "a.gguf", tensors, **keys))
    assert caught.value.why and caught.value.fix


def test_rows_that_heads_do_not_share(tmp_path: Path) -> None:
    tensors = {"blk.0.attn_q.weight.lora_a": A, "blk.0.attn_q.weight.lora_b": np.ones((10, 2), np.float32)}
    read = read_adapter(write(tmp_path / "a.gguf", tensors))
    with pytest.raises(InputError, match="has 10 rows"):
        in_our_order(read, 4, 4)


def test_info_and_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only a base determines the head that a row belongs to."""
    adapter = write_adapter(tmp_path / "a.gguf", SHAPES["llama"])
    assert run(["lora", "info", str(adapter)]) == 0
    assert "gguf" in capsys.readouterr().out
    assert run(["lora", "convert", str(adapter), "-o", str(tmp_path / "peft")]) == 1
    assert "pass the base model with --model" in capsys.readouterr().err
    other = write(tmp_path / "b.gguf", PAIR, "qwen2")
    assert run(["lora", "convert", str(other), "-o", str(tmp_path / "peft")]) == 0
    np.testing.assert_array_equal(read_adapter(tmp_path / "peft").pairs["model.layers.0.mlp.up_proj"].b, 4 * B)


def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path) -> None:
    read = read_adapter(write(tmp_path / "a.gguf", PAIR, "qwen2"))
    os.truncate(tmp_path / "a.gguf", 0)
    np.testing.assert_array_equal(read.pairs["model.layers.0.mlp.up_proj"].b, B)


def test_listing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whole models and unreadable files are not adapters."""
    for place in (tmp_path, tmp_path / "inner"):
        place.mkdir(exist_ok=True)
        write(place / "a.gguf", PAIR)
        write(place / "m.gguf", PAIR, **{"general.type": "model"})
        write(place / "odd.gguf", PAIR, **{"general.type": [1, 2]})
        (place / "x.gguf").write_bytes(b"GGUF")
    assert run(["lora", "ls", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [str(tmp_path / "a.gguf"), str(tmp_path / "inner" / "a.gguf")]
    assert all("gguf, rank 2, 1 modules" in line for line in lines)
