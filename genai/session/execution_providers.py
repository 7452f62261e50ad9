"""Execution providers: finds providers, and divides a graph's nodes among them.

A provider is a plug-in. Another package registers a provider in the entry point group "genai.providers", under the name
that sessions use. The providers for NVIDIA GPUs and for the CPU are built in; the CPU computes all remaining nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol

import numpy as np
import onnx

from genai.ops.registry import KernelError, NodeSpec, operator

from ..devices import why_no_gpu
from ..errors import GenaiError, ProviderError
from ..onnx.ir import Graph, Node, OnnxModel, Value, make_node
from ..onnx.node import OURS
from ..onnx.uses import used_names
from ..onnx.writer import to_proto
from ..optimize.shapes import infer_shapes
from .partition import CPU_PROVIDER, CUDA_PROVIDER, keep_apart, partition

GROUP = "genai.providers"
PROVIDED = "Provided"
"""The operator that replaces a part of the graph that a provider computes."""
_PROVIDED = (OURS, PROVIDED)
ChosenProvider = tuple[str, Mapping[str, Any]]
"""A provider's name and options."""


CompiledNode = Callable[[list[Any]], list[Any]]


class Provider(Protocol):
    """The interface of a plug-in. The entry point is a callable from options (keywords) to a Provider."""

    def supports(self, node: Node, graph: Graph, version: int) -> bool:
        """Return True if the provider can run a node; `version` is the version of the node's operator set."""

    def compile(self, model: onnx.ModelProto) -> CompiledNode:
        """Compile a model of supported nodes to a function from its inputs to its outputs, both in graph order."""


class Taker(Protocol):
    """A component that selects nodes of a graph and computes them: a plug-in, or a built-in device.

    Attributes:
        keeps_values: True if results of the graph, and values that only this component's nodes read, may remain on its
            device.
        on_host: those values of the selected nodes that are computed on the host; available after `taken`.
    """

    @property
    def keeps_values(self) -> bool: ...

    @property
    def on_host(self) -> Collection[str]: ...

    def taken(self, model: OnnxModel) -> Collection[Node]:
        """Return the nodes of the model's main graph that this component computes."""

    def compile(self, part: OnnxModel, stays: Sequence[bool]) -> CompiledNode:
        """Compile a part of the graph as a separate model; `stays`: True for outputs that may remain on the device."""


@dataclass(frozen=True)
class _PlugIn:
    """A plug-in as a taker. Its results are returned as host arrays."""

    provider: Provider
    keeps_values = False
    on_host = ()

    def taken(self, model: OnnxModel) -> Collection[Node]:
        graph = model.graph
        return [node for node in graph.nodes if self._supports(node, graph, model.opset_version(node.domain))]

    def _supports(self, node: Node, graph: Graph, version: int | None) -> bool:
        return node.key != _PROVIDED and version is not None and self.provider.supports(node, graph, version)

    def compile(self, part: OnnxModel, stays: Sequence[bool]) -> CompiledNode:
        return self.provider.compile(to_proto(part))


def available_providers() -> list[str]:
    """Return the names of the providers that sessions can use on this machine; the CPU is last."""
    return [*([] if why_no_gpu(0) else [CUDA_PROVIDER]), *plug_ins(), CPU_PROVIDER]


def plug_ins() -> dict[str, EntryPoint]:
    """Return the providers of other packages, by name."""
    return {point.name: point for point in entry_points(group=GROUP)}


def make_provider(name: str, options: Mapping[str, Any]) -> Taker:
    """Create a provider by name. Raises ProviderError if it cannot be set up."""
    try:
        if name == CUDA_PROVIDER:
            # Imported here, because its kernels take memory that processes without a GPU do not need.
            from .cuda_partition import CudaProvider

            return CudaProvider(**options)
        return _PlugIn(plug_ins()[name].load()(**options))
    except Exception as error:
        raise ProviderError(
            f"provider {name!r} cannot be set up with {dict(options)}",
            f"{type(error).__name__}: {error!s:.300}",
            "check the provider's options and package, or remove the provider from `providers`",
        ) from error


@dataclass(frozen=True)
class AssignedNode:
    """A node of the rewritten graph.

    Attributes:
        name: the name in the model, or the name that a rewrite assigned.
        domain: the operator's domain; "" is ONNX's standard domain.
        op_type: the operator's name.
    """

    name: str
    domain: str
    op_type: str


@dataclass(frozen=True)
class AssignedPart:
    """Nodes that a provider computes in one call, in the order in which they run; the CPU has one part per node."""

    provider: str
    nodes: tuple[AssignedNode, ...]

    @staticmethod
    def of(provider: str, nodes: Sequence[Node]) -> AssignedPart:
        """Return an `AssignedPart` that describes these nodes."""
        return AssignedPart(provider, tuple(AssignedNode(node.name, node.domain, node.op_type) for node in nodes))


@dataclass(frozen=True)
class Divided:
    """A model's nodes, divided among the providers.

    Attributes:
        compiled: the function for each node that replaces a provider's part, keyed by the node's attribute `key`; this
            dictionary becomes the kernels' option "provided".
        parts: the parts of all providers, if they are recorded.
        on_device: inputs of the model that only a device reads, so they may be passed in device memory.
    """

    compiled: dict[int, CompiledNode]
    parts: list[AssignedPart]
    on_device: frozenset[str]


def hand_over(model: OnnxModel, chosen: Sequence[ChosenProvider], *, recording: bool) -> Divided:
    """Let each provider in turn compile the nodes that it supports, and replace each part by a single node.

    Raises:
        ProviderError: a provider cannot be set up, or cannot compile the nodes that it selected.
    """
    compiled: dict[int, CompiledNode] = {}
    recorded: list[AssignedPart] = []
    keeping: list[str] = []
    if chosen:
        infer_shapes(model)  # rewrites added values without shapes
    for name, options in chosen:
        provider = make_provider(name, options)
        parts = partition(model.graph, provider.taken(model))
        if provider.keeps_values:
            keeping.append(name)
            keep_apart(model.graph, parts, provider.on_host)
        inside = {node for nodes in parts for node in nodes}
        for nodes in parts:
            key = len(compiled)
            if recording:
                recorded.append(AssignedPart.of(name, nodes))
            compiled[key] = _replace(model, nodes, inside, name, provider, key)
    if compiled:
        model.opset_imports.setdefault(OURS, 1)
    on_device = frozenset(value.name for value in model.graph.inputs if _is_read_by(model.graph, value.name, keeping))
    if recording:
        rest = (node for graph in model.graphs() for node in graph.nodes if node.key != _PROVIDED)
        recorded.extend(AssignedPart.of(CPU_PROVIDER, [node]) for node in rest)
    return Divided(compiled, recorded, on_device)


def _replace(
    model: OnnxModel, nodes: Sequence[Node], inside: Collection[Node], name: str, provider: Taker, key: int
) -> CompiledNode:
    """Replace these nodes with one node. Values may remain on the device if no node outside `inside` reads them."""
    part, graph = _part(model, nodes), model.graph
    inputs, outputs = ([value.name for value in values] for values in (part.graph.inputs, part.graph.outputs))
    stays = [
        provider.keeps_values and all(user in inside or _is_own(user, name) for user in graph.consumers(value))
        for value in outputs
    ]
    try:
        compiled = provider.compile(part, stays)
    except Exception as error:
        raise ProviderError(
            f"provider {name!r} cannot compile {len(nodes)} nodes, starting at {nodes[0]!r:.100}",
            f"{type(error).__name__}: {error!s:.300}",
            "remove the provider from `providers`",
        ) from error
    graph.insert_before(nodes[0], make_node(PROVIDED, inputs, outputs, domain=OURS, name=name, provider=name, key=key))
    graph.remove_nodes(nodes)
    return compiled


def _is_read_by(graph: Graph, name: str, providers: Collection[str]) -> bool:
    """Return True if only parts of these providers read a value."""
    users = graph.consumers(name)
    return bool(users) and not graph.is_output(name) and all(any(_is_own(u, one) for one in providers) for u in users)


def _is_own(node: Node, provider: str) -> bool:
    return node.key == _PROVIDED and node.attribute("provider") == provider


def _part(model: OnnxModel, nodes: Sequence[Node]) -> OnnxModel:
    """Return the nodes as a separate model. Constants are included; outer values become inputs."""
    graph = model.graph
    made = {name for node in nodes for name in node.outputs if name}
    used = dict.fromkeys(name for node in nodes for name in sorted(used_names(node)) if name not in made)
    constants = {name: tensor for name in used if (tensor := graph.constant_tensor(name)) is not None}
    inside = set(nodes)
    wanted = [
        name
        for node in nodes
        for name in node.outputs
        if name and (graph.is_output(name) or any(user not in inside for user in graph.consumers(name)))
    ]
    part = Graph(
        "part",
        [Value(name, graph.type_of(name)) for name in used if name not in constants],
        [Value(name, graph.type_of(name)) for name in wanted],
        [node.copy() for node in nodes],
        {name: tensor.renamed(name) for name, tensor in constants.items()},
    )
    return OnnxModel(
        part, model.ir_version, dict(model.opset_imports), functions=dict(model.functions), folder=model.folder
    )


def _compiled_part(spec: NodeSpec) -> CompiledNode:
    run: CompiledNode | None = spec.options.get("provided", {}).get(int(spec.attributes["key"]))
    if run is None:
        raise KernelError("a model that was divided among providers can run only in the session that divided it")
    return run


@operator(PROVIDED, domain=OURS, run=_compiled_part)
def provided(*inputs: Any, provider: str = "", run: CompiledNode) -> Any:
    """Run a part of the graph that a provider computes."""
    try:
        results = run(list(inputs))
    except GenaiError:
        raise
    except Exception as error:
        raise ProviderError(
            f"provider {provider!r} failed: {error!s:.300}",
            type(error).__name__,
            "remove the provider from `providers`",
        ) from error
    return tuple(np.asarray(value) if isinstance(value, np.generic) else value for value in results)
