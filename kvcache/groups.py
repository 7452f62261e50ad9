"""Cache groups: layers that cache the same tokens share a block table, and all groups share the pages of one pool.

A layer with full attention caches one row per token. A layer with sliding-window attention needs only the last rows,
and a recurrent layer needs one state of fixed size. Layers of the same kind form groups, and each sequence has one
table per group. A window can therefore return its blocks while a full-attention layer of the same model retains its
blocks. To let one pool serve every group, a block of each group occupies one page of the same size; a kind with many
layers is split into several groups. vLLM's hybrid cache manager works in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum


class GroupKind(Enum):
    """The tokens that the layers of a group cache."""

    FULL = "full"
    """A row of keys and values per token; for latent attention (MLA), the latent row."""
    WINDOW = "window"
    """The rows of the last `window` tokens."""
    CHUNKED = "chunked"
    """The rows of the current chunk: a token attends to the preceding tokens of its own chunk of `window` tokens."""
    STATE = "state"
    """A state of fixed size that covers all tokens (see `states`)."""


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share one block table per sequence.

    Attributes:
        layers: the layer numbers, ascending.
        kind: see GroupKind.
        window: number of tokens that a token attends to, including itself (WINDOW), or tokens per chunk (CHUNKED);
            0 = all.
    """

    layers: tuple[int, ...]
    kind: GroupKind = GroupKind.FULL
    window: int = 0

    def __post_init__(self) -> None:
        has_window = self.kind in (GroupKind.WINDOW, GroupKind.CHUNKED)
        if has_window != (self.window != 0) or self.window < 0:
            raise ValueError(f"a group of kind {self.kind.value} has a window of {self.window} tokens")

    @property
    def is_bounded(self) -> bool:
        """True if blocks are returned once their tokens are no longer visible."""
        return self.window > 0

    def first_visible(self, position: int) -> int:
        """Return the index of the first token that the token at `position` attends to."""
        match self.kind:
            case GroupKind.WINDOW:
                return max(0, position - self.window + 1)
            case GroupKind.CHUNKED:
                return position // self.window * self.window
            case _:
                return 0

    def most_blocks(self, tokens: int, step_tokens: int, block_size: int) -> int:
        """Return the maximum number of blocks that a sequence of `tokens` tokens holds at a time.

        Args:
            tokens: length of the sequence.
            step_tokens: maximum number of tokens per step; a window returns its blocks between steps.
            block_size: tokens per block.
        """
        every = -(-tokens // block_size)
        if not self.is_bounded:
            return every
        # The window, the tokens of a step, a partial block at each end, and the block retained before the window.
        return min(every, (self.window + min(step_tokens, tokens)) // block_size + 3)

    def __str__(self) -> str:
        if not self.layers:
            return "no layers with keys and values"
        count = f"{len(self.layers)} layer{'s' * (len(self.layers) != 1)}"
        match self.kind:
            case GroupKind.WINDOW:
                return f"{count} with a window of {self.window} tokens"
            case GroupKind.CHUNKED:
                return f"{count} with chunks of {self.window} tokens"
            case GroupKind.STATE:
                return f"{count} with a state of fixed size"
            case _:
                return f"{count} with full attention"


# The maximum unused part of a page, relative to the bytes that the layers of a kind need. The first limit is for kinds
# that cache every token, the second for kinds that cache only some tokens.
_SPARE_FULL, _SPARE_BOUNDED = 1 / 16, 1 / 4


def plan_groups(layer_bytes: Sequence[int], kinds: Sequence[tuple[GroupKind, int]]) -> tuple[CacheGroup, ...]:
    """Split the layers into the fewest groups that have blocks of about the same size and waste little memory.

    Args:
        layer_bytes: bytes per token of each layer.
        kinds: kind and window (0 = all) of each layer.

    Returns:
        The groups. Groups with full attention come first, and one group of all layers with states comes last. Layers of
        a single kind form one group. If no layer caches rows, the first group has no layers: its blocks occupy no
        memory, and record which prefixes have been computed.
    """
    states = tuple(layer for layer, (kind, _) in enumerate(kinds) if kind is GroupKind.STATE)
    last = [CacheGroup(states, GroupKind.STATE)] if states else []
    by_kind: dict[tuple[GroupKind, int], list[int]] = {}
    for layer, of_layer in enumerate(kinds):
        if of_layer[0] is not GroupKind.STATE:
            by_kind.setdefault(of_layer, []).append(layer)
    if not by_kind:
        return (CacheGroup(()), *last)
    ordered = sorted(by_kind.items(), key=lambda one: (one[0][0] is not GroupKind.FULL, one[1]))
    best: list[CacheGroup] = []
    least = math.inf
    for page in sorted(_page_sizes(layer_bytes, [layers for _, layers in ordered]), reverse=True):
        groups: list[CacheGroup] = []
        waste, is_fine = 0.0, True
        for (kind, window), layers in ordered:
            packed = list(_packed(layers, layer_bytes, page))
            spare = len(packed) * page / sum(layer_bytes[layer] for layer in layers) - 1
            is_fine &= spare <= (_SPARE_FULL if kind is GroupKind.FULL else _SPARE_BOUNDED)
            waste += spare
            groups += [CacheGroup(tuple(part), kind, window) for part in packed]
        # Larger pages need fewer groups, so they are tried first. The first size that wastes little is used; if no size
        # does, the size that wastes the least is used.
        if is_fine:
            return (*groups, *last)
        if waste < least:
            best, least = groups, waste
    return (*best, *last)


def _page_sizes(layer_bytes: Sequence[int], kinds: Sequence[Sequence[int]]) -> set[int]:
    """Return the page sizes at which the layers of some kind fill 1, 2, 3, … pages, and the largest layer fits."""
    largest = max((layer_bytes[layer] for layers in kinds for layer in layers), default=0)
    sizes = set()
    for layers in kinds:
        for count in range(1, len(layers) + 1):
            each = -(-len(layers) // count)
            sizes.add(
                max(sum(layer_bytes[layer] for layer in layers[i : i + each]) for i in range(0, len(layers), each))
            )
    return {size for size in sizes if size >= largest}


def _packed(layers: Sequence[int], layer_bytes: Sequence[int], page: int) -> Iterator[list[int]]:
    """Yield the layers in order, in the largest consecutive parts that fit into a page."""
    part: list[int] = []
    used = 0
    for layer in layers:
        if part and used + layer_bytes[layer] > page:
            yield part
            part, used = [], 0
        part.append(layer)
        used += layer_bytes[layer]
    yield part
