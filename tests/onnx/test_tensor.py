"""Tensors: every element type from every storage, without copies where none are needed."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from genai.errors import GraphError
from genai.onnx.ir import DataType, Graph, OnnxModel, OnnxTensor
from genai.onnx.reader import read_model
from genai.onnx.storage import FieldStorage, RawStorage, pack_codes, packed_size, unpack_codes
from genai.onnx.writer import to_proto

# Older onnx packages do not know the newest element types.
NUMERIC = [dtype for dtype in DataType if dtype not in (0, 8) and int(dtype) in TensorProto.DataType.values()]
SHAPES = [(), (0,), (1,), (3,), (7, 3), (2, 0, 4)]


def read_tensor(proto: TensorProto) -> OnnxTensor:
    graph = helper.make_graph([], "g", [], [], [proto])
    return read_model(helper.make_model(graph, ir_version=10)).graph.initializers[proto.name]


def written(tensor: OnnxTensor) -> TensorProto:
    model = OnnxModel(Graph("g", initializers={tensor.name: tensor}), 10, {"": 20})
    return to_proto(model).graph.initializer[0]


def random_array(dtype: DataType, shape: tuple[int, ...]) -> np.ndarray:
    """Return random bit patterns that are values of the type."""
    generator = np.random.default_rng(int(dtype))
    if dtype is DataType.BOOL:
        return generator.integers(0, 2, shape).astype(bool)
    if dtype.is_sub_byte:
        return np.asarray(generator.integers(0, 2**dtype.bits, shape)).astype(np.uint8).view(dtype.numpy_dtype)
    if dtype in (DataType.COMPLEX64, DataType.COMPLEX128):
        return (generator.random(shape) + 1j * generator.random(shape)).astype(dtype.numpy_dtype)
    values = np.asarray(generator.integers(-100, 100, shape))
    return (
        values.astype(np.float32).astype(dtype.numpy_dtype)
        if dtype.numpy_dtype.kind in "fV"
        else values.astype(dtype.numpy_dtype)
    )


def bits_of(array: np.ndarray) -> bytes:
    """Return the bytes of an array; for sub-byte elements only their own bits, as the others are undefined."""
    dtype = DataType.from_numpy(array.dtype)
    if dtype.is_sub_byte:
        return bytes(np.ascontiguousarray(array).view(np.uint8) & (2**dtype.bits - 1))
    return array.tobytes()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", NUMERIC, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("raw", [True, False], ids=["raw", "field"])
def test_elements_agree_with_onnx(dtype, shape, raw):
    array = random_array(dtype, shape)
    if raw:
        proto = numpy_helper.from_array(array, "t")
    else:
        proto = helper.make_tensor("t", int(dtype), shape, array.reshape(-1))
    tensor = read_tensor(proto)
    assert isinstance(tensor.storage, RawStorage if raw else FieldStorage)
    result = tensor.array()
    assert result.dtype == dtype.numpy_dtype
    assert result.shape == shape
    assert bits_of(result) == bits_of(numpy_helper.to_array(proto))
    assert tensor.nbytes == len(numpy_helper.from_array(array).raw_data)
    assert bytes(tensor.raw()) == numpy_helper.from_array(array).raw_data
    assert not result.flags.writeable
    assert written(tensor) == proto


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", NUMERIC, ids=lambda dtype: dtype.name)
def test_from_array_is_read_back(dtype, shape):
    array = random_array(dtype, shape)
    tensor = OnnxTensor.from_array("t", array)
    assert (tensor.dtype, tensor.shape) == (dtype, shape)
    assert bits_of(tensor.array()) == bits_of(array)
    assert bits_of(numpy_helper.to_array(written(tensor))) == bits_of(array)


@pytest.mark.parametrize("bits", [2, 4, 6])
@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 64, 65])
def test_packing_is_inverted_by_unpacking(bits, count):
    codes = np.random.default_rng(count).integers(0, 2**bits, count).astype(np.uint8)
    packed = pack_codes(codes, bits)
    assert packed.size == packed_size(count, bits)
    np.testing.assert_array_equal(unpack_codes(packed, bits, count), codes)


def test_from_array_shares_memory_and_forbids_writing():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    view = OnnxTensor.from_array("t", array).array()
    assert np.shares_memory(view, array)
    with pytest.raises(ValueError, match="read-only"):
        view[0, 0] = 5


def test_from_array_keeps_values_of_strided_and_big_endian_arrays():
    array = np.arange(12, dtype=">i4").reshape(3, 4).T
    tensor = OnnxTensor.from_array("t", array)
    assert tensor.dtype is DataType.INT32
    np.testing.assert_array_equal(tensor.array(), array)
    np.testing.assert_array_equal(numpy_helper.to_array(written(tensor)), array)


def test_from_array_casts_to_the_type_asked_for():
    tensor = OnnxTensor.from_array("t", [1.5, -2.0], DataType.BFLOAT16)
    assert tensor.array().dtype == ml_dtypes.bfloat16
    assert tensor.array().tolist() == [1.5, -2.0]
    assert OnnxTensor.from_array("t", np.array([3, 9]), DataType.UINT4).nbytes == 1


def test_inline_bytes_are_not_copied():
    tensor = read_tensor(numpy_helper.from_array(np.arange(1000, dtype=np.float32), "t"))
    assert np.shares_memory(tensor.array(), tensor.array())
    assert np.shares_memory(tensor.array(), tensor.raw())


def test_strings_come_as_str_or_bytes():
    proto = TensorProto(
        name="t", data_type=TensorProto.STRING, dims=[2, 2], string_data=[b"a", "é".encode(), b"", b"\xff"]
    )
    tensor = read_tensor(proto)
    assert tensor.array().tolist() == [["a", "é"], ["", b"\xff"]]
    assert tensor.nbytes == 4
    assert written(tensor) == proto
    again = OnnxTensor.from_array("t", tensor.array())
    assert written(again) == proto
    assert OnnxTensor.from_array("t", np.array(["x", "yz"])).array().tolist() == ["x", "yz"]
    with pytest.raises(GraphError, match="no raw layout"):
        tensor.raw()


def test_renamed_shares_the_storage():
    tensor = OnnxTensor.from_array("a", np.zeros(3))
    assert tensor.renamed("b").name == "b"
    assert tensor.renamed("b").storage is tensor.storage
    assert tensor.name == "a"


def test_a_segment_has_no_array():
    proto = TensorProto(name="t", data_type=TensorProto.FLOAT, dims=[4], float_data=[1, 2])
    proto.segment.begin, proto.segment.end = 0, 2
    with pytest.raises(GraphError, match="segment"):
        read_tensor(proto).array()


@pytest.mark.parametrize(
    "value", [np.array([object()], dtype=object), np.zeros(2, dtype="datetime64[s]"), np.zeros(2, dtype=np.longdouble)]
)
def test_arrays_that_onnx_cannot_hold_are_refused(value):
    with pytest.raises(GraphError) as error:
        OnnxTensor.from_array("t", value)
    assert error.value.why
    assert error.value.fix


def test_undefined_has_no_numpy_type():
    assert DataType.UNDEFINED.bits == 0
    with pytest.raises(GraphError, match="UNDEFINED"):
        _ = DataType.UNDEFINED.numpy_dtype


@pytest.mark.parametrize("dtype", NUMERIC, ids=lambda dtype: dtype.name)
def test_numpy_types_agree_with_onnx(dtype):
    assert dtype.numpy_dtype == onnx.helper.tensor_dtype_to_np_dtype(int(dtype))
    assert DataType.from_numpy(dtype.numpy_dtype) is dtype
