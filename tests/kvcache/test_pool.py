"""The block pool: references, states, eviction, misuse, threads."""

import threading
import time

import pytest

from genai.kvcache.pool import BlockError, BlockPool, CacheFull
from tests.integrity import check_pool


def test_allocates_every_block_once_then_is_full():
    pool = BlockPool(3)
    assert sorted(pool.allocate(1)[0] for _ in range(3)) == [0, 1, 2]
    assert pool.num_free == 0
    with pytest.raises(CacheFull, match="1 cache blocks are needed, but only 0 of 3 are free"):
        pool.allocate(1)[0]


def test_low_ids_first_and_the_last_released_again_first():
    pool = BlockPool(8)
    assert pool.allocate(4) == [0, 1, 2, 3]
    pool.release([1])
    pool.release([3])
    assert pool.allocate(3) == [3, 1, 4]


def test_allocate_gives_all_or_nothing(sound):
    pool = BlockPool(4)
    pool.allocate(1)[0]
    with pytest.raises(CacheFull, match="4 cache blocks are needed, but only 3 of 4 are free"):
        pool.allocate(4)
    assert pool.num_free == 3
    assert pool.allocate(0) == []
    sound(pool, [[0]])


def test_a_shared_block_is_free_after_the_last_release():
    pool = BlockPool(1)
    block = pool.allocate(1)[0]
    pool.share([block])
    assert pool.references(block) == 2
    assert not pool.is_writable(block)
    pool.release([block])
    assert pool.num_free == 0
    assert pool.is_writable(block)
    pool.release([block])
    assert pool.num_free == 1


@pytest.mark.parametrize("operation", ["release", "share"])
def test_a_block_that_nobody_holds_cannot_be_used(operation, sound):
    pool = BlockPool(2)
    block = pool.allocate(1)[0]
    pool.release([block])
    with pytest.raises(BlockError, match=f"block {block} has no references"):
        getattr(pool, operation)([block])
    sound(pool, [])


@pytest.mark.parametrize("block", [-1, 2])
@pytest.mark.parametrize("operation", ["release", "share", "references", "is_writable"])
def test_a_block_outside_the_pool_is_an_error(operation, block):
    with pytest.raises(BlockError, match="which has the blocks 0 to 1"):
        getattr(BlockPool(2), operation)([block] if operation in ("release", "share") else block)


def test_share_shares_none_when_one_is_not_held():
    pool = BlockPool(2)
    held = pool.allocate(1)[0]
    with pytest.raises(BlockError):
        pool.share([held, 1 - held])
    assert pool.references(held) == 1


def test_sizes_are_checked():
    with pytest.raises(ValueError, match="num_blocks = 0"):
        BlockPool(0)
    with pytest.raises(ValueError, match="count = -1"):
        BlockPool(1).allocate(-1)


def test_a_published_block_is_found_until_it_is_evicted(sound):
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.publish(first, b"first")
    pool.publish(second, b"second")
    assert not pool.is_writable(first)
    pool.release([second, first])
    assert pool.num_free == 2
    assert pool.find(b"second") == (second, b"")
    assert pool.references(second) == 1
    sound(pool, [[second]])
    assert pool.allocate(1)[0] == first
    assert pool.find(b"first") is None
    with pytest.raises(CacheFull):
        pool.allocate(1)[0]


def test_eviction_takes_free_blocks_first_then_the_longest_idle():
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for block in blocks[:2]:
        pool.publish(block, bytes([block]))
    pool.release(blocks)
    assert pool.allocate(1)[0] == blocks[2]
    pool.release([pool.find(bytes([blocks[0]]))[0]])
    assert pool.allocate(1)[0] == blocks[1]
    assert pool.allocate(1)[0] == blocks[0]


def test_brief_blocks_are_evicted_before_others_until_they_are_found(sound):
    pool = BlockPool(6)
    blocks = pool.allocate(6)
    for index, block in enumerate(blocks):
        pool.publish(block, bytes([index]), is_brief=index >= 3)
    pool.release(blocks[:2])
    pool.release([blocks[5], blocks[4], blocks[3], blocks[2]])
    assert pool.num_free == 6
    found, _ = pool.find(bytes([3]))
    pool.release([found])  # it was useful, so it is like the others now
    assert [pool.allocate(1)[0] for _ in range(6)] == [blocks[index] for index in (5, 4, 0, 1, 2, 3)]
    sound(pool, [blocks])
    pool.publish(blocks[0], b"x", is_brief=True)
    assert pool.withdraw(blocks[0])
    pool.publish(blocks[0], b"x")
    pool.publish(blocks[1], b"y")
    pool.release([blocks[1], blocks[0]])
    assert [pool.allocate(1)[0] for _ in range(2)] == [blocks[1], blocks[0]]


def test_the_older_block_keeps_a_key(sound):
    pool = BlockPool(2)
    old, new = pool.allocate(2)
    pool.publish(old, b"key")
    pool.publish(old, b"key")
    pool.publish(new, b"key")
    assert pool.is_writable(new)
    assert pool.find(b"key") == (old, b"")
    sound(pool, [[old, new, old]])


def test_publishing_what_is_not_held_or_has_another_key_is_an_error():
    pool = BlockPool(2)
    block = pool.allocate(1)[0]
    with pytest.raises(BlockError, match="has no references"):
        pool.publish(1 - block, b"key")
    pool.publish(block, b"key")
    with pytest.raises(BlockError, match="already published"):
        pool.publish(block, b"other")


def test_contradictions_are_seen():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    with pytest.raises(AssertionError, match="references are"):
        check_pool(pool, [])
    pool._free.append(block)
    with pytest.raises(AssertionError, match="in 2 states"):
        check_pool(pool)
    pool._free.append(block)
    with pytest.raises(AssertionError, match="twice"):
        check_pool(pool)


class YieldingList(list):
    """Switches threads in the middle of every pool operation, so that a missing lock causes failures."""

    def pop(self, *args):
        time.sleep(0)
        return super().pop(*args)

    def append(self, item):
        time.sleep(0)
        super().append(item)


def test_threads_share_a_pool_without_losing_a_block(sound):
    pool = BlockPool(16)
    pool._free = YieldingList(pool._free)
    problems: list[object] = []
    in_use: set[int] = set()
    guard = threading.Lock()

    def turn(index: int, number: int) -> None:
        try:
            blocks = pool.allocate(1 + (number + index) % 7)
        except CacheFull:
            return
        with guard:
            problems.extend(in_use.intersection(blocks))
            in_use.update(blocks)
        pool.share(blocks)
        pool.release(blocks)
        pool.publish(blocks[0], bytes([index, number % 256]))
        with guard:
            in_use.difference_update(blocks)
        pool.release(blocks)

    def work(index: int) -> None:
        try:
            for number in range(200):
                turn(index, number)
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert pool.num_free == 16
    sound(pool, [])
