"""The prefix cache: hits, misses and eviction."""

import threading

import pytest

from genai.kvcache.groups import CacheGroup, GroupKind
from genai.kvcache.pool import BlockError, BlockPool, CacheFull
from genai.kvcache.sequence_cache import SequenceCache
from genai.kvcache.states import NO_STATE, StateTable

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
    with pytest.raises(BlockError, match="already has"):
        table.reuse(list(range(5)), ORIGIN, bytearray(5))
    sound(pool, [table.tables[0].blocks])
    with pytest.raises(ValueError, match="3 tokens were given for tables of 4 tokens"):
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


# --- several groups --------------------------------------------------------------------------------------------------

FULL, WINDOW = CacheGroup((0,)), CacheGroup((1,), GroupKind.WINDOW, 4)
MIXED = (FULL, WINDOW)


def forgotten(pool: BlockPool, key: bytes) -> None:
    """Unpublish a block, as if it had been evicted."""
    block = pool._block_of_key.pop(key)
    del pool._key_of_block[block], pool._note_of_block[block]
    if block in pool._idle:
        del pool._idle[block]
        pool._free.append(block)


@pytest.mark.parametrize("groups", [MIXED, (FULL, FULL)], ids=["full and window", "full twice"])
def test_blocks_of_two_groups_that_round_differently_are_not_one_prefix(groups: tuple[CacheGroup, ...], sound) -> None:
    pool = BlockPool(32)
    caches = [SequenceCache(pool, 4, groups) for _ in range(2)]
    for cache, numerics in zip(caches, ([1] * 12, [1] * 8 + [0] * 4), strict=True):
        cache.append(12)
        cache.publish(list(range(12)), ORIGIN, bytearray(numerics))
        if cache is caches[0]:
            forgotten(pool, cache._keys[2] + b"1")
    third = SequenceCache(pool, 4, groups)
    assert third.reuse(list(range(13)), ORIGIN, bytearray(13)) == 8
    sound(pool, [cache.held_blocks for cache in (*caches, third)])


def test_what_replaced_tokens_that_were_taken_back_is_published_as_itself() -> None:
    pool = BlockPool(3)
    cache = written(pool, list(range(8)))
    cache.truncate(4)
    pool.release(pool.allocate(2))  # the second block is evicted
    cache.append(4)
    cache.publish([0, 1, 2, 3, 9, 9, 9, 9], ORIGIN, bytearray(8))
    assert attached(pool, list(range(9))).length == 4
    assert attached(pool, [0, 1, 2, 3, 9, 9, 9, 9, 0]).length == 8


def test_a_block_that_was_copied_and_left_its_window_is_given_back_once(sound) -> None:
    pool = BlockPool(16)
    first = SequenceCache(pool, 4, (WINDOW,))
    first.append(6)
    second = first.fork()
    _, copies = second.append(10)
    assert len(copies) == 1
    second.leave_behind(16)
    assert second.tables[0].num_gone == 2
    second.truncate(0)
    sound(pool, [first.held_blocks])


def test_states_decide_how_long_a_prefix_is(sound) -> None:
    """A prefix must end exactly at a snapshot; where there was none, the next sequence stores one."""
    pool, states = BlockPool(32), BlockPool(8)
    groups = (FULL, CacheGroup((1,), GroupKind.STATE))

    def started(tokens: list[int]) -> SequenceCache:
        cache = SequenceCache(pool, 4, groups, states)
        found = cache.reuse(tokens, ORIGIN, bytearray(len(tokens)))
        count = len(tokens) - found
        assert cache.append_states(count, len(tokens))[0] == (cache.states.slots[found] if found else NO_STATE)
        cache.append(count)
        cache.publish(tokens, ORIGIN, bytearray(len(tokens)))
        return cache

    first = started(list(range(15)))
    second = started([*range(12), 50, 51, 52])
    assert [*second.states.slots] == [12, 15] and 12 in second.boundaries, "no state stood behind the common tokens"
    third = SequenceCache(pool, 4, groups, states)
    assert third.reuse([*range(12), 60], ORIGIN, bytearray(13)) == 12 == third.states.length
    assert third.truncate(9) == 0, "its state cannot be cut"
    second.truncate(14)
    assert second.length == 12
    for cache in (first, second, third):
        cache.release()
    sound(pool, [])
    sound(states, [])


def test_a_full_pool_of_states_is_refused_and_nothing_is_lost() -> None:
    pool = BlockPool(2)
    one, other = StateTable(pool, 32), StateTable(pool, 32)
    assert one.append(5)[1] == {5: 0}
    assert one.append(3, keep=[6, 7])[1] == {8: 1}, "what is wished for besides has no room"
    with pytest.raises(CacheFull):
        other.append(1)
    assert other.length == 0 and not other.slots and one.slots == {5: 0, 8: 1}
    with pytest.raises(ValueError, match="states are stored only at"):
        one.truncate(7)
    one.truncate(0)
    assert other.append(1)[1] and pool.num_free == 1


def test_what_leaves_a_window_is_kept_where_others_may_go_on(sound) -> None:
    pool = BlockPool(64)
    tokens = list(range(40))

    def read(own: list[int], boundaries: list[int]) -> tuple[SequenceCache, int]:
        """Block by block, as in the prefill of a long prompt."""
        cache = SequenceCache(pool, 4, MIXED)
        cache.boundaries |= {*boundaries}
        numerics = bytearray(len(own))
        found = cache.reuse(own, ORIGIN, numerics)
        for length in range(found + 4, len(own) + 1, 4):
            cache.append(4)
            cache.publish_leaving(length, own, ORIGIN, numerics)
            cache.leave_behind(length)
        cache.publish(own, ORIGIN, numerics)
        return cache, found

    first, _ = read(tokens, [20])
    assert sum(pool.references(block) == 0 for block in pool._key_of_block) == 1, "the block before the boundary"
    caches = [first]
    for own, expected in (
        ([*tokens[:22], *[90] * 18], 20),  # at the boundary
        ([*tokens[:30], *[91] * 10], 20),  # the longest that is left
        ([*tokens[:30], *[92] * 10], 28),  # where the one before it departed
    ):
        cache, found = read(own, [])
        assert found == expected
        caches.append(cache)
    sound(pool, [cache.held_blocks for cache in caches])


def test_a_window_that_would_reach_what_is_forgotten() -> None:
    cache = SequenceCache(BlockPool(32), 4, (CacheGroup((0,)), CacheGroup((1,), GroupKind.WINDOW, 9)))
    cache.append(24)
    cache.leave_behind(24)
    assert cache.tables[1].num_gone == 3
    assert cache.can_forget(0, 2) and not cache.can_forget(2, 3)
