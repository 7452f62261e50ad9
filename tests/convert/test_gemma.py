"""Gemma 3n and 4 in the forms in which they are published, and layers that share keys and values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import genai
from genai.convert import DecoderSpec, ExportOptions, write_model_folder
from genai.convert.architectures import find
from genai.convert.hf_config import HFConfig
from genai.convert.rope_scaling import ProportionalRope
from genai.convert.spec import PerLayerInputs
from genai.convert.tensors import tensor_shapes
from genai.errors import GenaiError, InputError
from tools.random_weights import RandomWeights

KINDS = ["sliding_attention", "full_attention"] * 2


def config(golden: Any, **changes: Any) -> HFConfig:
    given = {**golden("gemma4_text").config, **changes}
    return HFConfig({name: value for name, value in given.items() if value is not None})


def describe(golden: Any, **changes: Any) -> DecoderSpec:
    return find("gemma4_text").describe(config(golden, **changes))


def test_published_form(golden: Any) -> None:
    """Checkpoints of spring 2026 have no per_layer_config."""
    spec = describe(golden, per_layer_config=None, global_head_dim=10, num_global_key_value_heads=1)
    assert spec == describe(golden)
    assert (spec.full_head_size, spec.full_key_value_heads, spec.rotary_size) == (10, 1, 10)
    assert spec.rope_scaling == ProportionalRope(share=0.5)
    apart = describe(golden, per_layer_config=None, global_head_dim=10, attention_k_eq_v=False)
    assert (apart.full_key_value_heads, apart.keys_as_values) == (2, False)
    assert describe(golden, use_bidirectional_attention="vision") == spec
    same = describe(golden, per_layer_config={})  # as written if no layer differs
    assert (same.full_head_size, same.full_key_value_heads) == (same.head_size, same.num_key_value_heads)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_kv_shared_layers": 8}, "num_kv_shared_layers is 8"),
        ({"num_kv_shared_layers": 6}, "layer 2 has no window and attends to the keys"),
        ({"per_layer_config": {"2": {"head_dim": 10}}}, "per_layer_config is"),
        ({"per_layer_config": {layer: {"head_dim": int(layer) * 2} for layer in "257"}}, "per_layer_config is"),
        ({"per_layer_config": 7}, "an object for each layer"),
        ({"per_layer_config": {layer: {"head_dim": 21} for layer in "257"}}, "21 elements are rotated"),
        ({"per_layer_config": {layer: {"num_key_value_heads": 4} for layer in "257"}}, "full_key_value_heads is 4"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 40}, "vocab_size_per_layer_input is 40"),
        ({"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input is -1"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention to all"),
    ],
)
def test_contradictory_config(golden: Any, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(GenaiError) as caught:
        describe(golden, **changes)
    assert match in f"{caught.value.what}, {caught.value.why}"
    assert caught.value.fix


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"altup_num_inputs": 1}, "1 residual streams"),
        ({"altup_active_idx": 3}, "of which number 3 is active"),
        ({"laurel_rank": 0}, "laurel_rank is 0"),
        ({"activation_sparsity_pattern": [0.5]}, "activation_sparsity_pattern is [0.5]"),
        ({"activation_sparsity_pattern": 1.0}, "activation_sparsity_pattern is 1.0"),
        ({"activation_sparsity_pattern": ["high"] * 8}, "activation_sparsity_pattern is"),
        ({"intermediate_size": [75]}, "intermediate_size is [75]"),
        ({"hidden_size_per_layer_input": 0}, "other parts than those of Gemma 3n"),
        ({"num_kv_shared_layers": 8}, "num_kv_shared_layers is 8"),
    ],
)
def test_contradictory_config_of_gemma_3n(golden: Any, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(GenaiError) as caught:
        find("gemma3n_text").describe(HFConfig({**golden("gemma3n_text").config, **changes}))
    assert match in caught.value.what and caught.value.why and caught.value.fix


def test_defaults_of_gemma_3n(golden: Any) -> None:
    """The first ten of many layers are sparse, and every fifth layer has no window."""
    given = golden("gemma3n_text").config
    names = "activation_sparsity_pattern intermediate_size layer_types rope_parameters num_kv_shared_layers".split()
    config = {name: value for name, value in given.items() if name not in names} | {"num_hidden_layers": 30}
    spec = find("gemma3n_text").describe(HFConfig(config))
    assert spec.sparsities == (0.95,) * 10 + (0.0,) * 20
    assert [layer for layer in range(30) if spec.window(layer) is None] == [4, 9, 14, 19, 24, 29]
    assert (spec.intermediate_size, spec.num_cached_layers) == (16384, 15)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_cached_layers": 0}, "num_cached_layers is 0"),
        ({"intermediate_sizes": (8,)}, "intermediate_sizes is (8,)"),
        ({"full_head_size": 0, "local_rope_theta": 1e4}, "full_head_size is 0"),
        ({"full_head_size": 32}, "local_rope_theta is None"),
        ({"per_layer_inputs": PerLayerInputs(size=0, vocab_size=3)}, "0 elements"),
        ({"rope_scaling": ProportionalRope(share=1.5)}, "1.5 of the frequencies"),
    ],
)
def test_contradictory_specification(tiny: DecoderSpec, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError) as caught:
        replace(tiny, **changes)
    assert match in caught.value.what


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DecoderSpec]:
    """A folder in which layers 2 and 3 share the caches of layers 0 and 1, and with fewer tokens that have inputs."""
    spec = DecoderSpec(
        model_type="decoder", vocab_size=48, hidden_size=32, intermediate_size=32, num_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_size=16, context_length=96, sliding_window=8, sliding_layers=(0, 2), qk_norm=True,
        value_norm=True, num_cached_layers=2, per_layer_inputs=PerLayerInputs(size=8, vocab_size=40),
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("shared") / "model"
    options = ExportOptions(precision="fp32")
    return write_model_folder(folder, spec, options, RandomWeights(spec, seed=1)), spec


def test_shared_caches_count_once(shared: tuple[Path, DecoderSpec]) -> None:
    folder, spec = shared
    with genai.Model(folder, kv_dtype="fp32") as model:
        assert model.info.flattened, model.info.reason
        assert model.info.num_layers == 2
        assert model.info.kv_bytes_per_token == 2 * 2 * 16 * 4
        assert sum(len(group.layers) for group in model.info.cache_groups) == 2
    names = tensor_shapes(spec)
    assert names["model.embed_tokens_per_layer_rest.weight"] == (8, 32)
    assert "model.layers.3.self_attn.k_proj.weight" not in names


def test_same_past_with_other_keys_runs_alone(shared: tuple[Path, DecoderSpec], tmp_path: Path) -> None:
    """Two operators that store different keys in one cache cannot run over pages."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in shared[0].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    graph = onnx.load(folder / "model.onnx", load_external_data=False)
    last = [node for node in graph.graph.node if node.op_type == "GroupQueryAttention"][-1]
    last.input[1] = last.input[2]
    onnx.save(graph, folder / "model.onnx")
    with genai.Model(folder) as model:
        assert not model.info.flattened
        assert "share a past tensor, but not its content" in model.info.reason


def test_like_one_sequence_at_a_time(shared: tuple[Path, DecoderSpec]) -> None:
    """Forked, truncated and continued sequences have the logits of fresh ones."""
    from genai.engine.decoder import compute

    tokens = [int(token) for token in np.random.default_rng(5).integers(3, 48, 60)]
    with genai.Model(shared[0], accuracy="fp32") as model:
        fresh = model.decoder.open()
        fresh.append(tokens)
        expected = compute(model.decoder, [fresh], all_rows=True)[0]
        first = model.decoder.open()
        first.append(tokens)
        compute(model.decoder, [first])
        first.truncate(45)
        fork = first.fork()
        for rows in compute(model.decoder, [first, fork], all_rows=True):
            assert np.abs(rows - expected[-len(rows) :]).max() <= 1e-5
        for sequence in (fresh, first, fork):
            sequence.close()
