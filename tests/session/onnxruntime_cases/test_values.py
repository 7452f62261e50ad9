"""OrtValue, DLPack, devices, memory, and I/O binding."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper


def test_ort_value(ort, opened, product, x):
    value = ort.OrtValue.ortvalue_from_numpy(x)
    assert (value.device_name(), value.shape(), value.data_type()) == ("cpu", [3, 2], "tensor(float)")
    assert value.is_tensor() and value.tensor_size_in_bytes() == 24
    session = opened(product)
    assert session.run(["Y"], {"X": value})[0].tolist() == (x * x).tolist()
    (result,) = session.run_with_ort_values(["Y"], {"X": value})
    assert isinstance(result, ort.OrtValue) and result.numpy().tolist() == (x * x).tolist()
    assert value.numpy().tolist() == x.tolist(), "a run leaves what it is given"
    typed = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(x, TensorProto.FLOAT)
    assert (typed.is_tensor(), typed.element_type(), typed.shape()) == (True, 1, [3, 2])


def capsules(ort, value):
    """A value's DLPack capsules, by each way to get one."""
    yield value.__dlpack__()
    yield value.to_dlpack() if hasattr(value, "to_dlpack") else value._ortvalue.to_dlpack()


def test_ort_value_dlpack(ort, x):
    value = ort.OrtValue.ortvalue_from_numpy(x)
    for capsule in capsules(ort, value):
        again = ort.OrtValue.from_dlpack(capsule)
        assert again.data_ptr() == value.data_ptr()
        assert again.numpy().tolist() == x.tolist()
    assert value.__dlpack_device__() == (1, 0)


@pytest.mark.parametrize("shape", [(1, 8, 0, 128), (0,), (0, 4), (4, 0)])
def test_ort_value_dlpack_zero_size(ort, shape):
    array = np.zeros(shape, np.float32)
    for capsule in (array.__dlpack__(), *capsules(ort, ort.OrtValue.ortvalue_from_numpy(array))):
        value = ort.OrtValue.from_dlpack(capsule)
        assert value.shape() == list(shape) and value.numpy().shape == shape


def test_ort_value_dlpack_protocol(ort, x):
    value = ort.OrtValue.ortvalue_from_numpy(x)
    assert value.__dlpack_device__() == (1, 0)
    assert ort.OrtValue.from_dlpack(value.__dlpack__()).numpy().tolist() == x.tolist()


def test_ort_value_from_dlpack_protocol_object(ort, x):
    value = ort.OrtValue.from_dlpack(x)
    assert value.numpy().tolist() == x.tolist()
    again = ort.OrtValue.from_dlpack(value)
    assert again.data_ptr() == value.data_ptr() == x.ctypes.data


def test_ort_value_from_dlpack_bool(ort):
    for given in (np.array([True, False, True]), np.array([1, 2, 255], np.uint8)):
        value = ort.OrtValue.from_dlpack(ort.OrtValue.ortvalue_from_numpy(given))
        assert value.numpy().dtype == given.dtype
        assert value.numpy().tolist() == given.tolist()


def test_ort_value_array_protocol(ort, x):
    value = ort.OrtValue.ortvalue_from_numpy(x)
    for seen in (np.asarray(value), np.asarray(value, dtype=np.float32)):
        assert seen.ctypes.data == value.data_ptr() and seen.dtype == np.float32
        assert seen.tolist() == x.tolist()
    assert np.array(value).tolist() == x.tolist()
    assert np.asarray(value, dtype=np.float64).dtype == np.float64
    for other in (np.array([1, 2, 3]), np.array([True, False])):
        seen = np.asarray(ort.OrtValue.ortvalue_from_numpy(other))
        assert seen.dtype == other.dtype and seen.tolist() == other.tolist()


def test_ort_device(ort):
    """The processor; that of a graphics card is refused here."""
    device = ort.OrtDevice.make("cpu", 0)
    assert (device.device_id(), device.device_type(), device.device_mem_type()) == (0, 0, 0)
    assert device.device_vendor_id() == ort.OrtDeviceVendorId.NONE
    assert ort.OrtDeviceVendorId.NVIDIA == 0x10DE


def test_ort_memory_info(ort):
    kind = ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR
    info = ort.OrtMemoryInfo("Cpu", kind, 0, ort.OrtMemType.DEFAULT)
    assert (info.name, info.device_id, info.device_vendor_id) == ("Cpu", 0, 0)
    assert (info.mem_type, info.allocator_type) == (ort.OrtMemType.DEFAULT, kind)
    assert info.device_mem_type == ort.OrtDeviceMemoryType.DEFAULT


def test_ort_memory_info_create_v2(ort):
    kind = ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR
    device, memory = ort.OrtMemoryInfoDeviceType.CPU, ort.OrtDeviceMemoryType.DEFAULT
    info = ort.OrtMemoryInfo.create_v2("Test", device, 0x8086, 0, memory, 0, kind)
    assert (info.name, info.device_id, info.device_vendor_id) == ("Test", 0, 0x8086)
    assert (info.mem_type, info.allocator_type) == (ort.OrtMemType.DEFAULT, kind)
    assert info.device_mem_type == memory


def test_bind_input_to_cpu_arr(opened, product, x):
    session = opened(product)
    binding = session.io_binding()
    binding.bind_cpu_input("X", x)
    binding.bind_output("Y")
    session.run_with_iobinding(binding)
    binding.synchronize_outputs()
    assert binding.copy_outputs_to_cpu()[0].tolist() == (x * x).tolist()


TYPES = "float32 float64 int32 uint32 int64 uint64 int16 uint16 int8 uint8 float16 bool".split()


@pytest.mark.parametrize("name", TYPES)
def test_bind_input_types(ort, opened, make_model, name):
    x = np.arange(8).reshape(-1, 2).astype(name)
    kind = (helper.np_dtype_to_tensor_dtype(x.dtype), [None, 2])
    session = opened(make_model([helper.make_node("Identity", ["X"], ["Y"])], {"X": kind}, {"Y": kind}))
    value = ort.OrtValue.ortvalue_from_numpy(x)
    by_value, by_address = session.io_binding(), session.io_binding()
    by_value.bind_ortvalue_input("X", value)
    by_address.bind_input("X", "cpu", 0, x.dtype.type, x.shape, value.data_ptr())
    for binding in (by_value, by_address):
        binding.bind_output("Y", "cpu")
        session.run_with_iobinding(binding)
        (y,) = binding.get_outputs()
        assert y.numpy().dtype == x.dtype and y.numpy().tolist() == x.tolist()


def test_bind_input_only(ort, opened, product, x):
    session, value = opened(product), ort.OrtValue.ortvalue_from_numpy(x)
    binding = session.io_binding()
    binding.bind_input("X", "cpu", 0, np.float32, [3, 2], value.data_ptr())
    binding.synchronize_inputs()
    binding.bind_output("Y")
    session.run_with_iobinding(binding)
    assert binding.copy_outputs_to_cpu()[0].tolist() == (x * x).tolist()


def test_bind_input_and_preallocated_output(ort, opened, product, x):
    session, value = opened(product), ort.OrtValue.ortvalue_from_numpy(x)
    target = ort.OrtValue.ortvalue_from_shape_and_type([3, 2], np.float32, "cpu", 0)
    binding = session.io_binding()
    binding.bind_input("X", "cpu", 0, np.float32, [3, 2], value.data_ptr())
    binding.bind_output("Y", "cpu", 0, np.float32, [3, 2], target.data_ptr())
    session.run_with_iobinding(binding)
    assert binding.copy_outputs_to_cpu()[0].tolist() == (x * x).tolist()
    assert target.numpy().tolist() == (x * x).tolist()


def test_bind_input_and_non_preallocated_output(ort, opened, product, x):
    session = opened(product)
    binding = session.io_binding()
    binding.bind_output("Y", "cpu")
    for factor in (1, 2):
        value = ort.OrtValue.ortvalue_from_numpy(x * np.float32(factor))
        binding.bind_input("X", "cpu", 0, np.float32, [3, 2], value.data_ptr())
        session.run_with_iobinding(binding)
        for _ in range(2):  # as often as one likes
            (y,) = binding.get_outputs()
            assert y.device_name() == "cpu" and y.numpy().tolist() == (x * x * factor).tolist()


def test_bind_input_and_bind_output_with_ortvalues(ort, opened, product, x):
    session = opened(product)
    binding = session.io_binding()
    target = ort.OrtValue.ortvalue_from_shape_and_type([3, 2], np.float32, "cpu", 0)
    binding.bind_ortvalue_output("Y", target)
    for factor in (1, 2):
        binding.bind_ortvalue_input("X", ort.OrtValue.ortvalue_from_numpy(x * np.float32(factor)))
        session.run_with_iobinding(binding)
        assert target.numpy().tolist() == (x * x * factor).tolist()
