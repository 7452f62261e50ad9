"""Kernels as source text: what a file includes, which arguments its kernels take, and how one is made from a template.

A kernel takes one struct. It is declared once, in its file; its layout for the host is read from there, and the
compiler checks that both agree in size. So a launch costs the same however many arguments there are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np

# What structs are made of, and how the host sees it: addresses are integers.
_TYPES = {"int": "i4", "float": "f4", "long long": "i8", "unsigned short": "u2", "unsigned char": "u1"}
_TYPES |= {"double": "f8", "unsigned": "u4", "unsigned long long": "u8"}
_STRUCT = re.compile(r"^struct (\w+) \{\n((?:  [^\n]*;\n)+)\};", re.MULTILINE)
_FIELD = re.compile(r"^  (?:const )?([\w ]+?)(\*?) (\w+)(?:\[(\d+)\])?;$", re.MULTILINE)
_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"\n', re.MULTILINE)


@dataclass(frozen=True)
class CudaKernel:
    """A kernel: a function template of a file with its arguments filled in.

    Attributes:
        file: such as "norm.cu". function: such as "norm<true>". arguments: name of its struct.
        threads: of a block.
        blocks: so many shall fit on a multiprocessor, which bounds the registers; 0 = the compiler chooses.
        shared: bytes of dynamic shared memory of a block.
        capability: of the only GPUs that have its instructions, such as 90; 0 = all that the toolkit runs on.
        early: it waits for the kernels before it itself, once it has asked for weights.
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
        """What it is called in a module, different for every kernel."""
        return re.sub(r"\W+", "_", f"{self.file.removesuffix('.cu')}_{self.function}").strip("_")

    @property
    def layout(self) -> np.dtype[np.void]:
        """Its struct as the host sees it."""
        return structs(self.file)[self.arguments]

    @property
    def is_pointer(self) -> Mapping[str, bool]:
        """Which of the fields, those of structs inside spelled "step.tables", are addresses."""
        return pointers(self.file)[self.arguments]


@cache
def text_of(file: str) -> str:
    """The content of a file of `src`."""
    return (files(__package__) / "src" / file).read_text(encoding="utf-8")


def source_of(kernels: Iterable[CudaKernel]) -> str:
    """One text that makes all these kernels, every file and what it includes once."""
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
    """What is compiled on its own, with the kernels in it: a text per file, so that files may use the same names.

    Args:
        most: kernels of a text; few are compiled side by side, and found again by whoever needs others besides.
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
    """The structs that a file and those that it includes declare."""
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
    """Of every struct the fields, those of structs inside it as well, and whether they are addresses."""
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
    """Structs that hold data and nothing else, in order, with their fields: type, "*" or "", name, count or ""."""
    return [
        (name, _FIELD.findall(body))
        for name, body in _STRUCT.findall(_with_includes(file, set()))
        if len(_FIELD.findall(body)) == body.count("\n")
    ]
