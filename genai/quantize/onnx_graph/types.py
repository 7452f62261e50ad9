"""Types of quantised values, and formats of quantised models."""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeVar

from genai.quant.affine import IntegerRange, integer_range

from ...errors import NotSupportedYetError, OptionError, did_you_mean
from ...onnx.types import DataType


class QuantizationMode(Enum):
    """Quantisation of activations by their range in each run (IntegerOps), or by a fixed range (QLinearOps)."""

    IntegerOps = 0
    QLinearOps = 1

    def __str__(self) -> str:
        return self.name


class QuantFormat(Enum):
    """The format of a statically quantised model.

    QDQ: float operators between DequantizeLinear and QuantizeLinear; runtimes fuse the three. QOperator: integer
    operators, many of which are in the domain com.microsoft.
    """

    QOperator = 0
    QDQ = 1

    def __str__(self) -> str:
        return self.name

    @staticmethod
    def from_string(format: str) -> QuantFormat:
        """Return the format with this name. Raise OptionError if there is no such format."""
        return _by_name(QuantFormat, format)


class QuantType(Enum):
    """The type of quantised values."""

    QInt8 = 0
    QUInt8 = 1
    QFLOAT8E4M3FN = 2
    QInt16 = 3
    QUInt16 = 4
    QInt4 = 5
    QUInt4 = 6

    def __str__(self) -> str:
        return self.name

    @staticmethod
    def from_string(t: str) -> QuantType:
        """Return the type with this name. Raise OptionError if there is no such type."""
        return _by_name(QuantType, t)

    @property
    def data_type(self) -> DataType:
        """The element type in a graph."""
        return DataType[_ELEMENTS[self]]

    @property
    def tensor_type(self) -> int:
        """The element type as a number of onnx.TensorProto.DataType."""
        return int(self.data_type)

    @property
    def is_signed(self) -> bool:
        """True if the integers are signed."""
        return self in (QuantType.QInt8, QuantType.QInt16, QuantType.QInt4)

    def integers(self, *, symmetric: bool = False, reduce_range: bool = False) -> IntegerRange:
        """Return the range of the integers in use."""
        return integer_range(
            self.data_type.bits,
            signed=self.is_signed,
            symmetric=symmetric and self.is_signed,
            reduce_range=reduce_range,
        )


E = TypeVar("E", bound=Enum)
_ELEMENTS = {
    QuantType.QInt8: "INT8",
    QuantType.QUInt8: "UINT8",
    QuantType.QFLOAT8E4M3FN: "FLOAT8E4M3FN",
    QuantType.QInt16: "INT16",
    QuantType.QUInt16: "UINT16",
    QuantType.QInt4: "INT4",
    QuantType.QUInt4: "UINT4",
}


def _by_name(kind: type[E], name: str) -> E:
    try:
        return kind[name]
    except KeyError:
        known = list(kind.__members__)
        raise OptionError(
            f"{name!r} is not a {kind.__name__}",
            f"valid names are {', '.join(known)}",
            did_you_mean(str(name), known, f"pass {known[0]!r}"),
        ) from None


def checked_type(name: str, value: Any, known: tuple[QuantType, ...]) -> QuantType:
    """Return the type that the caller passed as a QuantType or as a name.

    Raises:
        NotSupportedYetError: the type is float8, which no kernel multiplies.
        OptionError: the value is not a QuantType, or is not in `known`.
    """
    if isinstance(value, str):
        value = QuantType.from_string(value)
    if value is QuantType.QFLOAT8E4M3FN:
        raise NotSupportedYetError(
            f"{name} is QFLOAT8E4M3FN", "only integer types are supported", "pass QuantType.QInt8"
        )
    if not isinstance(value, QuantType) or value not in known:
        raise OptionError(
            f"{name} is {value!s}",
            f"the supported types are {', '.join(f'QuantType.{one.name}' for one in known)}",
            f"pass QuantType.{known[0].name}",
        )
    return value


STATIC_TYPES = (
    QuantType.QInt8, QuantType.QUInt8, QuantType.QInt16, QuantType.QUInt16, QuantType.QInt4, QuantType.QUInt4
)  # fmt: skip
"""Types of weights and activations of statically quantised models."""
BYTES = (QuantType.QInt8, QuantType.QUInt8)
"""The types that integer operators support."""
