"""A flattened decoder as a program of ops, with host nodes for the operators without an op."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.ir import HostNode, Ids, Op, OpProgram, Per, RowsType, Weight, constant_names, weights_of
from genai.ops.registry import Kernel, NodeSpec

from ..onnx.ir import Graph, Node, OnnxModel
from ..onnx.storage import ExternalStorage
from ..onnx.types import TensorType
from ..session.loop import OpCall, call
from ..session.plan import Compiler, PlanOptions, Scope, checked_scope, unusable
from .rules import LoweringSpec, ValueType, find_lowering_rule

_COPIED_BYTES = 2**20


def build_program(
    model: OnnxModel,
    ids: Mapping[str, tuple[Ids, np.dtype[Any]]],
    options: PlanOptions,
    given: Mapping[str, RowsType] | None = None,
) -> OpProgram:
    """Compile the graph of a flattened model; the graph is first sorted topologically.

    Args:
        ids: the graph inputs that contain one integer per token, with their types.
        given: the graph inputs that contain a row of floats per token, with their types.
    """
    given = given or {}
    compiler = _RowCompiler(
        checked_scope(model, options, find_lowering_rule), {name: kind for name, (kind, _) in ids.items()} | dict(given)
    )
    plan = compiler.compile(model.graph, captured={})
    return OpProgram(
        parts=tuple(compiler.parts),
        types={name: type_ for name, type_ in compiler.types.items() if isinstance(type_, RowsType)},
        constants=ProgramConstants(compiler),
        outputs=plan.output_names,
        ids=ids,
        given=tuple(given),
    )


class _RowCompiler(Compiler):
    """Collects ops; nodes without a lowering rule become host nodes."""

    def __init__(self, scope: Scope, inputs: Mapping[str, ValueType]) -> None:
        super().__init__(scope)
        self.parts: list[Op | HostNode] = []
        self.types: dict[str, ValueType] = dict(inputs)

    def _take(self, node: Node) -> bool:
        domain, op_type = node.key
        rule = None if self.scope.model.function(node) is not None else find_lowering_rule(domain, op_type)
        if rule is None:
            return False
        types = [self.types.get(name) for name in node.inputs]
        spec = LoweringSpec(**vars(self._spec(node, {})), types=types)
        try:
            lowered = rule(spec)
        except Exception as error:  # Attributes of wrong types and lengths fail in many ways.
            raise unusable(node, error) from error
        if lowered is None:
            return False
        self.parts.extend(lowered.ops)
        self.types.update(lowered.types)
        return True

    def _spec(self, node: Node, subgraphs: Mapping[str, Any]) -> NodeSpec:
        """Build the spec, with one name for constants of the same bytes so that tied weights are packed only once."""
        spec = super()._spec(node, subgraphs)
        return replace(spec, inputs=tuple(self.weights.name_of(name) for name in node.inputs))

    def _append(self, node: Node, label: str, kernel: Kernel, inputs: Sequence[str]) -> None:
        known = [name in self.constants for name in inputs]
        self.parts.append(
            HostNode(
                op_type=node.op_type,
                label=label,
                function=partial(_on_host, OpCall(label, node.op_type, kernel, (), (), (), ())),
                inputs=tuple("" if is_known else name for name, is_known in zip(inputs, known, strict=True)),
                outputs=tuple(node.outputs),
                values=tuple(self.constants.get(name) if name else None for name in inputs),
            )
        )
        per = {type_.per for name in inputs if isinstance(type_ := self.types.get(name), RowsType)}
        for name in node.outputs:
            if name and len(per) == 1 and (type_ := _rows_type(self.graph, name, next(iter(per)))) is not None:
                self.types[name] = type_

    def origin(self, array: NDArray[Any]) -> Hashable:
        """Return the file, the place in it and the form of a constant; None if the constant is not a whole tensor."""
        tensor, folder = self.weights.tensor_of(array), self.scope.model.folder
        if tensor is None or folder is None or not isinstance(tensor.storage, ExternalStorage):
            return None
        storage = tensor.storage
        if storage.mapping is None:
            return None
        facts = (folder / storage.entries["location"]).stat()
        file = facts.st_dev, facts.st_ino, facts.st_mtime_ns
        return *file, storage.offset, str(array.dtype), array.shape, array.strides


def _on_host(step: OpCall, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Run a host node; errors name the node."""
    with np.errstate(all="ignore"):
        return call(step, None, inputs)


def _rows_type(graph: Graph, name: str, per: Per) -> RowsType | None:
    """Return the type of a host node's result: rows if it is [1, rows, features], else None (unknown)."""
    type_ = graph.type_of(name)
    shape = type_.shape if isinstance(type_, TensorType) else None
    if shape is None or len(shape) != 3 or not isinstance(shape[2], int) or isinstance(shape[1], int):
        return None
    return RowsType((1, -1, shape[2]), shape[2], per)


def _copied(array: NDArray[Any]) -> NDArray[Any]:
    """Copy a small constant, so that the files of a model are no longer needed once all large constants are packed."""
    return array.copy() if array.nbytes <= _COPIED_BYTES else array


class ProgramConstants:
    """The constants that ops name. Constants that a device has packed are removed, and their memory pages released."""

    def __init__(self, compiler: _RowCompiler) -> None:
        self._release = compiler.weights.release
        ops = [part for part in compiler.parts if isinstance(part, Op)]
        names = {name for op in ops for name in constant_names(op)}
        self._origins = {name: compiler.origin(compiler.constants[name]) for name in names}
        self._arrays: dict[str, NDArray[Any]] = {name: _copied(compiler.constants[name]) for name in names}
        weights = {weight for op in ops for weight in weights_of(op)}
        self._readers = Counter(name for weight in weights for name in constant_names(weight))

    def array(self, name: str) -> NDArray[Any]:
        return self._arrays[name]

    def origin(self, name: str) -> Hashable:
        return self._origins.get(name)

    def packed(self, weight: Weight) -> None:
        names = constant_names(weight)
        self._readers.subtract(names)
        for name in names:
            if self._readers[name] <= 0 and name in self._arrays:
                self._release(self._arrays.pop(name))
