"""Values outside a run, with their ONNX types: OrtValue, where it lies (the CPU, a GPU), DLPack in and out."""

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
    """How memory is allocated; values here come from NumPy, whatever is named."""

    INVALID = -1
    ORT_DEVICE_ALLOCATOR = 0
    ORT_ARENA_ALLOCATOR = 1


class OrtMemType(IntEnum):
    """What a value in memory is for."""

    CPU_INPUT = -2
    CPU_OUTPUT = -1
    CPU = -1
    DEFAULT = 0


class OrtDeviceMemoryType(IntEnum):
    """Who can reach a device's memory."""

    DEFAULT = 0
    HOST_ACCESSIBLE = 5


class OrtMemoryInfoDeviceType(IntEnum):
    """Kinds of devices."""

    CPU = 0
    GPU = 1
    FPGA = 2
    NPU = 3


class OrtDeviceVendorId(IntEnum):
    """Makers of devices, by their PCI numbers."""

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
    """Where a value lies."""

    def __init__(self, name: str = CPU, device_id: int = 0) -> None:
        self._is_gpu = device_of(name, device_id) is not None
        self._name, self._id = name, device_id

    @staticmethod
    def make(ort_device_name: str, device_id: int = 0, vendor_id: int = -1) -> OrtDevice:
        """A device by name."""
        return OrtDevice(ort_device_name, device_id)

    def device_type(self) -> int:
        """0, the CPU's number, or 1, that of GPUs."""
        return int(self._is_gpu)

    def device_id(self) -> int:
        """Which of several devices."""
        return self._id

    def device_mem_type(self) -> int:
        """0, ordinary memory."""
        return int(OrtDeviceMemoryType.DEFAULT)

    def device_vendor_id(self) -> int:
        """NVIDIA's number for a GPU; else 0: processors are not told apart."""
        return int(OrtDeviceVendorId.NVIDIA if self._is_gpu else OrtDeviceVendorId.NONE)

    def __str__(self) -> str:
        kind, vendor = self.device_type(), self.device_vendor_id()
        return f"Device:[Type:{kind} MemType:0 VendorId:{vendor} DeviceId:{self._id} Alignment:0]"


@typed_errors
@dataclass(frozen=True)
class OrtMemoryInfo:
    """Memory in which inputs and results of a session lie.

    Its name says the kind of device where `device_type` does not.

    Raises:
        InputError: of another device than the CPU.
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
        """Memory of a kind of device, by any name.

        Raises:
            InputError: of another device than the CPU, memory that devices share, or an alignment: NumPy chooses it.
        """
        if mem_type != OrtDeviceMemoryType.DEFAULT or alignment != 0:
            raise InputError(
                f"memory of type {mem_type} with alignment {alignment}",
                "values lie in ordinary memory that NumPy allocates",
                "use OrtDeviceMemoryType.DEFAULT and alignment 0",
            )
        return OrtMemoryInfo(name, allocator_type, device_id, OrtMemType.DEFAULT, vendor_id, device_type)

    @property
    def device_mem_type(self) -> OrtDeviceMemoryType:
        """Ordinary memory."""
        return OrtDeviceMemoryType.DEFAULT


def check_device(name: str, device_id: int = 0) -> None:
    """Refuse devices that are not the CPU. Raises InputError."""
    if name.lower() != CPU or device_id != 0:
        raise InputError(f"device {name!r} number {device_id}", "values of a session lie on the CPU", "use 'cpu', 0")


def device_of(name: str, device_id: int = 0) -> Driver | None:
    """The GPU that values are to lie on, None for the CPU.

    Raises:
        InputError: there is no such device. DeviceError: its GPU cannot be used.
    """
    if name.lower() == CPU and device_id == 0:
        return None
    if name.lower() not in (CUDA, "gpu"):
        raise InputError(
            f"device {name!r} number {device_id}",
            "values of a session lie on the CPU or on a GPU of NVIDIA",
            "use 'cpu', 0, or 'cuda' and a GPU's number",
        )
    try:
        return open_gpu(device_id)
    except NoDevice as error:
        instead = "'cpu', 0 takes the CPU"
        raise no_gpu(f"device {name!r} number {device_id} cannot hold values", error, instead) from error


@typed_errors
class OrtValue:
    """A tensor, a sequence, a map or nothing. The array given is used, not copied.

    Make one with `ortvalue_from_numpy`, `ortvalue_from_shape_and_type` or `from_dlpack`.
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    @staticmethod
    def ortvalue_from_numpy(numpy_obj: NDArray[Any], device_type: str = CPU, device_id: int = 0) -> OrtValue:
        """From an array of any ONNX element type, bfloat16 and smaller ones of ml_dtypes included.

        On "cuda" the array is copied into the GPU's memory.

        Raises:
            InputError: not an array, of a type that ONNX does not have, or text on a GPU.
            RuntimeException: the GPU has not so much memory. DeviceError: it cannot be used, or fails.
        """
        driver = device_of(device_type, device_id)
        if not isinstance(numpy_obj, np.ndarray | np.generic):
            raise InputError(f"got a {type(numpy_obj).__name__}", "a NumPy array is expected", "pass np.asarray(…)")
        DataType.from_numpy(numpy_obj.dtype)
        array = np.asarray(numpy_obj)
        if driver is None:
            return OrtValue(array)
        _check_no_text(array.dtype)
        return OrtValue(upload(driver, array))

    @staticmethod
    def ortvalue_from_numpy_with_onnx_type(data: NDArray[Any], onnx_element_type: int) -> OrtValue:
        """From the bits of an array, read as another element type of the same size (as bfloat16 in uint16).

        Raises:
            InputError: the sizes differ, or there is no such type.
        """
        dtype = element_dtype(onnx_element_type)
        if data.dtype.itemsize != dtype.itemsize:
            raise InputError(
                f"{data.dtype} cannot be read as ONNX type {onnx_element_type}",
                f"their elements take {data.dtype.itemsize} and {dtype.itemsize} bytes",
                "give an array of the same element size",
            )
        return OrtValue(data.view(dtype))

    @staticmethod
    def ortvalue_from_shape_and_type(
        shape: Sequence[int], element_type: Any = np.float32, device_type: str = CPU, device_id: int = 0
    ) -> OrtValue:
        """An uninitialised tensor; `element_type` is a NumPy dtype or ONNX's number.

        Raises:
            RuntimeException: there is not so much memory.
        """
        driver = device_of(device_type, device_id)
        dtype, sizes = element_dtype(element_type), tuple(shape)
        if driver is not None:
            _check_no_text(dtype)
            return OrtValue(empty(driver, sizes, dtype))
        return OrtValue(np.full(sizes, "", dtype) if dtype.hasobject else np.empty(sizes, dtype))

    @staticmethod
    def from_dlpack(value: Any, is_bool_tensor: bool = False) -> OrtValue:
        """From any object with __dlpack__ (of torch, JAX, CuPy), or a capsule of the CPU's, without a copy.

        What lies on a GPU stays there.

        Args:
            is_bool_tensor: read bytes as booleans, for producers whose DLPack has no boolean type.
        """
        found = value_from_dlpack(value)
        if not is_bool_tensor or found.dtype != np.uint8:
            return OrtValue(found)
        if isinstance(found, DeviceTensor):
            return OrtValue(DeviceTensor(found.region, found.first, found.shape, np.dtype(bool)))
        return OrtValue(found.view(np.bool_))

    @staticmethod
    def ort_value_from_sparse_tensor(value: Any) -> OrtValue:
        """Sparse tensors outside models are not supported. Raises NotSupportedYetError: always."""
        refuse("OrtValue.ort_value_from_sparse_tensor", REASONS["SparseTensor"])

    as_sparse_tensor = refusing_method("as_sparse_tensor", REASONS["SparseTensor"])

    def numpy(self) -> NDArray[Any]:
        """The array itself, not a copy; of a GPU's memory a copy. Raises InputError: this is not a tensor."""
        tensor = self._tensor()
        return tensor.numpy() if isinstance(tensor, DeviceTensor) else tensor

    def shape(self) -> list[int]:
        """Sizes of the axes."""
        return list(self._tensor().shape)

    def data_type(self) -> str:
        """Such as "tensor(float)"."""
        return type_name(self._value)

    def element_type(self) -> int:
        """ONNX's number of the element type."""
        return int(DataType.from_numpy(self._tensor().dtype))

    def device_name(self) -> str:
        """ "cpu" or "cuda"."""
        return CUDA if isinstance(self._value, DeviceTensor) else CPU

    def data_ptr(self) -> int:
        """Address of the first element."""
        tensor = self._tensor()
        if isinstance(tensor, DeviceTensor):
            tensor.region.driver.synchronize()  # what is written there is there for other libraries, too
            return tensor.address
        address: int = tensor.__array_interface__["data"][0]
        return address

    def tensor_size_in_bytes(self) -> int:
        """Bytes of the elements."""
        return int(self._tensor().nbytes)

    def has_value(self) -> bool:
        """False for an empty optional."""
        return self._value is not None

    def is_tensor(self) -> bool:
        """Whether this is a dense tensor."""
        return isinstance(self._value, np.ndarray | DeviceTensor)

    def is_sparse_tensor(self) -> bool:
        """False: sparse values become dense."""
        return False

    def is_tensor_sequence(self) -> bool:
        """Whether this is a sequence of tensors."""
        return isinstance(self._value, list)

    def update_inplace(self, array: NDArray[Any] | OrtValue) -> None:
        """Copy an array or OrtValue of the same shape and type into this tensor.

        Raises:
            InputError: shape or type differ, or the memory may not be written.
        """
        tensor = self._tensor()
        given = array.value if isinstance(array, OrtValue) else array
        if not isinstance(given, DeviceTensor):
            given = np.asarray(given)
        if given.shape != tensor.shape or given.dtype != tensor.dtype:
            raise InputError(
                f"{given.dtype}{list(given.shape)} cannot replace {tensor.dtype}{list(tensor.shape)}",
                "an update keeps shape and element type",
                "make a new OrtValue",
            )
        if isinstance(tensor, DeviceTensor):
            if isinstance(given, DeviceTensor) and given.region.driver is tensor.region.driver:
                tensor.copy_from(given)
            else:
                tensor.write(on_host([given])[0])
            tensor.region.driver.synchronize()  # whoever shares the memory may read it from now on
            return
        given = on_host([given])[0]
        if not tensor.flags.writeable:
            raise InputError("this OrtValue is read-only", "its memory belongs to someone else", "make a new OrtValue")
        tensor[...] = given

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def __dlpack__(self, **options: Any) -> Any:
        try:
            return self._tensor().__dlpack__(**options)
        except GenaiError as error:  # a GPU's memory says only now whether what lies there is right
            raise renamed(error) from None

    def __dlpack_device__(self) -> tuple[int, int]:
        found: tuple[int, int] = self._tensor().__dlpack_device__()
        return found

    def to_dlpack(self) -> Any:
        """A DLPack capsule over the same memory."""
        return self._tensor().__dlpack__()

    @property
    def value(self) -> Any:
        """What a run takes: an array, a list, a dict or None."""
        return self._value

    def _tensor(self) -> Any:
        if isinstance(self._value, np.ndarray | DeviceTensor):
            return self._value
        raise InputError(
            f"this OrtValue is {type_name(self._value)}", "only tensors have elements and a shape", "use value"
        )


@typed
def copy_tensors(src: Sequence[OrtValue], dst: Sequence[OrtValue], stream: Any = None) -> None:
    """Copy each tensor of `src` into the one of `dst` at the same place.

    Raises:
        InputError: they differ in number, shape or type.
    """
    if len(src) != len(dst):
        raise InputError(f"{len(src)} tensors to {len(dst)}", "each needs its target", "pass lists of one length")
    for source, target in zip(src, dst, strict=True):
        target.update_inplace(source)


def _check_no_text(dtype: np.dtype[Any]) -> None:
    if dtype.hasobject:
        raise InputError("text on a GPU", "numbers alone lie in its memory", "use 'cpu', 0")


def element_dtype(given: Any) -> np.dtype[Any]:
    """The NumPy type of elements given by ONNX's number, or by a type of NumPy's that ONNX has too."""
    if not isinstance(given, int | np.integer):
        return DataType.from_numpy(given).numpy_dtype
    try:
        return DataType(int(given)).numpy_dtype
    except ValueError:
        raise InputError(
            f"ONNX element type {given}", f"types go from 1 to {max(DataType)}", "use onnx.TensorProto's numbers"
        ) from None
