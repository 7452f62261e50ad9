"""A linker of the object files that LLVM writes for x86-64 Linux: kernels on disk are loaded without loading LLVM.

LLVM's library takes 40 MB of memory and 0.1 seconds to load. Kernels use the large code model, so an object has only
relocations of 64 bits, and needs no table of addresses. Objects with anything else are left to LLVM.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import struct
import sys
from dataclasses import dataclass
from typing import Any

_HEADER = b"\x7fELF\x02\x01\x01"  # 64 bits, little-endian, version 1
_RELOCATABLE, _X86_64 = 1, 62
# Types of sections.
_PROGBITS, _SYMTAB, _RELA, _NOBITS, _REL = 1, 2, 4, 8, 9
_WRITE, _ALLOC, _TLS = 1, 2, 1 << 10
_SECTION, _SYMBOL, _RELOCATION = struct.Struct("<IIQQQQIIQQ"), struct.Struct("<IBBHQQ"), struct.Struct("<QQq")
# Indices of sections that a symbol has if it is undefined, or an absolute number; other reserved indices follow.
_UNDEFINED, _ABSOLUTE, _RESERVED = 0, 0xFFF1, 0xFF00
_ADDRESS, _DISTANCE = 1, 24
_READ_EXECUTE = 5


class _Unsupported(Exception):
    pass


@dataclass(frozen=True)
class _Section:
    name: int
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    entry_size: int

    @property
    def is_placed(self) -> bool:
        """True if the section is a part of the code. Tables for unwinding are not, because no kernel raises."""
        return bool(self.flags & _ALLOC) and self.type in (_PROGBITS, _NOBITS)


@dataclass(frozen=True)
class LinkedCode:
    """Machine code, which stays in memory as long as this object exists, and the address of its entry."""

    memory: Any
    address: int


def link(content: bytes, entry: str) -> LinkedCode | None:
    """Link an object file; return None unless this linker supports the file and the machine.

    Args:
        content: the object file. Whoever could have written it can run code, so it must come from a trusted folder.
        entry: name of the function whose address is returned.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return None
    try:
        return _Object(content).linked(entry)
    except (_Unsupported, struct.error, IndexError, UnicodeDecodeError, OSError, OverflowError, ValueError):
        return None


class _Object:
    def __init__(self, content: bytes) -> None:
        self._content = content
        kind, machine = struct.unpack_from("<HH", content, 16)
        if not content.startswith(_HEADER) or (kind, machine) != (_RELOCATABLE, _X86_64):
            raise _Unsupported
        (start,), (size, count) = struct.unpack_from("<Q", content, 40), struct.unpack_from("<HH", content, 58)
        self._sections = [_Section(*_SECTION.unpack_from(content, start + size * index)) for index in range(count)]
        tables = [section for section in self._sections if section.type == _SYMTAB]
        if len(tables) != 1 or any(section.type == _REL for section in self._sections):
            raise _Unsupported
        self._symbols = [_SYMBOL.unpack_from(content, at) for at in self._entries(tables[0], _SYMBOL.size)]
        names = self._sections[tables[0].link]
        self._names = content[names.offset : names.offset + names.size]

    def _entries(self, section: _Section, size: int) -> range:
        if section.offset + section.size > len(self._content):
            raise _Unsupported
        return range(section.offset, section.offset + section.size - size + 1, size)

    def linked(self, entry: str) -> LinkedCode:
        """Place the sections, write the addresses, and make the memory executable."""
        places, total = self._placed()
        memory = mmap.mmap(-1, max(total, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for index, place in places.items():
            section = self._sections[index]
            if section.type == _PROGBITS:
                found = self._content[section.offset : section.offset + section.size]
                if len(found) != section.size:
                    raise _Unsupported
                memory[place : place + section.size] = found
        addresses = {index: base + place for index, place in places.items()}
        for section in self._sections:
            if section.type == _RELA and section.info in places:
                self._relocate(memory, base, section, addresses)
        starts = [self._address(symbol, addresses) for symbol in self._symbols if self._name(symbol) == entry]
        library = ctypes.CDLL(None, use_errno=True)
        if len(starts) != 1 or library.mprotect(ctypes.c_void_p(base), ctypes.c_size_t(total), _READ_EXECUTE):
            raise _Unsupported
        return LinkedCode(memory, starts[0])

    def _placed(self) -> tuple[dict[int, int], int]:
        """Return the offset of each section in memory, and the size of the memory."""
        places, total = {}, 0
        for index, section in enumerate(self._sections):
            if section.is_placed and section.size:
                if section.flags & (_WRITE | _TLS) or section.align > mmap.PAGESIZE:
                    raise _Unsupported
                total = -(-total // max(section.align, 1)) * max(section.align, 1)
                places[index] = total
                total += section.size
        return places, total

    def _relocate(self, memory: Any, base: int, section: _Section, addresses: dict[int, int]) -> None:
        limit = self._sections[section.info].size
        for at in self._entries(section, _RELOCATION.size):
            offset, info, addend = _RELOCATION.unpack_from(self._content, at)
            if offset + 8 > limit:
                raise _Unsupported
            place = addresses[section.info] + offset
            value = self._address(self._symbols[info >> 32], addresses) + addend
            kind = info & 0xFFFFFFFF
            if kind not in (_ADDRESS, _DISTANCE):
                raise _Unsupported
            number = value if kind == _ADDRESS else value - place
            struct.pack_into("<Q", memory, place - base, number & 0xFFFFFFFFFFFFFFFF)

    def _name(self, symbol: tuple[int, ...]) -> str:
        return self._names[symbol[0] : self._names.index(b"\0", symbol[0])].decode()

    def _address(self, symbol: tuple[int, ...], addresses: dict[int, int]) -> int:
        _, _, _, section, value, _ = symbol
        if section == _ABSOLUTE:
            return value
        if section == _UNDEFINED:
            return _function_of_process(self._name(symbol))
        if section >= _RESERVED or section not in addresses:
            raise _Unsupported
        return addresses[section] + value


def _function_of_process(name: str) -> int:
    """Return the address of a function of the C library."""
    try:
        found = getattr(ctypes.CDLL(None), name)
    except AttributeError:
        raise _Unsupported from None
    return ctypes.cast(found, ctypes.c_void_p).value or 0
