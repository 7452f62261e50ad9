"""The arguments that all operators of a layer share, and how they read them and the step."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..jit.arguments import Address, Arguments
from ..jit.dsl import inline
from ..jit.memory import read_int32, read_int64, write_int64
from ..program.calls import Rows
from ..program.step_table import ErrorCode, StepField


class AttentionArguments(Arguments):
    """One layer's attention, for all of its operators.

    Rows of queries, keys and values as they come from the projections; the cache's pages, which the block tables of
    `cache_group` lead to, `key_block` and `value_block` bytes from a block to the next, `key_page` and `value_page`
    from a head's page to the next; `group` query heads share a KV head. `query_factor`, `score_cap` and `sinks` are
    such that scores are in powers of two: softmax takes 2 ** score. Rotary tables of `half` columns for `positions`
    positions (0 columns: no rotation), those for long sequences beside them; norms per head (0: none).

    Then operators that others call by their address, so that each is small, and compiled once whoever calls it:
    `make_ready` is `heads.make_heads_ready`; `multiply_keys` and `add_values` are `products` of `rows_at_once` query
    rows; `pack_queries` and `pack_weights` are those of `packing`, where pages hold small integers and a value has
    `weight_groups` scales; the others are what
    `decode` and `prefill` say. `panels` is a table of `panels`. If `hadamard`, heads are stored
    as `hadamard_transform` makes them.
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
    window: int
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


NO_MAXIMUM = np.float32(-3.0e38)  # finite, so that the difference of two of them is zero and not NaN


@inline
def position_of(context: int, row: int) -> Any:
    """Index of a row's token in its sequence."""
    return read_int64(read_int64(context + 8 * StepField.POSITIONS) + 8 * row)


@inline
def sequence_of(context: int, row: int) -> Any:
    """The sequence that a row belongs to."""
    return np.int64(read_int32(read_int64(context + 8 * StepField.SEQUENCE_OF_ROW) + 4 * row))


@inline
def context_length(context: int, sequence: int) -> Any:
    """Tokens of a sequence in the cache, this step's included."""
    return np.int64(read_int32(read_int64(context + 8 * StepField.CONTEXT_LENGTHS) + 4 * sequence))


@inline
def first_visible(arguments: AttentionArguments, position: int) -> Any:
    """The first key that a row at this position sees."""
    window = arguments.window
    if window < -1:  # of chunks of so many tokens the number is -1 - tokens: there is no room for another argument
        return position // (-1 - window) * (-1 - window)
    return max(np.int64(0), position - window + 1) if window > 0 else np.int64(0)


@inline
def list_pages(
    arguments: AttentionArguments, context: int, sequence: int, first: int, last: int, head: int, keys: int, values: int
) -> Any:
    """Write down the addresses of pages [first, last) of a head, those of keys and those of values each in order.

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
