"""Which provider computes which node of a session."""

from __future__ import annotations

from dataclasses import dataclass

from ...session.execution_providers import AssignedNode, AssignedPart


@dataclass(frozen=True)
class OrtEpAssignedNode(AssignedNode):
    """A node of the graph as it is run, after rewriting.

    Attributes:
        name: as in the model, or what a rewrite gave it. domain: "" of the standard one. op_type: of its operator.
    """


@dataclass(frozen=True)
class OrtEpAssignedSubgraph:
    """Nodes that a provider computes in one go; the CPU has a subgraph per node.

    Attributes:
        ep_name: the provider.
    """

    ep_name: str
    nodes: tuple[OrtEpAssignedNode, ...]

    @staticmethod
    def of(part: AssignedPart) -> OrtEpAssignedSubgraph:
        """The description of such a part."""
        nodes = (OrtEpAssignedNode(node.name, node.domain, node.op_type) for node in part.nodes)
        return OrtEpAssignedSubgraph(part.provider, tuple(nodes))

    def get_nodes(self) -> list[OrtEpAssignedNode]:
        """Its nodes, in the order in which they are run."""
        return list(self.nodes)
