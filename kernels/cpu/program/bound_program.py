"""Programs that are built once and run many times with different addresses, such as single nodes of a session."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..jit.arguments import Binding
from ..jit.native import NativeOp
from .calls import Call, Items, Phases, Program, program_of
from .thread_pool import NO_STEP, Threads, recorder_of_thread, rows_context, run_only

T = TypeVar("T")
_ALONE = Threads(1)


class NodeProgram:
    """A program, and its approximate time on one thread: a constant plus a time per token of the step.

    Several threads may run the program at the same time, each with a separate copy.
    """

    def __init__(self, phases: Phases, nanoseconds: float = 0.0, per_token: float = 0.0) -> None:
        self._program, self._nanoseconds, self._per_token = program_of(phases), nanoseconds, per_token
        self._copies: list[Program] = []

    def run(self, threads: Threads | None, tokens: int = 0, /, **given: NDArray[Any] | int | None) -> None:
        """Bind all open entries and run the program.

        Args:
            threads: threads that share the run; None = only the calling thread.
            tokens: number of rows in the step; 0 = nothing depends on a step.
            given: value for each binding: a contiguous array (its address), an address, or None (0).
        """
        self.run_bound(addresses_of(given), threads, tokens, self._nanoseconds + self._per_token * tokens)

    def run_bound(self, addresses: Mapping[str, int], threads: Threads | None, tokens: int, nanoseconds: float) -> None:
        """Run the program with an address for each binding. `nanoseconds` is the run's time on one thread."""
        copies, program = self._copies, self._program
        try:
            copy = program.bound(addresses, copies.pop())
        except IndexError:
            copy = program.bound(addresses)
        threads = threads or _ALONE
        recorder = recorder_of_thread()
        if recorder is not None:
            recorder.add(program, addresses, tokens, threads, nanoseconds)
        call = copy.only_call if threads.is_direct(nanoseconds) else None
        if call is None:
            threads.run(copy, rows_context(tokens) if tokens else None, nanoseconds=nanoseconds)
        else:
            run_only(call, rows_context(tokens) if tokens else NO_STEP, tokens)
        copies.append(copy)


def addresses_of(given: Mapping[str, NDArray[Any] | int | None]) -> dict[str, int]:
    """Return the address for each binding: an array's first element, a number unchanged, or 0 for None.

    Raises:
        ValueError: an array is not contiguous, so operators would read wrong elements.
    """
    return {
        name: _address_of(name, value) if isinstance(value, np.ndarray) else value or 0 for name, value in given.items()
    }


def _address_of(name: str, array: NDArray[Any]) -> int:
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} has strides {array.strides} for shape {array.shape}, expected a contiguous array")
    return first_element(array)


def first_element(array: NDArray[Any]) -> int:
    """Return the address of an array for an operator that receives its strides. The caller keeps the array alive."""
    if _has_known_layout and isinstance(array, np.ndarray):  # a scalar of NumPy has another layout
        return _pointer_at(id(array) + _DATA_OFFSET).value or 0
    return array.ctypes.data


# The C API of NumPy fixes that an array object is a Python object followed by the address of its first element. Reading
# the address takes a tenth of the time of `__array_interface__`, which creates a dict.
_pointer_at, _DATA_OFFSET = ctypes.c_void_p.from_address, object.__basicsize__
_SAMPLE = np.zeros(1)
_has_known_layout = (
    sys.implementation.name == "cpython" and _pointer_at(id(_SAMPLE) + _DATA_OFFSET).value == _SAMPLE.ctypes.data
)


def run_alone(
    op: NativeOp, items: Items, nanoseconds: float, threads: Threads | None, /, tokens: int = 0, scratch: int = 0,
    **given: Any,
) -> None:  # fmt: skip
    """Run one operator. The program is cached by all arguments except the addresses of arrays.

    Args:
        op: operator to run.
        items: items of the operator's call.
        nanoseconds, threads, tokens: as for NodeProgram.
        scratch: bytes that each thread needs.
        given: arguments by name: an array (the address of its first element), a number, or None.
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
    """A cache of objects by key, such as programs by shapes and types. Most calls need one of the last few keys.

    Args:
        limit: maximum number of cached objects; an object beyond the limit clears the cache first.
    """

    def __init__(self, limit: int = 16) -> None:
        self._limit = limit
        self._found: dict[tuple[object, ...], T] = {}

    def get(self, make: Callable[..., T], *key: object) -> T:
        """Return make(*key), or its cached result."""
        found = self._found.get(key)
        if found is None:
            if len(self._found) >= self._limit:
                self._found = {}  # a new dict, because another thread may be reading the old one
            found = self._found[key] = make(*key)
        return found
