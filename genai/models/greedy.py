"""Greedy batches for a model, for use in benchmarks and evaluations."""

from __future__ import annotations

from ..engine.sampling.params import SamplingParams
from ..engine.sampling.plan import plan_sampling
from ..engine.sampling.search_options import SEARCH_OPTIONS
from ..engine.static_batch import StaticBatch
from .model import Model


def greedy_batch(model: Model, count: int, *, min_length: int = 0) -> StaticBatch:
    """Return a batch of empty sequences that use greedy decoding, with the other options of the model's search block.

    Args:
        model: the model.
        count: number of sequences.
        min_length: minimum number of tokens per sequence; 0 = the value in the search block.

    Raises:
        CacheCapacityError: there is not enough memory for all sequences.
    """
    search = {name: value for name, value in model.config.search.items() if name in SEARCH_OPTIONS}
    search |= {"do_sample": False, "min_length": min_length or search.get("min_length", 0)}
    vocab_size, config = model.decoder.vocab_size, model.config.model
    plan = plan_sampling(
        SamplingParams.from_search_options(search), vocab_size=vocab_size, eos_token_ids=config.eos_token_ids
    )
    return StaticBatch(model.decoder, model.sampler, plan, count, token_budget=search.get("chunk_size") or None)
