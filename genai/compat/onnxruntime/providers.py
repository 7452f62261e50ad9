"""Execution providers: which exist, which a session uses, and which nodes each of them takes.

A provider is a plug-in: another package offers it through the entry point group "genai.providers", under the name that
callers give to `InferenceSession(providers=[...])`. The CPU is built in and takes what nobody else takes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol

import numpy as np
import onnx

from genai.ops.registry import KernelError, NodeSpec, operator

from ...devices import why_no_gpu
from ...errors import GenaiError, whole_number
from ...onnx.ir import Graph, Node, OnnxModel, Value, make_node
from ...onnx.node import OURS
from ...onnx.uses import used_names
from ...onnx.writer import to_proto
from ...optimize.shapes import infer_shapes
from ...session.cuda_partition import CUDA_PROVIDER, CudaProvider
from ...session.partition import keep_apart, partition
from .assignment import PROVIDED, OrtEpAssignedSubgraph
from .errors import EPFail, InvalidArgument
from .options import SessionOptions

CPU_PROVIDER = "CPUExecutionProvider"
_PROVIDED = (OURS, PROVIDED)
GROUP = "genai.providers"
# Names that onnxruntime has; scripts may ask for them where they are not available.
_ELSEWHERE = frozenset(
    f"{name}ExecutionProvider"
    for name in (
        "ACL ArmNN Azure CANN CUDA CoreML Dml JS MIGraphX NvTensorRTRTX Nnapi OpenVINO QNN ROCM Rknpu SNPE Tensorrt "
        "VSINPU VitisAI WebGpu WebNN Xnnpack Dnnl"
    ).split()
)
Chosen = list[tuple[str, dict[str, Any]]]


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


def get_available_providers() -> list[str]:
    """Names of the providers that sessions can use here, the CPU last."""
    return [*([] if why_no_gpu(0) else [CUDA_PROVIDER]), *_plug_ins(), CPU_PROVIDER]


get_all_providers = get_available_providers  # what is not installed is not known


def get_device() -> str:
    """The kind of device that sessions can run on: "GPU" where there is one."""
    return "CPU" if why_no_gpu(0) else "GPU"


def make_provider(name: str, options: Mapping[str, Any]) -> Taker:
    """A provider by name."""
    try:
        if name == CUDA_PROVIDER:
            return CudaProvider(**options)
        return _PlugIn(_plug_ins()[name].load()(**options))
    except Exception as error:
        raise EPFail(
            f"provider {name!r} cannot be set up with {dict(options)}",
            f"{type(error).__name__}: {error!s:.300}",
            "check its options and its package, or leave it out of `providers`",
        ) from error


def _plug_ins() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def chosen_providers(
    providers: Sequence[Any] | None,
    provider_options: Sequence[dict[str, Any]] | None,
    options: SessionOptions,
    *,
    must_exist: bool = False,
) -> Chosen:
    """(name, options) per provider to use, the CPU last if it was not named.

    Raises:
        InvalidArgument: not a list of names or (name, options) pairs, provider_options that are not one dict for each
            name, or an unknown name where it must exist.
    """
    given = _listed("providers", options._providers if providers is None else providers)
    if provider_options is not None:
        more = _listed("provider_options", provider_options)
        if len(more) != len(given) or any(not isinstance(item, str) for item in given):
            raise InvalidArgument(
                f"{len(more)} provider_options for the providers {given}",
                "provider_options holds one dict for each of a list of names",
                "give names and as many dicts, or (name, options) pairs alone",
            )
        given = list(zip(given, more, strict=True))
    pairs = [_pair(item) for item in given]
    used: dict[str, dict[str, Any]] = {}
    for name, own in pairs:
        reason = _why_not(name, own)
        if must_exist and reason and name not in _ELSEWHERE:
            raise InvalidArgument(
                f"provider {name!r} is unknown",
                f"available are {', '.join(get_available_providers())}",
                "choose one of these",
            )
        if reason:
            warnings.warn(
                f"Specified provider '{name}' is not in available provider names. "
                f"Available providers: '{', '.join(get_available_providers())}'{reason}",
                stacklevel=4,
            )
        elif used.setdefault(name, own) is not own:
            warnings.warn(f"provider '{name}' is named twice; what was said first counts", stacklevel=4)
    used.setdefault(CPU_PROVIDER, {})
    return list(used.items())


def _why_not(name: str, options: Mapping[str, Any]) -> str:
    """What to say of a provider that is not there; "" = it is. For a GPU is looked only where one is asked for."""
    if name == CUDA_PROVIDER:
        index = whole_number(str(options.get("device_id", 0)))
        if index is None:
            return ""  # setting it up says what is wrong
        reason = why_no_gpu(0)  # with one that can be used, setting another up says why it cannot
        if reason and index:
            reason = why_no_gpu(index)
        return f". {reason}" if reason else ""
    return "" if name == CPU_PROVIDER or name in _plug_ins() else "."


def _listed(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise InvalidArgument(f"{name} is a {type(value).__name__}", "it must be a list", f"pass [{value!r}]")
    return list(value)


def _pair(item: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(item, str):
        return item, {}
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], dict):
        return item[0], dict(item[1])
    raise InvalidArgument(
        f"provider {item!r}", "a provider is a name or a (name, options) pair", f"pass {CPU_PROVIDER!r}"
    )


@dataclass(frozen=True)
class Divided:
    """A model's nodes among the providers.

    Attributes:
        compiled: what computes each node that stands for a provider's, by its attribute `key`; for the kernels' option
            "provided".
        subgraphs: of all providers, where they are recorded.
        on_device: inputs of the model that are read on a device alone, so that they may be given there.
    """

    compiled: dict[int, CompiledNode]
    subgraphs: list[OrtEpAssignedSubgraph]
    on_device: frozenset[str]


def hand_over(model: OnnxModel, chosen: Chosen, *, recording: bool) -> Divided:
    """Let providers compile what they support, each before the next; the graph then has a node for each run."""
    compiled: dict[int, CompiledNode] = {}
    subgraphs: list[OrtEpAssignedSubgraph] = []
    keeping: list[str] = []
    if len(chosen) > 1:
        infer_shapes(model)  # of what rewrites have made
    for name, options in chosen:
        if name == CPU_PROVIDER:
            break
        provider = make_provider(name, options)
        parts = partition(model.graph, provider.taken(model))
        if provider.keeps_values:
            keeping.append(name)
            keep_apart(model.graph, parts, provider.on_host)
        inside = {node for nodes in parts for node in nodes}
        for nodes in parts:
            key = len(compiled)
            if recording:
                subgraphs.append(OrtEpAssignedSubgraph.of(name, nodes))
            compiled[key] = _replace(model, nodes, inside, name, provider, key)
    if compiled:
        model.opset_imports.setdefault(OURS, 1)
    on_device = frozenset(value.name for value in model.graph.inputs if _is_read_by(model.graph, value.name, keeping))
    if recording:
        rest = (node for graph in model.graphs() for node in graph.nodes if node.key != _PROVIDED)
        subgraphs.extend(OrtEpAssignedSubgraph.of(CPU_PROVIDER, [node]) for node in rest)
    return Divided(compiled, subgraphs, on_device)


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
        raise EPFail(
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
        raise EPFail(
            f"provider {provider!r} failed: {error!s:.300}", type(error).__name__, "leave it out of `providers`"
        ) from error
    return tuple(np.asarray(value) if isinstance(value, np.generic) else value for value in results)
