"""Multi-device annotations (ONNX IR version 11): how nodes and tensors are spread over devices. Kept, not used."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceConfiguration:
    """A set of devices that a model may be spread over."""

    name: str
    num_devices: int
    devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class SimpleSharding:
    """One axis, or a part of it, split into `num_shards`. `dim` is an extent, a symbol, or None."""

    dim: int | str | None
    num_shards: int


@dataclass(frozen=True)
class ShardedDim:
    """How one axis of a tensor is split."""

    axis: int
    simple_shardings: tuple[SimpleSharding, ...] = ()


@dataclass(frozen=True)
class Sharding:
    """How one tensor of a node is split over devices.

    Attributes:
        devices: device numbers; a negative one stands for a group, listed in `device_groups`.
    """

    tensor_name: str
    devices: tuple[int, ...] = ()
    device_groups: tuple[tuple[int, tuple[int, ...]], ...] = ()
    sharded_dims: tuple[ShardedDim, ...] = ()


@dataclass(frozen=True)
class NodeDeviceConfiguration:
    """How one node runs under one of the model's device configurations."""

    configuration: str
    shardings: tuple[Sharding, ...] = ()
    pipeline_stage: int | None = None
