"""Finds blocks that already hold a token prefix, by a chain of hashes over full blocks.

The key of a block covers everything its keys and values depend on: the origin (model, adapter, KV format, RoPE regime)
and all tokens from the start of the sequence to the block's end. Keys are SHA-256, so that nobody can choose tokens
whose key collides with another user's. The idea is vLLM's automatic prefix caching; eviction is the pool's.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .pool import BlockPool
from .table import BlockTable


@dataclass(frozen=True)
class PrefixOrigin:
    """What computed the keys and values of a block.

    Attributes:
        model: identity of the weights.
        adapter: identity of the adapter; empty for none.
        kv_format: how they are stored, such as "float16".
        rope_table: which RoPE table rotated the keys.
    """

    model: str
    adapter: str = ""
    kv_format: str = "float16"
    rope_table: int = 0


class PrefixCache:
    """Published blocks of one pool.

    Safe to use from several threads; each with its own tables.

    Args:
        pool: the blocks.
        block_size: tokens per block.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size = {block_size}: a block holds at least one token")
        self._pool = pool
        self._block_size = block_size

    def attach(self, table: BlockTable, tokens: Sequence[int], origin: PrefixOrigin) -> int:
        """Fill an empty table with the published blocks of the longest known prefix.

        The last token is never taken from the cache: it has to be computed to get logits.

        Returns:
            How many tokens the table now holds: a multiple of the block size, less than len(tokens).
        """
        self._check(table)
        blocks: list[int] = []
        for key in self._keys(tokens[:-1], origin):
            block = self._pool.find(key)
            if block is None:
                break
            blocks.append(block)
        try:
            table.adopt(blocks)
        except BaseException:
            self._pool.release_many(reversed(blocks))
            raise
        return table.length

    def publish(self, table: BlockTable, tokens: Sequence[int], origin: PrefixOrigin) -> None:
        """Make a table's full blocks findable; call it only once their keys and values have been written.

        Args:
            table: holds the blocks.
            tokens: the tokens in it, at least table.length of them.
            origin: what computed them.
        """
        self._check(table)
        if len(tokens) < table.length:
            raise ValueError(f"{len(tokens)} tokens given for a table of {table.length}")
        for block, key in zip(table.blocks, self._keys(tokens[: table.length], origin), strict=False):
            self._pool.publish(block, key)

    def _check(self, table: BlockTable) -> None:
        if table.pool is not self._pool or table.block_size != self._block_size:
            raise ValueError("the table belongs to another pool, or has another block size")

    def _keys(self, tokens: Sequence[int], origin: PrefixOrigin) -> Iterator[bytes]:
        """One key per full block of tokens."""
        key = hashlib.sha256(repr(origin).encode()).digest()
        for end in range(self._block_size, len(tokens) + 1, self._block_size):
            block = tokens[end - self._block_size : end]
            key = hashlib.sha256(key + struct.pack(f"<{self._block_size}q", *block)).digest()
            yield key
