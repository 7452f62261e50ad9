"""Divides a graph among providers: runs of supported nodes become one node each, which its provider computes.

Nodes that follow one another in topological order form a run. Whatever leaves a run comes back only after it, so that
it can be computed as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from genai.kernels.registry import Kernel, KernelError, NodeSpec, register

from ..errors import GenaiError
from ..graph.ir import Graph, Model, Node, Value, make_node
from ..graph.uses import used_names
from ..graph.writer import to_proto
from .errors import EPFail
from .providers import CPU_PROVIDER, Chosen, Provider, make_provider

OURS = "genai"
Compiled = Callable[[list[Any]], list[Any]]


def hand_over(model: Model, chosen: Chosen) -> dict[int, Compiled]:
    """Let providers compile what they support, each before the next; the graph then has a node for each run.

    Returns:
        What computes each of these nodes, by its attribute `key`; for the kernels' option "provided".

    Raises:
        EPFail: a provider cannot be set up, or refuses a graph of nodes that it supports.
    """
    compiled: dict[int, Compiled] = {}
    for name, options in chosen:
        if name == CPU_PROVIDER:
            break
        provider = make_provider(name, options)
        for nodes in _runs(model, provider):
            key = len(compiled)
            compiled[key] = _replace(model, nodes, name, provider, key)
    if compiled:
        model.opset_imports.setdefault(OURS, 1)
    return compiled


def _runs(model: Model, provider: Provider) -> list[list[Node]]:
    graph = model.graph
    graph.topological_sort()
    runs: list[list[Node]] = [[]]
    for node in graph.nodes:
        version = model.opset_version(node.domain)
        if node.key != (OURS, "Provided") and version is not None and provider.supports(node, graph, version):
            runs[-1].append(node)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _replace(model: Model, nodes: Sequence[Node], name: str, provider: Provider, key: int) -> Compiled:
    part = _part(model, nodes)
    try:
        compiled = provider.compile(to_proto(part))
    except Exception as error:
        raise EPFail(
            f"provider {name!r} cannot compile {len(nodes)} nodes from {nodes[0]!r:.100} on",
            f"{type(error).__name__}: {error!s:.300}",
            "leave the provider out of `providers`",
        ) from error
    inputs, outputs = ([value.name for value in values] for values in (part.graph.inputs, part.graph.outputs))
    graph = model.graph
    graph.insert_before(
        nodes[0], make_node("Provided", inputs, outputs, domain=OURS, name=name, provider=name, key=key)
    )
    graph.remove_nodes(nodes)
    return compiled


def _part(model: Model, nodes: Sequence[Node]) -> Model:
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
    return Model(
        part, model.ir_version, dict(model.opset_imports), functions=dict(model.functions), folder=model.folder
    )


@register("Provided", domain=OURS)
def provided(spec: NodeSpec) -> Kernel:
    """A part of the graph that a provider computes."""
    run: Compiled | None = spec.options.get("provided", {}).get(int(spec.attributes["key"]))
    if run is None:
        raise KernelError("a model that was divided among providers runs only in the session that divided it")

    name = spec.attributes.get("provider", "")

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        try:
            results = run(list(inputs))
        except GenaiError:
            raise
        except Exception as error:
            raise EPFail(
                f"provider {name!r} failed: {error!s:.300}", type(error).__name__, "leave it out of `providers`"
            ) from error
        return tuple(np.asarray(value) if isinstance(value, np.generic) else value for value in results)

    return kernel
