"""Checks of internal bookkeeping: a graph's index, a pool's blocks, and a table's blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from genai.kvcache.pool import BlockPool
from genai.kvcache.table import GONE, BlockTable
from genai.onnx.graph import Graph
from genai.onnx.uses import UseIndex


def check_graph(graph: Graph) -> None:
    """Check that the indexes of a graph and its subgraphs equal newly built ones, so no edit went unreported."""
    kept, made = graph._uses(), UseIndex(graph.nodes)
    assert kept._producers == made._producers, "an edit without graph.update(node) or graph.invalidate()"
    for name in kept._consumers.keys() | made._consumers.keys():
        users = set(kept.consumers(name)), set(made.consumers(name))
        assert users[0] == users[1], f"{name!r}: an edit without graph.update(node) or graph.invalidate()"
    for node in graph.nodes:
        for subgraph in node.subgraphs():
            check_graph(subgraph)


def check_pool(pool: BlockPool, holders: Iterable[Sequence[int]] | None = None) -> None:
    """Check that every block is in exactly one state, and that both key maps agree.

    Args:
        holders: if given, the blocks of every holder; their references must add up.
    """
    with pool._lock:
        free, idle = set(pool._free), set(pool._idle)
        assert len(free) == len(pool._free), "a block is twice in the free list"
        for block, count in enumerate(pool._references):
            states = (count > 0) + (block in free) + (block in idle)
            assert count >= 0, f"block {block} has {count} references"
            assert states == 1, f"block {block} with {count} references is in {states} states"
            assert block not in free or block not in pool._key_of_block, f"free block {block} has a key"
        assert idle <= pool._key_of_block.keys(), "an idle block has no key"
        inverse = {block: key for key, block in pool._block_of_key.items()}
        assert inverse == pool._key_of_block, "the maps of keys and blocks disagree"
        if holders is not None:
            counts = [0] * pool.num_blocks
            for blocks in holders:
                for block in blocks:
                    counts[block] += 1
            assert counts == pool._references, f"references are {pool._references}, holders have {counts}"


def check_table(table: BlockTable) -> None:
    """Check that the number of blocks fits the length, and that all blocks are held."""
    assert len(table.blocks) == -(-table.length // table.block_size), "other blocks than the length needs"
    held = table.blocks[table.num_gone :]
    assert len(set(held)) == len(held), f"a block is twice in the table: {table.blocks}"
    assert [*table.blocks[: table.num_gone]] == [GONE] * table.num_gone and GONE not in held
    for block in table.held_blocks:
        assert table.pool.references(block) >= 1, f"block {block} is in a table, but nobody holds it"
