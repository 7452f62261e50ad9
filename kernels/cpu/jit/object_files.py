"""A loader that links object files into memory as machine code.

It uses the linker in `elf` if possible, and LLVM's linker otherwise, and it does not import Numba.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from genai.common.forks import renew_locks

from .elf import link

# The function that every object has, and its return value for a kernel that ended with an error.
ENTRY = "genai_kernel"
FAILED = -1

# The prefix that `pack` writes before an object file. LLVM must never read other content, which could kill the process.
_HEADER = b"genai kernel\0"
_LOCK = threading.Lock()
renew_locks(sys.modules[__name__], "_LOCK")


class ObjectError(ValueError):
    """Bytes that are not an object file for this machine."""


class LoadedObject:
    """The code of an object file, which stays in memory as long as this object exists.

    Args:
        packed: return value of `pack`.

    Attributes:
        address: address of the function ENTRY.

    Raises:
        ObjectError: `packed` is not a packed object file, cannot be loaded, or has no function ENTRY.
    """

    def __init__(self, packed: bytes) -> None:
        if not packed.startswith(_HEADER):
            raise ObjectError("the data is not a packed object file")
        content = packed[len(_HEADER) :]
        self._linked = link(content, ENTRY)
        if self._linked is not None:
            self.address = self._linked.address
            return
        from llvmlite import binding

        with _LOCK:
            self._engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _target_machine())
            try:
                self._engine.add_object_file(binding.ObjectFileRef.from_data(content))
            except RuntimeError as error:
                raise ObjectError(str(error)) from error
            self._engine.finalize_object()
            self.address = int(self._engine.get_function_address(ENTRY))
        if not self.address:
            raise ObjectError(f"the object file contains no function {ENTRY}")


def _target_machine() -> Any:
    """Return a new target machine, because each engine takes ownership of its target machine."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.Target.from_triple(binding.get_process_triple()).create_target_machine(jit=True)


def pack(content: bytes) -> bytes:
    """Return an object file in the form that `LoadedObject` reads."""
    return _HEADER + content
