"""Block tables: growth, rewind, forks, and copy-on-write, one behaviour at a time."""

import pytest

from genai.kvcache.pool import BlockPool, CacheFull
from genai.kvcache.table import GONE, BlockTable
from tests.integrity import check_pool, check_table


def table_of(pool: BlockPool, num_tokens: int, block_size: int = 4) -> BlockTable:
    table = BlockTable(pool, block_size)
    table.append(num_tokens)
    return table


def test_slots_follow_the_blocks():
    pool = BlockPool(8)
    pool.allocate(1)[0]
    table = BlockTable(pool, 4)
    assert table.append(3) == ([4, 5, 6], [])
    assert table.append(3) == ([7, 8, 9], [])
    assert (table.length, list(table.blocks)) == (6, [1, 2])
    assert table.append(0) == ([], [])
    assert table.append(7) == ([10, 11, 12, 13, 14, 15, 16], [])


def test_a_full_pool_leaves_the_table_as_it_was():
    pool = BlockPool(2)
    table = table_of(pool, 3)
    with pytest.raises(CacheFull, match="2 cache blocks are needed, but only 1 of 2 are free"):
        table.append(6)
    assert (table.length, list(table.blocks), pool.num_free) == (3, [0], 1)
    assert table.append(5) == ([3, 4, 5, 6, 7], [])


def test_truncate_frees_blocks_and_later_slots_are_reused(sound):
    pool = BlockPool(4)
    table = table_of(pool, 10)
    table.truncate(5)
    assert (table.length, len(table.blocks), pool.num_free) == (5, 2, 2)
    assert table.append(1) == ([5], [])
    table.truncate(4)
    assert len(table.blocks) == 1
    table.release()
    table.release()
    assert (table.length, pool.num_free) == (0, 4)
    sound(pool, [])


@pytest.mark.parametrize("length", [-1, 4])
def test_truncate_refuses_a_length_it_does_not_have(length):
    with pytest.raises(ValueError, match=f"length = {length}: the table has 3 tokens"):
        table_of(BlockPool(2), 3).truncate(length)


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="block_size = 0"):
        BlockTable(BlockPool(1), 0)
    with pytest.raises(ValueError, match="num_tokens = -1"):
        BlockTable(BlockPool(1), 4).append(-1)


def test_a_fork_shares_until_it_writes(sound):
    pool = BlockPool(8)
    table = table_of(pool, 6)
    fork = table.fork()
    assert list(fork.blocks) == list(table.blocks)
    slots, copies = fork.append(1)
    assert copies == [(1, 2)]
    assert slots == [2 * 4 + 2]
    assert (list(table.blocks), list(fork.blocks)) == ([0, 1], [0, 2])
    sound(pool, [table.held_blocks, fork.held_blocks])


def test_forks_at_a_block_boundary_copy_nothing():
    pool = BlockPool(8)
    table = table_of(pool, 8)
    fork = table.fork()
    assert fork.append(1)[1] == []
    assert table.append(1)[1] == []
    assert fork.blocks[-1] != table.blocks[-1]


def test_the_last_holder_writes_in_place():
    pool = BlockPool(8)
    table = table_of(pool, 6)
    fork = table.fork()
    table.release()
    assert fork.append(1) == ([6], [])


def test_a_copy_source_is_held_until_the_next_call():
    pool = BlockPool(3)
    table = table_of(pool, 2)
    fork = table.fork()
    assert fork.append(1) == ([6], [(0, 1)])
    table.release()
    assert pool.references(0) == 1
    assert pool.num_free == 1
    fork.append(1)
    assert pool.num_free == 2


def test_the_last_owner_of_a_copied_block_writes_into_it_once_the_copies_are_settled():
    pool = BlockPool(2)
    first = BlockTable(pool, 4)
    first.append(3)
    second = first.fork()
    first.append(1)
    with pytest.raises(CacheFull):
        second.append(1)
    first.settle()
    slots, copies = second.append(1)
    assert copies == [] and slots == [second.blocks[0] * 4 + 3] and first.blocks != second.blocks
    first.truncate(3)
    assert first.length == 3 and pool.num_free == 0, "a settled copy stays"


def test_a_fork_that_finds_no_block_for_its_copy_stays_as_it_was(sound):
    pool = BlockPool(1)
    table = table_of(pool, 2)
    fork = table.fork()
    with pytest.raises(CacheFull):
        fork.append(1)
    assert (fork.length, list(fork.blocks)) == (2, [0])
    sound(pool, [table.held_blocks, fork.held_blocks])


def test_truncating_straight_after_an_append_undoes_the_copy(sound):
    pool = BlockPool(4)
    table = table_of(pool, 2)
    fork = table.fork()
    fork.append(5)
    fork.truncate(2)
    assert list(fork.blocks) == list(table.blocks)
    sound(pool, [table.held_blocks, fork.held_blocks])
    fork.append(5)
    fork.truncate(3)
    assert fork.blocks[0] != table.blocks[0]
    sound(pool, [table.held_blocks, fork.held_blocks])


def test_a_published_block_is_copied_before_it_is_written_again():
    pool = BlockPool(4)
    table = table_of(pool, 4)
    pool.publish(table.blocks[0], b"key")
    table.truncate(3)
    assert table.append(1) == ([7], [(0, 1)])
    table.append(0)
    assert pool.find(b"key") == (0, b"")


def test_blocks_that_are_left_behind_are_given_back() -> None:
    pool = BlockPool(8)
    table = BlockTable(pool, 4)
    table.append(18)
    before = list(table.blocks)
    other = table.fork()
    table.leave_behind(2)
    table.leave_behind(1)
    assert [*table.blocks] == [GONE, GONE, *before[2:]] and table.num_gone == 2 and table.length == 18
    check_pool(pool, [table.held_blocks, other.held_blocks])
    for index in (2, 3):
        pool.publish(table.blocks[index], b"key %d" % index)
    other.release()
    check_pool(pool, [table.held_blocks])
    assert pool.num_free == 5, "the published ones are held"
    third = table.fork()
    check_table(third)
    third.append(5)
    third.truncate(6)
    assert [*third.blocks] == [GONE, GONE] and third.own_blocks == 0
    third.truncate(0)
    assert third.num_gone == 0
    assert [source for source, _ in table.forget(1, 2)] == before[3:4], "only the published one is copied"
    assert table.num_gone == 1 and table.length == 10
    pool.release(before[3:4])
    table.leave_behind(99)
    assert table.num_gone == 2 and len(table.held_blocks) == 1
    table.release()
    check_pool(pool, [])


def test_blocks_that_only_their_own_prefix_cache_holds_need_no_copies() -> None:
    """If there are no free blocks for copies, blocks with a single holder are unpublished and may then be changed."""
    pool = BlockPool(5)
    table = BlockTable(pool, 4)
    table.append(20)
    for index, block in enumerate(table.blocks):
        pool.publish(block, b"key %d" % index)
    behind = list(table.blocks[3:])
    assert table.forget(1, 2) == []
    assert [*table.blocks[1:]] == behind
    assert pool.find(b"key 3") is pool.find(b"key 4") is None and pool.find(b"key 0") is not None
    pool.release(table.blocks[:1])
    other = table.fork()
    pool.allocate(2)
    with pytest.raises(CacheFull):  # what another one reads stays as it is
        table.forget(0, 1)
    assert [*table.blocks] == [*other.blocks] and table.length == 12
