"""Programs that are written once and run many times, with other addresses each time: what a node does by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..jit.arguments import Binding
from ..jit.native import NativeOp
from .calls import Call, Items, Phases, Program, program_of
from .thread_pool import Threads, rows_context

T = TypeVar("T")
_ALONE = Threads(1)


class NodeProgram:
    """A program, and what it takes on one thread, roughly: by itself, and per token of the step that it is run for.

    Several threads may run it at once, each by a copy.
    """

    def __init__(self, phases: Phases, nanoseconds: float = 0.0, per_token: float = 0.0) -> None:
        self._program, self._nanoseconds, self._per_token = program_of(phases), nanoseconds, per_token
        self._copies: list[Program] = []

    def run(self, threads: Threads | None, tokens: int = 0, /, **given: NDArray[Any] | int | None) -> None:
        """Bind what is open and run all of it.

        Args:
            threads: None = the calling thread alone.
            tokens: rows of the step; 0: nothing depends on a step.
            given: an array in one piece for its first element, an address, None for nothing (0).
        """
        self.run_bound(addresses_of(given), threads, tokens, self._nanoseconds + self._per_token * tokens)

    def run_bound(self, addresses: Mapping[str, int], threads: Threads | None, tokens: int, nanoseconds: float) -> None:
        """The same with what is bound to each name, and what the run takes on one thread."""
        try:
            copy = self._program.bound(addresses, self._copies.pop())
        except IndexError:
            copy = self._program.bound(addresses)
        context = rows_context(tokens) if tokens else None
        (threads or _ALONE).run(copy, context, nanoseconds=nanoseconds)
        self._copies.append(copy)


def addresses_of(given: Mapping[str, NDArray[Any] | int | None]) -> dict[str, int]:
    """What is bound to each name: of an array its first element, a number as it is, 0 for None.

    Raises:
        ValueError: an array does not lie in one piece, in order: whoever reads it by its address would read others.
    """
    return {
        name: _address_of(name, value) if isinstance(value, np.ndarray) else value or 0 for name, value in given.items()
    }


def _address_of(name: str, array: NDArray[Any]) -> int:
    if not array.flags.c_contiguous:
        raise ValueError(f"{name}: strides {array.strides} of shape {array.shape}, expected one piece in order")
    return first_element(array)


def first_element(array: NDArray[Any]) -> int:
    """The address of an array for an operator that is told its strides; somebody else keeps the array."""
    return int(array.__array_interface__["data"][0])


def run_alone(
    op: NativeOp, items: Items, nanoseconds: float, threads: Threads | None, /, tokens: int = 0, scratch: int = 0,
    **given: Any,
) -> None:  # fmt: skip
    """Run one operator by itself. Its call is kept for what it is told besides addresses of arrays.

    Args:
        nanoseconds, threads, tokens: as for NodeProgram. scratch: bytes that a thread needs.
        given: its arguments by name; an array for its first element, None for nothing.
    """
    addresses: dict[str, int] = {}
    for name, value in given.items():
        if isinstance(value, np.ndarray):
            addresses[name] = _address_of(name, value)
            given[name] = _BOUND
    program = _program_alone(op, items, scratch, tuple(given), tuple(given.values()))
    program.run_bound(addresses, threads, tokens, nanoseconds)


_BOUND = object()


@lru_cache(maxsize=1024)
def _program_alone(
    op: NativeOp, items: Items, scratch: int, names: tuple[str, ...], values: tuple[object, ...]
) -> NodeProgram:
    assert op.arguments is not None
    told = zip(names, values, strict=True)
    arguments = op.arguments(**{name: Binding(name) if value is _BOUND else value for name, value in told})
    return NodeProgram([[Call(op, arguments, items, scratch)]])


class BoundPrograms(Generic[T]):
    """What was made for some keys, such as shapes and types: the next call mostly asks for one of the last few.

    Args:
        limit: how many to keep; one more, and all of them are forgotten.
    """

    def __init__(self, limit: int = 16) -> None:
        self._limit = limit
        self._found: dict[tuple[object, ...], T] = {}

    def get(self, make: Callable[..., T], *key: object) -> T:
        """make(*key), or what it returned for this key before."""
        found = self._found.get(key)
        if found is None:
            if len(self._found) >= self._limit:
                self._found = {}  # another thread may be looking into the old one
            found = self._found[key] = make(*key)
        return found
