"""The cache's memory: shapes, on-demand growth, block copies, closing, and the fallback."""

import gc
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from genai.common import host_memory
from genai.kernels.cache_layout import PAGE_TOKENS
from genai.kernels.host_memory import HostMemory
from genai.kvcache.pool import BlockPool
from genai.kvcache.storage import CacheLayout, LayerShape, PagedStorage, blocks_that_fit
from genai.kvcache.table import BlockTable

FLOATS = LayerShape(kv_heads=2, head_size=8, v_head_size=4)
LAYOUT = CacheLayout((FLOATS, LayerShape(1, 16, 16, dtype="float16"), FLOATS), PAGE_TOKENS)


@pytest.fixture(params=["reserved", "fallback"])
def storage(request, monkeypatch):
    if request.param == "fallback":
        monkeypatch.setattr(host_memory, "_reserve_flags", lambda: None)
    elif not sys.platform.startswith("linux"):
        pytest.skip("reservations are Linux's")
    result = PagedStorage(LAYOUT, 6)
    yield result
    result.close()


def resident_bytes() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("smaps_rollup has no Anonymous line")


def test_shapes_and_dtypes(storage):
    layers = storage.layers
    assert len(layers) == 3
    assert layers[0].keys.shape == (6, 2, 8, 32)
    assert layers[0].values.shape == (6, 2, 32, 4)
    assert (layers[0].keys.dtype, layers[1].keys.dtype) == (np.float32, np.float16)
    assert layers[1].values.shape == (6, 1, 32, 16)
    assert all(array[3:4].flags.c_contiguous for cache in layers for array in (cache.keys, cache.values))


def test_sizes():
    assert LAYOUT.bytes_per_token == 2 * 2 * (8 + 4) * 4 + (16 + 16) * 2
    assert LAYOUT.bytes_per_block == LAYOUT.bytes_per_token * PAGE_TOKENS


@pytest.mark.parametrize(("dtype", "per_head"), [("int8", 64 + 2 + 128 + 2), ("int4", 32 + 4 + 64 + 8)])
def test_packed_layers(dtype, per_head):
    """Heads of 64 and 128 columns: their integers, and 2-byte scales per token, or per 32 columns."""
    layout = CacheLayout((LayerShape(3, 64, 128, dtype=dtype), FLOATS), PAGE_TOKENS)
    assert layout.layers[0].bytes_per_token == 3 * per_head
    storage = PagedStorage(layout, 4)
    packed, floats = storage.layers
    assert (packed.kind, packed.kv_heads, packed.head_size, packed.v_head_size) == (dtype, 3, 64, 128)
    assert floats.kind == "float32"
    assert (packed.keys[:1].nbytes + packed.values[:1].nbytes) == 32 * 3 * per_head
    packed.keys[1], packed.values[1] = 7, 9
    HostMemory().copy_blocks(storage.blocks, [(1, 3)])
    assert (packed.keys[3] == 7).all() and (packed.values[3] == 9).all() and not packed.keys[2].any()
    storage.close()


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float8", 1)])
def test_layers_of_bits_that_stand_for_floats(dtype, size):
    layout = CacheLayout((LayerShape(3, 10, 14, dtype=dtype), FLOATS), PAGE_TOKENS)
    assert layout.layers[0].bytes_per_token == 3 * (10 + 14) * size
    storage = PagedStorage(layout, 4)
    narrow, floats = storage.layers
    assert (narrow.kind, narrow.kv_heads, narrow.head_size, narrow.v_head_size) == (dtype, 3, 10, 14)
    assert (narrow.keys.itemsize, floats.kind) == (size, "float32")
    narrow.keys[1], narrow.values[1] = 7, 9
    HostMemory().copy_blocks(storage.blocks, [(1, 3)])
    assert (narrow.keys[3] == 7).all() and (narrow.values[3] == 9).all() and not narrow.keys[2].any()
    assert not floats.keys.any()
    storage.close()


def test_blocks_come_to_the_host_and_go_back():
    storage, host = PagedStorage(CacheLayout((FLOATS,), PAGE_TOKENS), 3), HostMemory()
    content = np.arange(storage.blocks.shape[1], dtype=np.uint8)
    host.write_block(storage.blocks, 2, content)
    found = host.read_block(storage.blocks, 2)
    host.write_block(storage.blocks, 2, content[::-1])
    assert np.array_equal(found, content)  # a copy
    assert np.array_equal(storage.blocks[2], content[::-1]) and not storage.blocks[:2].any()
    storage.close()


@pytest.mark.parametrize(("dtype", "row_bytes"), [("float32", 4 * 12), ("float16", 2 * 12), ("int8", 12 + 2)])
def test_latent_rows_are_stored_once(dtype, row_bytes):
    layout = CacheLayout((LayerShape(kv_heads=1, head_size=12, v_head_size=0, dtype=dtype), FLOATS), PAGE_TOKENS)
    storage = PagedStorage(layout, 2)
    assert layout.layers[0].bytes_per_token == storage.layers[0].token_bytes == row_bytes
    assert storage.layers[0].values is None and storage.layers[0].v_head_size == 12
    assert storage.parts[1][0] == -(-row_bytes * PAGE_TOKENS // 64) * 64  # the next layer follows the keys
    HostMemory().copy_blocks(storage.blocks, [(0, 1)])
    storage.close()


def test_arrays_do_not_overlap_and_start_on_cache_lines(storage):
    arrays = [array for cache in storage.layers for array in (cache.keys, cache.values)]
    for number, array in enumerate(arrays, 1):
        assert not array.any()
        array[...] = number
    for number, array in enumerate(arrays, 1):
        assert (array == number).all()
    starts = np.array([array.__array_interface__["data"][0] for array in arrays])
    assert not (starts % 64).any()


def test_a_block_holds_what_all_layers_keep(storage):
    """Memory then grows in whole blocks, and few huge pages serve a sequence."""
    arrays = [array for cache in storage.layers for array in (cache.keys, cache.values)]
    places = np.array([[array[block].__array_interface__["data"][0] for array in arrays] for block in range(6)])
    ends = places + [array[0].nbytes for array in arrays]
    assert (places[1:].min(axis=1) >= ends[:-1].max(axis=1)).all()


def test_copied_blocks_are_those_of_every_layer_and_nothing_else(storage):
    rng = np.random.default_rng(0)
    for cache in storage.layers:
        cache.keys[...] = rng.standard_normal(cache.keys.shape)
        cache.values[...] = rng.standard_normal(cache.values.shape)
    before = [(cache.keys.copy(), cache.values.copy()) for cache in storage.layers]
    HostMemory().copy_blocks(storage.blocks, [(1, 4), (0, 2), (4, 5)])
    for (keys, values), cache in zip(before, storage.layers, strict=True):
        for array in (keys, values):
            array[4], array[2], array[5] = array[1], array[0], array[1]
        np.testing.assert_array_equal(cache.keys, keys)
        np.testing.assert_array_equal(cache.values, values)


def test_a_storage_closes_twice(storage):
    storage.close()
    storage.close()
    assert storage.layers == ()


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="num_blocks = 0"):
        PagedStorage(LAYOUT, 0)


def test_random_forks_and_rewinds_keep_every_sequence_readable(storage, sound):
    """Copy-on-write against plain arrays: each token has a distinct key."""
    rng = np.random.default_rng(1)
    pool = BlockPool(storage.num_blocks)
    tables = [(BlockTable(pool, PAGE_TOKENS), [])]
    for step in range(300):
        table, values = tables[rng.integers(len(tables))]
        action = rng.integers(4)
        if action == 0 and len(tables) < 3:
            tables.append((table.fork(), list(values)))
        elif action == 1:
            length = int(rng.integers(len(values) + 1))
            table.truncate(length)
            del values[length:]
        elif action == 2 and len(tables) > 1:
            table.release()
            tables = [entry for entry in tables if entry[0] is not table]
        elif pool.num_free > 2:
            slots, copies = table.append(int(rng.integers(1, PAGE_TOKENS + 2)))
            HostMemory().copy_blocks(storage.blocks, copies)
            for slot in slots:
                values.append(step + slot / 100)
                storage.layers[0].keys[slot // PAGE_TOKENS, :, :, slot % PAGE_TOKENS] = values[-1]
                storage.layers[2].values[slot // PAGE_TOKENS, :, slot % PAGE_TOKENS] = -values[-1]
        sound(pool, [entry[0].held_blocks for entry in tables])
        for other, expected in tables:
            keys = storage.layers[0].keys[list(other.blocks)].transpose(0, 3, 1, 2).reshape(-1, 2, 8)
            np.testing.assert_array_equal(keys[: len(expected), 1, 3], np.array(expected, np.float32))
            back = storage.layers[2].values[list(other.blocks)].transpose(0, 2, 1, 3).reshape(-1, 2, 4)
            np.testing.assert_array_equal(back[: len(expected), 0, 0], -np.array(expected, np.float32))


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's smaps_rollup")
class TestMemory:
    LAYOUT = CacheLayout((LayerShape(8, 128, 128),), 32)
    NUM_BLOCKS = 32768  # 8 GiB

    def test_a_reservation_costs_nothing_until_written_and_close_gives_all_back(self):
        gc.collect()
        start = resident_bytes()
        storage = PagedStorage(self.LAYOUT, self.NUM_BLOCKS)
        assert resident_bytes() - start < 4 * 2**20
        keys, values = storage.layers[0].keys, storage.layers[0].values
        address = keys.__array_interface__["data"][0]
        for blocks in (64, 256):
            keys[:blocks] = values[:blocks] = 1
            grown, written = resident_bytes() - start, 2 * keys[:blocks].nbytes
            # A huge page more may be touched at either end.
            assert written <= grown < written + 8 * 2**20
        assert storage.layers[0].keys.__array_interface__["data"][0] == address
        storage.close()
        assert resident_bytes() - start < 4 * 2**20
        assert not keys[:256].any()

    def test_twenty_storages_in_a_row_leave_memory_flat(self):
        """In a process of its own, because other threads and garbage of a test worker change the resident memory."""
        code = (
            "from tests.kvcache.test_storage import TestMemory as T, resident_bytes, PagedStorage\n"
            "def once():\n"
            "    storage = PagedStorage(T.LAYOUT, 64)\n"
            "    storage.layers[0].keys[...] = 1\n"
            "    storage.layers[0].values[...] = 1\n"
            "    storage.close()\n"
            "once()\n"
            "start = resident_bytes()\n"
            "for _ in range(20): once()\n"
            "print(resident_bytes() - start)\n"
        )
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
        )
        assert int(run.stdout) < 4 * 2**20


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reservations are Linux's")
def test_more_than_the_address_space_is_a_memory_error():
    layout = CacheLayout((LayerShape(2**20, 2**10, 2**10),), 2**10)
    with pytest.raises(MemoryError, match="cannot reserve"):
        PagedStorage(layout, 2**12)


def test_blocks_that_fit() -> None:
    layout = CacheLayout((LayerShape(2, 8, 8),) * 2, 16)
    per_block = 2 * 2 * 16 * 4 * 16
    assert blocks_that_fit(layout, per_block * 3) == 3
    assert blocks_that_fit(layout, per_block * 3 - 1) == 2
    assert blocks_that_fit(layout, -5) == 0
