"""Random operations on caches that share a pool, with random groups, compared after each with plain lists of tokens."""

import os

import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from genai.kvcache.groups import CacheGroup, GroupKind
from genai.kvcache.pool import BlockPool, CacheFull
from genai.kvcache.sequence_cache import SequenceCache
from genai.kvcache.table import GONE
from tests.drawing import VARIABLE, Draw
from tests.integrity import check_pool, check_table

BLOCK_SIZE = 4
NUM_BLOCKS = 12
ORIGINS = (0, 1)
KINDS = (
    (GroupKind.FULL, 0),
    (GroupKind.WINDOW, 1),
    (GroupKind.WINDOW, 5),
    (GroupKind.WINDOW, 9),
    (GroupKind.CHUNKED, 6),
)


class Tables(RuleBasedStateMachine):
    """Each slot stores (group, origin, prefix of tokens, their numerics): everything that a key computed there depends
    on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.memory: dict[int, object] = {}
        self.caches: list[tuple[SequenceCache, list[int], int, bytearray]] = []

    @initialize(kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3))
    def make(self, kinds: list[tuple[GroupKind, int]]) -> None:
        self.groups = tuple(CacheGroup((layer,), *kind) for layer, kind in enumerate(kinds))
        self.num_blocks = NUM_BLOCKS * len(kinds)
        self.pool = BlockPool(self.num_blocks)

    def pick(self, data: st.DataObject) -> tuple[SequenceCache, list[int], int, bytearray]:
        return self.caches[data.draw(st.integers(0, len(self.caches) - 1))]

    def state_of(self, cache: SequenceCache) -> list[object]:
        return [cache.length, [list(table.blocks) for table in cache.tables]]

    def write(self, cache: SequenceCache, tokens: list[int], origin: int, numerics: bytearray, new: list[int]) -> None:
        before = self.state_of(cache)
        try:
            slots, copies = cache.append(len(new))
        except CacheFull:
            assert self.state_of(cache) == before
            return
        for source, destination in copies:
            for offset in range(BLOCK_SIZE):
                self.memory[destination * BLOCK_SIZE + offset] = self.memory.get(source * BLOCK_SIZE + offset)
        for index, token in enumerate(new):
            tokens.append(token)
            if len(numerics) < len(tokens):
                numerics.append(len(new) > 2)
            for group, own in enumerate(slots):
                self.memory[own[index]] = (group, origin, tuple(tokens), bytes(numerics[: len(tokens)]))

    @precondition(lambda self: len(self.caches) < 6)
    @rule(new=st.lists(st.integers(0, 1), max_size=14), origin=st.sampled_from(ORIGINS))
    def start(self, new: list[int], origin: int) -> None:
        cache = SequenceCache(self.pool, BLOCK_SIZE, self.groups)
        tokens, numerics = [], bytearray([len(new) > 2] * len(new))
        if new:
            tokens += new[: cache.reuse(new, origin, numerics)]
            assert len(tokens) < len(new)
        self.caches.append((cache, tokens, origin, numerics))
        self.write(cache, tokens, origin, numerics, new[len(tokens) :])
        del numerics[len(tokens) :]

    @precondition(lambda self: self.caches)
    @rule(data=st.data())
    def give_the_cache_back_and_find_it_again(self, data: st.DataObject) -> None:
        cache, tokens, origin, numerics = self.pick(data)
        cache.release()
        before = bytes(numerics)
        kept = cache.reuse(tokens, origin, numerics, len(tokens)) if tokens else 0
        assert numerics == before
        del tokens[kept:], numerics[kept:]

    @precondition(lambda self: self.caches)
    @rule(data=st.data(), new=st.lists(st.integers(0, 1), max_size=6))
    def append(self, data: st.DataObject, new: list[int]) -> None:
        self.write(*self.pick(data), new)

    @precondition(lambda self: self.caches)
    @rule(data=st.data(), num_tokens=st.integers(1, 6))
    def append_that_fails_half_way(self, data: st.DataObject, num_tokens: int) -> None:
        cache, tokens, *_ = self.pick(data)
        try:
            cache.append(num_tokens)
        except CacheFull:
            return
        cache.undo(len(tokens))

    @precondition(lambda self: self.caches)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        cache, tokens, _, numerics = self.pick(data)
        asked = data.draw(st.integers(0, len(tokens)))
        length = cache.truncate(asked)
        assert length == cache.length <= asked
        # Nothing is taken back without need: of windows that lost nothing everything is left.
        assert length in (0, asked)
        del tokens[length:], numerics[length:]

    @precondition(lambda self: self.caches)
    @rule(data=st.data())
    def leave_windows(self, data: st.DataObject) -> None:
        cache, tokens, origin, numerics = self.pick(data)
        if cache.has_left(len(tokens)):
            cache.publish(tokens, origin, numerics)
            cache.leave_behind(len(tokens))
        assert not cache.has_left(len(tokens))

    @precondition(lambda self: self.caches and len(self.caches) < 6)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        cache, tokens, origin, numerics = self.pick(data)
        self.caches.append((cache.fork(), list(tokens), origin, numerics[:]))

    @precondition(lambda self: self.caches)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        cache, tokens, origin, numerics = self.pick(data)
        cache.publish(tokens, origin, numerics)

    @precondition(lambda self: self.caches)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        entry = self.pick(data)
        entry[0].release()
        self.caches = [other for other in self.caches if other is not entry]

    @precondition(lambda self: self.caches)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """Remove blocks from the middle. The cache itself is not checked afterwards, but others must not change."""
        entry = self.pick(data)
        cache, tokens, *_ = entry
        last = len(tokens) // BLOCK_SIZE
        if last < 2:
            return
        first = data.draw(st.integers(0, last - 2))
        count = data.draw(st.integers(1, last - 1 - first))
        if cache.can_forget(first, count):
            try:
                copies = cache.forget(first, count)
            except CacheFull:
                pass
            else:
                self.pool.release(source for source, _ in copies)
                position = cache.length
                for group, table in zip(self.groups, cache.tables, strict=True):
                    check_table(table)
                    assert GONE not in table.blocks[group.first_visible(position) // BLOCK_SIZE :]
        cache.release()
        self.caches = [other for other in self.caches if other is not entry]

    @invariant()
    def bookkeeping_is_sound(self) -> None:
        if not hasattr(self, "pool"):
            return
        check_pool(self.pool, [cache.held_blocks for cache, *_ in self.caches])
        for cache, tokens, *_ in self.caches:
            assert cache.length == len(tokens)
            for table in cache.tables:
                check_table(table)
                assert table.length == len(tokens)

    @invariant()
    def every_table_reads_what_the_next_token_sees(self) -> None:
        for cache, tokens, origin, numerics in self.caches:
            for group, table in enumerate(cache.tables):
                for position in range(self.groups[group].first_visible(len(tokens)), len(tokens)):
                    slot = table.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
                    known = tuple(tokens[: position + 1]), bytes(numerics[: position + 1])
                    assert self.memory[slot] == (group, origin, *known)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for cache, *_ in self.caches:
            cache.release()
        assert self.pool.num_free == self.num_blocks
        check_pool(self.pool, [])


Tables.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
TestTables = Tables.TestCase


@pytest.mark.slow
class TestTablesLong(Tables.TestCase):
    settings = settings(
        max_examples=Draw(os.environ[VARIABLE]).fewer(1500, 3),
        stateful_step_count=80,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
