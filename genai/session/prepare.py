"""From a source to a plan: read, check the nodes, apply options, rewrite, compile."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from genai.common.host_memory import Arena
from genai.common.memory_limits import available_memory
from genai.ops.support import MAX_VALUE_BYTES as MOST_BYTES

from ..compat.onnxruntime.assignment import OrtEpAssignedSubgraph
from ..compat.onnxruntime.errors import InvalidArgument, ModelLoadCanceled, SourceTypeError
from ..compat.onnxruntime.module import global_threads
from ..compat.onnxruntime.options import (
    KEEPS_QDQ,
    MAX_VALUE_BYTES,
    RECORDS_ASSIGNMENT,
    WEIGHTS_FILE,
    WEIGHTS_FOLDER,
    WEIGHTS_LEAST_BYTES,
    SessionOptions,
    check_entries,
)
from ..compat.onnxruntime.providers import Chosen, hand_over
from ..devices import open_executor
from ..onnx.ir import Graph, OnnxModel, OnnxTensor, Value
from ..onnx.reader import read_model
from ..onnx.types import DataType, TensorType
from ..onnx.writer import write_model
from ..optimize.base import run_rewrites
from ..optimize.byte_tables import tabulate_bytes
from ..optimize.constant_folding import lift_constants
from ..optimize.gradients import expand_gradients
from ..optimize.quantized import fuse_quantized_arithmetic, fuse_quantized_nodes, move_quantized
from ..optimize.shapes import infer_shapes
from ..optimize.standard import SESSION_RULES
from .loop import Plan
from .node_checks import check_nodes, check_result_sizes
from .plan import PlanOptions, build_plan

# What turns DequantizeLinear, an operator and QuantizeLinear into one operator on integers.
_QDQ_RULES = frozenset(
    rule.name for rule in (fuse_quantized_nodes, fuse_quantized_arithmetic, move_quantized, tabulate_bytes)
)


@dataclass(frozen=True)
class Prepared:
    """A model ready to run.

    Attributes:
        model: after rewriting.
        plan: its calls.
        inputs: required inputs; overridable: those with a default; outputs: with declared types.
        subgraphs: which provider computes which nodes, where that is recorded.
        on_device: inputs that may be given in a device's memory as they are.
    """

    model: OnnxModel
    plan: Plan
    inputs: list[Value]
    overridable: list[Value]
    outputs: list[Value]
    subgraphs: list[OrtEpAssignedSubgraph]
    on_device: frozenset[str]


def prepare(source: Any, options: SessionOptions, providers: Chosen) -> Prepared:
    """Everything that happens before the first run."""
    entries = options._entries
    check_entries(entries)
    model = read(source, options)
    _check_cancelled(options)
    graph = model.graph
    _override_dims(model, options)
    _override_initializers(graph, options)
    outputs = [replace(value) for value in graph.outputs]
    level = options.graph_optimization_level.level
    check_nodes(model)
    run_rewrites(model, (lift_constants,), level)
    infer_shapes(model)
    if expand_gradients(model):
        infer_shapes(model)
    _check_cancelled(options)
    keeps_qdq = entries.get(KEEPS_QDQ) == "1"
    run_rewrites(model, [rule for rule in SESSION_RULES if not (keeps_qdq and rule.name in _QDQ_RULES)], level)
    if options.optimized_model_filepath:
        write_model(
            model,
            Path(options.optimized_model_filepath),
            external_data=entries.get(WEIGHTS_FILE) or None,
            size_threshold=int(entries.get(WEIGHTS_LEAST_BYTES, "1024")),
        )
    _check_cancelled(options)
    threads = options.intra_op_num_threads or (0 if options.use_per_session_threads else global_threads())
    executor = open_executor(threads=threads or None)
    divided = hand_over(model, providers, recording=entries.get(RECORDS_ASSIGNMENT) == "1")
    # What the caller says, or what this machine has left, at most 16 GiB.
    most = int(entries[MAX_VALUE_BYTES]) if MAX_VALUE_BYTES in entries else min(MOST_BYTES, available_memory())
    check_result_sizes(graph, most)
    shared = {"threads": executor.host_threads, "executor": executor, "provided": divided.compiled, "arena": Arena()}
    plan = build_plan(model, PlanOptions(kernel={**shared, "max_value_bytes": most}))
    defaults = set(graph.initializers) if graph.overridable_initializers else set()
    constants = set() if graph.overridable_initializers else set(graph.initializers)
    inputs = [value for value in graph.inputs if value.name not in defaults | constants]
    overridable = [value for value in graph.inputs if value.name in defaults]
    return Prepared(model, plan, inputs, overridable, outputs, divided.subgraphs, divided.on_device)


def _check_cancelled(options: SessionOptions) -> None:
    if options._load_cancelled:
        raise ModelLoadCanceled("loading was called off", "set_load_cancellation_flag(True) says so", "set it to False")


def read(source: Any, options: SessionOptions) -> OnnxModel:
    """The model behind a path, bytes or protobuf object."""
    if not isinstance(source, str | Path | bytes | bytearray | memoryview | onnx.ModelProto):
        raise SourceTypeError(
            f"unable to load from type {type(source)!r}",
            "a model is a path, its bytes, or an onnx.ModelProto",
            "pass one of these",
        )
    data = bytes(source) if isinstance(source, bytearray | memoryview) else source
    folder = options._entries.get(WEIGHTS_FOLDER)
    return read_model(
        data,
        external_data=options._external_files or None,
        external_folder=None if folder is None else Path(folder),
        replaced=frozenset(options._initializers),
    )


def _override_dims(model: OnnxModel, options: SessionOptions) -> None:
    """Fixed extents in place of symbols, everywhere that the model names them."""
    by_name, by_denotation = options._dims_by_name, options._dims_by_denotation
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


def _override_initializers(graph: Graph, options: SessionOptions) -> None:
    for name, value in options._initializers.items():
        old = graph.initializers.get(name)
        if old is None:
            raise InvalidArgument(
                f"the model has no initializer {name!r}",
                f"its initializers are {', '.join(list(graph.initializers)[:20]) or 'none'}",
                "check the name given to add_initializer",
            )
        array = np.asarray(value.value if hasattr(value, "value") else value)
        if array.shape != old.shape or DataType.from_numpy(array.dtype) is not old.dtype:
            raise InvalidArgument(
                f"initializer {name!r} is {old.dtype.onnx_name}{list(old.shape)}, "
                f"the value given is {array.dtype}{list(array.shape)}",
                "an override keeps element type and shape",
                "convert or reshape the value",
            )
        graph.add_initializer(OnnxTensor.from_array(name, array))
