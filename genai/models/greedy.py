"""Batches of a model that take the most likely tokens: what benches time and evaluations ask."""

from __future__ import annotations

from ..engine.sampling.params import SamplingParams
from ..engine.sampling.plan import plan_sampling
from ..engine.sampling.search_options import SEARCH_OPTIONS
from ..engine.static_batch import StaticBatch
from .model import Model


def greedy_batch(model: Model, count: int, *, min_length: int = 0) -> StaticBatch:
    """A batch of empty sequences, with what the model's search block asks for besides drawing.

    Args:
        count: of the sequences.
        min_length: no sequence ends before it has so many tokens; 0 = the search block says.

    Raises:
        CacheCapacityError: there is no memory for so many.
    """
    search = {name: value for name, value in model.config.search.items() if name in SEARCH_OPTIONS}
    search |= {"do_sample": False, "min_length": min_length or search.get("min_length", 0)}
    vocab_size, config = model.decoder.vocab_size, model.config.model
    plan = plan_sampling(
        SamplingParams.from_search_options(search), vocab_size=vocab_size, eos_token_ids=config.eos_token_ids
    )
    return StaticBatch(model.decoder, model.sampler, plan, count, token_budget=search.get("chunk_size") or None)
