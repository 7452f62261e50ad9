"""I/O binding: inputs and outputs that persist between runs, as in onnxruntime."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from genai.kernels.cuda.arrays.memory import DeviceTensor, Region, empty, upload
from genai.kernels.cuda.driver import Driver

from ...errors import InputError
from ...session.tensors import on_host, value_from_dlpack
from .errors import InvalidArgument, typed_errors
from .values import OrtValue, device_of, element_dtype

if TYPE_CHECKING:  # a session creates bindings, and a binding refers to its session
    from .inference_session import InferenceSession


@typed_errors
class IOBinding:
    """Bound inputs and outputs of a session. Created by `InferenceSession.io_binding`."""

    def __init__(self, session: InferenceSession) -> None:
        arguments = [*session.get_inputs(), *session.get_overridable_initializers()]
        self._input_names = [argument.name for argument in arguments]
        self._output_names = [argument.name for argument in session.get_outputs()]
        self._inputs: dict[str, Any] = {}
        self._outputs: dict[str, OrtValue | None] = {}
        self._devices: dict[str, Driver | None] = {}
        self._results: dict[str, OrtValue] = {}

    def bind_cpu_input(self, name: str, arr_on_cpu: Any) -> None:
        """Use an array as an input. Each run reads the array."""
        self._bind_input(name, np.asarray(arr_on_cpu))

    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Sequence[int], buffer_ptr: int
    ) -> None:
        """Use memory at an address as an input. The memory must stay valid and hold `shape` elements. A DLPack object
        is safer: pass `OrtValue.from_dlpack(object)` to `bind_ortvalue_input`."""
        driver = device_of(device_type, device_id)
        self._bind_input(name, _memory(element_type, shape, buffer_ptr, driver))

    def bind_ortvalue_input(self, name: str, ortvalue: OrtValue) -> None:
        """Use an OrtValue as an input."""
        self._bind_input(name, ortvalue if isinstance(ortvalue, OrtValue) else OrtValue(value_from_dlpack(ortvalue)))

    def bind_output(
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: Any = None,
        shape: Sequence[int] | None = None,
        buffer_ptr: int | None = None,
    ) -> None:
        """Request an output on a device. With `buffer_ptr`, `element_type` and `shape`, write it to that memory."""
        driver = device_of(device_type, device_id)
        _check_name("output", name, self._output_names)
        self._devices[name] = driver
        if buffer_ptr is None:
            self._outputs[name] = None
            return
        if element_type is None or shape is None:
            raise InvalidArgument(
                f"output {name!r} is bound to memory without a type or shape",
                "memory needs an element type and a shape",
                "pass element_type and shape",
            )
        self._outputs[name] = OrtValue(_memory(element_type, shape, buffer_ptr, driver))

    def bind_ortvalue_output(self, name: str, ortvalue: Any) -> None:
        """Write an output to an OrtValue."""
        _check_name("output", name, self._output_names)
        if not isinstance(ortvalue, OrtValue):
            kind = type(ortvalue).__name__
            raise InvalidArgument(
                f"output {name!r} is bound to a {kind}", "results are written to OrtValues", "pass an OrtValue"
            )
        self._outputs[name] = ortvalue

    def clear_binding_inputs(self) -> None:
        """Remove all bound inputs."""
        self._inputs.clear()

    def clear_binding_outputs(self) -> None:
        """Remove all bound outputs."""
        self._outputs.clear()
        self._devices.clear()
        self._results.clear()

    def synchronize_inputs(self) -> None:
        """Wait until other work finishes on the GPUs of bound inputs: it may be writing memory bound by address."""
        for driver in _drivers(self._inputs.values()):
            driver.settle()

    def synchronize_outputs(self) -> None:
        """Do nothing, because results are complete when a run returns."""

    def get_outputs(self) -> list[OrtValue]:
        """Return the results of the last run, in the order in which the outputs were bound."""
        return list(self._results.values())

    get_outputs_as_ortvaluevector = get_outputs

    def copy_outputs_to_cpu(self) -> list[Any]:
        """Return copies of the results of the last run."""
        found = on_host([value.value for value in self._results.values()])
        return [np.array(value) if isinstance(value, np.ndarray) else value for value in found]

    @property
    def output_names(self) -> list[str]:
        """The bound outputs, in order."""
        return list(self._outputs)

    def feed(self) -> dict[str, Any]:
        """Return the bound inputs."""
        return dict(self._inputs)

    def accept(self, names: Sequence[str], results: Sequence[Any]) -> None:
        """Store the results of a run. Raises InputError if a result does not fit the memory bound to its output."""
        self._results = {}
        wanted = [self._placed(name, result) for name, result in zip(names, results, strict=True)]
        for name, result in zip(names, on_host(wanted), strict=True):
            self._results[name] = result if isinstance(result, OrtValue) else OrtValue(result)
        for driver in _drivers(self._results.values()):
            driver.synchronize()
        for value in self._results.values():
            if isinstance(value.value, DeviceTensor):
                value.value.region.verify()

    def _placed(self, name: str, result: Any) -> Any:
        """Return a result as an OrtValue on its requested device, or unchanged if it must still be moved to the CPU."""
        bound, driver = self._outputs.get(name), self._devices.get(name)
        if bound is not None:
            bound.update_inplace(result)
            return bound
        if driver is None or (isinstance(result, DeviceTensor) and result.region.driver is driver):
            return result if driver is None else OrtValue(result)
        (array,) = on_host([result])
        return OrtValue(upload(driver, array) if isinstance(array, np.ndarray) and not array.dtype.hasobject else array)

    def _bind_input(self, name: str, value: Any) -> None:
        _check_name("input", name, self._input_names)
        self._inputs[name] = value


def _check_name(kind: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise InvalidArgument(
            f"failed to find {kind} {name!r}", f"the model's {kind}s are {', '.join(known)}", "use one of these names"
        )


def _drivers(values: Iterable[Any]) -> list[Driver]:
    """Return the devices that hold the values, without duplicates."""
    bare = [value.value if isinstance(value, OrtValue) else value for value in values]
    return list({id(one.region.driver): one.region.driver for one in bare if isinstance(one, DeviceTensor)}.values())


def _memory(element_type: Any, shape: Sequence[int], address: int, driver: Driver | None) -> Any:
    """Return an array over memory at an address that the caller guarantees to be valid."""
    dtype, count = element_dtype(element_type), math.prod(shape)
    # In some libraries, empty arrays have the address 0.
    if address < 0 or (address == 0 and count) or any(size < 0 for size in shape):
        raise InputError(
            f"address {address} cannot hold an array of shape {list(shape)}",
            "the address must point to valid memory",
            "pass array.ctypes.data",
        )
    if not count:
        return np.zeros(tuple(shape), dtype) if driver is None else empty(driver, shape, dtype)
    if driver is not None:
        nbytes = count * dtype.itemsize
        return DeviceTensor(Region(driver, driver.borrow(address, nbytes)), 0, shape, dtype)
    buffer = (ctypes.c_byte * (count * dtype.itemsize)).from_address(address)
    return np.frombuffer(memoryview(buffer), dtype, count).reshape(tuple(shape))


SessionIOBinding = IOBinding
