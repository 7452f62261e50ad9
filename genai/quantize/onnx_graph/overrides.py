"""`TensorQuantOverrides`: the caller's settings for individual tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ...errors import NotSupportedYetError, OptionError, did_you_mean
from .types import STATIC_TYPES, QuantType, checked_type


@dataclass(frozen=True)
class ChannelOverride:
    """The settings for a tensor or for one of its channels; None means no setting."""

    quant_type: QuantType | None = None
    scale: float | None = None
    zero_point: int | None = None
    symmetric: bool | None = None
    reduce_range: bool | None = None
    rmin: float | None = None
    rmax: float | None = None


@dataclass(frozen=True)
class TensorOverride:
    """The settings for a tensor.

    Attributes:
        channels: one override for the whole tensor, or one override per channel of `axis`.
        axis: axis of the channels.
    """

    channels: tuple[ChannelOverride, ...]
    axis: int | None = None

    @property
    def common(self) -> ChannelOverride:
        """The settings of the first channel, including all settings that cannot differ between channels."""
        return self.channels[0]


_KEYS = {one.name for one in fields(ChannelOverride)}


def read_overrides(option: str, overrides: Any) -> dict[str, TensorOverride]:
    """Return the overrides by tensor.

    Raises:
        OptionError: the overrides do not have the documented format.
        NotSupportedYetError: an override has "convert".
    """
    if not isinstance(overrides, Mapping):
        raise OptionError(
            f"{option} is {overrides!r:.80}", "the option must map tensor names to lists of dicts", "pass a dict"
        )
    return {name: _tensor(name, override) for name, override in overrides.items()}


def _tensor(name: str, channels: Any) -> TensorOverride:
    if (
        not isinstance(channels, Sequence)
        or not channels
        or not all(isinstance(channel, Mapping) for channel in channels)
    ):
        raise _wrong(name, channels, "an override must be a list of dictionaries: one in total, or one per channel")
    axis = channels[0].get("axis")
    if axis is not None and not isinstance(axis, int):
        raise _wrong(name, channels[0], "an axis must be an integer")
    if axis is None and len(channels) > 1:
        raise _wrong(name, channels, "several dictionaries apply to channels, so an 'axis' is needed")
    return TensorOverride(tuple(_channel(name, channel) for channel in channels), axis)


def _channel(name: str, override: Mapping[str, Any]) -> ChannelOverride:
    if "convert" in override:
        raise NotSupportedYetError(
            f"TensorQuantOverrides[{name!r}] sets 'convert'",
            "a tensor can have only one quantised type",
            "set 'quant_type' instead",
        )
    for key in override:
        if key not in _KEYS and key != "axis":
            raise _wrong(
                name, override, f"the key {key!r} is unknown; {did_you_mean(str(key), _KEYS, str(sorted(_KEYS)))}"
            )
    values = {key: value for key, value in override.items() if key != "axis"}
    if "quant_type" in values:
        values["quant_type"] = checked_type(f"TensorQuantOverrides[{name!r}]", values["quant_type"], STATIC_TYPES)
    if ("scale" in values) != ("zero_point" in values):
        raise _wrong(name, override, "'scale' and 'zero_point' must be set together")
    if "scale" in values:
        clash = sorted(values.keys() & {"symmetric", "reduce_range", "rmin", "rmax"})
        if clash:
            raise _wrong(name, override, f"{clash} have no effect together with 'scale' and 'zero_point'")
        if not float(values["scale"]) > 0:
            raise _wrong(name, override, "a scale must be above 0")
        values["scale"], values["zero_point"] = float(values["scale"]), int(values["zero_point"])
    for key in ("rmin", "rmax"):
        if key in values:
            values[key] = float(values[key])
    return ChannelOverride(**values)


def _wrong(name: str, override: Any, why: str) -> OptionError:
    return OptionError(
        f"TensorQuantOverrides[{name!r}] is {override!r:.120}", why, "correct this entry of TensorQuantOverrides"
    )
