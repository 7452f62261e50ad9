"""Random operations on tables that share a pool, compared after each one with plain lists of tokens."""

import os

import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from genai.kvcache.pool import BlockPool, CacheFull
from genai.kvcache.table import BlockTable
from tests.drawing import VARIABLE, Draw
from tests.integrity import check_pool, check_table

BLOCK_SIZE = 4
NUM_BLOCKS = 12
ORIGINS = (0, 1)


class Tables(RuleBasedStateMachine):
    """Slots hold (origin, prefix of tokens, how each rounds): what a key computed at that place depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.memory: dict[int, object] = {}
        self.tables: list[tuple[BlockTable, list[int], int, bytearray]] = []

    def pick(self, data: st.DataObject) -> tuple[BlockTable, list[int], int, bytearray]:
        return self.tables[data.draw(st.integers(0, len(self.tables) - 1))]

    def write(self, table: BlockTable, tokens: list[int], origin: int, numerics: bytearray, new: list[int]) -> None:
        before = (table.length, list(table.blocks))
        try:
            slots, copies = table.append(len(new))
        except CacheFull:
            assert (table.length, list(table.blocks)) == before
            return
        for source, destination in copies:
            for offset in range(BLOCK_SIZE):
                self.memory[destination * BLOCK_SIZE + offset] = self.memory.get(source * BLOCK_SIZE + offset)
        for slot, token in zip(slots, new, strict=True):
            tokens.append(token)
            if len(numerics) < len(tokens):
                numerics.append(len(new) > 2)
            self.memory[slot] = (origin, tuple(tokens), bytes(numerics[: len(tokens)]))

    @precondition(lambda self: len(self.tables) < 6)
    @rule(new=st.lists(st.integers(0, 1), max_size=14), origin=st.sampled_from(ORIGINS))
    def start(self, new: list[int], origin: int) -> None:
        table, tokens, numerics = BlockTable(self.pool, BLOCK_SIZE), [], bytearray([len(new) > 2] * len(new))
        if new:
            tokens += new[: table.reuse(new, origin, numerics)]
            assert len(tokens) < len(new)
        self.tables.append((table, tokens, origin, numerics))
        self.write(table, tokens, origin, numerics, new[len(tokens) :])
        del numerics[len(tokens) :]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def give_the_cache_back_and_find_it_again(self, data: st.DataObject) -> None:
        table, tokens, origin, numerics = self.pick(data)
        table.release()
        before = bytes(numerics)
        kept = table.reuse(tokens, origin, numerics, len(tokens)) if tokens else 0
        assert numerics == before
        del tokens[kept:], numerics[kept:]

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), new=st.lists(st.integers(0, 1), max_size=6))
    def append(self, data: st.DataObject, new: list[int]) -> None:
        self.write(*self.pick(data), new)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), num_tokens=st.integers(1, 6))
    def append_that_fails_half_way(self, data: st.DataObject, num_tokens: int) -> None:
        table, tokens, *_ = self.pick(data)
        try:
            table.append(num_tokens)
        except CacheFull:
            return
        table.truncate(len(tokens))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        table, tokens, _, numerics = self.pick(data)
        length = data.draw(st.integers(0, len(tokens)))
        table.truncate(length)
        del tokens[length:], numerics[length:]

    @precondition(lambda self: self.tables and len(self.tables) < 6)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table, tokens, origin, numerics = self.pick(data)
        self.tables.append((table.fork(), list(tokens), origin, numerics[:]))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        table, tokens, origin, numerics = self.pick(data)
        table.publish(tokens, origin, numerics)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        entry = self.pick(data)
        entry[0].release()
        self.tables = [other for other in self.tables if other is not entry]

    @invariant()
    def bookkeeping_is_sound(self) -> None:
        check_pool(self.pool, [table.held_blocks for table, *_ in self.tables])
        for table, tokens, *_ in self.tables:
            check_table(table)
            assert table.length == len(tokens)

    @invariant()
    def every_table_reads_its_own_tokens(self) -> None:
        for table, tokens, origin, numerics in self.tables:
            for position in range(len(tokens)):
                slot = table.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
                assert self.memory[slot] == (origin, tuple(tokens[: position + 1]), bytes(numerics[: position + 1]))

    def teardown(self) -> None:
        for table, *_ in self.tables:
            table.release()
        assert self.pool.num_free == NUM_BLOCKS
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
