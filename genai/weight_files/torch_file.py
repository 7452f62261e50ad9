"""Tensors of a file written by torch.save, read without running the pickle that the file contains.

Such a file is a ZIP archive with the numbers of each tensor and with `data.pkl`, a program for the pickle machine that
builds the dict of tensors. Running a pickle can run any code. This module does not run it: it interprets the few
operations that torch.save writes for a dict of tensors, which create only dicts, lists, tuples, numbers, texts and
descriptions of tensors. Any other operation, and any other name that the program imports, is an error.
"""

from __future__ import annotations

import math
import pickletools
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..common.reading import MOST_DIMENSIONS, is_addressable, pointer_error
from ..errors import InputError

_DTYPES: dict[str, Any] = {
    "DoubleStorage": np.float64,
    "FloatStorage": np.float32,
    "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
    "ShortStorage": np.int16,
    "CharStorage": np.int8,
    "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
}
# The program of the largest checkpoints has a few hundred kilobytes.
_MOST_PROGRAM_BYTES = 1 << 26
_LOCAL_HEADER = 30


@dataclass(frozen=True)
class _Global:
    """A name that the program imports."""

    name: str


@dataclass(frozen=True)
class _Storage:
    """The numbers of a tensor: the member of the archive, and their type and count."""

    key: str
    dtype: np.dtype[Any]
    count: int


@dataclass(frozen=True)
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class TorchFile:
    """The tensors of a file written by torch.save, by name. Reading a contiguous tensor maps its bytes without a copy.

    Raises:
        InputError: the file cannot be read, has the format of PyTorch before 1.6, or contains more than tensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive:
                members = {info.filename: info for info in archive.infolist()}
                if len(members) < len(archive.infolist()):
                    raise _malformed(path, "a name occurs twice in the archive")
                (program,) = [name for name in members if name.endswith("/data.pkl")] or [""]
                if not program:
                    raise _malformed(path, "the archive has no data.pkl")
                if members[program].file_size > _MOST_PROGRAM_BYTES:
                    raise _malformed(path, f"data.pkl has more than {_MOST_PROGRAM_BYTES} bytes")
                folder = program.removesuffix("data.pkl")
                order = archive.read(folder + "byteorder") if folder + "byteorder" in members else b"little"
                found = _interpret(path, archive.read(program))
        except InputError:
            raise
        except OSError as error:
            raise InputError(
                f"{path}: the file cannot be read", str(error), "check the file and its permissions"
            ) from error
        except (zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError) as error:
            raise _malformed(path, f"it is not an archive of PyTorch 1.6 or later ({error})") from error
        if order != b"little":
            raise _malformed(path, f"its byte order is {order[:20]!r}; only little is supported")
        if not isinstance(found, dict):
            raise _malformed(path, "it does not contain a dict of tensors")
        self.tensors: Mapping[str, _Tensor] = {
            name: tensor for name, tensor in found.items() if isinstance(name, str) and isinstance(tensor, _Tensor)
        }
        if not self.tensors:
            raise _malformed(path, "it does not contain a dict of tensors")
        self._bytes = np.memmap(path, np.uint8, "r")
        self._starts = {name: self._start(members, folder, tensor.storage) for name, tensor in self.tensors.items()}

    def read(self, name: str) -> NDArray[Any]:
        """Return a tensor: a view of the file if the tensor is contiguous, else a copy."""
        tensor = self.tensors[name]
        dtype, start = tensor.storage.dtype, self._starts[name]
        whole = self._bytes[start : start + tensor.storage.count * dtype.itemsize].view(dtype)[tensor.offset :]
        if tensor.strides == _contiguous(tensor.shape):
            view: NDArray[Any] = whole[: math.prod(tensor.shape)].reshape(tensor.shape)
            return view
        strides = [stride * dtype.itemsize for stride in tensor.strides]
        return np.ascontiguousarray(np.lib.stride_tricks.as_strided(whole, tensor.shape, strides, writeable=False))

    def _start(self, members: Mapping[str, zipfile.ZipInfo], folder: str, storage: _Storage) -> int:
        """Return the first byte of a storage in the file."""
        info = members.get(f"{folder}data/{storage.key}")
        size = storage.count * storage.dtype.itemsize
        if info is None or info.compress_type != zipfile.ZIP_STORED or info.file_size != size:
            raise _malformed(self.path, f"the numbers {storage.key!r:.40} are missing, compressed or cut off")
        header = self._bytes[info.header_offset : info.header_offset + _LOCAL_HEADER]
        if len(header) < _LOCAL_HEADER:
            raise _malformed(self.path, "it is cut off")
        names = int.from_bytes(header[26:28].tobytes(), "little") + int.from_bytes(header[28:30].tobytes(), "little")
        start = info.header_offset + _LOCAL_HEADER + names
        if start + size > len(self._bytes):
            raise _malformed(self.path, "it is cut off")
        return start


def read_torch(path: Path) -> dict[str, NDArray[Any]]:
    """Return copies of all tensors of a small file. Raises InputError; see TorchFile."""
    file = TorchFile(path)
    return {name: np.array(file.read(name)) for name in file.tensors}


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _malformed(path: Path, why: str) -> InputError:
    return pointer_error(path, InputError) or InputError(
        f"{path}: the tensors cannot be read", why, "download the file again, or save the tensors as safetensors"
    )


# --- the program -----------------------------------------------------------------------------------------------------


class _Machine:
    """The state of the pickle machine: a stack, the positions of marks, and the memo."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def since_mark(self) -> list[Any]:
        """Remove and return the items after the last mark."""
        first = self.marks.pop()
        items = self.stack[first:]
        del self.stack[first:]
        return items

    def pop(self, count: int) -> list[Any]:
        """Remove and return the last items."""
        if count > len(self.stack):
            raise IndexError("the stack is empty")
        items = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return items


def _interpret(path: Path, program: bytes) -> Any:
    """Return the object that a program describes, with tensors as descriptions."""
    machine = _Machine(path)
    try:
        for operation, argument, _ in pickletools.genops(program):
            if operation.name == "STOP":
                return machine.stack[-1]
            if operation.name in _PUSHES:
                machine.stack.append(_PUSHES[operation.name](argument))
            elif operation.name in _STEPS:
                _STEPS[operation.name](machine, argument)
            else:
                raise _malformed(path, f"data.pkl has the operation {operation.name}, which no dict of tensors needs")
    except (IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise _malformed(path, f"data.pkl is malformed ({type(error).__name__}: {error})") from error
    raise _malformed(path, "data.pkl is cut off")


def _constant(argument: Any) -> Any:
    return argument


_PUSHES: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(
        ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "INT"), _constant
    ),
    "NONE": lambda _: None,
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
    "EMPTY_DICT": lambda _: {},
    "EMPTY_LIST": lambda _: [],
    "EMPTY_TUPLE": lambda _: (),
    "GLOBAL": lambda argument: _Global(argument.replace(" ", ".")),
}


def _mark(machine: _Machine, _: Any) -> None:
    machine.marks.append(len(machine.stack))


def _put(machine: _Machine, argument: Any) -> None:
    machine.memo[len(machine.memo) if argument is None else argument] = machine.stack[-1]


def _get(machine: _Machine, argument: Any) -> None:
    machine.stack.append(machine.memo[argument])


def _tuple(machine: _Machine, _: Any) -> None:
    machine.stack.append(tuple(machine.since_mark()))


def _tuple_of(count: int) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.stack.append(tuple(machine.pop(count)))


def _set_items(machine: _Machine, _: Any) -> None:
    items = machine.since_mark()
    target = machine.stack[-1]
    if not isinstance(target, dict):
        raise TypeError("items of an object that is not a dict")
    target.update(zip(items[::2], items[1::2], strict=True))


def _set_item(machine: _Machine, _: Any) -> None:
    key, value = machine.pop(2)
    target = machine.stack[-1]
    if not isinstance(target, dict):
        raise TypeError("an item of an object that is not a dict")
    target[key] = value


def _append(machine: _Machine, _: Any) -> None:
    (value,) = machine.pop(1)
    _list(machine).append(value)


def _appends(machine: _Machine, _: Any) -> None:
    items = machine.since_mark()
    _list(machine).extend(items)


def _list(machine: _Machine) -> list[Any]:
    target = machine.stack[-1]
    if not isinstance(target, list):
        raise TypeError("items of an object that is not a list")
    return target


def _storage(machine: _Machine, _: Any) -> None:
    ((kind, type_, key, _, count),) = machine.pop(1)
    name = type_.name.removeprefix("torch.")
    if kind != "storage" or name not in _DTYPES or not isinstance(key, str) or not _is_count(count):
        raise _malformed(machine.path, f"it has numbers of the type {type_.name}, which is not supported")
    machine.stack.append(_Storage(key, np.dtype(_DTYPES[name]), count))


def _reduce(machine: _Machine, _: Any) -> None:
    function, arguments = machine.pop(2)
    match function.name:
        case "collections.OrderedDict":
            machine.stack.append(dict(*arguments))
        case "torch._utils._rebuild_tensor_v2" | "torch._utils._rebuild_tensor":
            if len(arguments) > 6 and arguments[6]:  # for example a bit that negates all numbers
                raise _malformed(machine.path, f"a tensor has the properties {arguments[6]!r:.100}, not only numbers")
            machine.stack.append(_checked(machine.path, *arguments[:4]))
        case "torch._utils._rebuild_parameter":
            machine.stack.append(arguments[0])
        case name:
            raise _malformed(machine.path, f"it would call {name}, which no dict of tensors needs")


def _checked(path: Path, storage: Any, offset: Any, shape: Any, strides: Any) -> _Tensor:
    """Return a tensor all of whose numbers are inside its storage."""
    numbers = [offset, *shape, *strides]
    fits = isinstance(storage, _Storage) and all(map(_is_count, numbers)) and len(shape) == len(strides)
    if not fits or len(shape) > MOST_DIMENSIONS or not is_addressable(shape, storage.dtype.itemsize):
        raise _malformed(path, f"a tensor has the shape {shape!r:.100} and the strides {strides!r:.100}")
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if math.prod(shape) and last >= storage.count:
        raise _malformed(path, f"a tensor of shape {list(shape)} has numbers outside its {storage.count} numbers")
    return _Tensor(storage, offset, tuple(shape), tuple(strides))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _build(machine: _Machine, _: Any) -> None:
    machine.pop(1)  # attributes of a dict, such as _metadata of a state_dict


_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": lambda machine, _: None,
    "MARK": _mark,
    "BINPUT": _put,
    "LONG_BINPUT": _put,
    "MEMOIZE": _put,
    "BINGET": _get,
    "LONG_BINGET": _get,
    "TUPLE": _tuple,
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "SETITEM": _set_item,
    "SETITEMS": _set_items,
    "APPEND": _append,
    "APPENDS": _appends,
    "BINPERSID": _storage,
    "REDUCE": _reduce,
    "BUILD": _build,
}
