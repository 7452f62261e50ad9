"""Adapters in mlx-lm's format."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import genai
from genai import InputError, ModelFolderError
from genai.lora.bind import bind
from genai.lora.describe import describe, find_adapters
from genai.lora.parameters import scaled
from genai.lora.peft import write_peft
from genai.lora.read import read_adapter

RANK = 4
MODULES = {"self_attn.q_proj": (256, 256), "mlp.up_proj": (256, 640)}


def tensors(rank: int = RANK, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    rng, found = np.random.default_rng(0), {}
    for layer in (0, 1):
        for name, (inputs, outputs) in MODULES.items():
            module = f"model.layers.{layer}.{name}"
            found[f"{module}.lora_a"] = rng.standard_normal((inputs, rank)).astype(dtype)
            found[f"{module}.lora_b"] = rng.standard_normal((rank, outputs)).astype(dtype)
    return found


@pytest.fixture
def mlx_folder(tmp_path: Path) -> Callable[..., Path]:
    def make(arrays: dict[str, np.ndarray] | None = None, **config: Any) -> Path:
        folder = tmp_path / "adapter"
        folder.mkdir(exist_ok=True)
        given = {
            "fine_tune_type": "lora",
            "num_layers": -1,
            "model": "mlx-community/base",
            "lora_parameters": {"rank": RANK, "scale": 20.0, "dropout": 0.0, "keys": list(MODULES)},
            **config,
        }
        kept = {name: value for name, value in given.items() if value is not None}
        (folder / "adapter_config.json").write_text(json.dumps(kept))
        save_file(tensors() if arrays is None else arrays, str(folder / "adapters.safetensors"))
        return folder

    return make


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_the_product_is_that_of_mlx(mlx_folder: Callable[..., Path], dtype: Any) -> None:
    """mlx-lm's fused weight is W + (scale * lora_b.T) @ lora_a.T."""
    arrays = tensors(dtype=dtype)
    adapter = read_adapter(mlx_folder(arrays))
    assert (adapter.kind, adapter.base, len(adapter.pairs)) == ("mlx", "mlx-community/base", 4)
    rng = np.random.default_rng(1)
    for name, pair in adapter.pairs.items():
        weight = rng.standard_normal((pair.b.shape[0], pair.a.shape[1]))
        expected = weight + 20.0 * (arrays[f"{name}.lora_a"].astype(float) @ arrays[f"{name}.lora_b"].astype(float)).T
        a, b = scaled(pair)
        np.testing.assert_allclose(weight + b.astype(float) @ a.astype(float), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 20.0),
        ({"fine_tune_type": None}, 20.0),
        ({"lora_parameters": {"rank": RANK, "scale": 10, "alpha": 16}}, 10.0),
        ({"num_layers": None, "lora_layers": 2, "lora_parameters": {"rank": 4, "alpha": 16, "scale": 10.0}}, 40.0),
        ({"num_layers": None, "lora_layers": 2, "lora_parameters": {"rank": 4, "scale": 10.0}}, 10.0),
        ({"num_layers": None, "lora_layers": 2, "lora_parameters": None, "rank": 4, "alpha": 8, "scale": 10.0}, 20.0),
        ({"lora_parameters": {"scale": 2.5}}, 2.5),
    ],
)
def test_scales(mlx_folder: Callable[..., Path], config: dict[str, Any], scale: float) -> None:
    assert {pair.scale for pair in read_adapter(mlx_folder(**config)).pairs.values()} == {scale}


def test_replies_are_those_of_the_peft_folder(
    mlx_folder: Callable[..., Path], tmp_path: Path, bundled: genai.Model
) -> None:
    adapter = read_adapter(folder := mlx_folder())
    assert find_adapters(tmp_path) == [folder] and describe(adapter)["scales"] == [20.0]
    assert sum(map(len, bind(adapter, bundled.lora_targets()))) == 4
    write_peft(adapter, tmp_path / "converted", np.float32)
    with genai.LLM(lora=True) as llm:
        llm.load_adapter(folder, "mlx", scale=1e-2)
        llm.load_adapter(tmp_path / "converted", "peft", scale=1e-2)
        mlx, peft, plain = llm.generate(["Once"] * 3, adapter=["mlx", "peft", None], temperature=0, max_tokens=8)
    assert mlx.token_ids == peft.token_ids != plain.token_ids


def changed(old: str, new: str) -> dict[str, np.ndarray]:
    return {name.replace(old, new): array for name, array in tensors().items()}


REFUSED: list[tuple[dict[str, np.ndarray] | None, dict[str, Any], str]] = [
    (None, {"fine_tune_type": "dora"}, "fine_tune_type is 'dora'"),
    (None, {"fine_tune_type": "full"}, "fine_tune_type is 'full'"),
    ({**tensors(), "model.layers.0.self_attn.q_proj.m": np.ones(256, np.float32)}, {}, "magnitude of DoRA"),
    ({**tensors(), "model.norm.weight": np.ones(256, np.float32)}, {}, "neither lora_a nor lora_b"),
    (changed("lora_b", "lora_a.x.lora_b"), {}, "has no factor"),
    ({}, {}, "contains no factors"),
    ({"model.layers.0.mlp.switch_mlp.up_proj.lora_a": np.ones((8, 4, 256), np.float32),
      "model.layers.0.mlp.switch_mlp.up_proj.lora_b": np.ones((8, 640, 4), np.float32)}, {}, "factors per expert"),
    (tensors(rank=3), {}, "has rank 3, but adapter_config.json has rank 4"),
    ({**tensors(), "x.lora_a": np.ones((4, 3), np.float32), "x.lora_b": np.ones((5, 4), np.float32)}, {}, "same rank"),
    (changed("", "") | {"x.lora_a": np.ones((4, 4), np.int32), "x.lora_b": np.ones((4, 4), np.int32)}, {}, "floats"),
    (None, {"lora_parameters": 3}, "lora_parameters is 3"),
    (None, {"lora_parameters": {"rank": 4}}, "scale is None"),
    (None, {"lora_parameters": {"rank": 4, "scale": math.nan}}, "scale is nan"),
    (None, {"lora_parameters": {"rank": -1, "scale": 1.0}}, "rank is -1"),
    (None, {"lora_parameters": {"rank": True, "scale": 1.0}}, "rank is True"),
    (None, {"num_layers": None, "lora_layers": 1, "lora_parameters": {"alpha": 4, "scale": 1.0}}, "there is no rank"),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(REFUSED)))
def test_adapters_that_are_refused(mlx_folder: Callable[..., Path], index: int) -> None:
    arrays, config, message = REFUSED[index]
    with pytest.raises(InputError, match=message) as raised:
        read_adapter(mlx_folder(arrays, **config))
    assert raised.value.why and raised.value.fix


def keyed(*keys: Any) -> dict[str, Any]:
    return {"lora_parameters": {"rank": RANK, "scale": 1.0, "keys": list(keys)}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_layers": -1}, ""),
        ({"num_layers": 0}, ""),
        ({"num_layers": 16}, ""),
        (keyed(*MODULES, "self_attn.v_proj"), ""),
        (keyed("self_attn.q_proj", "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"), ""),
        ({"num_layers": 1}, "num_layers is 1, .*layers.0"),
        ({"num_layers": None, "lora_layers": 1}, "num_layers is 1, .*layers.0"),
        ({"num_layers": "2"}, "num_layers is '2'"),
        (keyed("self_attn.q_proj"), "keys is .*layers.0.mlp.up_proj"),
        (keyed("q_proj", "mlp.up_proj"), "keys is .*layers.0.self_attn.q_proj"),  # keys have no ends of names
        ({"lora_parameters": {"rank": RANK, "scale": 1.0, "keys": "self_attn.q_proj"}}, "keys is 'self_attn.q_proj'"),
    ],
)
def test_the_config_selects_modules(mlx_folder: Callable[..., Path], config: dict[str, Any], message: str) -> None:
    """mlx-lm creates factors only for the selected modules, and ignores the other tensors of the file."""
    folder = mlx_folder(**config)
    if not message:
        assert len(read_adapter(folder).pairs) == 4
        return
    with pytest.raises(InputError, match=message) as raised:
        read_adapter(folder)
    assert raised.value.why and raised.value.fix


def test_the_last_layers_are_those_of_the_base(mlx_folder: Callable[..., Path], bundled: genai.Model) -> None:
    adapter = read_adapter(mlx_folder(num_layers=2))
    with pytest.raises(InputError, match=r"adapter_config\.json: num_layers is 2, .*layers.0"):
        bind(adapter, bundled.lora_targets())


def test_files_that_are_missing(mlx_folder: Callable[..., Path]) -> None:
    folder = mlx_folder()
    (folder / "adapters.safetensors").unlink()
    with pytest.raises(ModelFolderError, match=r"no adapters\.safetensors"):
        read_adapter(folder)
    (folder / "adapters.npz").write_bytes(b"")
    with pytest.raises(ModelFolderError, match=r"in adapters\.npz") as raised:
        read_adapter(folder)
    assert "save_safetensors" in raised.value.fix
