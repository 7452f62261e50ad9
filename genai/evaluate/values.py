"""Intermediate values of a prompt's prefill, by their names in the graph, from our engine or from onnxruntime.

onnxruntime runs the model's own graph with every requested value as an extra output. onnxruntime is not a dependency of
this toolkit. Only this module imports onnxruntime, and only for comparisons with onnxruntime.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from numpy.typing import NDArray

from genai.common.memory_limits import available_memory, format_bytes
from genai.kernels.device import StepContext
from genai.kernels.host_memory import TimedByHost
from genai.kernels.ir import Op

from ..engine.paged import PagedDecoder
from ..engine.unbatched import UnbatchedDecoder
from ..errors import ContextOverflowError, InputError, MissingPackageError, ModelOutputError, UnsupportedModelError
from ..lora.targets import without_targets
from .scored_text import pending_logits

if TYPE_CHECKING:
    from ..models.config import DecoderConfig
    from ..models.model import Model
    from ..session.loop import OpCall, Plan

# A function that receives an operator's name and the names and values of its outputs, and returns the values to use
# instead.
Observer = Callable[[str, Sequence[str], Sequence[Any]], tuple[Any, ...]]


@dataclass(frozen=True)
class TracedValue:
    """A value: the operator that computed it, and the array, which is [1, T, ...] for a prompt of T tokens."""

    op_type: str
    array: NDArray[Any]


def trace_values(
    model: Model,
    tokens: NDArray[np.int64],
    *,
    instead: Mapping[str, NDArray[Any]] | None = None,
    memory: int | None = None,
) -> dict[str, TracedValue]:
    """Return all values that a prompt's prefill computes, by name, in the order of computation.

    The prompt is processed in one step from an empty cache, with the logits of every token. Values that fusion removed
    are missing; a fused operator's result has the name of the last value that it replaces.

    Args:
        tokens: int64 [T].
        instead: values that replace computed values of the same name and size. Each operator's result then shows only
            the operator's own error, not the accumulated error of the preceding operators.
        memory: maximum bytes for the values; None = a third of the currently available memory.

    Raises:
        ContextOverflowError: there are more tokens than the model's context holds.
        InputError: the values do not fit into memory.
        UnsupportedModelError: the decoder has neither an op program nor a plan of kernel calls.
    """
    limit = model.config.model.context_length
    if len(tokens) > limit:
        raise ContextOverflowError(
            f"the prompt has {len(tokens)} tokens", f"the model's context_length is {limit}", "shorten the prompt"
        )
    tracer = _Tracer(instead or {}, available_memory() // 3 if memory is None else memory)
    decoder = copy.copy(model.decoder)
    if isinstance(decoder, PagedDecoder):
        decoder.run = _StepwiseFunction(decoder, tracer.see)
    elif isinstance(decoder, UnbatchedDecoder):
        decoder.plan = _observed(decoder.plan, tracer.see)
    else:
        raise UnsupportedModelError(
            f"the values inside a {type(decoder).__name__} cannot be traced",
            "the decoder has neither an op program nor a plan of kernel calls",
            "use another model",
        )
    with closing(decoder.open()) as sequence:
        sequence.append(tokens.tolist())
        pending_logits(decoder, sequence, all_rows=True, token_budget=len(tokens))
    return tracer.values


class _Tracer:
    def __init__(self, instead: Mapping[str, NDArray[Any]], memory: int) -> None:
        self.values: dict[str, TracedValue] = {}
        self._instead, self._memory, self._kept_bytes = instead, memory, 0

    def see(self, op_type: str, names: Sequence[str], results: Sequence[Any]) -> tuple[Any, ...]:
        """Record an operator's results, and return the values to use instead."""
        going_on = list(results)
        for index, name in enumerate(names[: len(going_on)]):
            value = results[index]
            if name and isinstance(value, (np.ndarray, np.generic)) and is_number(np.asarray(value)):
                self._keep(name, op_type, value)
                replacement = self._instead.get(name)
                if replacement is not None and replacement.size == value.size:
                    going_on[index] = np.array(replacement, value.dtype).reshape(value.shape)
        return tuple(going_on)

    def _keep(self, name: str, op_type: str, value: Any) -> None:
        self._kept_bytes += value.nbytes
        if self._kept_bytes > self._memory:
            raise InputError(
                f"the values inside the model need more than {format_bytes(self._memory)} of memory",
                "all values are stored for the comparison",
                "shorten the prompt to a few tokens, which show where models diverge",
            )
        # Kernels may reuse the memory of their results, so the stored value must be a copy.
        self.values[name] = TracedValue(op_type, np.array(value))


def is_number(array: NDArray[Any]) -> bool:
    """Return True if an array holds numbers that can be subtracted."""
    return array.dtype.kind in "fiu" or array.dtype.name == "bfloat16"


class _StepwiseFunction(TimedByHost):
    """A decoder's program that is compiled part by part; each part reads the observer's values (see StepFunction)."""

    takes_choices = False

    def __init__(self, decoder: PagedDecoder, observer: Observer) -> None:
        self._executor, self._observer, self._outputs = decoder.executor, observer, decoder.program.outputs
        compiled, apart = decoder.executor.compile, without_targets(decoder.program).apart()
        self._parts = [(program, compiled(program, decoder.storage.layers)) for program in apart]

    def run(self, step: StepContext, inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
        values: dict[str, Any] = dict(inputs or {})
        for program, function in self._parts:
            # `given` also names the step's integers, which the step itself provides.
            results_of_part = function.run(step, {name: values[name] for name in program.given if name in values})
            (part,) = program.parts
            results = [results_of_part[name] for name in program.outputs]
            if isinstance(part, Op):
                results = [self._executor.host(rows) for rows in results]
            values.update(zip(program.outputs, self._observer(part.op_type, program.outputs, results), strict=True))
        return {name: values[name] for name in self._outputs}

    def cancel(self) -> None:
        for _, function in self._parts:
            function.cancel()

    def resume(self) -> None:
        for _, function in self._parts:
            function.resume()


def _observed(plan: Plan, observer: Observer) -> Plan:
    """Return a plan whose calls read the observer's values. The bodies of If and Loop are not observed."""

    def observed(step: OpCall) -> OpCall:
        def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
            return observer(step.op_type, step.names, step.kernel(context, inputs))

        return replace(step, kernel=kernel)

    return replace(plan, calls=tuple(map(observed, plan.calls)))


_TYPES: dict[str, type[Any]] = {
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
}


def onnxruntime_values(
    model: Model, tokens: NDArray[np.int64], names: Collection[str], *, threads: int | None = None
) -> dict[str, NDArray[Any]]:
    """Return values of the model's own graph for one prompt and an empty past, computed by onnxruntime on the CPU.

    Graph optimisations are off, so that each operator is computed as in the graph. No file is written: the model with
    its extra outputs stays in memory, and the weights are read from the model's folder.

    Args:
        tokens: int64 [T].
        names: names of the values to return; names that the graph does not compute are ignored.
        threads: None = onnxruntime's default.

    Raises:
        MissingPackageError: onnxruntime is not installed.
        UnsupportedModelError: the graph has inputs of unknown meaning.
        ModelFolderError: a file of the model was replaced after it was loaded.
        ModelOutputError: onnxruntime cannot load or run the model.
    """
    library = import_onnxruntime()
    decoder = model.config.model.decoder
    path = model.folder_as_loaded() / decoder.filename
    try:
        proto = onnx.load(path, load_external_data=False)
        room = _past_room(proto, len(tokens))
        computed = (name for node in proto.graph.node for name in node.output)
        without = (decoder.names.present_key, decoder.names.present_value) if room else ()
        traced = [name for name in computed if name in names and not _matches(name, without)]
        present = {value.name for value in proto.graph.output}
        # Only the name is needed, because onnxruntime infers the types.
        proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in traced if name not in present)
        session = library.InferenceSession(
            proto.SerializeToString(), _options(library, path.parent, threads), providers=["CPUExecutionProvider"]
        )
        feeds = {value.name: _feed(value, tokens, decoder, room) for value in session.get_inputs()}
        results = session.run(traced, feeds)
    except UnsupportedModelError:
        raise
    except Exception as error:  # onnxruntime's exceptions have no common base class
        raise ModelOutputError(
            f"onnxruntime {library.__version__} cannot run {path}: {error}",
            f"onnxruntime raised {type(error).__name__}",
            "check that this version of onnxruntime supports the model's operators",
        ) from error
    return dict(zip(traced, results, strict=True))


def import_onnxruntime() -> Any:
    """Import onnxruntime with telemetry off. Raise MissingPackageError if it is missing or cannot be imported."""
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingPackageError(
            "onnxruntime cannot be imported",
            f"{error} (onnxruntime is an optional dependency for comparisons)",
            "pip install onnxruntime",
        ) from error
    return onnxruntime


def _options(library: Any, folder: Path, threads: int | None) -> Any:
    options = library.SessionOptions()
    options.graph_optimization_level = library.GraphOptimizationLevel.ORT_DISABLE_ALL
    # Errors are raised as exceptions; only fatal errors should also be logged.
    options.log_severity_level = 4
    options.intra_op_num_threads = threads or 0
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder.resolve()))
    return options


def _past_room(proto: onnx.ModelProto, num_tokens: int) -> int:
    """Return the length of the past tensors. onnxruntime expects an attention window's full length, even if unused.

    The mask marks the past as empty. The present tensors also contain these unused positions, so the present tensors
    are not compared. Windows that are longer than the prompt do not hide any of its tokens, so these windows are cut to
    the prompt's length; otherwise the windows could be arbitrarily long.
    """
    room = 0
    for node in proto.graph.node:
        for attribute in node.attribute:
            if attribute.name == "local_window_size":
                attribute.i = min(attribute.i, num_tokens)
                room = max(room, attribute.i)
    return room


def _feed(value: Any, tokens: NDArray[np.int64], decoder: DecoderConfig, room: int) -> NDArray[Any]:
    """Return an input for the prefill: the prompt, a mask of ones, positions starting at 0, or an empty past."""
    names, count = decoder.names, len(tokens)
    plain: dict[str, NDArray[Any]] = {
        names.input_ids: tokens[None, :],
        names.attention_mask: np.ones((1, count)),
        names.position_ids: np.arange(count)[None, :],
    }
    dtype, shape = _TYPES.get(value.type), value.shape
    if dtype is not None and value.name in plain:
        return plain[value.name].astype(dtype)
    if dtype is not None and len(shape) == 4 and _matches(value.name, (names.past_key, names.past_value)):
        heads = shape[1] if isinstance(shape[1], int) else decoder.num_key_value_heads
        head_size = shape[3] if isinstance(shape[3], int) else decoder.head_size
        return np.zeros((1, heads, room, head_size), dtype)
    raise UnsupportedModelError(
        f"the graph has the input {value.name!r}, which is {value.type} {shape}",
        "the meaning of the input is unknown, so no value can be passed for it",
        "add the input to model.decoder.inputs in genai_config.json, or export the decoder without this input",
    )


def _matches(name: str, templates: tuple[str, ...]) -> bool:
    """Return True if a name matches one of the templates with a layer number in place of %d."""
    return any(re.fullmatch(re.escape(template).replace("%d", r"\d+"), name) for template in templates)
