"""The prefix cache: what is found, what is not, and what evicts."""

import threading
from dataclasses import replace

import pytest

from genai.kvcache.pool import BlockError, BlockPool
from genai.kvcache.prefix import PrefixCache, PrefixOrigin
from genai.kvcache.table import BlockTable

ORIGIN = PrefixOrigin("model")


def written(pool: BlockPool, cache: PrefixCache, tokens: list[int], origin: PrefixOrigin = ORIGIN) -> BlockTable:
    """A table whose blocks hold `tokens` and are published."""
    table = BlockTable(pool, 4)
    table.append(len(tokens))
    cache.publish(table, tokens, origin)
    return table


def attached(pool: BlockPool, cache: PrefixCache, tokens: list[int], origin: PrefixOrigin = ORIGIN) -> BlockTable:
    table = BlockTable(pool, 4)
    assert cache.attach(table, tokens, origin) == table.length
    return table


def test_a_known_prefix_shares_its_full_blocks():
    pool = BlockPool(8)
    cache = PrefixCache(pool, 4)
    first = written(pool, cache, list(range(10)))
    second = attached(pool, cache, [*range(9), 99, 100])
    assert list(second.blocks) == list(first.blocks[:2])
    pool.check_integrity([first.blocks, second.blocks])


def test_the_last_token_is_always_left_to_compute():
    pool = BlockPool(8)
    cache = PrefixCache(pool, 4)
    written(pool, cache, list(range(8)))
    assert attached(pool, cache, list(range(8))).length == 4
    assert attached(pool, cache, list(range(9))).length == 8
    assert attached(pool, cache, [0]).length == 0
    assert attached(pool, cache, []).length == 0


@pytest.mark.parametrize(
    "other",
    [
        replace(ORIGIN, model="other"),
        replace(ORIGIN, adapter="pirate"),
        replace(ORIGIN, kv_format="float32"),
        replace(ORIGIN, rope_table=1),
    ],
)
def test_blocks_of_another_origin_are_not_found(other):
    pool = BlockPool(8)
    cache = PrefixCache(pool, 4)
    written(pool, cache, list(range(8)))
    assert attached(pool, cache, list(range(9)), other).length == 0


def test_a_block_counts_only_after_the_same_start():
    pool = BlockPool(8)
    cache = PrefixCache(pool, 4)
    written(pool, cache, [1, 2, 3, 4, 5, 6, 7, 8])
    assert attached(pool, cache, [5, 6, 7, 8, 9]).length == 0
    assert attached(pool, cache, [9, 2, 3, 4, 5, 6, 7, 8, 9]).length == 0


def test_released_blocks_stay_findable_until_memory_is_needed_and_the_end_goes_first():
    pool = BlockPool(3)
    cache = PrefixCache(pool, 4)
    written(pool, cache, list(range(12))).release()
    assert (pool.num_free, pool.num_idle) == (3, 3)
    block = pool.allocate()
    survivor = attached(pool, cache, list(range(12)))
    assert survivor.length == 8
    pool.check_integrity([[block], survivor.blocks])


def test_publishing_the_same_content_twice_keeps_one_copy():
    pool = BlockPool(8)
    cache = PrefixCache(pool, 4)
    first, second = (written(pool, cache, list(range(4))) for _ in range(2))
    second.release()
    assert pool.num_idle == 0
    assert list(attached(pool, cache, list(range(5))).blocks) == list(first.blocks)


def test_misuse_is_an_error_and_loses_no_block():
    pool = BlockPool(4)
    cache = PrefixCache(pool, 4)
    table = written(pool, cache, list(range(4)))
    with pytest.raises(BlockError, match="already holds"):
        cache.attach(table, list(range(5)), ORIGIN)
    pool.check_integrity([table.blocks])
    with pytest.raises(ValueError, match="3 tokens given for a table of 4"):
        cache.publish(table, [0, 1, 2], ORIGIN)
    with pytest.raises(ValueError, match="another pool"):
        cache.attach(BlockTable(pool, 8), [1], ORIGIN)
    with pytest.raises(ValueError, match="another pool"):
        cache.publish(BlockTable(BlockPool(1), 4), [], ORIGIN)
    with pytest.raises(ValueError, match="block_size = 0"):
        PrefixCache(pool, 0)


def test_threads_attach_and_publish_at_once():
    pool = BlockPool(24)
    cache = PrefixCache(pool, 4)
    failures = []

    def work(index: int) -> None:
        for turn in range(200):
            tokens = [turn % 5] * 6 + [index % 3] * 3
            table = BlockTable(pool, 4)
            cached = cache.attach(table, tokens, ORIGIN)
            try:
                table.append(len(tokens) - cached)
            except RuntimeError as error:
                failures.append(error)
            cache.publish(table, tokens, ORIGIN)
            table.release()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert pool.num_free == 24
    pool.check_integrity([])
