"""Cache groups and layouts: sizes and validation."""

import dataclasses

import pytest

from genai.kvcache.groups import CacheGroup, CacheLayout

PAGED = CacheGroup(index=0, layers=(0, 1), kv_heads=2, head_size=8, v_head_size=8, dtype="float16")
STATE = CacheGroup(index=1, layers=(2,), kind="fixed_state", state_bytes=96)


def test_sizes():
    assert PAGED.bytes_per_token == 2 * 2 * (8 + 8) * 2
    assert PAGED.bytes_per_sequence == 0
    assert (STATE.bytes_per_token, STATE.bytes_per_sequence) == (0, 96)
    layout = CacheLayout((PAGED, STATE), 16)
    assert (layout.bytes_per_token, layout.bytes_per_sequence, layout.bytes_per_block) == (128, 96, 2048)
    assert layout.num_layers == 3


def test_layers_that_share_an_entry_cost_nothing():
    group = dataclasses.replace(PAGED, shared_layers=((4, 1), (5, 1)))
    assert group.bytes_per_token == PAGED.bytes_per_token
    assert group.all_layers == (0, 1, 4, 5)
    assert CacheLayout((group,), 4).num_layers == 6


def test_a_latent_group_has_no_values():
    latent = CacheGroup(index=0, layers=(0,), kv_heads=1, head_size=576, v_head_size=0, dtype="float16")
    assert latent.bytes_per_token == 1152


def test_they_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PAGED.kv_heads = 4
    assert hash(PAGED) == hash(dataclasses.replace(PAGED))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "latent"}, "kind = 'latent'"),
        ({"kv_heads": 0}, "kv_heads = 0"),
        ({"head_size": 0}, "head_size = 0"),
        ({"v_head_size": -1}, "v_head_size = -1"),
        ({"state_bytes": 4}, "state_bytes = 4 has no meaning"),
        ({"window": 0}, "window = 0"),
        ({"dtype": "int8"}, "dtype = 'int8'"),
        ({"layers": ()}, "layers is empty"),
        ({"shared_layers": ((3, 2),)}, "layer 3 shares the entry of layer 2"),
        ({"kind": "fixed_state"}, "state_bytes = 0"),
    ],
)
def test_a_group_is_checked(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PAGED, **change)


def test_a_state_group_keeps_nothing_per_token():
    with pytest.raises(ValueError, match="kv_heads = 2 has no meaning"):
        dataclasses.replace(STATE, kv_heads=2)


@pytest.mark.parametrize(
    ("groups", "block_size", "message"),
    [
        ((PAGED,), 0, "block_size = 0"),
        ((), 4, "at least one group"),
        ((STATE,), 4, "numbered from 0"),
        ((PAGED, dataclasses.replace(PAGED, index=1)), 4, "layer 0 is listed 2 times"),
        ((dataclasses.replace(PAGED, layers=(-1,)),), 4, "layer -1"),
    ],
)
def test_a_layout_is_checked(groups, block_size, message):
    with pytest.raises(ValueError, match=message):
        CacheLayout(groups, block_size)
