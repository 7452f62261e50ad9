"""Session: any ONNX model, arrays in, arrays out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from genai.common.garbage import collection_paused
from genai.common.single import Single
from genai.common.warning import warn_caller
from genai.kernels.cpu.arrays.blas import BLAS_THREADS
from genai.kernels.device import DeviceFailed

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
from .running import Profiler, run_call
from .tensors import on_host

Stop = Callable[[], bool]
"""Asked before each node of a run, which ends with RunStopped where it says True."""
Observer = Callable[[str, Any], None]
"""Gets the name and the value of an input, or of what a node has computed."""
Feeds = list[tuple[int, Any]]
"""Checked inputs: the plan's slots, and their values."""
RunCall = Callable[[OpCall, RunContext | None, Sequence[Any]], tuple[Any, ...]]


class Session(Single):
    """A model that is ready to run. Several threads may run one session at once.

    Args:
        source: a path, the bytes of a model, or an onnx.ModelProto.
        config: see `SessionConfig`.

    Attributes:
        inputs: those that every run needs. overridable: those that have a default. outputs: in order.
        header: the model without its nodes and constants.
        plan: the calls of a run.
        providers: those in use, in order of preference; the CPU, which takes the rest, is not among them.
        assignment: which provider computes which nodes, where `SessionConfig.record_assignment` asks for it.
        profiler: None where nothing is recorded.
        falls_back: where a provider fails in a run, warn, and from then on use the CPU alone; else ProviderError.

    Raises:
        SourceTypeError, ModelFolderError, ProtobufError, GraphError, ExternalDataError, UnsupportedOpError: the model
            cannot be read, is malformed, or needs what is not there.
        ArgumentError: `SessionConfig.initializers` do not fit the model.
        NodeError: a value would take more memory than one may.
        ProviderError, OutOfMemoryError, LoadCancelledError, InternalError: see their descriptions.
    """

    def __init__(self, source: Any, config: SessionConfig | None = None) -> None:
        self.config = config or SessionConfig()
        # Needed again only if a provider fails.
        self._source = source if self.config.providers else None
        self.providers = [name for name, _ in self.config.providers]
        self.falls_back, self._fallback_lock = True, threading.Lock()
        prepared = _loaded(source, self.config)
        self.plan, self.assignment = prepared.plan, prepared.parts
        self.inputs, self.overridable = _known(prepared.inputs), _known(prepared.overridable)
        self.outputs, self.header = prepared.outputs, prepared.header
        self._feed_check = FeedCheck(
            [*self.inputs, *self.overridable],
            {value.name for value in self.overridable},
            self.plan.inputs,
            prepared.on_device,
        )
        self._result_check = ResultCheck(self.outputs)
        self._positions = {value.name: index for index, value in enumerate(self.outputs)}
        prefix = self.config.profile_prefix
        self.profiler = None if prefix is None else Profiler(prefix)

    def run(
        self, feeds: Mapping[str, Any], outputs: Sequence[str] | None = None, *, stop: Stop | None = None
    ) -> dict[str, Any]:
        """Run the model.

        Args:
            feeds: per input an array; also lists and numbers (taken as the input's element type), and anything with
                DLPack. Sequences are lists, empty optionals None.
            outputs: which to return; None or [] = all.

        Returns:
            Arrays of their own memory by the outputs' names; lists for sequences, lists of dicts for sequences of
            maps, None for empty optionals.

        Raises:
            ArgumentError, InputError: names, element types, shapes or values that do not fit.
            NodeError: a node cannot compute what it got; the message names it.
            ExternalDataError: a file of the model was changed.
            ProviderError, DeviceError, OutOfMemoryError, RunStopped, InternalError: see their descriptions.
        """
        try:
            positions = self.positions(outputs)
            results = self.compute(self.checked(feeds), stop)
            found = on_host([results[index] for index in positions])
        except GenaiError:
            raise
        except MemoryError as error:
            raise out_of_memory("while running the model", error) from error
        except DeviceFailed as error:
            raise gpu_failed("Session.run", error) from error
        except Exception as error:
            raise _unforeseen("the model cannot be run on these inputs", error) from error
        return {self.outputs[index].name: value for index, value in zip(positions, found, strict=True)}

    def observe(self, feeds: Mapping[str, Any], observer: Observer, *, stop: Stop | None = None) -> None:
        """Run the model, and show each value as soon as it is computed, so that nothing needs to be kept.

        The session should be made with `Level.NONE`: what rewrites joined is not seen.

        Args:
            observer: called with each input given, and with each result of a node of the main graph, in the order in
                which they come about.

        Raises: see `run`. A provider that fails is not left.
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
            _run(plan, checked, stop, call)
        except DeviceFailed as error:
            raise gpu_failed("Session.observe", error) from error

    # What `run` is made of

    def positions(self, outputs: Sequence[str] | None) -> list[int]:
        """Where outputs stand among all; None or [] = all. Raises ArgumentError: there is no such output."""
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
                "ask for one of these",
            ) from None

    def checked(self, feeds: Mapping[str, Any]) -> Feeds:
        """Feeds as `compute` takes them. Raises ArgumentError, InputError: see `run`."""
        return self._feed_check(feeds)

    def compute(self, feeds: Feeds, stop: Stop | None = None) -> list[Any]:
        """Run the model; returns all outputs in order, wherever they lie: also in a device's memory.

        Raises: see `run`.
        """
        plan = self.plan
        try:
            results = _run(plan, feeds, stop, partial(run_call, self.profiler))
        except ProviderError as error:
            if not self.falls_back:
                raise
            self._leave_providers(plan, error)
            names = {slot: name for name, slot in plan.inputs.items()}
            values = on_host([value for _, value in feeds])
            again = [(self.plan.inputs[names[slot]], value) for (slot, _), value in zip(feeds, values, strict=True)]
            return self.compute(again, stop)
        return self._result_check(results, feeds)

    def _leave_providers(self, plan: Plan, error: ProviderError) -> None:
        """Compile for the CPU alone; other runs in progress end with the plan that they began with."""
        with self._fallback_lock:
            if self.plan is not plan:
                return  # another run has done so
            if not self.providers:
                raise error
            warn_caller(f"{error.what} ({error.why}); from now on the session uses the CPU alone")
            prepared = _loaded(self._source, replace(self.config, providers=()))
            self.providers = []
            self.plan, self.assignment = prepared.plan, prepared.parts
            self._feed_check.on_device = prepared.on_device


def _loaded(source: Any, config: SessionConfig) -> Prepared:
    try:
        with collection_paused():
            return prepare(source, config)
    except GenaiError:
        raise
    except RecursionError:
        raise UnsupportedModelError(
            "the model nests too deeply", "hundreds of graphs in each other", "export it again"
        ) from None
    except MemoryError as error:
        raise out_of_memory("while loading the model", error) from error
    except Exception as error:
        raise _unforeseen("the model cannot be loaded", error) from error


def _unforeseen(what: str, error: Exception) -> InternalError:
    return InternalError(
        what, f"{type(error).__name__}: {error!s:.300}", "check the model and its inputs; if they are right, report it"
    )


def _known(values: Iterable[Value]) -> list[Value]:
    """What is known of values now, whatever becomes of the graph."""
    return [replace(value) for value in values]


def _run(plan: Plan, feeds: Feeds, stop: Stop | None, call: RunCall) -> tuple[Any, ...]:
    """Outputs of a plan, in order."""
    try:
        check_unchanged(plan.files)
        with BLAS_THREADS.single():
            return run_slots(plan, feeds, None if stop is None else RunContext(stop), call)
    except MemoryError as error:
        raise out_of_memory("while running the model", error) from error
