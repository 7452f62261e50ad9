"""Preparation of a model: reads it, checks the nodes, applies options, rewrites it, and compiles it to a plan."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from genai.common.host_memory import Arena
from genai.common.memory_limits import available_memory
from genai.ops.support import MAX_VALUE_BYTES

from ..devices import open_executor, open_threads
from ..errors import ArgumentError, LoadCancelledError, SourceTypeError
from ..onnx.ir import Graph, OnnxModel, OnnxTensor, Value
from ..onnx.reader import read_model
from ..onnx.types import DataType, TensorType
from ..onnx.writer import write_model
from ..optimize.base import run_rewrites
from ..optimize.byte_tables import tabulate_bytes
from ..optimize.constant_folding import fold_before_inference, fold_constants, lift_constants
from ..optimize.gradients import expand_gradients
from ..optimize.halves import compute_halves_in_float32
from ..optimize.quantized import fuse_quantized_arithmetic, fuse_quantized_nodes, move_quantized
from ..optimize.shapes import infer_shapes
from ..optimize.simplify import share_subexpressions
from ..optimize.standard import LAYOUT_RULES, SESSION_RULES
from .config import SessionConfig
from .execution_providers import AssignedPart, hand_over
from .loop import Plan
from .node_checks import check_nodes, check_result_sizes
from .plan import PlanOptions, build_plan
from .table_sizes import head_sizes, table_sizes

# Rules that fuse DequantizeLinear, an operator and QuantizeLinear to a single integer operator.
_QDQ_RULES = frozenset(
    rule.name for rule in (fuse_quantized_nodes, fuse_quantized_arithmetic, move_quantized, tabulate_bytes)
)


@dataclass(frozen=True)
class Prepared:
    """A model that is ready to run.

    Attributes:
        header: the model without its nodes and constants.
        plan: the calls of a run.
        inputs: the required inputs.
        overridable: inputs with a default.
        outputs: the outputs with declared types.
        parts: the assignment of nodes to providers, if it was requested.
        on_device: inputs that may be passed in device memory.
        table_sizes: see `table_sizes`.
        head_sizes: see `head_sizes`.
        read_ns: time at which the model was read, in nanoseconds of time.perf_counter_ns.
    """

    header: OnnxModel
    plan: Plan
    inputs: list[Value]
    overridable: list[Value]
    outputs: list[Value]
    parts: list[AssignedPart]
    on_device: frozenset[str]
    table_sizes: dict[str, int]
    head_sizes: dict[str, int]
    read_ns: int


def prepare(source: Any, config: SessionConfig) -> Prepared:
    """Perform all steps that precede the first run."""
    model = read(source, config)
    read_ns = time.perf_counter_ns()
    _check_cancelled(config)
    graph = model.graph
    _override_dims(model, config)
    _override_initializers(graph, config.initializers)
    outputs = [replace(value) for value in graph.outputs]
    check_nodes(model)
    disabled = config.disabled_rules | (_QDQ_RULES if config.keep_qdq else frozenset())
    if fold_constants.name in disabled:
        disabled |= {fold_before_inference.name}
    early = [
        rule for rule in (lift_constants, share_subexpressions, fold_before_inference) if rule.name not in disabled
    ]
    run_rewrites(model, early, config.level)
    infer_shapes(model)
    if expand_gradients(model):
        infer_shapes(model)
    # Rewrites fuse look-ups with other nodes, so the sizes are found before.
    sizes, heads = table_sizes(graph), head_sizes(graph)
    _check_cancelled(config)
    if config.providers:  # which may have kernels for 16-bit floats
        disabled |= {compute_halves_in_float32.name}
    rules = [rule for rule in SESSION_RULES if rule.name not in disabled]
    run_rewrites(model, rules, config.level)
    if not config.providers:  # which have kernels for the standard layout
        run_rewrites(model, [rule for rule in LAYOUT_RULES if rule.name not in disabled], config.level)
    if config.optimized_path is not None:
        write_model(
            model,
            config.optimized_path,
            external_data=config.optimized_weights,
            size_threshold=config.optimized_weights_min_bytes,
        )
    _check_cancelled(config)
    threads = open_threads(config.threads or None)
    divided = hand_over(model, config.providers, recording=config.record_assignment)
    most = config.max_value_bytes
    if most is None:  # the machine's free memory, at most 16 GiB
        most = min(MAX_VALUE_BYTES, available_memory())
    check_result_sizes(graph, most)
    shared = {
        "threads": threads,
        "executor": cache(lambda: open_executor(threads=config.threads or None)),
        "provided": divided.compiled,
        "arena": Arena(),
    }
    defaults = set(graph.initializers) if graph.overridable_initializers else set()
    constants = set() if graph.overridable_initializers else set(graph.initializers)
    inputs = [value for value in graph.inputs if value.name not in defaults | constants]
    overridable = [value for value in graph.inputs if value.name in defaults]
    header = _header(model)
    plan = build_plan(model, PlanOptions(kernel={**shared, "max_value_bytes": most}, consumes_constants=True))
    return Prepared(header, plan, inputs, overridable, outputs, divided.parts, divided.on_device, sizes, heads, read_ns)


def _header(model: OnnxModel) -> OnnxModel:
    """Return the model's metadata, without nodes or constants."""
    graph = Graph(model.graph.name, doc_string=model.graph.doc_string)
    return replace(model, graph=graph, functions={}, training_info=[], files=())


def _check_cancelled(config: SessionConfig) -> None:
    if config.is_cancelled():
        raise LoadCancelledError("loading was cancelled", "is_cancelled returned True", "load the model again")


def read(source: Any, config: SessionConfig) -> OnnxModel:
    """Read a model from a path, from bytes or from a protobuf object."""
    if not isinstance(source, str | Path | bytes | bytearray | memoryview | onnx.ModelProto):
        raise SourceTypeError(
            f"unable to load from type {type(source)!r}",
            "a model is a path, its bytes, or an onnx.ModelProto",
            "pass one of these types",
        )
    return read_model(
        bytes(source) if isinstance(source, bytearray | memoryview) else source,
        external_data=config.external_data or None,
        external_folder=config.external_folder,
        replaced=frozenset(config.initializers),
    )


def _override_dims(model: OnnxModel, config: SessionConfig) -> None:
    """Replace symbolic dimensions with fixed sizes, everywhere in the model."""
    by_name, by_denotation = config.dims, config.dims_by_denotation
    if not by_name and not by_denotation:
        return
    for graph in model.graphs():
        for value in (*graph.inputs, *graph.outputs, *graph.values.values()):
            known = value.type
            if isinstance(known, TensorType) and known.shape is not None:
                denotations = (*known.dim_denotations, *[""] * len(known.shape))
                shape = tuple(
                    by_denotation.get(denotation, by_name.get(dim, dim) if isinstance(dim, str) else dim)
                    for dim, denotation in zip(known.shape, denotations, strict=False)
                )
                value.type = replace(known, shape=shape)


def _override_initializers(graph: Graph, initializers: Mapping[str, Any]) -> None:
    for name, value in initializers.items():
        old = graph.initializers.get(name)
        if old is None:
            raise ArgumentError(
                f"the model has no initializer {name!r}",
                f"its initializers are {', '.join(list(graph.initializers)[:20]) or 'none'}",
                "correct the name that is passed to add_initializer",
            )
        array = np.asarray(value)
        if array.shape != old.shape or DataType.from_numpy(array.dtype) is not old.dtype:
            raise ArgumentError(
                f"initializer {name!r} is {old.dtype.onnx_name}{list(old.shape)}, but the new value is "
                f"{array.dtype}{list(array.shape)}",
                "the new value must have the same element type and shape",
                "convert or reshape the new value",
            )
        graph.add_initializer(OnnxTensor.from_array(name, array))
