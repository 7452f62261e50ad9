"""Multi-device annotations to and from protobuf."""

from __future__ import annotations

from onnx import DeviceConfigurationProto, NodeDeviceConfigurationProto, ShardedDimProto, ShardingSpecProto

from .devices import DeviceConfiguration, NodeDeviceConfiguration, ShardedDim, Sharding, SimpleSharding
from .type_protos import text


def decode_configuration(proto: DeviceConfigurationProto) -> DeviceConfiguration:
    """A model's device configuration."""
    return DeviceConfiguration(text(proto.name), proto.num_devices, tuple(text(name) for name in proto.device))


def encode_configuration(configuration: DeviceConfiguration) -> DeviceConfigurationProto:
    """The inverse of `decode_configuration`."""
    return DeviceConfigurationProto(
        name=configuration.name, num_devices=configuration.num_devices, device=configuration.devices
    )


def decode_node_configuration(proto: NodeDeviceConfigurationProto) -> NodeDeviceConfiguration:
    """A node's device configuration."""
    return NodeDeviceConfiguration(
        text(proto.configuration_id),
        tuple(_decode_sharding(item) for item in proto.sharding_spec),
        proto.pipeline_stage if proto.HasField("pipeline_stage") else None,
    )


def encode_node_configuration(configuration: NodeDeviceConfiguration) -> NodeDeviceConfigurationProto:
    """The inverse of `decode_node_configuration`."""
    proto = NodeDeviceConfigurationProto(configuration_id=configuration.configuration)
    proto.sharding_spec.extend(map(_encode_sharding, configuration.shardings))
    if configuration.pipeline_stage is not None:
        proto.pipeline_stage = configuration.pipeline_stage
    return proto


def _decode_sharding(proto: ShardingSpecProto) -> Sharding:
    return Sharding(
        text(proto.tensor_name),
        tuple(proto.device),
        tuple((group.key, tuple(group.value)) for group in proto.index_to_device_group_map),
        tuple(_decode_dim(item) for item in proto.sharded_dim),
    )


def _encode_sharding(sharding: Sharding) -> ShardingSpecProto:
    proto = ShardingSpecProto(tensor_name=sharding.tensor_name, device=sharding.devices)
    for key, members in sharding.device_groups:
        group = proto.index_to_device_group_map.add()
        group.key = key
        group.value.extend(members)
    for dim in sharding.sharded_dims:
        _fill_dim(proto.sharded_dim.add(), dim)
    return proto


def _decode_dim(proto: ShardedDimProto) -> ShardedDim:
    simple = []
    for item in proto.simple_sharding:
        kind = item.WhichOneof("dim")
        extent = item.dim_value if kind == "dim_value" else text(item.dim_param) if kind == "dim_param" else None
        simple.append(SimpleSharding(extent, item.num_shards))
    return ShardedDim(proto.axis, tuple(simple))


def _fill_dim(proto: ShardedDimProto, dim: ShardedDim) -> None:
    proto.axis = dim.axis
    for item in dim.simple_shardings:
        simple = proto.simple_sharding.add()
        simple.num_shards = item.num_shards
        if isinstance(item.dim, int):
            simple.dim_value = item.dim
        elif item.dim is not None:
            simple.dim_param = item.dim
