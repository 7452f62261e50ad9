"""What an LLM has done and does: counted by its engine, read at any time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..engine.engine import Engine, EngineCounts
from ..models.model import Model


@dataclass(frozen=True)
class Stats:
    """Figures of an LLM; those that count began with its first request.

    Attributes:
        running, waiting: requests that share the steps now, and that wait for a place.
        finished, failed, cancelled: requests that are over: with a result, an error, or because nobody wanted more.
        expired: of these, those whose time was over.
        preempted: how often a request gave its part of the cache back and waited.
        steps: steps of the engine.
        prompt_tokens: of the requests that began; cached_tokens of them were in the cache.
        generated_tokens: tokens chosen.
        cache_blocks, cache_blocks_free: of the KV cache, which other users of the model share. None where sequences
            have memory of their own. block_tokens: tokens of a block.
        prefix_cache: of the directory, if there is one: blocks found, blocks written, bytes held.

    Beam searches run beside the engine and are not counted.
    """

    running: int
    waiting: int
    finished: int
    failed: int
    cancelled: int
    expired: int
    preempted: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    cache_blocks: int | None
    cache_blocks_free: int | None
    block_tokens: int
    prefix_cache: dict[str, int] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Names and values."""
        return asdict(self)


def read_stats(model: Model, engine: Engine | None) -> Stats:
    """The figures of a model's engine; None = it has not begun."""
    decoder, pool = model.decoder, model.decoder.pool
    counts = EngineCounts() if engine is None else engine.counts
    backing = None if pool is None else pool.backing
    return Stats(
        running=0 if engine is None else engine.num_running,
        waiting=0 if engine is None else engine.num_waiting,
        **asdict(counts),
        cache_blocks=None if pool is None else pool.num_blocks,
        cache_blocks_free=None if pool is None else pool.num_free,
        block_tokens=decoder.block_size,
        prefix_cache=None if backing is None else backing.figures(),
    )
