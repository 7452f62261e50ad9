"""Specifications and options: what they derive, and every value that they refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from genai.convert import DecoderSpec, ExportOptions, LongRope
from genai.errors import InputError, OptionError


def test_derived_sizes(tiny: DecoderSpec) -> None:
    assert (tiny.query_size, tiny.key_value_size, tiny.rotary_size) == (64, 32, 16)
    assert replace(tiny, partial_rotary_factor=0.4).rotary_size == 6


def test_windows(tiny: DecoderSpec) -> None:
    assert tiny.window(0) is None
    assert [replace(tiny, sliding_window=8).window(layer) for layer in range(2)] == [8, 8]
    some = replace(tiny, sliding_window=8, sliding_layers=(1,))
    assert [some.window(layer) for layer in range(2)] == [None, 8]
    none = replace(tiny, sliding_window=8, sliding_layers=())
    assert none.window(0) is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"num_layers": -1}, "num_layers is -1"),
        ({"num_attention_heads": 5}, "num_attention_heads is 5 and num_key_value_heads is 2"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"hidden_activation": "relu6"}, "'relu6'"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0"),
        ({"partial_rotary_factor": 0.0}, "partial_rotary_factor is 0.0"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
        ({"partial_rotary_factor": 0.33}, "5 elements are rotated"),
        ({"head_size": 15}, "15 elements are rotated"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"sliding_window": 2**31}, "sliding_window is 2147483648"),
        ({"sliding_window": 4, "sliding_layers": (2,)}, "contains layer 2"),
        ({"attention_softcap": -1.0}, "attention_softcap is -1.0"),
        ({"logit_softcap": -1.0}, "logit_softcap is -1.0"),
        ({"eos_token_ids": ()}, "eos_token_ids is empty"),
        ({"eos_token_ids": (2, 48)}, "eos_token_ids contains 48"),
        ({"bos_token_id": -1}, "bos_token_id contains -1"),
        ({"pad_token_id": 99}, "pad_token_id contains 99"),
    ],
)
def test_contradictory_specifications(tiny: DecoderSpec, change: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match="invalid decoder specification") as caught:
        replace(tiny, **change)
    assert named in caught.value.what
    assert caught.value.why
    assert caught.value.fix


def test_long_rope_of_another_head_size(tiny: DecoderSpec) -> None:
    scaling = LongRope(short_factor=(1.0,) * 8, long_factor=(2.0,) * 7, original_max_position_embeddings=16)
    with pytest.raises(InputError, match="long_factor has 7 entries"):
        replace(tiny, rope_scaling=scaling)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("precision", "int5"),
        ("precision", None),
        ("head_precision", "fp64"),
        ("embedding_precision", "int2"),
        ("block_size", 24),
        ("block_size", 8),
        ("block_size", 512),
        ("accuracy_level", 5),
        ("accuracy_level", -1),
    ],
)
def test_unknown_option_values(option: str, value: object) -> None:
    with pytest.raises(OptionError, match=option) as caught:
        ExportOptions(**{option: value})  # type: ignore[arg-type]
    assert repr(value) in caught.value.what
    assert caught.value.why
    assert caught.value.fix


@pytest.mark.parametrize(
    ("options", "tied", "embedding", "head"),
    [
        (ExportOptions(), True, "int4", "int4"),
        (ExportOptions(), False, "fp32", "int4"),
        (ExportOptions(head_precision="int8"), True, "int8", "int8"),
        (ExportOptions(precision="int8"), True, "fp32", "int8"),
        (ExportOptions(precision="fp32"), True, "fp32", "fp32"),
        (ExportOptions(embedding_precision="int8"), False, "int8", "int4"),
    ],
)
def test_default_precisions(options: ExportOptions, tied: bool, embedding: str, head: str) -> None:
    assert (options.embedding(tied=tied), options.head) == (embedding, head)
