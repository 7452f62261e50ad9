"""Which provider computes which node of a session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...onnx.ir import Node

PROVIDED = "Provided"
"""The operator that stands for a part of the graph that a provider computes."""


@dataclass(frozen=True)
class OrtEpAssignedNode:
    """A node of the graph as it is run, after rewriting.

    Attributes:
        name: as in the model, or what a rewrite gave it. domain: "" of the standard one. op_type: of its operator.
    """

    name: str
    domain: str
    op_type: str

    @staticmethod
    def of(node: Node) -> OrtEpAssignedNode:
        """The description of a node."""
        return OrtEpAssignedNode(node.name, node.domain, node.op_type)


@dataclass(frozen=True)
class OrtEpAssignedSubgraph:
    """Nodes that a provider computes in one go; the CPU has a subgraph per node.

    Attributes:
        ep_name: the provider.
    """

    ep_name: str
    nodes: tuple[OrtEpAssignedNode, ...]

    @staticmethod
    def of(provider: str, nodes: Sequence[Node]) -> OrtEpAssignedSubgraph:
        """The description of such nodes."""
        return OrtEpAssignedSubgraph(provider, tuple(map(OrtEpAssignedNode.of, nodes)))

    def get_nodes(self) -> list[OrtEpAssignedNode]:
        """Its nodes, in the order in which they are run."""
        return list(self.nodes)
