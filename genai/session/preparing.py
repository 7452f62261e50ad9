"""From a source to a plan: read, apply options, rewrite, compile."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from genai.kernels.cpu.large import Arena
from genai.kernels.cpu.tape.replay import Crew
from genai.kernels.cpu.team import Team

from ..graph.gradients import expand_gradients
from ..graph.ir import Graph, Model, Tensor, Value
from ..graph.reader import read_model
from ..graph.rewrites.base import run_rewrites
from ..graph.rewrites.constant_folding import LiftConstants
from ..graph.rewrites.standard import SESSION_RULES
from ..graph.shapes import infer_shapes
from ..graph.types import DataType, TensorType
from ..graph.writer import write_model
from ..runtime.plan import Plan, PlanOptions, build_plan
from .errors import InvalidArgument, SourceTypeError
from .model_check import check_nodes
from .options import SessionOptions
from .partition import hand_over
from .providers import Chosen

MAX_VALUE_BYTES = "session.max_value_bytes"


@dataclass(frozen=True)
class Prepared:
    """A model ready to run.

    Attributes:
        model: after rewriting.
        plan: its steps.
        inputs: required inputs; overridable: those with a default; outputs: with declared types.
    """

    model: Model
    plan: Plan
    inputs: list[Value]
    overridable: list[Value]
    outputs: list[Value]


def prepare(source: Any, options: SessionOptions, providers: Chosen) -> Prepared:
    """Everything that happens before the first run.

    Raises:
        GenaiError: one of the classes in `genai.session.errors`.
    """
    model = read(source, options)
    graph = model.graph
    _override_dims(model, options)
    _override_initializers(graph, options)
    outputs = [replace(value) for value in graph.outputs]
    level = options.graph_optimization_level.level
    check_nodes(model)
    run_rewrites(model, (LiftConstants(),), level)
    infer_shapes(model)
    if expand_gradients(model):
        infer_shapes(model)
    run_rewrites(model, SESSION_RULES, level)
    if options.optimized_model_filepath:
        write_model(model, Path(options.optimized_model_filepath))
    team = Team(options.intra_op_num_threads or None)
    provided = hand_over(model, providers)
    shared = {"team": team, "crew": Crew(team.threads), "provided": provided, "arena": Arena()}
    plan = build_plan(model, PlanOptions(kernel={**shared, **_limits(options)}))
    defaults = set(graph.initializers) if graph.overridable_initializers else set()
    constants = set() if graph.overridable_initializers else set(graph.initializers)
    inputs = [value for value in graph.inputs if value.name not in defaults | constants]
    overridable = [value for value in graph.inputs if value.name in defaults]
    return Prepared(model, plan, inputs, overridable, outputs)


def _limits(options: SessionOptions) -> dict[str, int]:
    """The largest value that a node may make, where the caller limits it."""
    text = options._entries.get(MAX_VALUE_BYTES)
    if text is None:
        return {}
    if not text.isdecimal():
        raise InvalidArgument(f"config entry {MAX_VALUE_BYTES} = {text!r}", "it is a number of bytes", "correct it")
    return {"max_value_bytes": int(text)}


def read(source: Any, options: SessionOptions) -> Model:
    """The model behind a path, bytes or protobuf object.

    Raises:
        SourceTypeError: another kind of object.
    """
    if not isinstance(source, str | Path | bytes | bytearray | memoryview | onnx.ModelProto):
        raise SourceTypeError(
            f"unable to load from type {type(source)!r}",
            "a model is a path, its bytes, or an onnx.ModelProto",
            "pass one of these",
        )
    data = bytes(source) if isinstance(source, bytearray | memoryview) else source
    return read_model(data, external_data=options._external_files or None)


def _override_dims(model: Model, options: SessionOptions) -> None:
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
        graph.add_initializer(Tensor.from_array(name, array))
