"""Execution providers: which there are, which nodes of a graph each takes, and the graph divided among them.

A provider is a plug-in: another package offers it through the entry point group "genai.providers", under the name by
which sessions ask for it. GPUs of NVIDIA are built in, and so is the CPU, which takes what nobody else takes.
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
from .cuda_partition import CUDA_PROVIDER, CudaProvider
from .partition import keep_apart, partition

CPU_PROVIDER = "CPUExecutionProvider"
GROUP = "genai.providers"
PROVIDED = "Provided"
"""The operator that stands for a part of the graph that a provider computes."""
_PROVIDED = (OURS, PROVIDED)
ChosenProvider = tuple[str, Mapping[str, Any]]
"""A provider by name, and its options."""


CompiledNode = Callable[[list[Any]], list[Any]]


class Provider(Protocol):
    """What a plug-in offers. Its entry point is a callable: options (keywords) -> Provider."""

    def supports(self, node: Node, graph: Graph, version: int) -> bool:
        """Whether it can run a node; `version` is of the node's operator set."""

    def compile(self, model: onnx.ModelProto) -> CompiledNode:
        """Prepare a model of supported nodes: inputs in the order of its graph -> outputs in that order."""


class Taker(Protocol):
    """What takes nodes of a graph, as a session sees it: a plug-in, or a device of ours.

    Attributes:
        keeps_values: whether what only its own nodes read, and results of the graph, may stay on its device.
        on_host: once it has taken nodes, those of their values that are computed on the host all the same.
    """

    @property
    def keeps_values(self) -> bool: ...

    @property
    def on_host(self) -> Collection[str]: ...

    def taken(self, model: OnnxModel) -> Collection[Node]:
        """The nodes of a model's main graph that it computes."""

    def compile(self, part: OnnxModel, stays: Sequence[bool]) -> CompiledNode:
        """Prepare a part of the graph as a model of its own; `stays`: per output, whether it may stay on the device."""


@dataclass(frozen=True)
class _PlugIn:
    """A plug-in as a taker: what it computes comes back as arrays."""

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
    """Names of the providers that sessions can use here, the CPU last."""
    return [*([] if why_no_gpu(0) else [CUDA_PROVIDER]), *plug_ins(), CPU_PROVIDER]


def plug_ins() -> dict[str, EntryPoint]:
    """Providers of other packages by name."""
    return {point.name: point for point in entry_points(group=GROUP)}


def make_provider(name: str, options: Mapping[str, Any]) -> Taker:
    """A provider by name. Raises ProviderError: it cannot be set up."""
    try:
        if name == CUDA_PROVIDER:
            return CudaProvider(**options)
        return _PlugIn(plug_ins()[name].load()(**options))
    except Exception as error:
        raise ProviderError(
            f"provider {name!r} cannot be set up with {dict(options)}",
            f"{type(error).__name__}: {error!s:.300}",
            "check its options and its package, or leave it out of `providers`",
        ) from error


@dataclass(frozen=True)
class AssignedNode:
    """A node of the graph as it is run, after rewriting.

    Attributes:
        name: as in the model, or what a rewrite gave it. domain: "" of the standard one. op_type: of its operator.
    """

    name: str
    domain: str
    op_type: str


@dataclass(frozen=True)
class AssignedPart:
    """Nodes that a provider computes in one go, in the order in which they are run; the CPU has a part per node."""

    provider: str
    nodes: tuple[AssignedNode, ...]

    @staticmethod
    def of(provider: str, nodes: Sequence[Node]) -> AssignedPart:
        """The description of such nodes."""
        return AssignedPart(provider, tuple(AssignedNode(node.name, node.domain, node.op_type) for node in nodes))


@dataclass(frozen=True)
class Divided:
    """A model's nodes among the providers.

    Attributes:
        compiled: what computes each node that stands for a provider's, by its attribute `key`; for the kernels' option
            "provided".
        parts: of all providers, where they are recorded.
        on_device: inputs of the model that are read on a device alone, so that they may be given there.
    """

    compiled: dict[int, CompiledNode]
    parts: list[AssignedPart]
    on_device: frozenset[str]


def hand_over(model: OnnxModel, chosen: Sequence[ChosenProvider], *, recording: bool) -> Divided:
    """Let providers compile what they support, each before the next; the graph then has a node for each part.

    Raises:
        ProviderError: a provider cannot be set up, or cannot compile what it took.
    """
    compiled: dict[int, CompiledNode] = {}
    recorded: list[AssignedPart] = []
    keeping: list[str] = []
    if chosen:
        infer_shapes(model)  # of what rewrites have made
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
    """A node in the place of these; what only nodes of `inside` read, or nobody, may stay with the provider."""
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
            f"provider {name!r} cannot compile {len(nodes)} nodes from {nodes[0]!r:.100} on",
            f"{type(error).__name__}: {error!s:.300}",
            "leave the provider out of `providers`",
        ) from error
    graph.insert_before(nodes[0], make_node(PROVIDED, inputs, outputs, domain=OURS, name=name, provider=name, key=key))
    graph.remove_nodes(nodes)
    return compiled


def _is_read_by(graph: Graph, name: str, providers: Collection[str]) -> bool:
    """Whether all that read a value are parts of these providers."""
    users = graph.consumers(name)
    return bool(users) and not graph.is_output(name) and all(any(_is_own(u, one) for one in providers) for u in users)


def _is_own(node: Node, provider: str) -> bool:
    return node.key == _PROVIDED and node.attribute("provider") == provider


def _part(model: OnnxModel, nodes: Sequence[Node]) -> OnnxModel:
    """The nodes as a model of their own: constants inside, values from outside as inputs."""
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
        raise KernelError("a model that was divided among providers runs only in the session that divided it")
    return run


@operator(PROVIDED, domain=OURS, run=_compiled_part)
def provided(*inputs: Any, provider: str = "", run: CompiledNode) -> Any:
    """A part of the graph that a provider computes."""
    try:
        results = run(list(inputs))
    except GenaiError:
        raise
    except Exception as error:
        raise ProviderError(
            f"provider {provider!r} failed: {error!s:.300}", type(error).__name__, "leave it out of `providers`"
        ) from error
    return tuple(np.asarray(value) if isinstance(value, np.generic) else value for value in results)
