"""The assignment of a session's nodes to providers."""

from __future__ import annotations

from dataclasses import dataclass

from ...session.execution_providers import AssignedNode, AssignedPart


@dataclass(frozen=True)
class OrtEpAssignedNode(AssignedNode):
    """A node of the rewritten graph.

    Attributes:
        name: the node's name in the model, or the name that a rewrite assigned.
        domain: the operator's domain; "" is the standard domain.
        op_type: the operator's name.
    """


@dataclass(frozen=True)
class OrtEpAssignedSubgraph:
    """The nodes that a provider computes in one call; on the CPU, each node is a separate subgraph.

    Attributes:
        ep_name: the provider's name.
        nodes: the nodes, in the order in which they run.
    """

    ep_name: str
    nodes: tuple[OrtEpAssignedNode, ...]

    @staticmethod
    def of(part: AssignedPart) -> OrtEpAssignedSubgraph:
        """Describe a part."""
        nodes = (OrtEpAssignedNode(node.name, node.domain, node.op_type) for node in part.nodes)
        return OrtEpAssignedSubgraph(part.provider, tuple(nodes))

    def get_nodes(self) -> list[OrtEpAssignedNode]:
        """Return the nodes in the order in which they run."""
        return list(self.nodes)
