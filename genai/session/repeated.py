"""Faster forms of a plan for shapes of inputs that occur again.

The second run with the same shapes is recorded. Later runs do not compute results that depend only on shapes, and
adjacent kernels that only run compiled programs become one program. In small graphs, most calls of kernels take longer
than their work. With several threads, the Python code of a call also delays all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from genai.common.host_memory import recycled
from genai.kernels.cpu.arrays.blas import BLAS_THREADS
from genai.kernels.cpu.program.bound_program import first_element
from genai.kernels.cpu.program.recording import POISON, JoinedProgram, RecordedRun, Recorder, recorded
from genai.kernels.errors import StepError
from genai.ops.control import If
from genai.ops.dependence import is_fast_alone, is_native, reads_only_shapes, shape_inputs, value_inputs

from .arguments import root_of
from .loop import (
    Explain,
    OpCall,
    Plan,
    RunContext,
    call,
    explained,
    raise_explained,
    run_slots,
    run_unobserved,
    with_lifetimes,
)

Call = Callable[[OpCall, RunContext | None, Sequence[Any]], tuple[Any, ...]]
Feeds = Sequence[tuple[int, Any]]
# Number of sets of shapes for which a plan has a faster form, and that are remembered after one run.
_MAX_FORMS, _MAX_SEEN = 16, 64
# Larger values are computed by separate calls, whose memory is released after the last use.
_MAX_BYTES = 1 << 22
# Larger values take longer to compute than a call of a kernel takes. For broadcast operands of this size, kernels use
# compiled programs also if they are not recorded.
_FEW_BYTES = 1 << 18
# Stored values are smaller, because they take memory between runs.
_MAX_STORED_BYTES = 1 << 16
_LINE = 64
# NumPy returns scalars for results without axes.
_ARRAYS = (np.ndarray, np.generic)


class RepeatedPlan:
    """A plan with faster forms for the shapes of inputs that occurred before. Several threads may run it."""

    def __init__(self, plan: Plan, *, limits_blas: bool = False) -> None:
        """`limits_blas`: True to limit BLAS to one thread during runs of kernels that may call it."""
        self._plan, self._limits_blas = plan, limits_blas
        self._forms: dict[Any, Plan] = {}
        self._programs: dict[Any, OnlyProgram] = {}
        self._seen: set[Any] = set()

    def run(self, feeds: Feeds, explain: Explain = explained) -> tuple[Any, ...]:
        """Run the plan; see `run_unobserved`."""
        return self.run_and_name(feeds, explain)[0]

    def run_and_name(self, feeds: Feeds, explain: Explain) -> tuple[tuple[Any, ...], OnlyProgram | None]:
        """Run the plan; return its results and the program that computed all of them, None if there is none."""
        key = _key(feeds)
        only = self._programs.get(key)
        if only is not None:
            return only.run(feeds, explain), only
        plan = None if key is None else self._forms.get(key)
        if plan is None:
            if key is not None:
                if key in self._seen:
                    return self._record(feeds, key, explain), None
                self._seen = {*self._seen, key} if len(self._seen) < _MAX_SEEN else {key}
            plan = self._plan
        with BLAS_THREADS.single() if self._limits_blas and plan.calls_blas else nullcontext():
            return run_unobserved(plan, feeds, explain), None

    def _record(self, feeds: Feeds, key: Any, explain: Explain) -> tuple[Any, ...]:
        """Record a run, and add the faster form to the forms; the plan itself stands for no faster form."""
        recording = _Recording(self._plan, feeds, partial(call, explain=explain))
        with BLAS_THREADS.single() if self._limits_blas and self._plan.calls_blas else nullcontext():
            results = run_slots(self._plan, feeds, None, recording.call)
        forms = self._forms if len(self._forms) < _MAX_FORMS else {}
        self._forms = {**forms, key: recording.plan() or self._plan}
        programs = {known: OnlyProgram.of(plan, known) for known, plan in self._forms.items()}
        self._programs = {known: only for known, only in programs.items() if only is not None}
        return results


class OnlyProgram:
    """A plan whose first call is a joined program, without the slots of a run. Other calls only convert results.

    Attributes:
        is_checked: True if a caller has checked the results of a run. The results of all runs are new arrays with the
            same shapes and types; False if this is not known.
    """

    def __init__(self, plan: Plan, indices: Sequence[int]) -> None:
        """`indices`: the index of each of the program's inputs in the feeds."""
        op, *conversions = plan.calls
        self._op, self._indices, self.is_checked = op, indices, False
        kernel = op.kernel
        assert isinstance(kernel, _JoinedKernel)
        self._kernel = kernel
        # Each conversion's kernel, and the numbers of its inputs among the program's results and earlier conversions.
        self._conversions: list[tuple[Any, list[int]]] = []
        made = [*op.outputs]
        for other in conversions:
            self._conversions.append((other.kernel, [made.index(slot) for slot in other.inputs]))
            made += other.outputs
        self._results = [made.index(slot) for slot in plan.outputs]

    @property
    def makes_new_arrays(self) -> bool:
        """True if the arrays that each run returns are new, have the same shapes and types, and share no memory."""
        return self._kernel.is_plain and len(set(self._results)) == len(self._results)

    @staticmethod
    def of(plan: Plan, key: Sequence[Any]) -> OnlyProgram | None:
        """Return the program of a plan for the feeds of a key; None if the plan has other calls."""
        given = key[::_KEY_ITEMS]
        if not plan.calls or not isinstance(plan.calls[0].kernel, _JoinedKernel):
            return None
        op, *others = plan.calls
        made = {*op.outputs, *(slot for other in others for slot in other.outputs)}
        if (
            any(other.op_type not in _CONVERSIONS or not made.issuperset(other.inputs) for other in others)
            or (not others and op.outputs != plan.outputs)
            or not made.issuperset(plan.outputs)
            or not set(given).issuperset(op.inputs)
        ):
            return None
        return OnlyProgram(plan, [given.index(slot) for slot in op.inputs])

    def run(self, feeds: Feeds, explain: Explain) -> tuple[Any, ...]:
        """Run the plan; see `run_unobserved`."""
        op, inputs = self._op, [feeds[index][1] for index in self._indices]
        try:
            found = self._kernel.run(inputs)
            if not self._conversions:
                return found
            for kernel, indices in self._conversions:
                found += kernel(None, [found[index] for index in indices])
            return tuple([found[index] for index in self._results])
        except Exception as error:
            raise_explained(explain, op, inputs, error)


# Operators of Python objects, which compute no numbers.
_CONVERSIONS = frozenset({"ZipMap"})
# Number of items of a key for each input.
_KEY_ITEMS = 3


def _key(feeds: Feeds) -> Any:
    """Return the slots, shapes and types of arrays, or None if an input is not an array."""
    key: list[Any] = []
    for slot, array in feeds:
        if type(array) is not np.ndarray:
            return None
        key += slot, array.shape, array.dtype
    return tuple(key)


@dataclass(frozen=True)
class _Layout:
    """The shape, strides and element type of an array."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any

    @staticmethod
    def of(array: Any) -> _Layout:
        return _Layout(array.shape, array.strides, array.dtype)


@dataclass(frozen=True, eq=False)
class _Buffer:
    """Memory that the calls of a segment write: its bytes, and its address modulo a cache line."""

    size: int
    start: int


# A place in memory: an outer slot or a buffer of the segment, and the offset in bytes.
_Place = tuple[int | _Buffer, int]


@dataclass
class _Segment:
    """Adjacent calls that become one program.

    Attributes:
        ops: the calls, for arrays of other layouts.
        runs: recorded runs of programs, with the place of each address that changes.
        outer: slots that the calls read and that other calls write, with their layouts.
        produced: slots that the calls write, with their places and layouts.
        held: constants whose addresses the programs contain.
        views: the calls that return views of outer values. They take no time, unless another kernel needs the views.
        made: numbers of the views that are also made by an ordinary call ahead of the segment.
        nanoseconds: approximate time of the runs on one thread.
        is_fast_alone: True if a call takes less time as an ordinary call than as a program of one call.
        is_large: True if an input is large.
    """

    ops: list[OpCall] = field(default_factory=list)
    runs: list[tuple[RecordedRun, dict[int, _Place]]] = field(default_factory=list)
    outer: dict[int, _Layout] = field(default_factory=dict)
    produced: dict[int, tuple[_Place, _Layout]] = field(default_factory=dict)
    held: list[Any] = field(default_factory=list)
    views: list[OpCall] = field(default_factory=list)
    made: set[int] = field(default_factory=set)
    nanoseconds: float = 0.0
    is_fast_alone: bool = False
    is_large: bool = False

    def computes(self, slots: Sequence[int]) -> bool:
        """Return True if one of these slots is written by a program."""
        return any(slot in self.produced and not isinstance(self.produced[slot][0][0], int) for slot in slots)

    def make_views(self, slots: Collection[int]) -> list[OpCall]:
        """Return the calls that make the views in these slots, except calls that were returned before."""
        needed, found = set(slots), []
        for number, op in reversed([*enumerate(self.views)]):
            if number not in self.made and not needed.isdisjoint(op.outputs):
                self.made.add(number)
                found.append(op)
                needed.update(op.inputs)
        return found[::-1]


class _Recording:
    """A run of a plan whose calls are recorded."""

    def __init__(self, plan: Plan, feeds: Sequence[tuple[int, Any]], call: Call) -> None:
        self._plan, self._call = plan, call
        given = {slot for slot, _ in feeds}
        absent = len(plan.initial) - 1
        self._absent = {-1, absent}
        self._stored = {
            slot: value for slot, value in enumerate(plan.initial) if slot not in given and value is not None
        }
        self._sized = given | set(self._stored) | self._absent
        self._steps: list[OpCall | _Segment] = []
        self._segment = _Segment()
        # Conversions that no other call needs yet, so that they do not divide a segment.
        self._later: list[OpCall] = []
        # The slots of bodies follow the slots of the plan. Results of a body are in the body's slots.
        self._slots = len(plan.initial)
        self._actual: dict[int, int] = {}

    def call(self, op: OpCall, context: RunContext | None, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Run a call of the plan, and decide how later runs compute its results."""
        if not self._actual.keys().isdisjoint(op.inputs):
            op = replace(op, inputs=tuple([self._actual.get(slot, slot) for slot in op.inputs]))
        body = self._body(op, inputs)
        if body is not None:
            return self._run_body(op, *body)
        count = shape_inputs(op.op_type) if op.is_own else None
        is_known = count is not None and self._sized.issuperset(op.inputs[:count])
        if not is_known or not self._are_stored(op.inputs[count:]):
            results = self._call(op, context, inputs)
            self._add_ordinary(op)
            return results
        if reads_only_shapes(op.op_type) or self._are_stored(op.inputs):
            results = self._call(op, context, inputs)
            if not self._store(op, results):
                self._add_ordinary(op)
        elif is_native(op.op_type, op.kernel) and self._are_stored(
            [op.inputs[index] for index in value_inputs(op.op_type, len(op.inputs))]
        ):
            with recorded() as recorder:
                results = self._call(op, context, inputs)
            if not self._join(op, inputs, results, recorder):
                self._add_ordinary(op)
        else:
            results = self._call(op, context, inputs)
            self._add_ordinary(op)
        self._sized.update(op.outputs)
        return results

    def _body(self, op: OpCall, inputs: Sequence[Any]) -> tuple[Plan, Sequence[int], Sequence[Any]] | None:
        """Return the plan that the call always runs, its inputs' slots and values; None if another kernel runs."""
        kernel, first = op.kernel, 0
        if isinstance(kernel, If) and self._are_stored(op.inputs[:1]):
            kernel, first = kernel.branch(inputs[0]), 1
        plan = getattr(kernel, "plan", None)
        return (plan, op.inputs[first:], inputs[first:]) if isinstance(plan, Plan) else None

    def _run_body(self, op: OpCall, plan: Plan, slots: Sequence[int], inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Run a body, and add its calls to the calls of the plan."""
        given = dict(zip(plan.inputs.values(), slots, strict=False))
        first = self._slots
        self._slots += len(plan.initial)
        actual = {slot: given.get(slot, first + slot) for slot in range(len(plan.initial))}
        actual[-1] = -1
        for slot, value in enumerate(plan.initial):
            if value is not None and slot not in given:
                self._stored[actual[slot]] = value
                self._sized.add(actual[slot])

        def call(op: OpCall, context: RunContext | None, inputs: Sequence[Any]) -> tuple[Any, ...]:
            moved = [tuple([actual[slot] for slot in slots]) for slots in (op.inputs, op.outputs)]
            return self.call(replace(op, inputs=moved[0], outputs=moved[1]), context, inputs)

        results = run_slots(plan, zip(plan.inputs.values(), inputs, strict=False), None, call)
        for slot, made in zip(op.outputs, plan.outputs, strict=False):
            if slot >= 0:
                self._actual[slot] = self._actual.get(actual[made], actual[made])
        return results

    def _are_stored(self, slots: Sequence[int]) -> bool:
        return all(slot in self._stored or slot in self._absent for slot in slots)

    def _store(self, op: OpCall, results: Sequence[Any]) -> bool:
        """Store results that are the same in later runs. Return False if they are too large."""
        if not all(isinstance(value, _ARRAYS) and value.nbytes <= _MAX_STORED_BYTES for value in results):
            return False
        for slot, value in zip(op.outputs, results, strict=False):
            if isinstance(value, np.ndarray):
                value.flags.writeable = False  # a run returns copies of read-only arrays
            if slot >= 0:
                self._stored[slot] = value
        return True

    def _add_ordinary(self, op: OpCall) -> None:
        """Add a call as it is: ahead of the current segment, or after it if the call reads the segment's results."""
        if op.op_type in _CONVERSIONS:
            self._later.append(op)
            return
        if any(not set(later.outputs).isdisjoint(op.inputs) for later in self._later):
            self._end_segment()
        if self._segment.computes(op.inputs):
            self._end_segment()
        self._steps += [*self._segment.make_views(op.inputs), op]

    def _end_segment(self) -> None:
        if self._segment.ops:
            self._steps.append(self._segment)
        self._segment = _Segment()
        self._steps += self._later
        self._later = []

    def _join(self, op: OpCall, inputs: Sequence[Any], results: Sequence[Any], recorder: Recorder) -> bool:
        """Add a call to the current segment. Return False if its work is more than the recorded runs."""
        if recorder.can_join and not recorder.can_follow(self._segment.nanoseconds):
            self._end_segment()
        segment = self._segment
        regions = _Regions()
        regions.constants += recorder.fixed
        for slot, array in zip(op.inputs, inputs, strict=False):
            if array is None:
                continue
            if slot in self._stored:
                regions.constants += [array] if isinstance(array, np.ndarray) else []
            elif slot in segment.produced:
                regions.add(array, *segment.produced[slot][0])
            else:
                regions.add(array, slot, 0)
        places = [None if value is None else regions.place_of_result(value) for value in results]
        if not (recorder.can_join and recorder.is_complete and regions.is_valid):
            return False
        for _, memory in recorder.own:
            regions.add(memory, _Buffer(memory.nbytes, first_element(memory) % _LINE), 0)
        runs = regions.placed(recorder.runs)
        if runs is None:
            return False
        written = {where for _, bound in runs for where, _ in bound.values()}
        made = [
            (slot, place, value)
            for slot, place, value in zip(op.outputs, places, results, strict=False)
            if slot >= 0 and place is not None
        ]
        if any(where in regions.new and where not in written for _, (where, _), _ in made):
            return False
        if not runs and all(isinstance(where, int) for _, (where, _), _ in made):
            segment.views.append(op)
        elif any(isinstance(where, int) for _, (where, _), _ in made):
            return False
        segment.ops.append(op)
        segment.runs += runs
        segment.nanoseconds += recorder.nanoseconds
        arrays = [array for array in inputs if isinstance(array, np.ndarray)]
        is_large = max((array.nbytes for array in arrays), default=0) > _FEW_BYTES
        is_broadcast = len({array.size for array in arrays}) > 1
        segment.is_fast_alone |= is_fast_alone(op.op_type, is_broadcast=is_large and is_broadcast)
        segment.is_large |= is_large
        segment.held += regions.constants
        for slot, array in zip(op.inputs, inputs, strict=False):
            if array is not None and slot not in self._stored and slot not in segment.produced:
                segment.outer[slot] = _Layout.of(array)
        segment.produced.update((slot, (place, _Layout.of(value))) for slot, place, value in made)
        return True

    def plan(self) -> Plan | None:
        """Return the faster form of the plan, or None if there is none. The run must be complete."""
        plan = self._plan
        self._end_segment()
        outputs = tuple([self._actual.get(slot, slot) for slot in plan.outputs])
        initial = [*plan.initial, *[None] * (self._slots + 1 - len(plan.initial))]
        for slot, value in self._stored.items():
            initial[slot] = value
        needed = set(outputs)
        calls: list[OpCall] = []
        is_faster = bool(self._actual) or len(self._steps) < len(plan.calls)
        for step in reversed(self._steps):
            if isinstance(step, OpCall):
                found = [step]
            elif not _is_worth_joining(step, is_only=len(self._steps) == 1):
                found = [op for op in step.ops[::-1] if op not in step.views or step.views.index(op) not in step.made]
            else:
                read = tuple(slot for slot in step.produced if slot in needed and step.computes([slot]))
                found = [_joined(step, read, tuple(initial))] if read else []
                found += step.make_views(needed)[::-1]
                is_faster = True
            calls += found
            needed.update(slot for op in found for slot in op.inputs)
        kept = set(outputs) | set(self._stored) | self._absent
        if not is_faster:
            return None
        unused = set(self._stored) - needed
        for slot in unused - {slot for slot, value in enumerate(plan.initial) if value is not None}:
            initial[slot] = None
        return replace(
            plan,
            calls=with_lifetimes(calls[::-1], kept),
            initial=tuple(initial),
            outputs=outputs,
            calls_blas=any(op.calls_blas for op in calls),
        )


# Number of runs in which a program is compared with the calls that it replaces.
_CHECKS = 2
# The place of an address that never changes.
_FIXED: _Place = (-1, 0)


def _is_worth_joining(segment: _Segment, *, is_only: bool) -> bool:
    """Return True if a joined program takes less time than the calls of a segment.

    Args:
        is_only: True if the plan has no other calls.
    """
    if is_only and len(segment.runs) == 1 and not segment.is_large:
        return True
    return len(segment.runs) > 1 or (len(segment.runs) == 1 and not segment.is_fast_alone)


class _Regions:
    """The memory that a call may use, and its places.

    Attributes:
        constants: arrays whose addresses never change.
        new: buffers that the call has allocated for its results.
        is_valid: False if an array is large or not an array, so that the call is not joined.
    """

    def __init__(self) -> None:
        self.constants: list[Any] = []
        self.new: set[_Buffer] = set()
        self.is_valid = True
        self._known: list[tuple[int, int, int | _Buffer, int]] = []  # begin, end, place
        self._roots: dict[int, tuple[int, int | _Buffer, int]] = {}  # root's id: an address in it, its place

    def add(self, array: Any, place: int | _Buffer, offset: int) -> None:
        """Add an array with the place of its first element."""
        if type(array) is not np.ndarray or array.dtype.hasobject or not 0 < array.nbytes <= _MAX_BYTES:
            self.is_valid = False
            return
        begin, end = first_element(array), _end(array)
        self.is_valid &= min(array.strides, default=0) >= 0
        self._known.append((begin, end, place, offset))
        self._roots.setdefault(id(root_of(array)), (begin, place, offset))

    def place_of_result(self, array: Any) -> _Place | None:
        """Return the place of a result: in the memory of an input, or in a new buffer."""
        if type(array) is not np.ndarray:
            self.is_valid = False
            return None
        root, begin = root_of(array), first_element(array)
        if id(root) not in self._roots:
            start = first_element(root)
            buffer = _Buffer(root.nbytes, start % _LINE)
            self.new.add(buffer)
            self.add(root, buffer, 0)
            self._roots[id(root)] = start, buffer, 0
        if not self.is_valid:
            return None
        known, place, offset = self._roots[id(root)]
        return place, offset + begin - known

    def placed(self, runs: Sequence[RecordedRun]) -> list[tuple[RecordedRun, dict[int, _Place]]] | None:
        """Return the places of the addresses that each run binds; None if the runs cannot be joined."""
        result = []
        for run in runs:
            places: dict[int, _Place] = {}
            for _, name, _ in run.program.open:
                address = run.addresses[name]
                found = self.find(address)
                if found is None or not run.can_join:
                    return None
                if found != _FIXED:
                    places[address] = found
            result.append((run, places))
        return result

    def find(self, address: int) -> _Place | None:
        """Return the place of an address. None = unknown, or it may be in the memory of several inputs."""
        if address == 0:
            return _FIXED
        found = [known for known in self._known if known[0] <= address < known[1]]
        exact = [known for known in found if known[0] == address]
        places = {(place, offset + address - begin) for begin, _, place, offset in exact or found}
        if any(first_element(array) <= address < _end(array) for array in self.constants):
            places.add(_FIXED)
        return places.pop() if len(places) == 1 else None


def _end(array: Any) -> int:
    """Return the address after the last element of an array without negative strides."""
    last = sum((size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True))
    return int(first_element(array) + last + array.itemsize)


def _joined(segment: _Segment, outputs: tuple[int, ...], initial: tuple[Any, ...]) -> OpCall:
    """Return the calls of a segment as one call."""
    first, last = segment.ops[0], segment.ops[-1]
    kernel = _JoinedKernel(segment, outputs, initial)
    label = f"{first.label} to {last.label}"
    return OpCall(label, "Joined", kernel, tuple(segment.outer), outputs, (), ("",) * len(outputs), True, False)


class _JoinedKernel:
    """The kernel of a segment: one program for arrays of the recorded layouts, the segment's calls for others.

    The first runs compare the program with the calls. A program that does not give the same bits is not used again.
    """

    def __init__(self, segment: _Segment, outputs: tuple[int, ...], initial: tuple[Any, ...]) -> None:
        self._expected = [(known.shape, known.strides, known.dtype) for known in segment.outer.values()]
        self._strides = [known.strides for known in segment.outer.values()]
        self._held = segment.held
        self._slots = tuple(segment.outer)
        # The calls of a body release slots of the body's plan, which are other slots here.
        self._fallback = Plan(with_lifetimes(segment.ops, set(outputs)), initial, {}, (), outputs)
        made = [segment.produced[slot] for slot in outputs]
        buffers = list(dict.fromkeys(place[0] for place, _ in made))
        # The buffers of results are allocated for each run. A result is a whole buffer or a view.
        whole = {place[0]: layout for place, layout in made if _is_whole(place, layout)}
        self._buffers = [
            (*_shape_and_type(whole.get(buffer)), buffer.size, buffer.start)
            for buffer in buffers
            if isinstance(buffer, _Buffer)
        ]
        self._results = [
            (buffers.index(place[0]), place[1], None if whole.get(place[0]) is layout else layout)
            for place, layout in made
        ]
        # True if each result is a separate new array.
        self.is_plain = [(index, 0, None) for index in range(len(buffers))] == self._results
        indices: dict[Any, int] = {slot: index for index, slot in enumerate(self._slots)}
        indices.update({buffer: len(self._slots) + index for index, buffer in enumerate(buffers)})
        offsets, size = _inner_offsets(segment, set(buffers))

        def place(run: int, address: int) -> tuple[int, int] | None:
            found = segment.runs[run][1].get(address)
            if found is None:
                return None
            where, offset = found
            if where in indices:
                return indices[where], offset
            assert isinstance(where, _Buffer)
            return -1, offsets[where] + offset

        self._program = JoinedProgram([run for run, _ in segment.runs], place, size)
        self._checks_left, self._is_wrong = _CHECKS, False

    def run(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Run with arrays of the recorded shapes and types, but perhaps of other strides."""
        if self._checks_left > 0 or self._is_wrong or [array.strides for array in inputs] != self._strides:
            return self(None, inputs)
        return self._run_program(inputs)

    def __call__(self, context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        for array, (shape, strides, dtype) in zip(inputs, self._expected, strict=True):
            if (
                type(array) is not np.ndarray
                or array.shape != shape
                or array.strides != strides
                or array.dtype != dtype
            ):
                return self._run_calls(context, inputs)
        if self._is_wrong or self._checks_left > 0:
            return self._checked(context, inputs)
        return self._run_program(inputs)

    def _checked(self, context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return the results of the calls, and compare them with the program's unless the program is known to be wrong.

        Memory that the program does not write would often contain the results of an earlier run.
        """
        expected = self._run_calls(context, inputs)
        if not self._is_wrong:
            found = self._run_program(inputs, poison=True)
            self._is_wrong = not all(map(_are_same, found, expected))
            self._checks_left -= 1
        return expected

    def _run_calls(self, context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return run_slots(self._fallback, zip(self._slots, inputs, strict=True), context)

    def _run_program(self, inputs: Sequence[Any], *, poison: bool = False) -> tuple[Any, ...]:
        """Run the program. `poison`: True to overwrite the memory of results and of inner values before.

        If an operator rejects values, the calls run instead, because a call's error names them.
        """
        roots = [
            _memory(size, start) if shape is None else np.empty(shape, dtype)
            for shape, dtype, size, start in self._buffers
        ]
        if poison:
            for root in roots:
                root.reshape(-1).view(np.uint8).fill(POISON)
        try:
            self._program.run([*map(first_element, inputs), *map(first_element, roots)], poison=poison)
        except StepError:
            return self._run_calls(None, inputs)
        if self.is_plain:
            return tuple(roots)
        return tuple(
            [
                roots[index] if made is None else np.ndarray(made.shape, made.dtype, roots[index], offset, made.strides)
                for index, offset, made in self._results
            ]
        )


def _are_same(found: Any, expected: Any) -> bool:
    """Return True if two results have the same type, shape and bits."""
    return (
        found.dtype == expected.dtype and found.shape == expected.shape and bool(found.tobytes() == expected.tobytes())
    )


def _shape_and_type(layout: _Layout | None) -> tuple[tuple[int, ...] | None, Any]:
    return (None, None) if layout is None else (layout.shape, layout.dtype)


def _is_whole(place: _Place, layout: _Layout) -> bool:
    """Return True if a value in C order fills its buffer, so that it can be allocated without a view."""
    where, size = place[0], layout.dtype.itemsize
    for extent, stride in zip(reversed(layout.shape), reversed(layout.strides), strict=True):
        if stride != size and extent > 1:
            return False
        size *= extent
    return isinstance(where, _Buffer) and where.size == size


def _memory(size: int, start: int) -> Any:
    """Return bytes whose address modulo a cache line is `start`."""
    memory = recycled(size + _LINE)
    memory = np.empty(size + _LINE, np.uint8) if memory is None else memory
    skipped = (start - first_element(memory)) % _LINE
    return memory[skipped : skipped + size]


def _inner_offsets(segment: _Segment, outer: set[Any]) -> tuple[dict[_Buffer, int], int]:
    """Return an offset for each buffer that only the segment uses, and the bytes that all need.

    Buffers that are not used by the same runs can share memory.
    """
    used: dict[_Buffer, tuple[int, int]] = {}
    for number, (_, places) in enumerate(segment.runs):
        for where, _ in places.values():
            if isinstance(where, _Buffer) and where not in outer:
                used[where] = used.get(where, (number, number))[0], number
    offsets: dict[_Buffer, int] = {}
    total = 0
    for buffer, (first, last) in used.items():
        size = -(-(buffer.size + buffer.start) // _LINE) * _LINE
        taken = sorted(
            (offsets[other] - other.start, offsets[other] + other.size)
            for other in offsets
            if used[other][0] <= last and first <= used[other][1]
        )
        at = 0
        for begin, end in taken:
            if at + size <= begin:
                break
            at = max(at, -(-end // _LINE) * _LINE)
        offsets[buffer] = at + buffer.start
        total = max(total, at + size)
    return offsets, total
