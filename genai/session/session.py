"""Session: runs any ONNX model on arrays."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from genai.common.garbage import collection_paused
from genai.common.single import Single
from genai.common.warning import warn_caller
from genai.kernels.cpu.arrays.blas import BLAS_THREADS
from genai.kernels.errors import DeviceFailed

from ..errors import (
    ArgumentError,
    GenaiError,
    InternalError,
    ProviderError,
    UnsupportedModelError,
    gpu_failed,
    out_of_memory,
)
from ..onnx.external_data import check_unchanged
from ..onnx.ir import Value
from .arguments import FeedCheck, ResultCheck
from .config import SessionConfig
from .loop import OpCall, Plan, RunContext, run_slots
from .prepare import Prepared, prepare
from .repeated import OnlyProgram, RepeatedPlan
from .running import Profiler, node_error, run_call
from .tensors import on_host

Stop = Callable[[], bool]
"""A function called before each node of a run; if it returns True, the run stops and raises RunStopped."""
Observer = Callable[[str, Any], None]
"""A function called with the name and value of an input or of a node's result."""
Feeds = list[tuple[int, Any]]
"""Checked inputs: pairs of a plan's slot and a value."""
RunCall = Callable[[OpCall, RunContext | None, Sequence[Any]], tuple[Any, ...]]


class Session(Single):
    """A model that is ready to run. Several threads may run one session at the same time.

    Args:
        source: a path, the bytes of a model, or an onnx.ModelProto.
        config: see `SessionConfig`.

    Attributes:
        inputs: the required inputs.
        overridable: inputs with a default.
        outputs: the outputs, in order.
        header: the model without its nodes and constants.
        plan: the calls of a run.
        providers: the providers in use, in order of preference, without the CPU, which computes the remaining nodes.
        assignment: the nodes that each provider computes, if `SessionConfig.record_assignment` is set.
        table_sizes: the number of rows of the smallest table that an input is an index of, by input name.
        head_sizes: the sizes of symbolic dimensions that attention nodes require, by dimension name.
        profiler: the profiler; None if nothing is recorded.
        falls_back: If a provider fails in a run: True to warn and continue on the CPU alone, False to raise
            ProviderError.

    Raises:
        SourceTypeError, ModelFolderError, ProtobufError, GraphError, ExternalDataError, UnsupportedOpError: the model
            cannot be read, is malformed, or uses features that are not supported.
        ArgumentError: `SessionConfig.initializers` does not fit the model.
        NodeError: a value would exceed the maximum size.
        ProviderError, OutOfMemoryError, LoadCancelledError, InternalError: see their descriptions.
    """

    def __init__(self, source: Any, config: SessionConfig | None = None) -> None:
        self.config = config or SessionConfig()
        # The source is only needed again if a provider fails.
        self._source = source if self.config.providers else None
        self.providers = [name for name, _ in self.config.providers]
        self.falls_back, self._fallback_lock = True, threading.Lock()
        prefix = self.config.profile_prefix
        self.profiler = None if prefix is None else Profiler(prefix)
        prepared = _loaded(source, self.config)
        if self.profiler is not None:
            # The names of onnxruntime's trace.
            name = "model_loading_uri" if isinstance(source, str | Path) else "model_loading_array"
            self.profiler.record_phase(name, self.profiler.start_ns, prepared.read_ns)
            self.profiler.record_phase("session_initialization", prepared.read_ns, time.perf_counter_ns())
        self.plan, self.assignment = prepared.plan, prepared.parts
        self._repeated = RepeatedPlan(self.plan, limits_blas=True)
        self.inputs, self.overridable = _known(prepared.inputs), _known(prepared.overridable)
        self.outputs, self.header = prepared.outputs, prepared.header
        self.table_sizes, self.head_sizes = prepared.table_sizes, prepared.head_sizes
        self._feed_check = FeedCheck(
            [*self.inputs, *self.overridable],
            {value.name for value in self.overridable},
            self.plan.inputs,
            prepared.on_device,
        )
        self._result_check = ResultCheck(self.outputs)
        self._positions = {value.name: index for index, value in enumerate(self.outputs)}

    def run(
        self, feeds: Mapping[str, Any], outputs: Sequence[str] | None = None, *, stop: Stop | None = None
    ) -> dict[str, Any]:
        """Run the model.

        Args:
            feeds: array by input name. Also accepted: lists and numbers (converted to the input's element type), and
                objects that support DLPack. Sequences are lists; empty optionals are None.
            outputs: names of the outputs to return; None or [] = all.
            stop: function called before each node; if it returns True, the run stops and raises RunStopped.

        Returns:
            Arrays by output name, which do not share memory with the session. Sequences are returned as lists,
            sequences of maps as lists of dicts, and empty optionals as None.

        Raises:
            ArgumentError, InputError: names, element types, shapes or values do not fit.
            NodeError: a node fails on its inputs; the message names the node.
            ExternalDataError: a file of the model was changed.
            ProviderError, DeviceError, OutOfMemoryError, RunStopped, InternalError: see their descriptions.
        """
        try:
            selected = self.positions(outputs) if outputs else None
            results = self.compute(self.checked(feeds), stop)
            found = on_host(results if selected is None else [results[index] for index in selected])
        except GenaiError:
            raise
        except MemoryError as error:
            raise out_of_memory("while running the model", error) from error
        except DeviceFailed as error:
            raise gpu_failed("Session.run", error) from error
        except Exception as error:
            raise _unforeseen("the model cannot be run on these inputs", error) from error
        names = self._positions if selected is None else [self.outputs[index].name for index in selected]
        return dict(zip(names, found, strict=True))

    def observe(self, feeds: Mapping[str, Any], observer: Observer, *, stop: Stop | None = None) -> None:
        """Run the model and pass each value to a function as soon as it is computed; no values need be stored.

        Create the session with `Level.NONE`, because values within fused nodes are not observed.

        Args:
            feeds: see `run`.
            observer: function called with each input that is passed, and with each result of a node of the main graph,
                in the order of computation.
            stop: see `run`.

        Raises: see `run`. If a provider fails, the run does not fall back to the CPU.
        """

        def call(op: OpCall, context: RunContext | None, inputs: Sequence[Any]) -> tuple[Any, ...]:
            results = run_call(None, op, context, inputs)
            for name, value in zip(op.names, results, strict=False):
                if name:
                    observer(name, value)
            return results

        plan = self.plan
        names = {slot: name for name, slot in plan.inputs.items()}
        try:
            checked = self.checked(feeds)
            for slot, value in checked:
                observer(names[slot], value)
            _run(plan, checked, stop, None, call)
        except DeviceFailed as error:
            raise gpu_failed("Session.observe", error) from error

    # The parts of `run`

    def positions(self, outputs: Sequence[str] | None) -> list[int]:
        """Return the indices of outputs; None or [] = all. Raises ArgumentError if an output does not exist."""
        known = self._positions
        if not outputs:
            return list(known.values())
        try:
            return [known[name] for name in outputs]
        except KeyError:
            unknown = [str(name) for name in outputs if name not in known]
            raise ArgumentError(
                f"invalid output name: {', '.join(unknown)}",
                f"the model's outputs are {', '.join(known)}",
                "use one of these names",
            ) from None

    def checked(self, feeds: Mapping[str, Any]) -> Feeds:
        """Check feeds for `compute`. Raises ArgumentError and InputError as `run` does."""
        return self._feed_check(feeds)

    def compute(self, feeds: Feeds, stop: Stop | None = None) -> list[Any]:
        """Run the model and return all outputs in order, in host or device memory.

        Raises: the same errors as `run`.
        """
        plan, repeated, profiler = self.plan, self._repeated, self.profiler
        only: OnlyProgram | None = None
        begin = 0 if profiler is None else time.perf_counter_ns()
        try:
            if stop is None and profiler is None:
                check_unchanged(plan.files)
                results, only = repeated.run_and_name(feeds, node_error)
                if only is not None and only.is_checked:
                    return list(results)
            else:
                results = _run(plan, feeds, stop, profiler, partial(run_call, profiler))
        except MemoryError as error:
            raise out_of_memory("while running the model", error) from error
        except ProviderError as error:
            if not self.falls_back:
                raise
            self._leave_providers(plan, error)
            names = {slot: name for name, slot in plan.inputs.items()}
            values = on_host([value for _, value in feeds])
            again = [(self.plan.inputs[names[slot]], value) for (slot, _), value in zip(feeds, values, strict=True)]
            return self.compute(again, stop)
        checked = self._result_check(results, feeds)
        if only is not None and only.makes_new_arrays:
            only.is_checked = self._result_check.are_declared(results)
        if profiler is not None:
            profiler.record_phase("model_run", begin, time.perf_counter_ns())
        return checked

    def _leave_providers(self, plan: Plan, error: ProviderError) -> None:
        """Compile the model for the CPU alone. Runs that are in progress finish with their previous plan."""
        with self._fallback_lock:
            if self.plan is not plan:
                return  # another run has already done this
            if not self.providers:
                raise error
            warn_caller(f"{error.what} ({error.why}); the session continues on the CPU alone")
            prepared = _loaded(self._source, replace(self.config, providers=()))
            self.providers = []
            self.plan, self.assignment = prepared.plan, prepared.parts
            self._repeated = RepeatedPlan(self.plan, limits_blas=True)
            self._feed_check.on_device = prepared.on_device


def _loaded(source: Any, config: SessionConfig) -> Prepared:
    try:
        with collection_paused():
            return prepare(source, config)
    except GenaiError:
        raise
    except RecursionError:
        raise UnsupportedModelError(
            "the graphs of the model are nested too deeply",
            "hundreds of nested graphs exceed Python's recursion limit",
            "export the model with fewer nested If, Loop and Scan nodes",
        ) from None
    except MemoryError as error:
        raise out_of_memory("while loading the model", error) from error
    except Exception as error:
        raise _unforeseen("the model cannot be loaded", error) from error


def _unforeseen(what: str, error: Exception) -> InternalError:
    return InternalError(
        what,
        f"{type(error).__name__}: {error!s:.300}",
        "check the model and its inputs; if they are correct, report a bug",
    )


def _never() -> bool:
    return False


def _known(values: Iterable[Value]) -> list[Value]:
    """Copy values as they are now, so that later changes of the graph do not affect them."""
    return [replace(value) for value in values]


def _run(plan: Plan, feeds: Feeds, stop: Stop | None, profiler: Profiler | None, call: RunCall) -> tuple[Any, ...]:
    """Run a plan whose calls are observed, and return its outputs in order."""
    context = None
    if stop is not None or profiler is not None:
        context = RunContext(stop or _never, None if profiler is None else profiler.record)
    try:
        check_unchanged(plan.files)
        if not plan.calls_blas:
            return run_slots(plan, feeds, context, call)
        with BLAS_THREADS.single():
            return run_slots(plan, feeds, context, call)
    except MemoryError as error:
        raise out_of_memory("while running the model", error) from error
