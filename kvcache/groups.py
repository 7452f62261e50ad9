"""Cache groups: layers that keep their state alike share a block table, and all groups share the pages of one pool.

A layer with full attention keeps a row per token. A layer with sliding-window attention needs the last rows only, and a
recurrent layer one state of fixed size. Layers of the same kind form groups, and each sequence has one table per group,
so that a window gives its blocks back while a full layer of the same model keeps its own. To let one pool serve every
group, a block of each group takes one page of the same size; a kind with many layers is split into several groups.
vLLM's hybrid cache manager works in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum


class GroupKind(Enum):
    """What the layers of a group keep."""

    FULL = "full"
    """A row of keys and values per token; of latent attention (MLA) the latent row."""
    WINDOW = "window"
    """The rows of the last `window` tokens."""
    CHUNKED = "chunked"
    """The rows of the current chunk: a token sees those before it in its own chunk of `window` tokens."""
    STATE = "state"
    """A state of fixed size, which has seen every token (see `states`)."""


@dataclass(frozen=True)
class CacheGroup:
    """Layers with one block table per sequence.

    Attributes:
        layers: their numbers, ascending.
        kind: see GroupKind.
        window: tokens that a token sees, itself included (WINDOW), or tokens of a chunk (CHUNKED); 0 = all.
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
        """Whether tokens that are no longer visible give their blocks back."""
        return self.window > 0

    def first_visible(self, position: int) -> int:
        """The first token that the token at a position sees."""
        match self.kind:
            case GroupKind.WINDOW:
                return max(0, position - self.window + 1)
            case GroupKind.CHUNKED:
                return position // self.window * self.window
            case _:
                return 0

    def most_blocks(self, tokens: int, step_tokens: int, block_size: int) -> int:
        """The most blocks that a sequence of so many tokens holds at a time.

        Args:
            step_tokens: the most tokens of a step: a window gives its blocks back between steps.
        """
        every = -(-tokens // block_size)
        if not self.is_bounded:
            return every
        # The window, the tokens of a step, parts of blocks at both ends, and the block that stays behind the window.
        return min(every, (self.window + min(step_tokens, tokens)) // block_size + 3)

    def __str__(self) -> str:
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


# A page has as much unused room as this part of what the layers of a kind keep: those that keep every token, and those
# that keep few.
_SPARE_FULL, _SPARE_BOUNDED = 1 / 16, 1 / 4


def plan_groups(layer_bytes: Sequence[int], kinds: Sequence[tuple[GroupKind, int]]) -> tuple[CacheGroup, ...]:
    """Form groups whose blocks have about the same size: as few as waste little memory.

    Args:
        layer_bytes: what each layer keeps in a block. kinds: per layer its kind, and its window (0 = all).

    Returns:
        The groups, those with full attention first, and one of all layers with states last. Layers of one kind alone
        form one group.
    """
    states = tuple(layer for layer, (kind, _) in enumerate(kinds) if kind is GroupKind.STATE)
    last = [CacheGroup(states, GroupKind.STATE)] if states else []
    by_kind: dict[tuple[GroupKind, int], list[int]] = {}
    for layer, of_layer in enumerate(kinds):
        if of_layer[0] is not GroupKind.STATE:
            by_kind.setdefault(of_layer, []).append(layer)
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
        # Large pages come first, which make the fewest groups: the first that is fine, else the least wasteful.
        if is_fine:
            return (*groups, *last)
        if waste < least:
            best, least = groups, waste
    return (*best, *last)


def _page_sizes(layer_bytes: Sequence[int], kinds: Sequence[Sequence[int]]) -> set[int]:
    """Sizes that hold the layers of one kind in 1, 2, 3, … pages, and no layer is larger than."""
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
    """Layers in order, as many as a page holds together."""
    part: list[int] = []
    used = 0
    for layer in layers:
        if part and used + layer_bytes[layer] > page:
            yield part
            part, used = [], 0
        part.append(layer)
        used += layer_bytes[layer]
    yield part
