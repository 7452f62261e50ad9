"""Arrays for trying out a session: inputs from files or random, results to files, comparison with onnxruntime."""

from __future__ import annotations

import lzma
import os
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from copy import copy
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ..common.atomic_files import whole_file
from ..errors import GenaiError, InputError, MissingPackageError
from ..onnx.ir import Value
from ..onnx.types import DataType, TensorType
from .arguments import shape_of
from .dimensions import Sizes, dim_name

# Whole numbers are often indices or token ids, so random whole numbers are small.
_MAX_INTEGER = 10
_MAX_ELEMENTS = 1 << 28
# The number of inputs that an error lists.
_INPUTS_SHOWN = 6
# The first bytes of NumPy's files.
_NPY, _ZIP = b"\x93NUMPY", b"PK"
# Exceptions that NumPy and zipfile raise for damaged files: a shape can need more memory than exists or overflow an
# integer, and an archive can be encrypted or compressed in an unsupported way.
_UNREADABLE = (
    OSError, ValueError, EOFError, ArithmeticError, MemoryError, RuntimeError, zipfile.BadZipFile, zlib.error,
    lzma.LZMAError,
)  # fmt: skip


def load_arrays(path: Path) -> dict[str, Any]:
    """Return arrays by name from an .npz file, or one array named after an .npy file. Pickled objects are refused.

    Raises:
        InputError: the file is missing, or is not an .npy or .npz file.
    """
    try:
        with path.open("rb") as file:
            start = file.read(len(_NPY))
        if start != _NPY and not start.startswith(_ZIP):
            # np.load would treat any other file as a pickle, and advise opening it with pickles allowed.
            raise InputError(
                f"{str(path)!r} is neither an .npy nor an .npz file: it begins with {start!r}",
                "an .npy file begins with \\x93NUMPY, and an .npz file begins with PK",
                "write the file with np.save(path, array) or np.savez(path, name=array)",
            )
        found = np.load(path, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return {path.stem: found}
        with found:
            return {name: found[name] for name in found.files}
    except InputError:
        raise
    except FileNotFoundError as error:
        raise InputError(
            f"{str(path)!r} cannot be read as arrays", "the file does not exist", "check the path"
        ) from error
    except _UNREADABLE as error:
        raise InputError(
            f"{str(path)!r} cannot be read as arrays: {_reason(error)}",
            "an input file must be an intact .npy or .npz file",
            "write the file with np.savez",
        ) from error


def _reason(error: Exception) -> str:
    """Return the reason why NumPy could not read a file, without NumPy's advice to allow pickles."""
    text = str(error)
    return "it contains Python objects, which are not loaded" if "pickle" in text else text


def save_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write results to an .npz file: strings as text, and types that NumPy does not have as float32.

    Raises:
        InputError: a result is not an array, or the file cannot be written.
    """
    plain: dict[str, Any] = {}
    for name, value in arrays.items():
        if not isinstance(value, np.ndarray):
            raise InputError(
                f"output {name!r} is a {type(value).__name__}", "an .npz file can contain only arrays", "omit --output"
            )
        if value.dtype.kind == "O":
            value = value.astype(np.str_)
        plain[name] = value if value.dtype.isbuiltin == 1 or value.dtype.kind == "U" else value.astype(np.float32)
    try:
        with whole_file(path) as file:
            np.savez(file, **plain)
    except OSError as error:
        raise InputError(
            f"{str(path)!r} cannot be written: {error}",
            "the operating system could not write the file",
            "check the path and its permissions",
        ) from error


def random_feed(
    inputs: Sequence[Value],
    sizes: Mapping[str, int] | Sizes,
    seed: int = 0,
    tables: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Return random inputs: normally distributed floats, small whole numbers, and ones for masks.

    A mask is an input whose name contains "mask". Indices of a table, such as token types, are less than its size.

    Args:
        sizes: sizes of symbolic dimensions, and of unnamed dimensions as "INPUT:AXIS"; others get size 1. Sizes that
            depend on other inputs are a Sizes object.
        tables: sizes of the tables that inputs are indices of, by input name; see `Session.table_sizes`.

    Raises:
        InputError: an input is not a tensor, or would be too large.
        OptionError: see Sizes.
    """
    known = sizes if isinstance(sizes, Sizes) else Sizes(inputs, sizes)
    generator = np.random.default_rng(seed)
    limits = tables or {}
    return {
        value.name: _random(value, known, generator, min(_MAX_INTEGER, limits.get(value.name, _MAX_INTEGER)))
        for value in inputs
    }


def _random(value: Value, sizes: Sizes, generator: np.random.Generator, limit: int) -> Any:
    name, known = value.name, value.type
    if not isinstance(known, TensorType):
        raise InputError(
            f"input {name!r} is {known or 'untyped'}",
            "random values can be generated only for tensors",
            "pass the inputs in a file: --input FILE",
        )
    dtype = known.dtype
    shape = tuple(
        dim if isinstance(dim, int) else sizes[dim_name(value, axis)] for axis, dim in enumerate(shape_of(value))
    )
    if np.prod([float(extent) for extent in shape]) > _MAX_ELEMENTS:
        raise InputError(
            f"input {name!r} would have shape {list(shape)}",
            "this shape is too large for random values",
            "set smaller dimensions with --dim NAME=SIZE",
        )
    if dtype is DataType.STRING:
        return np.full(shape, "text", dtype=object)
    target = dtype.numpy_dtype
    if target.kind in "iu" or dtype.is_sub_byte:
        values = np.ones(shape) if "mask" in name else generator.integers(0, limit, shape) % 2 ** min(dtype.bits - 1, 8)
        return values.astype(target)
    if target.kind == "b":
        return np.ones(shape, bool) if "mask" in name else generator.random(shape) < 0.5
    return generator.standard_normal(shape).astype(np.float32).astype(target)


def with_chosen_sizes(error: GenaiError, inputs: Sequence[Value], feed: Mapping[str, Any], sizes: Sizes) -> GenaiError:
    """Return a copy of an error of a run on random inputs, which names the sizes that were chosen without the user.

    Args:
        error: the error.
        inputs: the inputs that have random values.
        feed: arrays by input name.
        sizes: the sizes of their dimensions.
    """
    shapes = ", ".join(f"{value.name} {list(feed[value.name].shape)}" for value in inputs[:_INPUTS_SHOWN])
    shapes += f" and {len(inputs) - _INPUTS_SHOWN} more" * (len(inputs) > _INPUTS_SHOWN)
    chosen = ", ".join(f"{name}={size}" for name, size in sizes.chosen.items())
    made = copy(error)
    made.args = made.what, made.why, made.fix = (
        f"the model cannot run on these random inputs: {error.what}",
        f"the random inputs are {shapes}{f', with the sizes {chosen}' if chosen else ''}; {error.why}",
        "set sizes that fit together with --dim NAME=SIZE, or pass inputs whose values the model accepts in files",
    )
    return made


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """Return (output, maximum absolute difference, that difference / the peer's maximum), the largest ratio first.

    The difference between outputs of different shapes, types or kinds is infinite; equal infinities and NaNs are equal.
    """
    found = [(name, *_difference(value, theirs[name])) for name, value in ours.items()]
    return sorted(found, key=lambda item: -item[2])


def _difference(a: Any, b: Any) -> tuple[float, float]:
    if not isinstance(a, np.ndarray) or not isinstance(b, np.ndarray):
        equal = _plain(a) == _plain(b)
        return (0.0, 0.0) if equal else (np.inf, np.inf)
    if a.shape != b.shape or a.dtype != b.dtype:
        return np.inf, np.inf
    if a.dtype.kind == "O":
        return (0.0, 0.0) if a.tolist() == b.tolist() else (np.inf, np.inf)
    first, second = a.astype(np.float64), b.astype(np.float64)
    same = (first == second) | (np.isnan(first) & np.isnan(second))
    with np.errstate(invalid="ignore"):
        gap = np.where(same, 0.0, np.abs(first - second))
    gap = np.where(np.isnan(gap), np.inf, gap)
    largest = float(gap.max(initial=0.0))
    finite = np.abs(second[np.isfinite(second)])
    return largest, largest / max(float(finite.max(initial=0.0)), 1e-30) if largest else 0.0


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return {key: round(float(item), 4) for key, item in value.items()} if isinstance(value, dict) else value


PEERS = ("onnxruntime",)


def peer_module() -> Any:
    """Return the module onnxruntime.

    Raises:
        MissingPackageError: onnxruntime is not installed.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        return import_module("onnxruntime")
    except ImportError as error:
        raise MissingPackageError(
            "a comparison with onnxruntime needs the package onnxruntime, which is not installed",
            str(error),
            "run pip install onnxruntime",
        ) from error


class Peer:
    """The same model in onnxruntime. Raises MissingPackageError or InputError."""

    def __init__(self, source: Any, threads: int = 0) -> None:
        module = peer_module()
        options = module.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads
        try:
            self._session = module.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise InputError("onnxruntime cannot load the model", f"{error!s:.300}", "compare another model") from error

    def run(self, feed: Mapping[str, Any]) -> dict[str, Any]:
        """Return the outputs by name."""
        try:
            values = self._session.run(None, dict(feed))
        except Exception as error:
            raise InputError(
                "onnxruntime cannot run the model on these inputs", f"{error!s:.300}", "try other inputs"
            ) from error
        return dict(zip((item.name for item in self._session.get_outputs()), values, strict=True))
