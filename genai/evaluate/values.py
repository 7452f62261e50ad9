"""The values inside a model while it computes a prompt, under the graph's names: what our engine's steps give; and what
onnxruntime does, which runs the model's own graph with every wanted value as an extra output.

onnxruntime is no dependency of this toolkit: it is imported here, and only when a comparison with it is asked for.
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

# Gets an operator's name, and names and values of its outputs; returns the values to go on with.
Observer = Callable[[str, Sequence[str], Sequence[Any]], tuple[Any, ...]]


@dataclass(frozen=True)
class TracedValue:
    """One value: the operator that gave it, and the array, [1, T, ...] for T tokens of a prompt."""

    op_type: str
    array: NDArray[Any]


def trace_values(
    model: Model,
    tokens: NDArray[np.int64],
    *,
    instead: Mapping[str, NDArray[Any]] | None = None,
    memory: int | None = None,
) -> dict[str, TracedValue]:
    """Every value that a prompt's prefill computes, by name, in the order of computation.

    The prompt is computed in one step from an empty cache, with the logits of every token. Values that a fusion left
    out are not among them; a fused operator's result has the name of the last one that it stands for.

    Args:
        tokens: int64 [T].
        instead: values to go on with in place of those of the same name and size that this model computed; then an
            operator's result shows its own error alone, not what those before it did.
        memory: most bytes for the values; None = a third of the memory available now.

    Raises:
        ContextOverflowError: more tokens than the model's context.
        InputError: the values do not fit into memory.
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
            f"the values inside a {type(decoder).__name__} cannot be seen",
            "it has neither a program of records nor a plan of kernel calls",
            "use another",
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
        """Keep an operator's results; returns those to go on with."""
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
                f"the values inside the model take more than {format_bytes(self._memory)}",
                "all of them are kept, to be compared",
                "shorten the prompt: a few tokens show where models part",
            )
        # Kernels may use their memory again, so this must be a copy.
        self.values[name] = TracedValue(op_type, np.array(value))


def is_number(array: NDArray[Any]) -> bool:
    """Whether an array holds numbers that can be subtracted."""
    return array.dtype.kind in "fiu" or array.dtype.name == "bfloat16"


class _StepwiseFunction(TimedByHost):
    """A decoder's program, a program per part: each goes on with what the observer returns (see StepFunction)."""

    takes_choices = False

    def __init__(self, decoder: PagedDecoder, observer: Observer) -> None:
        self._executor, self._observer, self._outputs = decoder.executor, observer, decoder.program.outputs
        compiled, apart = decoder.executor.compile, without_targets(decoder.program).apart()
        self._parts = [(program, compiled(program, decoder.storage.layers)) for program in apart]

    def run(self, step: StepContext, inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
        values: dict[str, Any] = dict(inputs or {})
        for program, function in self._parts:
            # The step's integers are given as well, but by the step.
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
    """The same plan, whose calls go on with what the observer returns. Bodies of If and Loop stay unseen."""

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
    """Values of the model's own graph for one prompt from an empty past, computed by onnxruntime on the CPU.

    Its graph optimisations are off, so that each operator is computed as the graph says. Nothing is written: the model
    file with its extra outputs stays in memory, and weights are read from the folder that it lies in.

    Args:
        tokens: int64 [T].
        names: values wanted; those that the graph does not compute are left out.
        threads: None = onnxruntime's own choice.

    Raises:
        MissingPackageError: onnxruntime is not installed.
        UnsupportedModelError: the graph wants inputs of unknown meaning.
        ModelOutputError: onnxruntime cannot load or run the model.
    """
    library = import_onnxruntime()
    decoder = model.config.model.decoder
    path = model.folder / decoder.filename
    try:
        proto = onnx.load(path, load_external_data=False)
        room = _past_room(proto, len(tokens))
        computed = (name for node in proto.graph.node for name in node.output)
        without = (decoder.names.present_key, decoder.names.present_value) if room else ()
        traced = [name for name in computed if name in names and not _matches(name, without)]
        present = {value.name for value in proto.graph.output}
        # A name is enough: onnxruntime infers the types.
        proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in traced if name not in present)
        session = library.InferenceSession(
            proto.SerializeToString(), _options(library, path.parent, threads), providers=["CPUExecutionProvider"]
        )
        feeds = {value.name: _feed(value, tokens, decoder, room) for value in session.get_inputs()}
        results = session.run(traced, feeds)
    except UnsupportedModelError:
        raise
    except Exception as error:  # onnxruntime's exceptions share no base class
        raise ModelOutputError(
            f"onnxruntime {library.__version__} cannot run {path}: {error}",
            f"it raised {type(error).__name__}",
            "check that this version of onnxruntime knows the model's operators",
        ) from error
    return dict(zip(traced, results, strict=True))


def import_onnxruntime() -> Any:
    """The onnxruntime package, with its telemetry off; MissingPackageError if it is not there, or does not load."""
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingPackageError(
            "onnxruntime cannot be imported",
            f"{error}; it is needed only for comparisons with it, so it is not installed with this toolkit",
            "pip install onnxruntime",
        ) from error
    return onnxruntime


def _options(library: Any, folder: Path, threads: int | None) -> Any:
    options = library.SessionOptions()
    options.graph_optimization_level = library.GraphOptimizationLevel.ORT_DISABLE_ALL
    # What goes wrong is raised; only what is fatal is worth a line of its own.
    options.log_severity_level = 4
    options.intra_op_num_threads = threads or 0
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder.resolve()))
    return options


def _past_room(proto: onnx.ModelProto, num_tokens: int) -> int:
    """Length of the past tensors: onnxruntime wants room for an attention window even if none of it is in use yet.

    The mask tells that the past is empty. Presents then hold that room too, so they are not compared. Windows longer
    than this prompt hide nothing of it; they are cut to its length, for they may be of any.
    """
    room = 0
    for node in proto.graph.node:
        for attribute in node.attribute:
            if attribute.name == "local_window_size":
                attribute.i = min(attribute.i, num_tokens)
                room = max(room, attribute.i)
    return room


def _feed(value: Any, tokens: NDArray[np.int64], decoder: DecoderConfig, room: int) -> NDArray[Any]:
    """One input at prefill: the prompt, a mask of ones, positions from 0, or an empty past."""
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
        f"the graph wants input {value.name!r}, {value.type} {shape}",
        "its meaning is not known, so it cannot be fed",
        "name it in genai_config.json (model.decoder.inputs) or export the decoder without it",
    )


def _matches(name: str, templates: tuple[str, ...]) -> bool:
    """Whether a name is one of the templates with a layer in place of %d."""
    return any(re.fullmatch(re.escape(template).replace("%d", r"\d+"), name) for template in templates)
