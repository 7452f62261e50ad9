"""States of recurrent layers: a state of fixed size covers all tokens of a sequence, and is stored in a slot of a pool.

Unlike rows of keys and values, a state cannot be truncated. A step therefore writes every state that may be needed
again to a separate slot: after the last token, after the last full block, after each draft token, and at positions
where other sequences may continue (snapshots). A state is never changed in place: forks share slots, and a step that
fails leaves its initial state intact.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from genai.common.interrupts import uninterrupted

from .pool import BlockPool, CacheFull

NO_STATE = -1
"""The slot number that stands for the initial state of zeros, when no token has been computed."""


class StateTable:
    """The states of a sequence, keyed by the number of tokens that each state covers.

    Args:
        pool: the pool of slots.
        block_size: tokens per block of the layers that have pages. The state after the last full block is stored, too,
            because saved states and prefixes consist of whole blocks.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool, self.block_size = pool, block_size
        self._slots: dict[int, int] = {}
        self._length = 0

    @property
    def length(self) -> int:
        """The number of tokens that the last state covers."""
        return self._length

    @property
    def slots(self) -> dict[int, int]:
        """The slots of the states, keyed by the number of tokens covered. A live view: read it, do not store it."""
        return self._slots

    @property
    def own_slots(self) -> int:
        """The number of slots that no other table holds."""
        return sum(self.pool.references(slot) == 1 for slot in self._slots.values())

    def reachable(self, length: int) -> int:
        """Return the length of the longest prefix, up to `length` tokens, that has a stored state; else 0."""
        return max((position for position in self._slots if position <= length), default=0)

    @uninterrupted
    def append(self, count: int, keep: Collection[int] = ()) -> tuple[int, dict[int, int]]:
        """Allocate slots for the states of a step.

        Earlier states are released, except the step's initial state and the state after its last full block.

        Args:
            count: number of tokens in the step.
            keep: additional prefix lengths for which to store the state. They are skipped if the pool has too few
                slots.

        Returns:
            The slot of the initial state, or NO_STATE; and the slot to write for each prefix length that is stored.

        Raises:
            CacheFull: there is no slot for the last state; the initial state is kept.
        """
        first, last = self._length, self._length + count
        if not count:
            return self._slots.get(first, NO_STATE), {}
        full = last - last % self.block_size
        wanted = sorted({last, *(position for position in (*keep, full) if first < position < last)})
        self._release_except(first, first - first % self.block_size)
        try:
            fresh = self.pool.allocate(len(wanted))
        except CacheFull:
            self._release_except(first)
            wanted, fresh = [last], self.pool.allocate(1)
        writes = dict(zip(wanted, fresh, strict=True))
        self._slots |= writes
        self._length = last
        return self._slots.get(first, NO_STATE), writes

    @uninterrupted
    def truncate(self, length: int) -> None:
        """Drop all states after `length` tokens. The state at `length` tokens must be stored, unless `length` is 0."""
        if length != self.reachable(length):
            raise ValueError(f"length = {length}: states are stored only at the lengths {sorted(self._slots)}")
        self._release(position for position in [*self._slots] if position > length)
        self._length = length

    @uninterrupted
    def fill(self, length: int, slot: int) -> None:
        """Start this empty table with a state. The table takes over the caller's reference to the state's slot."""
        self._slots, self._length = {length: slot}, length

    @uninterrupted
    def share(self, other: StateTable) -> None:
        """Share the states of another table; this one must be empty."""
        self.pool.share([*other._slots.values()])
        self._slots, self._length = dict(other._slots), other._length

    def _release_except(self, *positions: int) -> None:
        self._release([position for position in self._slots if position not in positions])

    def _release(self, positions: Iterable[int]) -> None:
        for position in positions:
            self.pool.release([self._slots.pop(position)])
