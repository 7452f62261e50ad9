"""InferenceSession: runs any ONNX model, with the methods and errors of onnxruntime.InferenceSession."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...common.single import Single
from ...errors import LoadCancelledError, RunStopped
from ...onnx.types import TensorType
from ...session.partition import CPU_PROVIDER
from ...session.session import Feeds, Session
from ...session.tensors import on_host
from ..refused import refusing_method
from .assignment import OrtEpAssignedSubgraph
from .binding import IOBinding
from .errors import Fail, InvalidArgument, ModelLoadCanceled, named_as_in_onnxruntime, typed_errors
from .model_info import ModelMetadata, NodeArg
from .options import RECORDS_ASSIGNMENT, RunOptions, SessionOptions, disabled_rules, session_config
from .providers import Chosen, before_the_cpu, chosen_providers
from .values import OrtMemoryInfo, OrtValue

Callback = Callable[[list[Any], Any, str], None]


@typed_errors
class InferenceSession(Single):
    """A model that is ready to run. Several threads may use one session concurrently.

    Args:
        path_or_bytes: path of the model, its bytes, or an onnx.ModelProto.
        sess_options: see `SessionOptions`.
        providers: names, or (name, options) pairs, in order of preference. The CPU is always last. Providers that are
            not available cause a warning, as in onnxruntime.
        provider_options: one dict of options per provider, if `providers` contains only names.
        disabled_optimizers: names of optimizers of onnxruntime, or of rewrites of genai.optimize, that are not applied.
            Names of optimizers that have no counterpart here have no effect.
        enable_fallback: 0 to disable the fallback to the CPU; see `disable_fallback`.

    Raises:
        NoSuchFile, InvalidProtobuf, InvalidGraph, NotImplemented, Fail: see `genai.compat.onnxruntime.errors`; all are
            GenaiErrors.
        SourceTypeError: a model cannot be read from this type of object.
    """

    def __init__(
        self,
        path_or_bytes: Any,
        sess_options: SessionOptions | None = None,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[dict[str, Any]] | None = None,
        *,
        disabled_optimizers: Collection[str] | None = None,
        enable_fallback: int = 1,
        **unsupported: Any,
    ) -> None:
        if unsupported:
            raise InvalidArgument(
                f"InferenceSession takes no {', '.join(sorted(unsupported))}",
                "the arguments are path_or_bytes, sess_options, providers, provider_options, disabled_optimizers and "
                "enable_fallback",
                "remove the other arguments",
            )
        if sess_options is not None and not isinstance(sess_options, SessionOptions):
            raise InvalidArgument(
                f"sess_options is a {type(sess_options).__name__}",
                "a SessionOptions object is expected",
                "pass SessionOptions()",
            )
        self._options = sess_options or SessionOptions()
        self._chosen = self._choose(providers, provider_options)
        self._session = _loaded(path_or_bytes, self._options, self._chosen, disabled_rules(disabled_optimizers))
        self._session.falls_back = bool(int(enable_fallback))
        given = [*self._session.inputs, *self._session.overridable]
        self._containers = {value.name for value in given if not isinstance(value.type, TensorType)}

    def _choose(
        self, providers: Any, provider_options: Sequence[dict[str, Any]] | None, *, must_exist: bool = False
    ) -> Chosen:
        given = self._options._providers if providers is None else providers
        return chosen_providers(given, provider_options, must_exist=must_exist)

    # Description of the model

    def get_inputs(self) -> list[NodeArg]:
        """Return the required inputs."""
        return [NodeArg.of(value) for value in self._session.inputs]

    def get_outputs(self) -> list[NodeArg]:
        """Return the outputs, in order."""
        return [NodeArg.of(value) for value in self._session.outputs]

    def get_overridable_initializers(self) -> list[NodeArg]:
        """Return the inputs that have a default value."""
        return [NodeArg.of(value) for value in self._session.overridable]

    def get_modelmeta(self) -> ModelMetadata:
        """Return the model's metadata."""
        return ModelMetadata.of(self._session.header)

    def get_providers(self) -> list[str]:
        """Return the providers in use, in order of preference."""
        return [name for name, _ in self._in_use()]

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """Return the options of each provider in use."""
        return {name: {key: str(value) for key, value in options.items()} for name, options in self._in_use()}

    def _in_use(self) -> Chosen:
        """Return the chosen providers, or only the CPU if the other providers failed."""
        failed = before_the_cpu(self._chosen) and not self._session.providers
        return [(CPU_PROVIDER, {})] if failed else self._chosen

    def get_session_options(self) -> SessionOptions:
        """Return the options that the session was created with."""
        return self._options

    def set_providers(self, providers: Sequence[Any], provider_options: Sequence[dict[str, Any]] | None = None) -> None:
        """Replace the options of the session's providers.

        Raises:
            InvalidArgument: a provider is unknown, or the providers differ from those that the session was loaded with.
        """
        chosen = self._choose(providers, provider_options, must_exist=True)
        if [name for name, _ in chosen] != self.get_providers():
            raise InvalidArgument(
                f"providers {[name for name, _ in chosen]} cannot be set after loading",
                "the graph is divided among providers only when it is loaded",
                "create a new session with these providers",
            )
        self._chosen = chosen

    def get_input_memory_infos(self) -> list[OrtMemoryInfo]:
        """Return the memory of each input, which is CPU memory."""
        return [OrtMemoryInfo() for _ in self._session.inputs]

    def get_output_memory_infos(self) -> list[OrtMemoryInfo]:
        """Return the memory of each output, which is CPU memory."""
        return [OrtMemoryInfo() for _ in self._session.outputs]

    def get_input_epdevices(self) -> list[None]:
        """Return None for each input, because there are no native provider devices."""
        return [None for _ in self._session.inputs]

    def get_provider_graph_assignment_info(self) -> list[OrtEpAssignedSubgraph]:
        """Return, for each provider, the nodes that it computes in the rewritten graph and its subgraphs.

        Raises:
            Fail: the session option "session.record_ep_graph_assignment_info" is not "1".
        """
        if not self._session.config.record_assignment:
            raise Fail(
                "the assignment of nodes to providers was not recorded",
                f'the session configuration entry {RECORDS_ASSIGNMENT!r} must be "1"',
                "add the entry to the session's options before you create the session",
            )
        return [OrtEpAssignedSubgraph.of(part) for part in self._session.assignment]

    def create_ortvalue_from_shape_and_type(
        self, shape: Sequence[int], element_type: Any, device_type: str = "cpu", device_id: int = 0, vendor_id: int = -1
    ) -> OrtValue:
        """Create an uninitialised tensor, like `OrtValue.ortvalue_from_shape_and_type`."""
        return OrtValue.ortvalue_from_shape_and_type(shape, element_type, device_type, device_id)

    get_tuning_results = refusing_method("get_tuning_results", "kernels are not tuned at run time")
    release_captured_graph = refusing_method("release_captured_graph", "runs are not captured")
    set_ep_dynamic_options = refusing_method(
        "set_ep_dynamic_options", "provider options are set when the session is created"
    )
    set_tuning_results = refusing_method("set_tuning_results", "kernels are not tuned at run time")

    def enable_fallback(self) -> None:
        """If a provider fails during a run, warn and continue on the CPU only. This is the default."""
        self._session.falls_back = True

    def disable_fallback(self) -> None:
        """If a provider fails during a run, raise EPFail. Nodes that no provider supports still run on the CPU."""
        self._session.falls_back = False

    # Running

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: RunOptions | None = None
    ) -> list[Any]:
        """Run the model.

        Args:
            output_names: names of the outputs to return; None or [] = all.
            input_feed: arrays by input name. Values may also be lists and numbers (converted to the input's element
                type), OrtValues, and objects that support DLPack. Sequences are lists; empty optionals are None.
            run_options: see `RunOptions`.

        Returns:
            Arrays that do not share memory with the session, in the order of `output_names`; lists for sequences,
            lists of dicts for sequences of maps, None for empty optionals.

        Raises:
            InvalidArgument: names, element types or shapes do not match the model.
            Fail: a node cannot process its inputs; the message names the node.
        """
        return on_host(self._wherever(output_names, input_feed, run_options))

    def _wherever(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: RunOptions | None
    ) -> list[Any]:
        """Return the results of `run`, and leave results that are in device memory there."""
        if not output_names:
            return self._run(self._checked(input_feed, run_options), run_options)
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
        """Run on another thread, which then calls callback(results, user_data, error); error is "" on success.

        The feed is checked before this method returns.
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
        """Run the model with OrtValues as inputs and outputs; see `run`."""
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
        """Run the model with lists of names and values, and append the results to `fetches`; see `run`."""
        results = self.run(list(fetch_names), dict(zip(feed_names, feeds, strict=True)), run_options)
        fetches.extend(OrtValue(value) for value in results)

    def io_binding(self) -> IOBinding:
        """Create an object that retains inputs and outputs between runs."""
        return IOBinding(self)

    def run_with_iobinding(self, iobinding: IOBinding, run_options: RunOptions | None = None) -> None:
        """Run with the bound inputs, and write results to the bound outputs.

        Raises:
            InvalidArgument: no output is bound. Other errors: see `run`.
        """
        names = iobinding.output_names
        if not names:
            raise InvalidArgument(
                "at least one output should be requested", "no output is bound", "call bind_output first"
            )
        iobinding.accept(names, self._wherever(names, iobinding.feed(), run_options))

    # Profiling

    def get_profiling_start_time_ns(self) -> int:
        """Return the start of the recording, in nanoseconds of `time.perf_counter_ns`; 0 if nothing is recorded."""
        return 0 if self._session.profiler is None else self._session.profiler.start_ns

    def profile_totals(self) -> dict[str, tuple[int, int]]:
        """Return the calls and nanoseconds of each operator, the slowest first; {} if nothing is recorded."""
        return {} if self._session.profiler is None else self._session.profiler.totals()

    def end_profiling(self) -> str:
        """Write the trace (Chrome's format) and return its path; "" if nothing is recorded."""
        profiler = self._session.profiler
        if profiler is None:
            return ""
        path, self._session.profiler = profiler.write(), None
        return path

    def _checked(self, feed: Mapping[str, Any], options: RunOptions | None) -> Feeds:
        """Check a feed for the underlying session. Arrays of active adapters replace missing inputs."""
        values = {} if options is None else options.adapter_values
        if values:
            feed = {**values, **feed}
        return self._session.checked(self._bare(feed))

    def _bare(self, feed: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a feed in which OrtValues are unwrapped, including OrtValues in lists for sequences."""
        try:
            for name, value in feed.items():
                if isinstance(value, OrtValue) or name in self._containers:
                    return {name: _bare(value, name in self._containers) for name, value in feed.items()}
        except AttributeError:
            pass  # not a mapping; the underlying session reports it
        return feed

    def _run(self, feeds: Feeds, options: RunOptions | None) -> list[Any]:
        if options is None:
            return self._session.compute(feeds)
        try:
            return self._session.compute(feeds, lambda: options.terminate)
        except RunStopped as error:
            raise Fail(error.what, "RunOptions.terminate is set", "set terminate to False and run again") from None


def _loaded(source: Any, options: SessionOptions, chosen: Chosen, disabled: frozenset[str]) -> Session:
    config = replace(session_config(options, before_the_cpu(chosen)), disabled_rules=disabled)
    if not isinstance(source, str | Path) and config.external_folder is None:
        with suppress(OSError):  # the current folder may have been deleted; the model may need no folder
            config = replace(config, external_folder=Path.cwd())
    try:
        with named_as_in_onnxruntime():
            return Session(source, config)
    except LoadCancelledError as error:
        why, fix = "set_load_cancellation_flag(True) was called", "set the flag to False"
        raise ModelLoadCanceled(error.what, why, fix) from None


def _bare(value: Any, inside: bool) -> Any:
    """Unwrap an OrtValue and, if `inside` is set, the OrtValues in a list."""
    if isinstance(value, OrtValue):
        return value.value
    return [_bare(item, inside) for item in value] if inside and isinstance(value, list | tuple) else value
