"""Cuts the bytes of large initializers out of a model's file before protobuf reads it.

Protobuf holds a file's bytes and copies each field out of them: a model with its weights inside would take its size
three times. So the file is mapped and walked by the lengths of its fields (three messages deep: model, graph, tensor),
and protobuf gets what is left.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import NamedTuple

_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
# Tensors below this stay where they are.
SMALLEST = 1 << 16

Data = bytes | mmap.mmap


class Field(NamedTuple):
    """A field of a message: its number and kind, where it begins, where its contents begin and end."""

    number: int
    kind: int
    begin: int
    first: int
    end: int


class _Odd(Exception):
    """Not what a writer of models writes; protobuf is to judge."""


def cut_large_tensors(data: Data, smallest: int = SMALLEST) -> tuple[bytes, dict[int, tuple[int, int]]] | None:
    """A model without the raw data of its large initializers.

    Returns:
        The rest of the model, in which those have raw data of no bytes; and by the number of an initializer where its
        raw data begins and ends in `data`. None if the bytes are not a plain sequence of known fields.
    """
    try:
        fields = list(_fields(data, 0, len(data)))
        graphs = [field for field in fields if field.number == _GRAPH]
        if len(graphs) != 1 or graphs[0].kind != _BYTES:
            return None
        rest, places = _cut_graph(data, graphs[0], smallest)
    except _Odd:
        return None
    parts = [rest if field.number == _GRAPH else data[field.begin : field.end] for field in fields]
    return b"".join(parts), places


def _cut_graph(data: Data, graph: Field, smallest: int) -> tuple[bytes, dict[int, tuple[int, int]]]:
    parts: list[bytes] = []
    places: dict[int, tuple[int, int]] = {}
    number = 0
    kept = graph.first  # what has not been copied yet begins here
    for field in _fields(data, graph.first, graph.end):
        if field.number != _INITIALIZER:
            continue
        if field.kind != _BYTES:
            raise _Odd
        if field.end - field.first >= smallest:
            tensor = list(_fields(data, field.first, field.end))
            raw = [one for one in tensor if one.number == _RAW_DATA]
            if len(raw) > 1 or any(one.kind != _BYTES for one in raw):
                raise _Odd
            if raw and raw[0].end - raw[0].first >= smallest:
                places[number] = raw[0].first, raw[0].end
                left = data[field.first : raw[0].begin] + _header(_RAW_DATA, 0) + data[raw[0].end : field.end]
                parts += [data[kept : field.begin], _header(_INITIALIZER, len(left)), left]
                kept = field.end
        number += 1
    parts.append(data[kept : graph.end])
    contents = b"".join(parts)
    return _header(_GRAPH, len(contents)) + contents, places


def _fields(data: Data, first: int, end: int) -> Iterator[Field]:
    """The fields of the message in data[first:end]."""
    place = first
    while place < end:
        key, contents = _varint(data, place, end)
        number, kind = key >> 3, key & 7
        if kind == _BYTES:
            size, contents = _varint(data, contents, end)
            last = contents + size
        elif kind == _VARINT:
            _, last = _varint(data, contents, end)
        elif kind in (_FIXED64, _FIXED32):
            last = contents + (8 if kind == _FIXED64 else 4)
        else:
            raise _Odd
        if last > end or not number:
            raise _Odd
        yield Field(number, kind, place, contents, last)
        place = last


def _varint(data: Data, place: int, end: int) -> tuple[int, int]:
    """A number of seven bits per byte, and where it ends."""
    value = shift = 0
    while place < end and shift < 64:
        byte = data[place]
        value |= (byte & 127) << shift
        place += 1
        if byte < 128:
            return value, place
        shift += 7
    raise _Odd


def _header(number: int, size: int) -> bytes:
    """The key of a field of bytes, and their number."""
    result = bytearray([number << 3 | _BYTES])
    while size > 127:
        result.append(size & 127 | 128)
        size >>= 7
    result.append(size)
    return bytes(result)
