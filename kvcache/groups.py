"""What each layer keeps per token or per sequence: frozen descriptions, no arrays."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

ITEM_BYTES = {"float16": 2, "float32": 4}


@dataclass(frozen=True)
class CacheGroup:
    """Layers that keep the same shape of state.

    Attributes:
        index: place of the group in its layout.
        layers: numbers of the layers that have an entry of their own.
        kv_heads: heads of keys and values; latent attention (MLA) has one.
        head_size: elements per key head; for latent attention the whole latent row.
        v_head_size: elements per value head; 0 where values are part of the key row (latent attention).
        dtype: "float16" or "float32".
        kind: "paged" (keys and values per token, in blocks) or "fixed_state" (one state per sequence, such as a
            convolution's or a recurrence's).
        window: newest tokens that attention looks at; None = all.
        shared_layers: (layer, owner) for layers that read the entry of another layer of this group.
        state_bytes: bytes per layer and sequence of a fixed_state group.

    Raises:
        ValueError: naming the attribute and its value.
    """

    index: int
    layers: tuple[int, ...]
    kv_heads: int = 0
    head_size: int = 0
    v_head_size: int = 0
    dtype: str = "float32"
    kind: Literal["paged", "fixed_state"] = "paged"
    window: int | None = None
    shared_layers: tuple[tuple[int, int], ...] = ()
    state_bytes: int = 0

    def __post_init__(self) -> None:
        if self.kind == "paged":
            required = {"kv_heads": self.kv_heads, "head_size": self.head_size}
            unused = {"state_bytes": self.state_bytes}
        elif self.kind == "fixed_state":
            required = {"state_bytes": self.state_bytes}
            unused = {"kv_heads": self.kv_heads, "head_size": self.head_size, "v_head_size": self.v_head_size}
        else:
            raise ValueError(f'{self._name}: kind = {self.kind!r} is not "paged" or "fixed_state"')
        for name, value in required.items():
            if value < 1:
                raise ValueError(f"{self._name}: {name} = {value}, a {self.kind} group needs at least 1")
        for name, value in unused.items():
            if value:
                raise ValueError(f"{self._name}: {name} = {value} has no meaning in a {self.kind} group")
        self._check_values()

    def _check_values(self) -> None:
        if self.v_head_size < 0:
            raise ValueError(f"{self._name}: v_head_size = {self.v_head_size} is negative")
        if self.window is not None and self.window < 1:
            raise ValueError(f"{self._name}: window = {self.window}, at least 1 or None is expected")
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"{self._name}: dtype = {self.dtype!r}, known: {', '.join(ITEM_BYTES)}")
        if not self.layers:
            raise ValueError(f"{self._name}: layers is empty")
        for layer, owner in self.shared_layers:
            if owner not in self.layers:
                raise ValueError(f"{self._name}: layer {layer} shares the entry of layer {owner}, which is not in it")

    @property
    def _name(self) -> str:
        return f"cache group {self.index}"

    @property
    def all_layers(self) -> tuple[int, ...]:
        """Layers with an entry of their own, then layers that share one."""
        return self.layers + tuple(layer for layer, _ in self.shared_layers)

    @property
    def bytes_per_token(self) -> int:
        """Cache bytes per token over all entries; 0 for a fixed_state group."""
        return len(self.layers) * self.kv_heads * (self.head_size + self.v_head_size) * ITEM_BYTES[self.dtype]

    @property
    def bytes_per_sequence(self) -> int:
        """Bytes per sequence over all entries; 0 for a paged group."""
        return len(self.layers) * self.state_bytes


@dataclass(frozen=True)
class CacheLayout:
    """All groups of a model.

    Attributes:
        groups: in the order of their index; every layer is in at most one of them.
        block_size: tokens per block.

    Raises:
        ValueError: groups out of order, a layer that is in two groups, or a block size below 1.
    """

    groups: tuple[CacheGroup, ...]
    block_size: int

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size = {self.block_size}: a block holds at least one token")
        indices = [group.index for group in self.groups]
        if not indices or indices != list(range(len(indices))):
            raise ValueError(f"group indices are {indices}: at least one group, numbered from 0, is expected")
        uses = Counter(layer for group in self.groups for layer in group.all_layers)
        for layer, count in uses.items():
            if layer < 0 or count > 1:
                raise ValueError(f"layer {layer} is listed {count} times: layers are numbered from 0 and listed once")

    @cached_property
    def bytes_per_token(self) -> int:
        """Cache bytes per token over all paged groups."""
        return sum(group.bytes_per_token for group in self.groups)

    @cached_property
    def bytes_per_sequence(self) -> int:
        """Bytes per sequence over all fixed_state groups."""
        return sum(group.bytes_per_sequence for group in self.groups)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all paged groups."""
        return self.bytes_per_token * self.block_size

    @property
    def num_layers(self) -> int:
        """One more than the greatest layer number."""
        return 1 + max(layer for group in self.groups for layer in group.all_layers)
