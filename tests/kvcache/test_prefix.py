"""The prefix cache: what is found, what is not, and what evicts."""

import threading

import pytest

from genai.kvcache.pool import BlockError, BlockPool
from genai.kvcache.sequence_cache import SequenceCache

ORIGIN = 0


def written(
    pool: BlockPool, tokens: list[int], origin: int = ORIGIN, numerics: list[int] | None = None
) -> SequenceCache:
    """A table whose blocks hold `tokens` and are published."""
    table = SequenceCache(pool, 4)
    table.append(len(tokens))
    table.publish(tokens, origin, bytearray(numerics or [0] * len(tokens)))
    return table


def attached(pool: BlockPool, tokens: list[int], origin: int = ORIGIN) -> SequenceCache:
    table = SequenceCache(pool, 4)
    assert table.reuse(tokens, origin, bytearray(len(tokens))) == table.length
    return table


def test_a_known_prefix_shares_its_full_blocks(sound):
    pool = BlockPool(8)
    first = written(pool, list(range(10)))
    second = attached(pool, [*range(9), 99, 100])
    assert list(second.tables[0].blocks) == list(first.tables[0].blocks[:2])
    sound(pool, [first.tables[0].blocks, second.tables[0].blocks])


def test_the_last_token_is_always_left_to_compute():
    pool = BlockPool(8)
    written(pool, list(range(8)))
    assert attached(pool, list(range(8))).length == 4
    assert attached(pool, list(range(9))).length == 8
    assert attached(pool, [0]).length == 0
    assert attached(pool, []).length == 0


def test_blocks_of_another_origin_are_not_found():
    pool = BlockPool(8)
    written(pool, list(range(8)))
    assert attached(pool, list(range(9)), origin=1).length == 0


def test_who_finds_blocks_learns_how_they_round():
    pool = BlockPool(8)
    written(pool, list(range(12)), numerics=[1] * 6 + [0] * 6)
    numerics = bytearray([1] * 13)
    assert SequenceCache(pool, 4).reuse(list(range(13)), ORIGIN, numerics) == 12
    assert numerics == bytearray([1] * 6 + [0] * 6 + [1])


def test_blocks_behind_others_that_round_differently_are_not_found():
    pool = BlockPool(8)
    ones = written(pool, list(range(4)), numerics=[1] * 4)
    written(pool, list(range(8)), numerics=[0] * 8)  # its first block stays unknown: the older one has its key
    found = attached(pool, list(range(9)))
    assert list(found.tables[0].blocks) == list(ones.tables[0].blocks)


def test_what_is_settled_is_found_only_as_it_is(sound):
    pool = BlockPool(8)
    first = written(pool, list(range(8)), numerics=[1] * 4 + [0] * 4)
    for settled, expected in ((8, 4), (5, 4), (4, 8), (0, 8)):
        numerics, table = bytearray([1] * 9), SequenceCache(pool, 4)
        assert table.reuse(list(range(9)), ORIGIN, numerics, settled) == expected
        assert numerics[:expected] == bytearray([1] * 4 + [0] * 4)[:expected] and numerics[8] == 1
        sound(pool, [first.tables[0].blocks, table.tables[0].blocks])
        table.release()


def test_a_block_counts_only_after_the_same_start():
    pool = BlockPool(8)
    written(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    assert attached(pool, [5, 6, 7, 8, 9]).length == 0
    assert attached(pool, [9, 2, 3, 4, 5, 6, 7, 8, 9]).length == 0


def test_released_blocks_stay_findable_until_memory_is_needed_and_the_end_goes_first(sound):
    pool = BlockPool(3)
    written(pool, list(range(12))).release()
    assert pool.num_free == 3
    block = pool.allocate(1)[0]
    survivor = attached(pool, list(range(12)))
    assert survivor.length == 8
    sound(pool, [[block], survivor.tables[0].blocks])


def test_publishing_the_same_content_twice_keeps_one_copy():
    pool = BlockPool(8)
    first, second = (written(pool, list(range(4))) for _ in range(2))
    second.release()
    assert list(attached(pool, list(range(5))).tables[0].blocks) == list(first.tables[0].blocks)


def test_misuse_is_an_error_and_loses_no_block(sound):
    pool = BlockPool(4)
    table = written(pool, list(range(4)))
    with pytest.raises(BlockError, match="already holds"):
        table.reuse(list(range(5)), ORIGIN, bytearray(5))
    sound(pool, [table.tables[0].blocks])
    with pytest.raises(ValueError, match="3 tokens given for a table of 4"):
        table.publish([0, 1, 2], ORIGIN, bytearray(3))


def test_threads_attach_and_publish_at_once(sound):
    pool = BlockPool(24)
    failures = []

    def work(index: int) -> None:
        for turn in range(200):
            tokens = [turn % 5] * 6 + [index % 3] * 3
            table = SequenceCache(pool, 4)
            cached = table.reuse(tokens, ORIGIN, bytearray(len(tokens)))
            try:
                table.append(len(tokens) - cached)
            except RuntimeError as error:
                failures.append(error)
            table.publish(tokens, ORIGIN, bytearray(len(tokens)))
            table.release()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert pool.num_free == 24
    sound(pool, [])
