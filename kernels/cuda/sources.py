"""Kernels as source text: the includes of a file, the arguments of its kernels, and the instances of its templates.

A kernel has a single argument, which is a struct. The struct is declared only once, in the kernel's file; the host
reads the struct's layout from this file, and the compiler checks that both sizes agree. With a struct, the cost of a
launch does not depend on the number of fields.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np

# The C++ types of struct fields, with the corresponding NumPy types. Addresses are integers.
_TYPES = {"int": "i4", "float": "f4", "long long": "i8", "unsigned short": "u2", "unsigned char": "u1"}
_TYPES |= {"double": "f8", "unsigned": "u4", "unsigned long long": "u8"}
_STRUCT = re.compile(r"^struct (\w+) \{\n((?:  [^\n]*;\n)+)\};", re.MULTILINE)
_FIELD = re.compile(r"^  (?:const )?([\w ]+?)(\*?) (\w+)(?:\[(\d+)\])?;$", re.MULTILINE)
_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"\n', re.MULTILINE)


@dataclass(frozen=True)
class CudaKernel:
    """A kernel: a function template of a file with its template arguments.

    Attributes:
        file: name of the file, such as "norm.cu".
        function: instance of the template, such as "norm<true>".
        arguments: name of the argument struct.
        threads: number of threads of a block.
        blocks: number of blocks that must fit on a multiprocessor, which limits the registers; 0 = the compiler
            chooses.
        shared: bytes of dynamic shared memory of a block.
        capability: compute capability of the only GPUs that have the kernel's instructions, such as 90; 0 = all
            supported GPUs.
        early: True if the kernel itself waits for the preceding kernels, after it has requested weights.
    """

    file: str
    function: str
    arguments: str
    threads: int
    blocks: int = 0
    shared: int = 0
    capability: int = 0
    early: bool = False

    @property
    def name(self) -> str:
        """The kernel's name in a module, which is unique to the kernel."""
        return re.sub(r"\W+", "_", f"{self.file.removesuffix('.cu')}_{self.function}").strip("_")

    @property
    def layout(self) -> np.dtype[np.void]:
        """The layout of the argument struct on the host."""
        return structs(self.file)[self.arguments]

    @property
    def is_pointer(self) -> Mapping[str, bool]:
        """True for each field that is an address. Fields of nested structs are spelled "step.tables"."""
        return pointers(self.file)[self.arguments]


@cache
def text_of(file: str) -> str:
    """Return the content of a file of `src`."""
    return (files(__package__) / "src" / file).read_text(encoding="utf-8")


def source_of(kernels: Iterable[CudaKernel]) -> str:
    """Return one text that defines these kernels and contains each file and include only once."""
    wanted = sorted(set(kernels), key=lambda kernel: kernel.name)
    seen: set[str] = set()
    parts = [_with_includes(file, seen) for file in sorted({kernel.file for kernel in wanted})]
    return "".join([*parts, *map(_definition, wanted)])


def _definition(kernel: CudaKernel) -> str:
    macro, bounds = "EARLY_KERNEL" if kernel.early else "KERNEL", str(kernel.threads)
    if kernel.blocks:
        macro, bounds = f"BOUND_{macro}", f"{kernel.threads}, {kernel.blocks}"
    return f"{macro}({kernel.name}, {kernel.arguments}, {kernel.layout.itemsize}, {bounds}, {kernel.function})\n"


def modules(kernels: Iterable[CudaKernel], most: int = 1 << 30) -> list[tuple[str, list[CudaKernel]]]:
    """Return the texts to compile separately, with their kernels. Texts hold one file each, so files may share names.

    Args:
        kernels: the kernels.
        most: maximum number of kernels per text. Small texts compile in parallel, and other models can reuse them.
    """
    by_file: dict[str, list[CudaKernel]] = {}
    for kernel in sorted(set(kernels), key=lambda kernel: kernel.name):
        by_file.setdefault(kernel.file, []).append(kernel)
    parts = [ones[first : first + most] for ones in by_file.values() for first in range(0, len(ones), most)]
    return [(source_of(ones), ones) for ones in parts]


def _with_includes(file: str, seen: set[str]) -> str:
    if file in seen:
        return ""
    seen.add(file)
    text = text_of(file)
    before = "".join(_with_includes(name, seen) for name in _INCLUDE.findall(text))
    body = _INCLUDE.sub("", text).replace("#pragma once\n", "")
    return f'{before}#line 1 "{file}"\n{body}'


@cache
def structs(file: str) -> dict[str, np.dtype[np.void]]:
    """Return the structs that a file and its includes declare."""
    found: dict[str, np.dtype[np.void]] = {}
    for name, fields in _declared(file):
        members = []
        for kind, star, field, count in fields:
            dtype = np.dtype("u8") if star else found[kind] if kind in found else np.dtype(_TYPES[kind])
            members.append((field, dtype, (int(count),)) if count else (field, dtype))
        found[name] = np.dtype(members, align=True)
    return found


@cache
def pointers(file: str) -> dict[str, dict[str, bool]]:
    """Return the fields of every struct, including those of nested structs, with True for addresses."""
    found: dict[str, dict[str, bool]] = {}
    for name, fields in _declared(file):
        own: dict[str, bool] = {}
        for kind, star, field, _ in fields:
            if kind in found and not star:
                own |= {f"{field}.{inner}": is_address for inner, is_address in found[kind].items()}
            else:
                own[field] = bool(star)
        found[name] = own
    return found


@cache
def _declared(file: str) -> list[tuple[str, list[tuple[str, str, str, str]]]]:
    """Return the structs that hold only data, in order, with their fields: type, "*" or "", name, count or ""."""
    return [
        (name, _FIELD.findall(body))
        for name, body in _STRUCT.findall(_with_includes(file, set()))
        if len(_FIELD.findall(body)) == body.count("\n")
    ]
