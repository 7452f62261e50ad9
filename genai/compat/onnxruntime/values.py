"""Values outside a run, with their ONNX types: OrtValue on the CPU or a GPU, and conversion through DLPack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.cuda.arrays.memory import DeviceTensor, empty, upload
from genai.kernels.cuda.driver import Driver, NoDevice

from ...devices import no_gpu, open_gpu
from ...errors import GenaiError, InputError
from ...onnx.types import DataType
from ...session.tensors import on_host, type_name, value_from_dlpack
from ..refused import REASONS, refuse, refusing_method
from .errors import renamed, typed, typed_errors

CPU, CUDA = "cpu", "cuda"


class OrtAllocatorType(IntEnum):
    """Kinds of allocators. They are ignored, because NumPy allocates host memory."""

    INVALID = -1
    ORT_DEVICE_ALLOCATOR = 0
    ORT_ARENA_ALLOCATOR = 1


class OrtMemType(IntEnum):
    """Uses of a value in memory."""

    CPU_INPUT = -2
    CPU_OUTPUT = -1
    CPU = -1
    DEFAULT = 0


class OrtDeviceMemoryType(IntEnum):
    """Accessibility of a device's memory."""

    DEFAULT = 0
    HOST_ACCESSIBLE = 5


class OrtMemoryInfoDeviceType(IntEnum):
    """Kinds of devices."""

    CPU = 0
    GPU = 1
    FPGA = 2
    NPU = 3


class OrtDeviceVendorId(IntEnum):
    """PCI vendor ids of device makers."""

    NONE = 0x0000
    AMD = 0x1002
    NVIDIA = 0x10DE
    ARM = 0x13B5
    MICROSOFT = 0x1414
    HUAWEI = 0x19E5
    QUALCOMM = 0x5143
    INTEL = 0x8086


@typed_errors
class OrtDevice:
    """The device that holds a value."""

    def __init__(self, name: str = CPU, device_id: int = 0) -> None:
        self._is_gpu = device_of(name, device_id) is not None
        self._name, self._id = name, device_id

    @staticmethod
    def make(ort_device_name: str, device_id: int = 0, vendor_id: int = -1) -> OrtDevice:
        """Create a device by name."""
        return OrtDevice(ort_device_name, device_id)

    def device_type(self) -> int:
        """Return 0 for the CPU, 1 for GPUs."""
        return int(self._is_gpu)

    def device_id(self) -> int:
        """Return the device's number."""
        return self._id

    def device_mem_type(self) -> int:
        """Return 0, ordinary memory."""
        return int(OrtDeviceMemoryType.DEFAULT)

    def device_vendor_id(self) -> int:
        """Return NVIDIA's vendor id for a GPU, else 0: CPU vendors are not distinguished."""
        return int(OrtDeviceVendorId.NVIDIA if self._is_gpu else OrtDeviceVendorId.NONE)

    def __str__(self) -> str:
        kind, vendor = self.device_type(), self.device_vendor_id()
        return f"Device:[Type:{kind} MemType:0 VendorId:{vendor} DeviceId:{self._id} Alignment:0]"


@typed_errors
@dataclass(frozen=True)
class OrtMemoryInfo:
    """Memory that holds inputs and outputs of a session.

    If `device_type` is None, the name determines the kind of device.

    Raises:
        InputError: the device is not the CPU.
    """

    name: str = "Cpu"
    allocator_type: OrtAllocatorType = OrtAllocatorType.ORT_DEVICE_ALLOCATOR
    device_id: int = 0
    mem_type: OrtMemType = OrtMemType.DEFAULT
    device_vendor_id: int = 0
    device_type: OrtMemoryInfoDeviceType | None = None

    def __post_init__(self) -> None:
        check_device(self.name if self.device_type is None else self.device_type.name, self.device_id)

    @staticmethod
    def create_v2(
        name: str,
        device_type: OrtMemoryInfoDeviceType,
        vendor_id: int,
        device_id: int,
        mem_type: OrtDeviceMemoryType,
        alignment: int,
        allocator_type: OrtAllocatorType,
    ) -> OrtMemoryInfo:
        """Create a description of memory on a kind of device, under any name.

        Raises:
            InputError: the device is not the CPU, the memory is shared by devices, or `alignment` is not 0 (NumPy
                chooses the alignment).
        """
        if mem_type != OrtDeviceMemoryType.DEFAULT or alignment != 0:
            raise InputError(
                f"memory of type {mem_type} with alignment {alignment} is not supported",
                "NumPy allocates the memory of values",
                "use OrtDeviceMemoryType.DEFAULT and alignment 0",
            )
        return OrtMemoryInfo(name, allocator_type, device_id, OrtMemType.DEFAULT, vendor_id, device_type)

    @property
    def device_mem_type(self) -> OrtDeviceMemoryType:
        """Ordinary memory."""
        return OrtDeviceMemoryType.DEFAULT


def check_device(name: str, device_id: int = 0) -> None:
    """Raise InputError if the device is not the CPU."""
    if name.lower() != CPU or device_id != 0:
        raise InputError(
            f"device {name!r} number {device_id} is not supported",
            "values of a session are on the CPU",
            "use device 'cpu' and number 0",
        )


def device_of(name: str, device_id: int = 0) -> Driver | None:
    """Return the GPU that a device name refers to; None for the CPU.

    Raises:
        InputError: the device does not exist.
        DeviceError: the GPU cannot be used.
    """
    if name.lower() == CPU and device_id == 0:
        return None
    if name.lower() not in (CUDA, "gpu"):
        raise InputError(
            f"device {name!r} number {device_id} is not supported",
            "values of a session are on the CPU or on an NVIDIA GPU",
            "use device 'cpu' and number 0, or device 'cuda' and a GPU's number",
        )
    try:
        return open_gpu(device_id)
    except NoDevice as error:
        instead = "to use the CPU, pass device 'cpu' and number 0"
        raise no_gpu(f"device {name!r} number {device_id} cannot hold values", error, instead) from error


@typed_errors
class OrtValue:
    """A tensor, a sequence, a map or an empty optional. An array is not copied.

    Create an OrtValue with `ortvalue_from_numpy`, `ortvalue_from_shape_and_type` or `from_dlpack`.
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    @staticmethod
    def ortvalue_from_numpy(numpy_obj: NDArray[Any], device_type: str = CPU, device_id: int = 0) -> OrtValue:
        """Create an OrtValue from an array of any ONNX element type, including bfloat16 and ml_dtypes' small types.

        On "cuda", the array is copied to GPU memory.

        Raises:
            InputError: `numpy_obj` is not an array, ONNX lacks its type, or it contains text and the device is a GPU.
            RuntimeException: GPU memory is insufficient.
            DeviceError: the GPU cannot be used, or fails.
        """
        driver = device_of(device_type, device_id)
        if not isinstance(numpy_obj, np.ndarray | np.generic):
            raise InputError(
                f"numpy_obj is a {type(numpy_obj).__name__}", "a NumPy array is expected", "pass np.asarray(…)"
            )
        DataType.from_numpy(numpy_obj.dtype)
        array = np.asarray(numpy_obj)
        if driver is None:
            return OrtValue(array)
        _check_no_text(array.dtype)
        return OrtValue(upload(driver, array))

    @staticmethod
    def ortvalue_from_numpy_with_onnx_type(data: NDArray[Any], onnx_element_type: int) -> OrtValue:
        """Create an OrtValue by reading an array's bits as another type of the same size, such as bfloat16 in uint16.

        Raises:
            InputError: the sizes differ, or the type does not exist.
        """
        dtype = element_dtype(onnx_element_type)
        if data.dtype.itemsize != dtype.itemsize:
            raise InputError(
                f"{data.dtype} cannot be read as ONNX type {onnx_element_type}",
                f"the elements of the two types have {data.dtype.itemsize} and {dtype.itemsize} bytes",
                "pass an array with the same element size",
            )
        return OrtValue(data.view(dtype))

    @staticmethod
    def ortvalue_from_shape_and_type(
        shape: Sequence[int], element_type: Any = np.float32, device_type: str = CPU, device_id: int = 0
    ) -> OrtValue:
        """Create an uninitialised tensor; `element_type` is a NumPy dtype or ONNX's number.

        Raises:
            RuntimeException: memory is insufficient.
        """
        driver = device_of(device_type, device_id)
        dtype, sizes = element_dtype(element_type), tuple(shape)
        if driver is not None:
            _check_no_text(dtype)
            return OrtValue(empty(driver, sizes, dtype))
        return OrtValue(np.full(sizes, "", dtype) if dtype.hasobject else np.empty(sizes, dtype))

    @staticmethod
    def from_dlpack(value: Any, is_bool_tensor: bool = False) -> OrtValue:
        """Create an OrtValue from any object with __dlpack__ (torch, JAX, CuPy) or from a CPU capsule, without a copy.

        Data on a GPU stays there.

        Args:
            value: the object or capsule.
            is_bool_tensor: True to read bytes as booleans, for producers whose DLPack has no boolean type.
        """
        found = value_from_dlpack(value)
        if not is_bool_tensor or found.dtype != np.uint8:
            return OrtValue(found)
        if isinstance(found, DeviceTensor):
            return OrtValue(DeviceTensor(found.region, found.first, found.shape, np.dtype(bool)))
        return OrtValue(found.view(np.bool_))

    @staticmethod
    def ort_value_from_sparse_tensor(value: Any) -> OrtValue:
        """Raises NotSupportedYetError: sparse tensors outside models are not supported."""
        refuse("OrtValue.ort_value_from_sparse_tensor", REASONS["SparseTensor"])

    as_sparse_tensor = refusing_method("as_sparse_tensor", REASONS["SparseTensor"])

    def numpy(self) -> NDArray[Any]:
        """Return the array itself, or a copy if it is in GPU memory. Raises InputError if this is not a tensor."""
        tensor = self._tensor()
        return tensor.numpy() if isinstance(tensor, DeviceTensor) else tensor

    def shape(self) -> list[int]:
        """Return the sizes of the axes."""
        return list(self._tensor().shape)

    def data_type(self) -> str:
        """Return the type, such as "tensor(float)"."""
        return type_name(self._value)

    def element_type(self) -> int:
        """Return ONNX's number for the element type."""
        return int(DataType.from_numpy(self._tensor().dtype))

    def device_name(self) -> str:
        """Return "cpu" or "cuda"."""
        return CUDA if isinstance(self._value, DeviceTensor) else CPU

    def data_ptr(self) -> int:
        """Return the address of the first element."""
        tensor = self._tensor()
        if isinstance(tensor, DeviceTensor):
            tensor.region.driver.synchronize()  # other libraries must see completed writes
            return tensor.address
        address: int = tensor.__array_interface__["data"][0]
        return address

    def tensor_size_in_bytes(self) -> int:
        """Return the size of the elements in bytes."""
        return int(self._tensor().nbytes)

    def has_value(self) -> bool:
        """Return False for an empty optional."""
        return self._value is not None

    def is_tensor(self) -> bool:
        """Return True if this is a dense tensor."""
        return isinstance(self._value, np.ndarray | DeviceTensor)

    def is_sparse_tensor(self) -> bool:
        """Return False: sparse values are converted to dense ones."""
        return False

    def is_tensor_sequence(self) -> bool:
        """Return True if this is a sequence of tensors."""
        return isinstance(self._value, list)

    def update_inplace(self, array: NDArray[Any] | OrtValue) -> None:
        """Copy an array or OrtValue with the same shape and type into this tensor.

        Raises:
            InputError: the shapes or types differ, or the memory is read-only.
        """
        tensor = self._tensor()
        given = array.value if isinstance(array, OrtValue) else array
        if not isinstance(given, DeviceTensor):
            given = np.asarray(given)
        if given.shape != tensor.shape or given.dtype != tensor.dtype:
            raise InputError(
                f"{given.dtype}{list(given.shape)} cannot replace {tensor.dtype}{list(tensor.shape)}",
                "an update must have the same shape and element type",
                "create a new OrtValue",
            )
        if isinstance(tensor, DeviceTensor):
            if isinstance(given, DeviceTensor) and given.region.driver is tensor.region.driver:
                tensor.copy_from(given)
            else:
                tensor.write(on_host([given])[0])
            tensor.region.driver.synchronize()  # other users of this memory may read it after this call
            return
        given = on_host([given])[0]
        if not tensor.flags.writeable:
            raise InputError("this OrtValue is read-only", "another object owns its memory", "create a new OrtValue")
        tensor[...] = given

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def __dlpack__(self, **options: Any) -> Any:
        try:
            return self._tensor().__dlpack__(**options)
        except GenaiError as error:  # pending GPU errors are reported only when the memory is accessed
            raise renamed(error) from None

    def __dlpack_device__(self) -> tuple[int, int]:
        found: tuple[int, int] = self._tensor().__dlpack_device__()
        return found

    def to_dlpack(self) -> Any:
        """Return a DLPack capsule over the same memory."""
        return self._tensor().__dlpack__()

    @property
    def value(self) -> Any:
        """The value for a run: an array, a list, a dict or None."""
        return self._value

    def _tensor(self) -> Any:
        if isinstance(self._value, np.ndarray | DeviceTensor):
            return self._value
        raise InputError(
            f"this OrtValue is {type_name(self._value)}",
            "only tensors have elements and a shape",
            "use the attribute `value` of the OrtValue",
        )


@typed
def copy_tensors(src: Sequence[OrtValue], dst: Sequence[OrtValue], stream: Any = None) -> None:
    """Copy each tensor of `src` to the tensor of `dst` at the same index.

    Raises:
        InputError: the lists differ in length, or two tensors differ in shape or type.
    """
    if len(src) != len(dst):
        raise InputError(
            f"{len(src)} tensors cannot be copied to {len(dst)} tensors",
            "each tensor needs a target",
            "pass lists of equal length",
        )
    for source, target in zip(src, dst, strict=True):
        target.update_inplace(source)


def _check_no_text(dtype: np.dtype[Any]) -> None:
    if dtype.hasobject:
        raise InputError(
            "text cannot be stored on a GPU", "GPU memory contains only numbers", "use device 'cpu' and number 0"
        )


def element_dtype(given: Any) -> np.dtype[Any]:
    """Return the NumPy type for ONNX's number, or for a NumPy type that ONNX supports."""
    if not isinstance(given, int | np.integer):
        return DataType.from_numpy(given).numpy_dtype
    try:
        return DataType(int(given)).numpy_dtype
    except ValueError:
        raise InputError(
            f"ONNX element type {given} does not exist",
            f"element types are integers from 1 to {max(DataType)}",
            "use a value of onnx.TensorProto.DataType",
        ) from None
