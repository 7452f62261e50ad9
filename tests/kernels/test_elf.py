"""Object files linked without LLVM, and files that are left to LLVM."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from genai.kernels.cpu.arrays.functions import softmax, softmax_rows
from genai.kernels.cpu.jit import elf, object_files
from genai.kernels.cpu.jit.object_files import ENTRY, LoadedObject, ObjectError, pack
from genai.kernels.cpu.program.driver import run_alone

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine != "x86_64", reason="objects of other systems are linked by LLVM"
)


@pytest.fixture(scope="module")
def content() -> bytes:
    """The object of a kernel that returns its number of calls times nothing: 0 for a table without calls."""
    return run_alone.make()[len(pack(b"")) :]


def _call(address: int, *arguments: int) -> int:
    return int(ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * len(arguments))(address)(*arguments))


def test_a_kernel_is_linked_and_runs(content):
    code = elf.link(content, ENTRY)
    assert code is not None and _call(code.address, 0, 0, 0, 0) == 0


def test_constants_and_code_of_a_kernel_are_those_that_llvm_links(monkeypatch):
    x = np.random.default_rng(0).standard_normal((3, 50), np.float32)
    expected = softmax_rows(None, x)
    packed = softmax.make()
    monkeypatch.setattr(object_files, "link", lambda content, entry: None)
    by_llvm = LoadedObject(packed)
    monkeypatch.undo()
    linked = LoadedObject(packed)
    assert linked._linked is not None and by_llvm._linked is None
    for loaded in (by_llvm, linked):
        out = np.zeros_like(x)
        table = np.array([x.ctypes.data, out.ctypes.data, x.shape[1]], np.int64)
        assert _call(loaded.address, table.ctypes.data, 0, 0, len(x), 0) == 0
        np.testing.assert_array_equal(out, expected)


def test_code_is_not_writable(content):
    code = elf.link(content, ENTRY)
    assert code is not None
    lines = Path("/proc/self/maps").read_text(encoding="ascii").splitlines()
    found = [line.split() for line in lines if _contains(line.split()[0], code.address)]
    assert [parts[1] for parts in found] == ["r-xp"]


def _contains(span: str, address: int) -> bool:
    first, last = (int(part, 16) for part in span.split("-"))
    return first <= address < last


def test_every_prefix_and_other_damage_is_refused(content):
    for size in range(0, len(content), 97):
        elf.link(content[:size], ENTRY)  # must not crash
    assert elf.link(content[: len(content) // 2], ENTRY) is None
    assert elf.link(b"", ENTRY) is None
    assert elf.link(content, "another_name") is None
    assert elf.link(b"\x7fELF\x01" + content[5:], ENTRY) is None  # 32 bits
    assert elf.link(content[:18] + struct.pack("<H", 183) + content[20:], ENTRY) is None  # another processor
    with pytest.raises(ObjectError):
        LoadedObject(b"something else")


@pytest.mark.parametrize("kind", [2, 4, 9])  # PC32, PLT32, GOTPCREL
def test_a_relocation_of_another_kind_is_left_to_llvm(kind):
    content = softmax.make()[len(pack(b"")) :]
    found = elf._Object(content)
    section = next(one for one in found._sections if one.type == elf._RELA and found._sections[one.info].is_placed)
    assert elf.link(content, ENTRY) is not None
    changed = bytearray(content)
    struct.pack_into("<I", changed, section.offset + 8, kind)
    assert elf.link(bytes(changed), ENTRY) is None


def test_an_undefined_function_is_left_to_llvm():
    with pytest.raises(elf._Unsupported):
        elf._function_of_process("no_function_has_this_name")
    assert elf._function_of_process("memcpy") != 0


RUN = """
import sys
import numpy as np
import onnx.parser
from genai.session.session import Session
graph = "g (float[4] x) => (float[4] y) {y = Softmax(x)}"
session = Session(onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 17]> ' + graph))
for _ in range(4):
    session.run({"x": np.zeros(4, np.float32)})
print("llvmlite.binding" in sys.modules, "numba" in sys.modules)
"""


def test_a_process_whose_kernels_are_on_disk_does_not_load_llvm(tmp_path):
    environment = {**os.environ, "GENAI_CACHE_DIR": str(tmp_path)}
    outputs = [
        subprocess.run([sys.executable, "-c", RUN], env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(3)
    ]
    # The first process compiles the kernels, and the second stores the description of the processor.
    assert outputs[0].split() == ["True", "True"] and outputs[2].split() == ["False", "False"]


def test_a_stored_description_that_is_damaged_is_made_again(tmp_path):
    environment = {**os.environ, "GENAI_CACHE_DIR": str(tmp_path)}
    (tmp_path / "genai" / "kernels").mkdir(parents=True, mode=0o700)
    code = "from genai.kernels.cpu.jit.isa import processor; print(processor())"
    command = [sys.executable, "-c", code]
    first = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    (file,) = tmp_path.glob("genai/kernels/host-*/processor.json")
    file.write_bytes(file.read_bytes()[:-3])
    assert subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout == first
