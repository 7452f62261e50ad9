"""Statistics of an LLM, counted by its engine. They can be read at any time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..common.html_parts import figures
from ..engine.engine import Engine, EngineCounts
from ..models.model import Model


@dataclass(frozen=True)
class Stats:
    """Statistics of an LLM. Counters start with the LLM's first request.

    Beam searches run outside the engine and are not counted.

    Attributes:
        running: requests that are in the current batch.
        waiting: requests that are queued.
        finished: requests that ended with a result.
        failed: requests that ended with an error.
        cancelled: requests that were cancelled.
        expired: finished and failed requests that ended at their deadline.
        preempted: number of preemptions, in which a request releases its cache blocks and is queued again.
        steps: steps of the engine.
        prompt_tokens: prompt tokens of the requests that have started.
        cached_tokens: prompt tokens that the prefix cache supplied.
        generated_tokens: tokens that were sampled.
        cache_blocks: blocks of the KV cache, shared by all users of the model; None if each sequence has separate
            memory.
        cache_blocks_free: free blocks of the KV cache; None if each sequence has separate memory.
        block_tokens: tokens per block.
        prefix_cache: numbers of blocks found, written and dropped, and of bytes stored, in prefix_cache_dir; None if
            there is no such folder.
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
        """Return the statistics by name."""
        return asdict(self)

    def _repr_html_(self) -> str:
        """Return the statistics for a notebook."""
        items = asdict(self).items()
        return figures((name.replace("_", " "), "-" if value is None else value) for name, value in items)


def read_stats(model: Model, engine: Engine | None) -> Stats:
    """Return the statistics of a model's engine; None = an engine that has not started."""
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
