"""A graph compiled to a plan: kernels chosen, constants computed and packed, lifetimes planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from genai.kernels.cpu.tape.context import Word
from genai.kernels.cpu.tape.walkers import Walkers
from genai.kernels.registry import Kernel, NodeSpec, Registry, load_ops

from ..errors import UnsupportedOpError
from ..graph.encode import EmbeddingEncoder
from ..graph.ir import Graph, Model, Node, Tensor
from .segments import Segments
from .weights import WeightStore

ABSENT = -1


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
    outputs: Mapping[str, int]


@dataclass(frozen=True)
class PlanOptions:
    """Choices that hold for a whole plan.

    Attributes:
        kernel: reaches every kernel factory as NodeSpec.options.
        walkers: who walks the tapes that nodes over token rows become; None: every node runs by its Python kernel.
        ids: graph inputs that every step has (token ids, positions), for those tapes.
    """

    device: str = "cpu"
    kernel: Mapping[str, Any] = field(default_factory=dict)
    walkers: Walkers | None = None
    ids: Mapping[str, Word] = field(default_factory=dict)


def build_plan(model: Model, options: PlanOptions | None = None) -> Plan:
    """Compile a model's graph (topologically sorted here).

    Raises:
        UnsupportedOpError: operators without a kernel, all of them named; or a node outside what its kernel supports.
    """
    options = options or PlanOptions()
    _check_operators(model, options.device)
    compiler = _Compiler(model, load_ops(), options)
    return compiler.compile(model.graph, captured={})


def missing_operators(model: Model, device: str = "cpu") -> list[str]:
    """Operators of a model, subgraphs included, for which there is no kernel: "domain::Op (version n)", sorted."""
    registry = load_ops()
    return sorted(
        {_operator(model, node) for node in _all_nodes(model.graph) if not _has_kernel(model, node, registry, device)}
    )


def _check_operators(model: Model, device: str) -> None:
    missing = missing_operators(model, device)
    if missing:
        raise UnsupportedOpError(
            f"no kernel for {', '.join(missing)}",
            f"the graph uses them and neither this toolkit nor onnx.reference implements them on {device!r}",
            "export the model without them, or register a kernel (docs/architecture.md, 'How to add an operator')",
        )


def _all_nodes(graph: Graph) -> list[Node]:
    nodes = list(graph.nodes)
    for node in graph.nodes:
        for subgraph in node.subgraphs():
            nodes += _all_nodes(subgraph)
    return nodes


def _operator(model: Model, node: Node) -> str:
    domain, op_type = node.key
    return f"{domain or 'ai.onnx'}::{op_type} (version {model.opset_imports.get(domain, 1)})"


def _has_kernel(model: Model, node: Node, registry: Registry, device: str) -> bool:
    from genai.kernels.ops import borrowed

    domain, op_type = node.key
    version = _version(model, domain)
    return registry.find(domain, op_type, version, device) is not None or borrowed.available(domain, op_type, version)


def _version(model: Model, domain: str) -> int:
    imports = model.opset_imports
    return imports.get(domain, imports.get("ai.onnx", 1) if domain == "" else 1)


class _Compiler:
    """Builds one plan; subgraphs are compiled by compilers of their own that see captured constants."""

    def __init__(self, model: Model, registry: Registry, options: PlanOptions) -> None:
        self.model, self.registry, self.options = model, registry, options
        self.slots: dict[str, int] = {}
        self.constants: dict[str, Any] = {}
        self.weights = WeightStore(self.constants)
        self.steps: list[Step] = []

    def compile(self, graph: Graph, captured: Mapping[str, Any], variables: Sequence[str] = ()) -> Plan:
        """`captured` and `variables`: constants and computed values that a subgraph takes from outside."""
        self.graph = graph
        walkers = self.options.walkers
        self.segments = None if walkers is None else Segments(graph, walkers, self.options.ids)
        self.constants.update(captured)
        overridable = {value.name for value in graph.inputs}
        for name, tensor in graph.initializers.items():
            if name not in overridable:
                self.constants[name] = tensor.array()
        inputs = {name: self._slot(name) for name in [*(value.name for value in graph.inputs), *variables]}
        defaults = {name: graph.initializers[name].array() for name in overridable & set(graph.initializers)}
        graph.topological_sort()
        for node in graph.nodes:
            self._add(node)
        self._close_segment()
        outputs = {value.name: self._slot(value.name) for value in graph.outputs}
        return self._finish(inputs, outputs, defaults)

    def _slot(self, name: str) -> int:
        return ABSENT if not name else self.slots.setdefault(name, len(self.slots))

    def _add(self, node: Node) -> None:
        if node.key == ("", "Constant"):
            self.constants[node.outputs[0]] = self.graph.constant(node.outputs[0])
            return
        subgraphs, captures = self._subgraphs(node)
        spec = self._spec(node, subgraphs)
        names = [*node.inputs, *captures]
        constant = self._is_constant(node, names)
        if self.segments is not None and not constant:
            if _guarded(node, lambda: self.segments is not None and self.segments.take(node, spec)):
                return
            self._close_segment()
            self.segments.passed(node)
        kernel = self._kernel(node, spec)
        if constant:
            self._fold(node, kernel, [self.constants.get(name) if name else None for name in names])
        else:
            self._append(f"{node.op_type} {node.name!r}", node.op_type, kernel, names, node.outputs)

    def _append(self, label: str, op_type: str, kernel: Kernel, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        read, written = (tuple(self._slot(name) for name in group) for group in (inputs, outputs))
        self.steps.append(Step(label, op_type, kernel, read, written, (), tuple(outputs)))

    def _close_segment(self) -> None:
        """What has gathered for a tape becomes a step."""
        if self.segments is not None and (step := self.segments.close()) is not None:
            self._append(f"tape of {len(step.nodes)} operators", "Tape", step, list(step.given), list(step.made))

    def _is_constant(self, node: Node, names: Sequence[str]) -> bool:
        known = all(name in self.constants for name in names if name)
        return (
            known
            and not node.op_type.startswith("Random")
            and node.op_type not in ("Bernoulli", "Multinomial", "Dropout")
        )

    def _fold(self, node: Node, kernel: Kernel, values: Sequence[Any]) -> None:
        """Compute a constant now; moves stay views of the memory map, so nothing is copied."""
        results = _guarded(node, lambda: kernel(None, values))
        self.constants.update((name, value) for name, value in zip(node.outputs, results, strict=False) if name)

    def _spec(self, node: Node, subgraphs: Mapping[str, Kernel]) -> NodeSpec:
        domain, op_type = node.key
        return NodeSpec(
            domain=domain,
            op_type=op_type,
            version=_version(self.model, domain),
            attributes={name: _python_value(node.attribute(name)) for name in node.attributes},
            inputs=tuple(node.inputs),
            outputs=tuple(node.outputs),
            constants=tuple(self.constants.get(name) if name else None for name in node.inputs),
            weights=self.weights,
            options=self.options.kernel,
            subgraphs=subgraphs,
            proto=lambda: EmbeddingEncoder().node(node),
        )

    def _kernel(self, node: Node, spec: NodeSpec) -> Kernel:
        from genai.kernels.ops import borrowed

        entry = self.registry.find(spec.domain, spec.op_type, spec.version, self.options.device)
        if entry is None:
            return borrowed.make(spec)
        kernel: Kernel = _guarded(node, lambda: entry.factory(spec))
        return kernel

    def _subgraphs(self, node: Node) -> tuple[dict[str, Kernel], list[str]]:
        """Compile subgraphs; what they capture becomes extra inputs of the node, in order."""
        graphs = {name: node.attribute(name) for name, item in node.attributes.items() if isinstance(item.value, Graph)}
        captures = sorted({name for graph in graphs.values() for name in _captured_names(graph)})
        constants = {name: self.constants[name] for name in captures if name in self.constants}
        variable = [name for name in captures if name not in constants]
        compiled: dict[str, Kernel] = {}
        for name, graph in graphs.items():
            options = replace(self.options, walkers=None)
            plan = _Compiler(self.model, self.registry, options).compile(graph, constants, variable)
            compiled[name] = _subgraph_kernel(plan)
        return compiled, variable

    def _finish(self, inputs: Mapping[str, int], outputs: Mapping[str, int], defaults: Mapping[str, Any]) -> Plan:
        used_constants = {name: self.slots[name] for name in self.constants if name in self.slots}
        initial: list[Any] = [None] * (len(self.slots) + 1)
        for name, slot in used_constants.items():
            initial[slot] = self.constants[name]
        for name, value in defaults.items():
            initial[self.slots[name]] = value
        keep = set(outputs.values()) | set(used_constants.values()) | {ABSENT}
        return Plan(_with_lifetimes(self.steps, keep), tuple(initial), inputs, outputs)


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


def _captured_names(graph: Graph) -> set[str]:
    own = {value.name for value in graph.inputs} | set(graph.initializers)
    captured: set[str] = set()
    for node in graph.nodes:
        names = set(node.inputs) | {n for subgraph in node.subgraphs() for n in _captured_names(subgraph)}
        captured |= names - own - {""}
        own |= set(node.outputs)
    return captured | ({value.name for value in graph.outputs} - own)


def _subgraph_kernel(plan: Plan) -> Kernel:
    from .python_loop import run_slots

    slots = tuple(plan.inputs.values())

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return run_slots(plan, dict(zip(slots, inputs, strict=True)), context)

    return kernel


def _guarded(node: Node, action: Any) -> Any:
    try:
        with np.errstate(all="ignore"):
            return action()
    except (ValueError, NotImplementedError) as error:
        raise UnsupportedOpError(
            f"{node.op_type} {node.name!r} cannot be run",
            str(error),
            "export the model in another form, or register a kernel for it (docs/architecture.md)",
        ) from error
