"""Files of torch.save: tensors are read, and nothing is executed."""

from __future__ import annotations

import io
import os
import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genai
from genai.weight_files.torch_file import TorchFile, read_torch
from tests.embed.conftest import MODELS


class Storage:
    """Written as torch.save writes the storage of a tensor."""

    def __init__(self, key: str, count: int, kind: str = "FloatStorage") -> None:
        self.key, self.count, self.kind = key, count, kind


class Name:
    """Written as a name that the program imports."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name


class Call:
    """Written as a call of a name."""

    def __init__(self, function: Name, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments


class _Writer(pickle._Pickler):
    """The Python pickler, which writes names that cannot be imported here."""

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, Storage):
            return ("storage", Name("torch", obj.kind), obj.key, "cpu", obj.count)
        return None

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if isinstance(obj, Name):
            self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
        elif isinstance(obj, Call):
            self.save(obj.function)
            self.save(obj.arguments)
            self.write(pickle.REDUCE)
        else:
            super().save(obj, save_persistent_id)  # type: ignore[misc]


def tensor(key: str, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0, count: int = 12) -> Call:
    rebuild = Name("torch._utils", "_rebuild_tensor_v2")
    return Call(rebuild, Storage(key, count), offset, shape, strides, False, Call(Name("collections", "OrderedDict")))


def program(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Writer(buffer, 2).dump(value)
    return buffer.getvalue()


def archive(path: Path, data: bytes, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        file.writestr("archive/data.pkl", data)
        file.writestr("archive/byteorder", members.pop("byteorder", b"little"))
        for name, content in members.items():
            file.writestr(f"archive/data/{name.removeprefix('m')}", content)
    return path


NUMBERS = np.arange(12, dtype=np.float32)


def test_tensors(tmp_path: Path) -> None:
    value = {
        "rows": tensor("0", (3, 4), (4, 1)),
        "columns": tensor("0", (4, 3), (1, 4)),
        "part": tensor("0", (2, 2), (4, 1), offset=5),
        "parameter": Call(Name("torch._utils", "_rebuild_parameter"), tensor("0", (12,), (1,)), True, None),
        "scalar": tensor("0", (), (), offset=3),
        "empty": tensor("0", (0, 4), (4, 1)),
        "epoch": 3,
    }
    file = TorchFile(archive(tmp_path / "a.pt", program(value), m0=NUMBERS.tobytes()))
    grid = NUMBERS.reshape(3, 4)
    assert set(file.tensors) == set(value) - {"epoch"}
    np.testing.assert_array_equal(file.read("rows"), grid)
    np.testing.assert_array_equal(file.read("columns"), grid.T)
    np.testing.assert_array_equal(file.read("part"), grid[1:, 1:3])
    np.testing.assert_array_equal(file.read("parameter"), NUMBERS)
    assert file.read("scalar") == 3 and file.read("scalar").shape == () and file.read("empty").shape == (0, 4)


def test_a_file_of_pytorch() -> None:
    found = read_torch(MODELS / "bge_m3" / "colbert_linear.pt")
    assert {name: array.shape for name, array in found.items()} == {"weight": (16, 24), "bias": (16,)}


class _Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [0, 1, 2, 4, 5])
def test_nothing_is_executed(protocol: int, tmp_path: Path) -> None:
    target = tmp_path / "made"
    data = pickle.dumps({"weight": _Attack(target)}, protocol)
    pickle.loads(data)
    target.rmdir()  # the program does what it says, if it is run
    with pytest.raises(genai.InputError, match=r"which no dict of tensors needs"):
        TorchFile(archive(tmp_path / "a.pt", data))
    assert not target.exists()


def eval_call() -> Any:
    return {"w": Call(Name("builtins", "eval"), "1")}


def negated() -> Call:
    """Return a tensor with the bit that negates all its numbers when they are read."""
    plain = tensor("0", (12,), (1,))
    return Call(plain.function, *plain.arguments, {"neg": True})


def twice(path: Path) -> None:
    """Write an archive with two members of one name, of which readers choose different ones."""
    archive(path, program({"a": tensor("0", (12,), (1,))}), m0=NUMBERS.tobytes())
    with warnings.catch_warnings(), zipfile.ZipFile(path, "a") as file:
        warnings.simplefilter("ignore")
        file.writestr("archive/data/0", np.zeros(12, np.float32).tobytes())


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda p: p.write_bytes(b"PK\3\4 and no archive"), "not an archive of PyTorch"),
        (lambda p: archive(p, program(eval_call())), "it would call builtins.eval"),
        (lambda p: archive(p, program([1, 2])), "does not contain a dict of tensors"),
        (lambda p: archive(p, program({"a": 1})), "does not contain a dict of tensors"),
        (lambda p: archive(p, program({"a": tensor("0", (3, 5), (5, 1))}), m0=NUMBERS.tobytes()), "outside its 12"),
        (lambda p: archive(p, program({"a": tensor("0", (3, 4), (-4, 1))}), m0=NUMBERS.tobytes()), "the strides"),
        (lambda p: archive(p, program({"a": tensor("0", (1,) * 70, (1,) * 70)}), m0=NUMBERS.tobytes()), "the shape"),
        (lambda p: archive(p, program({"a": tensor("0", (2**61, 2**61), (0, 0))}), m0=NUMBERS.tobytes()), "the shape"),
        (lambda p: archive(p, program({"a": tensor("0", (12,), (1,))}), m0=b"short"), "missing, compressed or cut"),
        (lambda p: archive(p, program({"a": tensor("7", (12,), (1,))}), m0=NUMBERS.tobytes()), "missing, compressed"),
        (lambda p: archive(p, program({"a": tensor("0", (12,), (1,))})[:-9], m0=NUMBERS.tobytes()), r"malformed|cut"),
        (lambda p: archive(p, b"\x80\x02}q\x00.", byteorder=b"big"), "byte order"),
        (lambda p: archive(p, b"\x80\x02h\x05."), "malformed"),
        (lambda p: archive(p, b"\x80\x02N(u."), "malformed"),
        (lambda p: archive(p, b"\x80\x02K\x01K\x02R."), "malformed"),
        (lambda p: archive(p, program({"a": negated()}), m0=NUMBERS.tobytes()), "a tensor has the properties"),
        (twice, "a name occurs twice"),
        (lambda p: p.mkdir(), "cannot be read"),
    ],
)  # fmt: skip
def test_malformed_files(write: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    write(path)
    with pytest.raises(genai.InputError, match=message):
        TorchFile(path)


def test_every_cut_is_an_error(tmp_path: Path) -> None:
    whole = (MODELS / "bge_m3" / "sparse_linear.pt").read_bytes()
    path = tmp_path / "a.pt"
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises(genai.InputError):
            TorchFile(path)
