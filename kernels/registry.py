"""One registry of kernels, keyed by (domain, operator, version, device).

A kernel is made once per node, when the plan is built (attributes are read, constant weights packed), and is then
called once per step. The registry also records where a kernel came from, so that docs can say so truthfully.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
T = TypeVar("T")


class Kernel(Protocol):
    """Called once per step with the node's inputs (None = absent); returns the node's outputs in order."""

    def __call__(self, context: Any, inputs: Sequence[Any], /) -> tuple[Any, ...]: ...


class Subgraph(Protocol):
    """A compiled subgraph: a kernel, and per output (dtype, sizes), None where the graph does not say."""

    @property
    def outputs(self) -> Sequence[tuple[Any, tuple[int | None, ...] | None]]: ...

    def __call__(self, context: Any, inputs: Sequence[Any], /) -> tuple[Any, ...]: ...


class Packer(Protocol):
    """Shares packed weights: the same constants in the same format are packed once."""

    def packed(self, names: tuple[str, ...], layout: str, make: Callable[[], T]) -> T: ...


@dataclass(frozen=True)
class NodeSpec:
    """What a kernel factory may know of its node.

    Attributes:
        domain, op_type, version: the operator, and the version its model imports.
        attributes: attribute values in Python form (strings decoded).
        inputs: input names ("" = absent); outputs: output names ("" = not wanted).
        constants: per input its constant value, or None.
        weights: shares packed forms of constants between nodes.
        options: run-wide choices, such as accuracy or the thread team.
        subgraphs: per attribute a callable that runs the subgraph: (context, inputs) -> outputs.
        proto: makes the node as an onnx.NodeProto, for operators borrowed from onnx.reference.
    """

    domain: str
    op_type: str
    version: int
    attributes: Mapping[str, Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: tuple[Array | None, ...]
    weights: Packer
    options: Mapping[str, Any] = field(default_factory=dict)
    subgraphs: Mapping[str, Subgraph] = field(default_factory=dict)
    proto: Callable[[], Any] | None = None

    def has(self, index: int) -> bool:
        """Whether input `index` is given."""
        return index < len(self.inputs) and self.inputs[index] != ""

    def constant(self, index: int) -> Array:
        """The constant value of input `index`; KernelError if it is computed at run time."""
        value = self.constants[index] if index < len(self.constants) else None
        if value is None:
            name = self.inputs[index] if index < len(self.inputs) else "(absent)"
            raise KernelError(f"{self.op_type} needs input {index} ({name!r}) to be a constant")
        return value

    def pack(self, indices: tuple[int, ...], layout: str, make: Callable[[], T]) -> T:
        """Pack the constants at `indices` into `layout`, once for all nodes that ask for the same."""
        return self.weights.packed(tuple(self.inputs[i] if self.has(i) else "" for i in indices), layout, make)


class KernelError(ValueError):
    """A node is outside what its kernel supports; the message names the operator and the reason."""


KernelFactory = Callable[[NodeSpec], Kernel]


@dataclass(frozen=True)
class Entry:
    """One registered kernel."""

    domain: str
    op_type: str
    since_version: int
    device: str
    source: str
    factory: KernelFactory


class Registry:
    """Finds the kernel for a node: the newest version not above the model's, for the device asked for."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str, str], list[Entry]] = {}

    def register(
        self, op_type: str, *, domain: str = "", since_version: int = 1, device: str = "cpu", source: str = "ours"
    ) -> Callable[[KernelFactory], KernelFactory]:
        """Decorator: register a kernel factory for an operator."""

        def add(factory: KernelFactory) -> KernelFactory:
            entries = self._entries.setdefault((domain, op_type, device), [])
            # Of one version the latest registration comes first, so that users can replace kernels.
            entries.insert(0, Entry(domain, op_type, since_version, device, source, factory))
            entries.sort(key=lambda entry: entry.since_version, reverse=True)
            return factory

        return add

    def find(self, domain: str, op_type: str, version: int, device: str = "cpu") -> Entry | None:
        """The entry for an operator, or None."""
        for entry in self._entries.get((domain, op_type, device), ()):
            if entry.since_version <= version:
                return entry
        return None

    def names(self, domain: str | None = None) -> list[str]:
        """Registered operators as "domain::Op" ("" = ai.onnx), sorted."""
        keys = {(d, o) for d, o, _ in self._entries if domain is None or d == domain}
        return sorted(f"{d or 'ai.onnx'}::{o}" for d, o in keys)

    def entries(self) -> list[Entry]:
        """All entries, for documentation."""
        return [entry for entries in self._entries.values() for entry in entries]


REGISTRY = Registry()
register = REGISTRY.register

_OP_MODULES = (
    "activations",
    "attention",
    "casting",
    "contrib_attention",
    "contrib_fused",
    "contrib_quantized",
    "control",
    "convolution",
    "decoder",
    "dense_attention",
    "elementwise",
    "experts",
    "indexing",
    "integer_convolution",
    "matmul",
    "ml",
    "movement",
    "normalization",
    "pooling",
    "quantization",
    "quantized",
    "random",
    "recurrent",
    "reduction",
    "regex",
    "resize",
    "sequences",
    "text",
    "trees",
)


def load_ops() -> Registry:
    """Import every op module, so that the registry is full; returns the registry."""
    for module in _OP_MODULES:
        import_module(f".ops.{module}", __package__)
    return REGISTRY


def as_tuple(value: Any) -> tuple[Any, ...]:
    """A kernel's result as the tuple that plans expect."""
    return value if isinstance(value, tuple) else (value,)


def scalar(value: Any) -> Any:
    """A Python scalar from a one-element array."""
    return np.asarray(value).reshape(-1)[0].item()
