"""States of recurrent layers: one of fixed size per sequence, which has seen all of its tokens, in slots of a pool.

A state cannot be cut back as rows of keys and values can. So a step writes the states that may be asked for again to
slots of their own: behind the last token, behind each guess, and at places where other sequences may go on (snapshots).
A state is never changed in place: forks share slots, and a step that fails leaves what it began from.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from genai.common.interrupts import uninterrupted

from .pool import BlockPool, CacheFull

NO_STATE = -1
"""In the place of a slot: nothing was seen yet, the state is zero."""


class StateTable:
    """The states of one sequence, by how many tokens they have seen.

    Args:
        pool: of slots.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._slots: dict[int, int] = {}
        self._length = 0

    @property
    def length(self) -> int:
        """Tokens that the last state has seen."""
        return self._length

    @property
    def slots(self) -> dict[int, int]:
        """The slot that holds the state behind so many tokens. A live view: read it, do not keep it."""
        return self._slots

    @property
    def own_slots(self) -> int:
        """Slots that nobody else holds."""
        return sum(self.pool.references(slot) == 1 for slot in self._slots.values())

    def reachable(self, length: int) -> int:
        """The most tokens, at most so many, whose state is held; 0 can always be gone back to."""
        return max((position for position in self._slots if position <= length), default=0)

    @uninterrupted
    def append(self, count: int, keep: Collection[int] = ()) -> tuple[int, dict[int, int]]:
        """Make room for the states of a step. Those of earlier steps go, but for the one that this step begins from.

        Args:
            count: tokens of the step. keep: how many tokens the states have seen that are wanted besides the last one.
                They are left out where there is no room for them.

        Returns:
            The slot to begin from, or NO_STATE; by how many tokens it has seen, the slot of each state to be kept.

        Raises:
            CacheFull: there is no slot for the last state; the table is as it was.
        """
        first, last = self._length, self._length + count
        if not count:
            return self._slots.get(first, NO_STATE), {}
        wanted = sorted({last, *(position for position in keep if first < position < last)})
        self._release(position for position in [*self._slots] if position != first)
        try:
            fresh = self.pool.allocate(len(wanted))
        except CacheFull:
            wanted, fresh = [last], self.pool.allocate(1)
        writes = dict(zip(wanted, fresh, strict=True))
        self._slots |= writes
        self._length = last
        return self._slots.get(first, NO_STATE), writes

    @uninterrupted
    def truncate(self, length: int) -> None:
        """Forget all states that have seen more tokens. That of `length` tokens must be held, or `length` be 0."""
        if length != self.reachable(length):
            raise ValueError(f"length = {length}: no state has seen so many tokens, only {sorted(self._slots)}")
        self._release(position for position in [*self._slots] if position > length)
        self._length = length

    @uninterrupted
    def fill(self, length: int, slot: int) -> None:
        """Begin this empty table with a state, of whose slot the caller has a reference."""
        self._slots, self._length = {length: slot}, length

    @uninterrupted
    def share(self, other: StateTable) -> None:
        """Hold the states of another table, too; this one is empty."""
        self.pool.share([*other._slots.values()])
        self._slots, self._length = dict(other._slots), other._length

    def _release(self, positions: Iterable[int]) -> None:
        for position in positions:
            self.pool.release([self._slots.pop(position)])
