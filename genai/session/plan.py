"""Compilation of a graph to a plan: selects kernels, folds and packs constants, and plans the lifetimes of values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from genai.ops.registry import Kernel, KernelError, NodeSpec, find_kernel, may_call_blas
from genai.ops.support import limited

from ..errors import UnsupportedOpError, malformed
from ..onnx.ir import Function, Graph, Node, OnnxModel
from ..onnx.node import NEW_EACH_TIME, canonical_imports, constant_tensor
from ..onnx.serialize import EmbeddingEncoder
from ..onnx.types import DataType, TensorType
from ..onnx.uses import free_names, used_names
from ..onnx.validate import MAX_ADDED_NODES, too_many_nodes, written_nodes
from .functions import bound_body, call_key, schema_function
from .loop import OpCall, Plan, RunContext, recorded_call, run_slots, with_lifetimes
from .packed_weights import WeightStore
from .repeated import RepeatedPlan
from .tensors import arrays_in

ABSENT = -1


@dataclass(frozen=True)
class PlanOptions:
    """Options of a whole plan.

    Attributes:
        kernel: options passed to every kernel factory as NodeSpec.options.
        on_packed: function called after each packing of weights, with the number of bytes.
        consumes_constants: True to remove each constant from the main graph when the last node that reads it is
            compiled, so that a weight and its packed form are not in memory together for the whole compilation.
    """

    kernel: Mapping[str, Any] = field(default_factory=dict)
    on_packed: Callable[[int], None] | None = None
    consumes_constants: bool = False


def build_plan(model: OnnxModel, options: PlanOptions | None = None) -> Plan:
    """Compile a model's graph. The graph is first sorted topologically.

    Raises:
        UnsupportedOpError: operators have no kernels (all are named), or a kernel does not support a node.
    """
    options = options or PlanOptions()
    scope = checked_scope(model, options)
    plan = Compiler(scope, consumes=options.consumes_constants).compile(model.graph, captured={})
    return replace(plan, files=model.files)


Known = Callable[[str, str], object]
"""A function of (domain, operator) that returns a true value if something other than a kernel runs the operator."""


def checked_scope(model: OnnxModel, options: PlanOptions, known: Known | None = None) -> Scope:
    """Return the scope of a model's main graph, after checking that every operator can run.

    Args:
        known: function that returns a true value for operators that need no kernel.
    """
    scope = _scope(model, options)
    if missing := _missing(scope, known):
        raise UnsupportedOpError(
            f"there is no kernel for {', '.join(missing)}",
            "the graph uses these operators, and neither this toolkit nor onnx.reference implements them on 'cpu'",
            "export the model without these operators, or register a kernel (docs/how-to/onnx-session.md)",
        )
    return scope


@dataclass(frozen=True)
class Scope:
    """The context of the main graph and its subgraphs, or of one function's body.

    Attributes:
        versions: operator set version by domain; "" is ONNX's standard domain.
        nodes_left: shared budget of nodes, so that functions that call functions cannot grow without bound.
        bodies: compiled function bodies, with the number of nodes of each; identical calls share one body.
    """

    model: OnnxModel
    versions: Mapping[str, int]
    options: PlanOptions
    nodes_left: list[int]
    bodies: dict[Any, tuple[SubplanKernel, int, Any]] = field(default_factory=dict)

    def version(self, domain: str) -> int:
        return self.versions.get(domain, 1)

    def inside(self, function: Function) -> Scope:
        """Return the scope of a function's body."""
        return replace(self, versions={**self.versions, **canonical_imports(function.opset_imports)})


def missing_operators(model: OnnxModel, known: Known | None = None) -> list[str]:
    """Return the operators of a model and its subgraphs that cannot run: "domain::Op (version n)", sorted.

    Args:
        known: function that returns a true value for operators that need no kernel.
    """
    return _missing(_scope(model, PlanOptions()), known)


def _missing(scope: Scope, known: Known | None) -> list[str]:
    nodes = [node for graph in scope.model.graphs() for node in graph.nodes]
    unknown = (node for node in nodes if known is None or not known(*node.key))
    return sorted({_operator(scope, node) for node in unknown if not _has_kernel(scope, node)})


def _scope(model: OnnxModel, options: PlanOptions) -> Scope:
    versions = {"": model.opset_version() or 1, **canonical_imports(model.opset_imports)}
    return Scope(model, versions, options, [written_nodes(model) + MAX_ADDED_NODES])


def _operator(scope: Scope, node: Node) -> str:
    domain, op_type = node.key
    return f"{domain or 'ai.onnx'}::{op_type} (version {scope.version(domain)})"


def _has_kernel(scope: Scope, node: Node) -> bool:
    from genai.ops import borrowed

    domain, op_type = node.key
    version = scope.version(domain)
    return (
        node.key == ("", "Constant")
        or scope.model.function(node) is not None
        or find_kernel(domain, op_type, version) is not None
        or borrowed.available(domain, op_type, version)
    )


class Compiler:
    """The compiler of one plan. Subgraphs and functions get separate compilers."""

    def __init__(self, scope: Scope, *, consumes: bool = False) -> None:
        """`consumes`: True to remove constants from the graph; see `PlanOptions.consumes_constants`."""
        self.scope, self._consumes = scope, consumes
        self.slots: dict[str, int] = {}
        self.constants: dict[str, Any] = {}
        self.weights = WeightStore(self.constants, scope.options.on_packed)
        self.calls: list[OpCall] = []
        self.calls_blas = False
        # Properties of the kernel that `_kernel` has selected last.
        self._is_own = self._kernel_calls_blas = False

    def compile(self, graph: Graph, captured: Mapping[str, Any], variables: Sequence[str] = ()) -> Plan:
        """Compile. `captured`, `variables`: constants and computed values that a subgraph uses from outer graphs."""
        self.graph = graph
        self.constants.update(captured)
        given = {value.name for value in graph.inputs}
        self.weights.add_tensors(graph.initializers.values())
        overridable = given if graph.overridable_initializers else set()
        for name, tensor in graph.initializers.items():
            if name not in overridable:
                self.constants[name] = tensor.array()
        for name, sparse in graph.sparse_initializers.items():
            if name not in overridable:
                self.constants[name] = sparse.array()
        inputs = {name: self._slot(name) for name in [*(value.name for value in graph.inputs), *variables]}
        defaults = {name: graph.initializers[name].array() for name in overridable & set(graph.initializers)}
        graph.topological_sort()
        read_last = _read_last(graph) if self._consumes else {}
        for node in graph.nodes:
            self._add(node)
            for name in read_last.get(node, ()):
                self._drop(name)
        outputs = tuple(self._slot(value.name) for value in graph.outputs)
        return self._finish(inputs, outputs, defaults)

    def _drop(self, name: str) -> None:
        """Drop a constant that neither a later node nor a call of the plan reads."""
        if name not in self.slots:
            self.constants.pop(name, None)
            self.graph.remove_initializer(name)

    def _slot(self, name: str) -> int:
        return ABSENT if not name else self.slots.setdefault(name, len(self.slots))

    def _add(self, node: Node) -> None:
        self._count_nodes()
        if node.key == ("", "Constant"):
            self.constants[node.outputs[0]] = _constant(node)
            return
        subgraphs, captures = self._subgraphs(node)
        names = [*node.inputs, *captures]
        if not subgraphs and not self._is_constant(node, names) and self._take(node):
            return
        before, self.calls_blas, self._is_own = self.calls_blas, False, False
        kernel = self._kernel(node, subgraphs)
        self._kernel_calls_blas, self.calls_blas = self.calls_blas, self.calls_blas or before
        if not subgraphs and self._is_constant(node, names) and self._fold(node, kernel, names):
            return
        packed = getattr(kernel, "packed", ())
        names = ["" if index in packed else name for index, name in enumerate(names)]
        self._append(node, f"{node.op_type} {node.name!r}", kernel, names)

    def _append(self, node: Node, label: str, kernel: Kernel, inputs: Sequence[str]) -> None:
        read, written = (tuple(self._slot(name) for name in group) for group in (inputs, node.outputs))
        more = self._is_own, self._kernel_calls_blas
        self.calls.append(OpCall(label, node.op_type, kernel, read, written, (), tuple(node.outputs), *more))

    def _take(self, node: Node) -> bool:
        """Return True if a subclass has handled a non-constant node, so that it needs no call in the plan."""
        return False

    def _count_nodes(self, count: int = 1) -> None:
        self.scope.nodes_left[0] -= count
        if self.scope.nodes_left[0] < 0:
            raise too_many_nodes()

    def _is_constant(self, node: Node, names: Sequence[str]) -> bool:
        known = all(name in self.constants for name in names if name)
        return known and self.scope.model.function(node) is None and node.op_type not in NEW_EACH_TIME

    def _fold(self, node: Node, kernel: Kernel, names: Sequence[str]) -> bool:
        """Compute a constant now. Views of the memory map remain views, so they are not copied.

        Return False if the computation fails: the node may be in a branch that never runs. If the node does run, it
        fails at run time.
        """
        values = [self.constants[name] if name else None for name in names]
        try:
            with np.errstate(all="ignore"):
                results = kernel(None, values)
        except Exception:
            return False
        kept = list(arrays_in(results))
        for array in kept:
            array.flags.writeable = False  # a run returns copies of read-only arrays, so callers cannot change these
        self.constants.update((name, value) for name, value in zip(node.outputs, results, strict=False) if name)
        for value in values:
            if isinstance(value, np.ndarray) and not any(np.may_share_memory(value, array) for array in kept):
                self.weights.release(value)
        return True

    def _kernel(self, node: Node, subgraphs: Mapping[str, SubplanKernel]) -> Kernel:
        """Select our kernel or the model's own function, otherwise a borrowed kernel or the operator's definition."""
        from genai.ops import borrowed

        function = self.scope.model.function(node)
        if function is not None:
            return self._function_kernel(node, function)
        domain, op_type = node.key
        spec = self._spec(node, subgraphs)
        entry = find_kernel(domain, op_type, spec.version)
        refusal: Exception | None = None
        if entry is not None:
            try:
                kernel = entry.factory(spec)
                may_call = entry.source != "ours" or may_call_blas(domain, op_type)
                self.calls_blas |= any(getattr(part, "calls_blas", may_call) for part in (kernel, *subgraphs.values()))
                self._is_own = entry.source == "ours"
                return limited(spec, kernel) if self._is_own else kernel
            except KernelError as error:
                refusal = error
            except Exception as error:  # attributes of wrong types or lengths cause many kinds of errors
                raise unusable(node, error) from error
        if not subgraphs and borrowed.implemented(domain, op_type, spec.version):
            self.calls_blas = True
            try:
                return borrowed.make(spec)
            except Exception as error:  # borrowed code may raise any exception
                raise unusable(node, refusal or error) from error
        body = schema_function(node, spec.version, self.graph)
        if body is None:
            raise unusable(
                node, refusal or KernelError("the operator's definition needs types that are unknown")
            ) from refusal
        return self._function_kernel(node, body)

    def _spec(self, node: Node, subgraphs: Mapping[str, SubplanKernel]) -> NodeSpec:
        domain, op_type = node.key
        return NodeSpec(
            domain=domain,
            op_type=op_type,
            version=self.scope.version(domain),
            attributes=node.attribute_values(),
            inputs=tuple(node.inputs),
            outputs=tuple(node.outputs),
            constants=tuple(self.constants.get(name) if name else None for name in node.inputs),
            weights=self.weights,
            options=self.scope.options.kernel,
            subgraphs=subgraphs,
            proto=lambda: EmbeddingEncoder().node(node),
        )

    def _function_kernel(self, node: Node, function: Function) -> Kernel:
        """Compile the body for this call, given the call's attributes and absent inputs."""
        scope = self.scope.inside(function)
        key = call_key(function, node), tuple(sorted(scope.versions.items()))
        known = scope.bodies.get(key)
        if known is not None:
            self._count_nodes(known[1])
            self.calls_blas |= known[0].calls_blas
            return known[0]
        before, body = scope.nodes_left[0], bound_body(function, node)
        kernel = SubplanKernel(Compiler(scope).compile(body, {}), body)
        self.calls_blas |= kernel.calls_blas
        # The key contains object identities, so the objects must stay alive as long as the key.
        scope.bodies[key] = kernel, before - scope.nodes_left[0], (function, node)
        return kernel

    def _subgraphs(self, node: Node) -> tuple[dict[str, SubplanKernel], list[str]]:
        """Compile subgraphs. The values that the subgraphs capture become extra inputs of the node, in order."""
        graphs = {name: node.attribute(name) for name, item in node.attributes.items() if isinstance(item.value, Graph)}
        captures = sorted({name for graph in graphs.values() for name in free_names(graph)})
        constants = {name: self.constants[name] for name in captures if name in self.constants}
        variable = [name for name in captures if name not in constants]
        compiled = {
            name: SubplanKernel(Compiler(self.scope).compile(graph, constants, variable), graph)
            for name, graph in graphs.items()
        }
        return compiled, variable

    def _finish(self, inputs: Mapping[str, int], outputs: tuple[int, ...], defaults: Mapping[str, Any]) -> Plan:
        used_constants = {name: self.slots[name] for name in self.constants if name in self.slots}
        initial: list[Any] = [None] * (len(self.slots) + 1)
        for name, slot in used_constants.items():
            initial[slot] = self.constants[name]
        for name, value in defaults.items():
            initial[self.slots[name]] = value
        keep = set(outputs) | set(used_constants.values()) | {ABSENT}
        names = tuple(value.name for value in self.graph.outputs)
        self.weights.forget_constants()
        calls = with_lifetimes(self.calls, keep)
        return Plan(calls, tuple(initial), inputs, names, outputs, calls_blas=self.calls_blas)


def _read_last(graph: Graph) -> dict[Node, set[str]]:
    """Return the values that each node is the last to read; graph outputs are read after all nodes."""
    read = {value.name for value in graph.outputs}
    last: dict[Node, set[str]] = {}
    for node in reversed(graph.nodes):
        last[node] = used_names(node) - read
        read |= last[node]
    return last


def _constant(node: Node) -> Any:
    tensor = constant_tensor(node)
    if tensor is not None:
        return tensor.array()
    sparse = node.attributes.get("sparse_value")
    if sparse is not None and sparse.value is not None:
        return sparse.value.array()
    raise malformed(
        f"Constant node {node.name!r} ({node.outputs}) has no value",
        "a Constant node must have one of the attributes value, value_float(s), value_int(s), value_string(s) or "
        "sparse_value",
    )


class SubplanKernel:
    """A plan as a kernel. Inputs are in the plan's order; trailing absent inputs may be omitted.

    Attributes:
        plan: the plan.
        outputs: (dtype, sizes) per output; None for properties that the graph does not declare.
        calls_blas: False if no kernel of the plan calls BLAS.
    """

    def __init__(self, plan: Plan, graph: Graph) -> None:
        self.plan, self.calls_blas = plan, plan.calls_blas
        self._repeated = RepeatedPlan(plan)
        self._slots = tuple(plan.inputs.values())
        self.outputs = [_known_type(graph.type_of(value.name)) for value in graph.outputs]

    def __call__(self, context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        if type(context) is RunContext:
            context.check()
            if context.record is not None:
                return run_slots(self.plan, zip(self._slots, inputs, strict=False), context, recorded_call)
            return run_slots(self.plan, zip(self._slots, inputs, strict=False), context)
        return self._repeated.run([*zip(self._slots, inputs, strict=False)])


def _known_type(known: Any) -> tuple[Any, tuple[int | None, ...] | None]:
    if not isinstance(known, TensorType) or known.dtype is DataType.UNDEFINED:
        return None, None
    shape = known.shape
    sizes = None if shape is None else tuple(size if isinstance(size, int) else None for size in shape)
    return known.dtype.numpy_dtype, sizes


def unusable(node: Node, error: Exception) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"{node.op_type} {node.name!r} cannot be run",
        str(error) if isinstance(error, KernelError) else f"{type(error).__name__}: {error}",
        "export the model in another form, or register a kernel for it (docs/how-to/onnx-session.md)",
    )
