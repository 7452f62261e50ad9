"""Object files become machine code in memory, by LLVM's linker alone: Numba is not imported for it."""

from __future__ import annotations

import sys
import threading
from typing import Any

from llvmlite import binding

from genai.common.forks import renew_locks

# The function that every object has, and what it returns for a kernel which ended with an error.
ENTRY = "genai_kernel"
FAILED = -1

# What `pack` writes before an object file: LLVM must never be given anything else, which may end the process.
_HEADER = b"genai kernel\0"
_LOCK = threading.Lock()
renew_locks(sys.modules[__name__], "_LOCK")


class ObjectError(ValueError):
    """The bytes are no object file for this machine."""


class LoadedObject:
    """The code of an object file, for as long as this lives.

    Args:
        packed: what `pack` returned.

    Attributes:
        address: of the function ENTRY.

    Raises:
        ObjectError: it is something else, cannot be loaded, or has no such function.
    """

    def __init__(self, packed: bytes) -> None:
        if not packed.startswith(_HEADER):
            raise ObjectError("no packed object file")
        content = packed[len(_HEADER) :]
        with _LOCK:
            self._engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _target_machine())
            try:
                self._engine.add_object_file(binding.ObjectFileRef.from_data(content))
            except RuntimeError as error:
                raise ObjectError(str(error)) from error
            self._engine.finalize_object()
            self.address = int(self._engine.get_function_address(ENTRY))
        if not self.address:
            raise ObjectError(f"no function {ENTRY}")


def _target_machine() -> Any:
    """An engine takes its own."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.Target.from_triple(binding.get_process_triple()).create_target_machine(jit=True)


def pack(content: bytes) -> bytes:
    """An object file as `LoadedObject` takes it."""
    return _HEADER + content
