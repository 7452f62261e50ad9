"""Types to and from protobuf, also with many dimensions, long symbols, and types inside types."""

from __future__ import annotations

import pytest
from onnx import TypeProto, helper

from genai.onnx.type_protos import decode_type, encode_type
from genai.onnx.types import DataType, SequenceType, SparseTensorType, TensorType

TYPES = [
    TensorType(DataType.FLOAT),
    TensorType(DataType.FLOAT, ()),
    TensorType(DataType.INT8, (1, "N", None)),
    TensorType(DataType.BOOL, (2, "C"), ("DATA_BATCH", "")),
    TensorType(DataType.FLOAT, ("long" * 1000, 3)),
    TensorType(DataType.INT64, tuple(range(300))),
    SparseTensorType(DataType.FLOAT, (4, "M")),
    SequenceType(TensorType(DataType.STRING, (None,))),
]


@pytest.mark.parametrize("known", TYPES, ids=lambda known: str(known)[:40])
def test_both_ways(known):
    assert decode_type(encode_type(known)) == decode_type(encode_type(known)) == known


def test_as_onnx_encodes():
    for shape in (None, (), (1, "N", None)):
        assert encode_type(TensorType(DataType.FLOAT, shape)) == helper.make_tensor_type_proto(1, shape)
        assert encode_type(SparseTensorType(DataType.FLOAT, shape)) == helper.make_sparse_tensor_type_proto(1, shape)


def test_no_kind():
    assert decode_type(TypeProto()) is None
