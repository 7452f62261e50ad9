"""InferenceSession: runs any ONNX model, with the calls and errors of onnxruntime.InferenceSession."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...common.single import Single
from ...errors import LoadCancelledError, RunStopped
from ...onnx.types import TensorType
from ...session.execution_providers import CPU_PROVIDER
from ...session.session import Feeds, Session
from ...session.tensors import on_host
from ..refused import refusing_method
from .assignment import OrtEpAssignedSubgraph
from .binding import IOBinding
from .errors import Fail, InvalidArgument, ModelLoadCanceled, named_as_in_onnxruntime, typed_errors
from .model_info import ModelMetadata, NodeArg
from .options import RECORDS_ASSIGNMENT, RunOptions, SessionOptions, session_config
from .providers import Chosen, before_the_cpu, chosen_providers
from .values import OrtMemoryInfo, OrtValue

Callback = Callable[[list[Any], Any, str], None]


@typed_errors
class InferenceSession(Single):
    """A model ready to run. One session may be used from several threads at once.

    Args:
        path_or_bytes: path of the model, its bytes, or an onnx.ModelProto.
        sess_options: see `SessionOptions`.
        providers: names, or (name, options) pairs, in order of preference. The CPU is always the last resort; names
            that are not available are warned about, as onnxruntime does.
        provider_options: options per provider, where `providers` holds names only.

    Raises:
        NoSuchFile, InvalidProtobuf, InvalidGraph, NotImplemented, Fail: see `genai.compat.onnxruntime.errors`; all are
            GenaiErrors.
        SourceTypeError: a model cannot be read from such an object.
    """

    def __init__(
        self,
        path_or_bytes: Any,
        sess_options: SessionOptions | None = None,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[dict[str, Any]] | None = None,
        **unsupported: Any,
    ) -> None:
        if unsupported:
            raise InvalidArgument(
                f"InferenceSession takes no {', '.join(sorted(unsupported))}",
                "it takes path_or_bytes, sess_options, providers and provider_options",
                "leave them out",
            )
        if sess_options is not None and not isinstance(sess_options, SessionOptions):
            raise InvalidArgument(
                f"sess_options is a {type(sess_options).__name__}", "it must be SessionOptions", "pass SessionOptions()"
            )
        self._options = sess_options or SessionOptions()
        self._chosen = self._choose(providers, provider_options)
        self._session = _loaded(path_or_bytes, self._options, self._chosen)
        given = [*self._session.inputs, *self._session.overridable]
        self._containers = {value.name for value in given if not isinstance(value.type, TensorType)}

    def _choose(
        self, providers: Any, provider_options: Sequence[dict[str, Any]] | None, *, must_exist: bool = False
    ) -> Chosen:
        given = self._options._providers if providers is None else providers
        return chosen_providers(given, provider_options, must_exist=must_exist)

    # What the model is

    def get_inputs(self) -> list[NodeArg]:
        """Inputs that every run needs."""
        return [NodeArg.of(value) for value in self._session.inputs]

    def get_outputs(self) -> list[NodeArg]:
        """Outputs, in order."""
        return [NodeArg.of(value) for value in self._session.outputs]

    def get_overridable_initializers(self) -> list[NodeArg]:
        """Inputs with a default."""
        return [NodeArg.of(value) for value in self._session.overridable]

    def get_modelmeta(self) -> ModelMetadata:
        """The model's header."""
        return ModelMetadata.of(self._session.header)

    def get_providers(self) -> list[str]:
        """Providers in use, in order of preference."""
        return [name for name, _ in self._in_use()]

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """Options of each provider in use."""
        return {name: {key: str(value) for key, value in options.items()} for name, options in self._in_use()}

    def _in_use(self) -> Chosen:
        """The providers chosen, without those that failed."""
        failed = before_the_cpu(self._chosen) and not self._session.providers
        return [(CPU_PROVIDER, {})] if failed else self._chosen

    def get_session_options(self) -> SessionOptions:
        """The options that the session was made with."""
        return self._options

    def set_providers(self, providers: Sequence[Any], provider_options: Sequence[dict[str, Any]] | None = None) -> None:
        """Choose providers again.

        Raises:
            InvalidArgument: a provider is unknown, or another than those of the session after loading.
        """
        chosen = self._choose(providers, provider_options, must_exist=True)
        if [name for name, _ in chosen] != self.get_providers():
            raise InvalidArgument(
                f"providers {[name for name, _ in chosen]} after loading",
                "the graph is divided among providers once, when it is loaded",
                "make a new session with them",
            )
        self._chosen = chosen

    def get_input_memory_infos(self) -> list[OrtMemoryInfo]:
        """Where each input is expected: on the CPU."""
        return [OrtMemoryInfo() for _ in self._session.inputs]

    def get_output_memory_infos(self) -> list[OrtMemoryInfo]:
        """Where each output will lie: on the CPU."""
        return [OrtMemoryInfo() for _ in self._session.outputs]

    def get_input_epdevices(self) -> list[None]:
        """The device of a native provider that each input lies on: none."""
        return [None for _ in self._session.inputs]

    def get_provider_graph_assignment_info(self) -> list[OrtEpAssignedSubgraph]:
        """Which provider computes which nodes of the rewritten graph, its subgraphs' among them.

        Raises:
            Fail: the session's options do not say "1" for "session.record_ep_graph_assignment_info".
        """
        if not self._session.config.record_assignment:
            raise Fail(
                "which provider computes which node was not recorded",
                f'the session configuration entry {RECORDS_ASSIGNMENT!r} must be "1"',
                "add it to the session's options before the session is made",
            )
        return [OrtEpAssignedSubgraph.of(part) for part in self._session.assignment]

    def create_ortvalue_from_shape_and_type(
        self, shape: Sequence[int], element_type: Any, device_type: str = "cpu", device_id: int = 0, vendor_id: int = -1
    ) -> OrtValue:
        """An uninitialised tensor; the same as `OrtValue.ortvalue_from_shape_and_type`."""
        return OrtValue.ortvalue_from_shape_and_type(shape, element_type, device_type, device_id)

    get_tuning_results = refusing_method("get_tuning_results", "kernels are not tuned at run time")
    release_captured_graph = refusing_method("release_captured_graph", "runs are not captured")
    set_ep_dynamic_options = refusing_method("set_ep_dynamic_options", "providers take options when a session is made")
    set_tuning_results = refusing_method("set_tuning_results", "kernels are not tuned at run time")

    def enable_fallback(self) -> None:
        """If a provider fails in a run, warn, and from then on use the CPU alone; so it is from the start."""
        self._session.falls_back = True

    def disable_fallback(self) -> None:
        """If a provider fails in a run, raise EPFail. Nodes that no provider takes run on the CPU all the same."""
        self._session.falls_back = False

    # Running

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: RunOptions | None = None
    ) -> list[Any]:
        """Run the model.

        Args:
            output_names: which outputs to return; None or [] = all.
            input_feed: per input name an array; also lists and numbers (taken as the input's element type), OrtValues,
                and anything with DLPack. Sequences are lists, empty optionals None.
            run_options: see `RunOptions`.

        Returns:
            Arrays of their own memory, in the order of `output_names`; lists for sequences, lists of dicts for
            sequences of maps, None for empty optionals.

        Raises:
            InvalidArgument: names, element types or shapes that do not fit.
            Fail: a node cannot compute what it got; the message names it.
        """
        return on_host(self._wherever(output_names, input_feed, run_options))

    def _wherever(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: RunOptions | None
    ) -> list[Any]:
        """What `run` gives, results of a device still there."""
        wanted = self._session.positions(output_names)
        results = self._run(self._checked(input_feed, run_options), run_options)
        return [results[index] for index in wanted]

    def run_async(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        callback: Callback,
        user_data: Any = None,
        run_options: RunOptions | None = None,
    ) -> None:
        """Run on another thread; then callback(results, user_data, error) is called there, error "" if all went well.

        The feed is checked before this returns.
        """
        wanted = self._session.positions(output_names)
        feeds = self._checked(input_feed, run_options)

        def work() -> None:
            try:
                results = self._run(feeds, run_options)
            except Exception as error:
                callback([], user_data, str(error))
                return
            callback(on_host([results[index] for index in wanted]), user_data, "")

        threading.Thread(target=work, name="genai-run-async", daemon=True).start()

    def run_with_ort_values(
        self,
        output_names: Sequence[str] | None,
        input_dict_ort_values: Mapping[str, OrtValue],
        run_options: RunOptions | None = None,
    ) -> list[OrtValue]:
        """Like `run`, with OrtValues in and out."""
        return [OrtValue(value) for value in self.run(output_names, input_dict_ort_values, run_options)]

    def run_with_ortvaluevector(
        self,
        run_options: RunOptions | None,
        feed_names: Sequence[str],
        feeds: Sequence[OrtValue],
        fetch_names: Sequence[str],
        fetches: list[OrtValue],
        fetch_devices: Sequence[Any] = (),
    ) -> None:
        """Like `run`, by lists; results are appended to `fetches`."""
        results = self.run(list(fetch_names), dict(zip(feed_names, feeds, strict=True)), run_options)
        fetches.extend(OrtValue(value) for value in results)

    def io_binding(self) -> IOBinding:
        """An object that keeps inputs and outputs between runs."""
        return IOBinding(self)

    def run_with_iobinding(self, iobinding: IOBinding, run_options: RunOptions | None = None) -> None:
        """Run with bound inputs; results go to the bound outputs.

        Raises:
            InvalidArgument: no output is bound; else as `run`.
        """
        names = iobinding.output_names
        if not names:
            raise InvalidArgument(
                "at least one output should be requested", "no output is bound", "call bind_output first"
            )
        iobinding.accept(names, self._wherever(names, iobinding.feed(), run_options))

    # Profiling

    def get_profiling_start_time_ns(self) -> int:
        """When recording began, in nanoseconds of `time.perf_counter_ns`; 0 where nothing is recorded."""
        return 0 if self._session.profiler is None else self._session.profiler.start_ns

    def profile_totals(self) -> dict[str, tuple[int, int]]:
        """Per operator calls and nanoseconds, the longest first; empty where nothing is recorded."""
        return {} if self._session.profiler is None else self._session.profiler.totals()

    def end_profiling(self) -> str:
        """Write the trace (Chrome's format) and return its path; "" where nothing is recorded."""
        profiler = self._session.profiler
        if profiler is None:
            return ""
        path, self._session.profiler = profiler.write(), None
        return path

    def _checked(self, feed: Mapping[str, Any], options: RunOptions | None) -> Feeds:
        """A feed as the session below takes it, and the arrays of active adapters for inputs that it has not."""
        values = {} if options is None else options.adapter_values
        if values:
            feed = {**values, **feed}
        return self._session.checked(self._bare(feed))

    def _bare(self, feed: Mapping[str, Any]) -> Mapping[str, Any]:
        """A feed without OrtValues, also in lists for sequences."""
        try:
            for name, value in feed.items():
                if isinstance(value, OrtValue) or name in self._containers:
                    return {name: _bare(value, name in self._containers) for name, value in feed.items()}
        except AttributeError:
            pass  # no mapping, which the session below says
        return feed

    def _run(self, feeds: Feeds, options: RunOptions | None) -> list[Any]:
        if options is None:
            return self._session.compute(feeds)
        try:
            return self._session.compute(feeds, lambda: options.terminate)
        except RunStopped as error:
            raise Fail(error.what, "RunOptions.terminate is set", "set it to False and run again") from None


def _loaded(source: Any, options: SessionOptions, chosen: Chosen) -> Session:
    try:
        with named_as_in_onnxruntime():
            return Session(source, session_config(options, before_the_cpu(chosen)))
    except LoadCancelledError as error:
        why, fix = "set_load_cancellation_flag(True) says so", "set it to False"
        raise ModelLoadCanceled(error.what, why, fix) from None


def _bare(value: Any, inside: bool) -> Any:
    """A value that is no OrtValue; `inside`: nor holds any, if it is a list."""
    if isinstance(value, OrtValue):
        return value.value
    return [_bare(item, inside) for item in value] if inside and isinstance(value, list | tuple) else value
