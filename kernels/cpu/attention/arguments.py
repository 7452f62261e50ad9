"""Arguments that all attention operators of a layer share, and functions that read them and the step."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..jit.arguments import Address, Arguments
from ..jit.dsl import inline
from ..jit.memory import read_int32, read_int64, write_int64
from ..program.calls import Rows
from ..program.step_table import ErrorCode, StepField


class AttentionArguments(Arguments):
    """The arguments of one layer's attention, shared by all of its operators.

    Attributes:
        query, key, value: rows from the projections.
        out: rows of results.
        key_pages, value_pages: pages of the cache. They are the same if keys are also the values.
        key_block, value_block: bytes between consecutive blocks.
        num_blocks: number of blocks in the cache.
        cache_group: cache group whose block tables refer to the pages.
        group: number of query heads that share a KV head.
        key_page, value_page: bytes between the pages of consecutive heads.
        hadamard: 1 if heads are stored after `hadamard_transform`.
        query_factor, score_cap, sinks: scaled so that scores are exponents of 2, because softmax computes 2 ** score.
        causal, window, chunk: as in `ir.Attention`.
        bias: as in `ir.Attention`, scaled like the scores; 0 = none.
        bias_tokens: maximum number of tokens of a sequence with a bias.
        cos, sin: rotary tables of `half` columns for `positions` positions; no rotation if `half` is 0.
        long_cos, long_sin: rotary tables of `long_positions` positions for long sequences.
        q_norm, k_norm: weights of the norms per head; 0 = none.
        make_ready: `heads.make_heads_ready`. This operator and those below are called by address, so each of them stays
            small and is compiled once for all callers.
        multiply_keys, add_values: operators of `products` or `int8_products`, for `rows_at_once` query rows.
        weigh, load_chunk, multiply_group, add_group: operators that `decode` and `prefill` describe.
        panels: table of `panels.Panels`.
        pack_queries, pack_weights: operators of `packing`, for pages of small integers.
        weight_groups: number of scales of a packed value.
        keys_to_values: operator of `latent`, which writes a page of keys as a page of values; 0 = values have pages.
    """

    query: Rows
    key: Rows
    value: Rows
    out: Rows
    key_pages: Address
    key_block: int
    value_pages: Address
    value_block: int
    num_blocks: int
    cache_group: int
    kv_heads: int
    group: int
    head_size: int
    v_head_size: int
    key_page: int
    value_page: int
    hadamard: int
    query_factor: float
    score_cap: float
    causal: int = 1
    window: int
    chunk: int = 0
    bias: Address = None
    bias_tokens: int = 0
    sinks: Address
    cos: Address = None
    sin: Address = None
    positions: int = 0
    long_cos: Address = None
    long_sin: Address = None
    long_positions: int = 0
    half: int = 0
    interleaved: int = 0
    q_norm: Address
    k_norm: Address
    epsilon: float
    make_ready: Address
    multiply_keys: Address = None
    add_values: Address = None
    rows_at_once: int = 0
    weigh: Address = None
    panels: Address = None
    load_chunk: Address = None
    multiply_group: Address = None
    add_group: Address = None
    pack_queries: Address = None
    pack_weights: Address = None
    weight_groups: int = 0
    keys_to_values: Address = None


NO_MAXIMUM = np.float32(-3.0e38)  # finite, because NO_MAXIMUM - NO_MAXIMUM must be zero and not NaN


@inline
def position_of(context: int, row: int) -> Any:
    """Return the position of a row's token in its sequence."""
    return read_int64(read_int64(context + 8 * StepField.POSITIONS) + 8 * row)


@inline
def sequence_of(context: int, row: int) -> Any:
    """Return the sequence that a row belongs to."""
    return np.int64(read_int32(read_int64(context + 8 * StepField.SEQUENCE_OF_ROW) + 4 * row))


@inline
def context_length(context: int, sequence: int) -> Any:
    """Return the number of a sequence's tokens in the cache, including the tokens of this step."""
    return np.int64(read_int32(read_int64(context + 8 * StepField.CONTEXT_LENGTHS) + 4 * sequence))


@inline
def first_visible(arguments: AttentionArguments, position: int) -> Any:
    """Return the first key that a row at this position sees."""
    window, chunk = arguments.window, arguments.chunk
    if chunk > 0:
        return position // chunk * chunk
    return max(np.int64(0), position - window + 1) if window > 0 else np.int64(0)


@inline
def end_visible(arguments: AttentionArguments, position: int, length: int) -> Any:
    """Return the key after the last key that a row at this position of a sequence of `length` tokens sees."""
    if arguments.causal != 0:
        return position + 1
    window = arguments.window
    return min(length, position + window) if window > 0 else length


@inline
def list_pages(
    arguments: AttentionArguments, context: int, sequence: int, first: int, last: int, head: int, keys: int, values: int
) -> Any:
    """Write the addresses of a head's pages [first, last), in order: key pages to `keys`, value pages to `values`.

    Returns 0, or ErrorCode.PAGE.
    """
    width = read_int64(context + 8 * StepField.TABLE_WIDTH)
    if last > width:
        return ErrorCode.PAGE.value
    row = arguments.cache_group * read_int64(context + 8 * StepField.SEQUENCES) + sequence
    table = read_int64(context + 8 * StepField.BLOCK_TABLES) + 4 * row * width
    first_key = arguments.key_pages + head * arguments.key_page
    first_value = arguments.value_pages + head * arguments.value_page
    for index in range(first, last):
        block = np.int64(read_int32(table + 4 * index))
        if block < 0 or block >= arguments.num_blocks:
            return ErrorCode.PAGE.value
        offset = 8 * (index - first)
        write_int64(keys + offset, first_key + block * arguments.key_block)
        write_int64(values + offset, first_value + block * arguments.value_block)
    return 0
