"""A graph compiled to a plan: kernels chosen, constants computed and packed, lifetimes planned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from genai.kernels.cpu.tape.context import Word
from genai.kernels.registry import Kernel, KernelError, NodeSpec, Registry, load_ops

from ..errors import GraphError, UnsupportedOpError
from ..graph.constants import constant_tensor
from ..graph.encode import EmbeddingEncoder
from ..graph.ir import Function, Graph, Model, Node, Tensor, canonical_domain
from ..graph.types import DataType, TensorType
from ..graph.uses import free_names
from .functions import bound_body, schema_function
from .run_context import RunContext
from .sparse import sparse_value
from .weights import WeightStore

if TYPE_CHECKING:
    from genai.kernels.cpu.tape.walkers import Walkers

    from .segments import Segments

ABSENT = -1
# Far more than any real model has, also after expansion.
MAX_COMPILED_NODES = 1_000_000
_NEW_EACH_TIME = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli", "Dropout"}
)


@dataclass(frozen=True)
class Step:
    """One kernel call: slots of its inputs and outputs (-1 = absent), and the slots that die with it.

    `names` are the graph's names of the outputs ("" = absent).
    """

    label: str
    op_type: str
    kernel: Kernel
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    release: tuple[int, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """Steps in order over numbered slots. The last slot is always None, so that index -1 reads as an absent input."""

    steps: tuple[Step, ...]
    initial: tuple[Any, ...]
    inputs: Mapping[str, int]
    output_names: tuple[str, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class PlanOptions:
    """Choices that hold for a whole plan.

    Attributes:
        kernel: reaches every kernel factory as NodeSpec.options.
        walkers: who walks the tapes that nodes over token rows become; None: every node runs by its Python kernel.
        ids: graph inputs that every step has (token ids, positions), for those tapes.
        on_packed: hears how many bytes of weights were packed, each time.
    """

    device: str = "cpu"
    kernel: Mapping[str, Any] = field(default_factory=dict)
    walkers: Walkers | None = None
    ids: Mapping[str, Word] = field(default_factory=dict)
    on_packed: Callable[[int], None] | None = None


def build_plan(model: Model, options: PlanOptions | None = None) -> Plan:
    """Compile a model's graph (topologically sorted here).

    Raises:
        UnsupportedOpError: operators without a kernel, all of them named; or a node outside what its kernel supports.
    """
    options = options or PlanOptions()
    scope = _scope(model, options)
    _check_operators(scope)
    return _Compiler(scope, _segments(model.graph, options)).compile(model.graph, captured={})


def _segments(graph: Graph, options: PlanOptions) -> Segments | None:
    if options.walkers is None:
        return None
    from .segments import Segments  # it needs the compiler, which describing a model does not

    return Segments(graph, options.walkers, options.ids)


@dataclass(frozen=True)
class _Scope:
    """What holds for the main graph and everything in it, or for one function's body.

    Attributes:
        versions: operator set version by domain, the standard one as "".
        nodes_left: one shared number: functions that call functions must not multiply without end.
    """

    model: Model
    versions: Mapping[str, int]
    registry: Registry
    options: PlanOptions
    nodes_left: list[int]

    def version(self, domain: str) -> int:
        return self.versions.get(domain, 1)

    def inside(self, function: Function) -> _Scope:
        """The scope of a function's body."""
        versions = {canonical_domain(name): version for name, version in function.opset_imports.items()}
        return replace(self, versions={**self.versions, **versions})


def _canonical(imports: Mapping[str, int], model: Model) -> dict[str, int]:
    versions = {canonical_domain(name): version for name, version in imports.items()}
    return {"": model.opset_version() or 1, **versions}


def missing_operators(model: Model, device: str = "cpu") -> list[str]:
    """Operators of a model, subgraphs included, that nothing can run: "domain::Op (version n)", sorted."""
    return _missing(_scope(model, PlanOptions(device)))


def _missing(scope: _Scope) -> list[str]:
    nodes = [node for graph in scope.model.graphs() for node in graph.nodes]
    return sorted({_operator(scope, node) for node in nodes if not _has_kernel(scope, node)})


def _scope(model: Model, options: PlanOptions) -> _Scope:
    return _Scope(model, _canonical(model.opset_imports, model), load_ops(), options, [MAX_COMPILED_NODES])


def _check_operators(scope: _Scope) -> None:
    """Name every operator of the main graph that nothing can run, in one message."""
    missing = _missing(scope)
    if missing:
        raise UnsupportedOpError(
            f"no kernel for {', '.join(missing)}",
            f"the graph uses them and neither this toolkit nor onnx.reference implements them on "
            f"{scope.options.device!r}",
            "export the model without them, or register a kernel (docs/architecture.md, 'How to add an operator')",
        )


def _operator(scope: _Scope, node: Node) -> str:
    domain, op_type = node.key
    return f"{domain or 'ai.onnx'}::{op_type} (version {scope.version(domain)})"


def _has_kernel(scope: _Scope, node: Node) -> bool:
    from genai.kernels.ops import borrowed

    domain, op_type = node.key
    version = scope.version(domain)
    return (
        node.key == ("", "Constant")
        or scope.model.function(node) is not None
        or scope.registry.find(domain, op_type, version, scope.options.device) is not None
        or borrowed.available(domain, op_type, version)
    )


class _Compiler:
    """Builds one plan; subgraphs and functions are compiled by compilers of their own, and have no tapes."""

    def __init__(self, scope: _Scope, segments: Segments | None = None) -> None:
        self.scope = scope
        self.segments = segments
        self.slots: dict[str, int] = {}
        self.constants: dict[str, Any] = {}
        self.weights = WeightStore(self.constants, scope.options.on_packed)
        self.steps: list[Step] = []

    def compile(self, graph: Graph, captured: Mapping[str, Any], variables: Sequence[str] = ()) -> Plan:
        """`captured` and `variables`: constants and computed values that a subgraph takes from outside."""
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
                self.constants[name] = sparse_value(sparse)
        inputs = {name: self._slot(name) for name in [*given_names(graph), *variables]}
        defaults = {name: graph.initializers[name].array() for name in overridable & set(graph.initializers)}
        graph.topological_sort()
        for node in graph.nodes:
            self._add(node)
        self._close_segment()
        outputs = tuple(self._slot(value.name) for value in graph.outputs)
        return self._finish(inputs, outputs, defaults)

    def _slot(self, name: str) -> int:
        return ABSENT if not name else self.slots.setdefault(name, len(self.slots))

    def _add(self, node: Node) -> None:
        self._count_node()
        if node.key == ("", "Constant"):
            self.constants[node.outputs[0]] = _constant(node)
            return
        subgraphs, captures = self._subgraphs(node)
        names = [*node.inputs, *captures]
        if not subgraphs and self._joins_tape(node, names):
            return
        kernel = self._kernel(node, subgraphs)
        if not subgraphs and self._is_constant(node, names) and self._fold(node, kernel, names):
            return
        if self.segments is not None:
            self._close_segment()
            self.segments.passed(node)
        packed = getattr(kernel, "packed", ())
        names = ["" if index in packed else name for index, name in enumerate(names)]
        self._append(f"{node.op_type} {node.name!r}", node.op_type, kernel, names, node.outputs)

    def _append(self, label: str, op_type: str, kernel: Kernel, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        read, written = (tuple(self._slot(name) for name in group) for group in (inputs, outputs))
        self.steps.append(Step(label, op_type, kernel, read, written, (), tuple(outputs)))

    def _joins_tape(self, node: Node, names: Sequence[str]) -> bool:
        """Whether the node becomes part of the tape that is being gathered."""
        if self.segments is None or self._is_constant(node, names) or self.scope.model.function(node) is not None:
            return False
        try:
            return self.segments.take(node, self._spec(node, {}))
        except Exception as error:  # Attributes of wrong types and lengths fail in many ways.
            raise _unusable(node, error) from error

    def _close_segment(self) -> None:
        """What has gathered for a tape becomes a step."""
        if self.segments is not None and (step := self.segments.close()) is not None:
            self._append(f"tape of {len(step.nodes)} operators", "Tape", step, list(step.given), list(step.made))

    def _count_node(self) -> None:
        self.scope.nodes_left[0] -= 1
        if self.scope.nodes_left[0] < 0:
            raise GraphError(
                f"the model has more than {MAX_COMPILED_NODES} nodes once its functions are expanded",
                "functions that call functions multiply",
                "export the model again; do not use a model that you do not trust",
            )

    def _is_constant(self, node: Node, names: Sequence[str]) -> bool:
        known = all(name in self.constants for name in names if name)
        return known and self.scope.model.function(node) is None and node.op_type not in _NEW_EACH_TIME

    def _fold(self, node: Node, kernel: Kernel, names: Sequence[str]) -> bool:
        """Compute a constant now; moves stay views of the memory map, so nothing is copied.

        False where it fails: the node may stand in a branch that never runs, and fails, if it does, with the others.
        """
        values = [self.constants[name] if name else None for name in names]
        try:
            with np.errstate(all="ignore"):
                results = kernel(None, values)
        except Exception:
            return False
        self.constants.update((name, value) for name, value in zip(node.outputs, results, strict=False) if name)
        return True

    def _kernel(self, node: Node, subgraphs: Mapping[str, SubplanKernel]) -> Kernel:
        """Ours, or else the model's own function, or a borrowed one, or the body that the operator is defined by."""
        from genai.kernels.ops import borrowed

        function = self.scope.model.function(node)
        if function is not None:
            return self._function_kernel(node, function)
        domain, op_type = node.key
        spec = self._spec(node, subgraphs)
        entry = self.scope.registry.find(domain, op_type, spec.version, self.scope.options.device)
        refusal: Exception | None = None
        if entry is not None:
            try:
                return entry.factory(spec)
            except KernelError as error:
                refusal = error
            except Exception as error:  # Attributes of wrong types and lengths fail in many ways.
                raise _unusable(node, error) from error
        if not subgraphs and borrowed.implemented(domain, op_type, spec.version):
            try:
                return borrowed.make(spec)
            except Exception as error:  # Borrowed code raises what it likes.
                raise _unusable(node, refusal or error) from error
        body = schema_function(node, spec.version, self.graph)
        if body is None:
            raise _unusable(node, refusal or KernelError("its definition needs types that are not known")) from refusal
        return self._function_kernel(node, body)

    def _spec(self, node: Node, subgraphs: Mapping[str, SubplanKernel]) -> NodeSpec:
        domain, op_type = node.key
        return NodeSpec(
            domain=domain,
            op_type=op_type,
            version=self.scope.version(domain),
            attributes={name: _python_value(node.attribute(name)) for name in node.attributes},
            inputs=tuple(node.inputs),
            outputs=tuple(node.outputs),
            constants=tuple(self.constants.get(name) if name else None for name in node.inputs),
            weights=self.weights,
            options=self.scope.options.kernel,
            subgraphs=subgraphs,
            proto=lambda: EmbeddingEncoder().node(node),
        )

    def _function_kernel(self, node: Node, function: Function) -> Kernel:
        """The body compiled for this call: attributes and absent inputs are known."""
        body = bound_body(function, node)
        return SubplanKernel(_Compiler(self.scope.inside(function)).compile(body, {}), body)

    def _subgraphs(self, node: Node) -> tuple[dict[str, SubplanKernel], list[str]]:
        """Compile subgraphs; what they capture becomes extra inputs of the node, in order."""
        graphs = {name: node.attribute(name) for name, item in node.attributes.items() if isinstance(item.value, Graph)}
        captures = sorted({name for graph in graphs.values() for name in free_names(graph)})
        constants = {name: self.constants[name] for name in captures if name in self.constants}
        variable = [name for name in captures if name not in constants]
        compiled = {
            name: SubplanKernel(_Compiler(self.scope).compile(graph, constants, variable), graph)
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
        return Plan(_with_lifetimes(self.steps, keep), tuple(initial), inputs, names, outputs)


def given_names(graph: Graph) -> list[str]:
    """Names of a graph's inputs, in order."""
    return [value.name for value in graph.inputs]


def _constant(node: Node) -> Any:
    tensor = constant_tensor(node)
    if tensor is not None:
        return tensor.array()
    sparse = node.attributes.get("sparse_value")
    if sparse is not None and sparse.value is not None:
        return sparse_value(sparse.value)
    raise GraphError(
        f"Constant node {node.name!r} ({node.outputs}) has no value",
        "it needs one of value, value_float, value_int, value_string, their lists, or sparse_value",
        "export the model again",
    )


def _with_lifetimes(steps: Sequence[Step], keep: set[int]) -> tuple[Step, ...]:
    """Mark, per step, the slots that no later step reads."""
    alive = set(keep)
    result = []
    for step in reversed(steps):
        touched = set(step.inputs) | set(step.outputs)
        dying = tuple(sorted(touched - alive))
        alive |= touched
        result.append(replace(step, release=dying))
    return tuple(reversed(result))


def _python_value(value: Any) -> Any:
    return value.array() if isinstance(value, Tensor) else value


class SubplanKernel:
    """A plan as a kernel: inputs in the plan's own order, trailing absent ones may be left out.

    Attributes:
        outputs: per output (dtype, sizes), None where the graph does not say.
    """

    def __init__(self, plan: Plan, graph: Graph) -> None:
        from .python_loop import run_slots

        self._plan, self._run = plan, run_slots
        self._slots = tuple(plan.inputs.values())
        self.outputs = [_known_type(graph.type_of(value.name)) for value in graph.outputs]

    def __call__(self, context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        if type(context) is RunContext:
            context.check()
        return self._run(self._plan, zip(self._slots, inputs, strict=False), context)


def _known_type(known: Any) -> tuple[Any, tuple[int | None, ...] | None]:
    if not isinstance(known, TensorType) or known.dtype is DataType.UNDEFINED:
        return None, None
    shape = known.shape
    sizes = None if shape is None else tuple(size if isinstance(size, int) else None for size in shape)
    return known.dtype.numpy_dtype, sizes


def _unusable(node: Node, error: Exception) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"{node.op_type} {node.name!r} cannot be run",
        str(error) if isinstance(error, KernelError) else f"{type(error).__name__}: {error}",
        "export the model in another form, or register a kernel for it (docs/architecture.md)",
    )
