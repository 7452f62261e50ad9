"""Control flow. Subgraphs arrive compiled; what they capture follows the node's own inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..registry import Kernel, NodeSpec, register, scalar


@register("If")
def if_(spec: NodeSpec) -> Kernel:
    """Run one of two subgraphs."""
    then_branch, else_branch = spec.subgraphs["then_branch"], spec.subgraphs["else_branch"]

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        branch = then_branch if scalar(inputs[0]) else else_branch
        return branch(context, inputs[1:])

    return kernel
