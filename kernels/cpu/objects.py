"""Object files become machine code in memory, by LLVM's linker alone: Numba is not imported for it."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

from llvmlite import binding

# The function that every object has, and what it returns for a kernel which ended with an error.
ENTRY = "genai_kernel"
FAILED = -1

# What `pack` writes before an object file: LLVM must never be given anything else, which may end the process.
_ALONE, _NEEDS_NUMBA = b"genai kernel, alone\0", b"genai kernel, Numba\0"
_LOCK = threading.Lock()


class ObjectError(ValueError):
    """The bytes are no object file for this machine."""


class LoadedObject:
    """The code of an object file, for as long as this lives.

    Args:
        content: the object file.

    Attributes:
        address: of the function ENTRY.

    Raises:
        ObjectError: it cannot be loaded, or has no such function.
    """

    def __init__(self, content: bytes) -> None:
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


@cache
def _machine_is_ready() -> bool:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return True


def _target_machine() -> Any:
    """An engine takes its own."""
    _machine_is_ready()
    return binding.Target.from_triple(binding.get_process_triple()).create_target_machine(jit=True)


def pack(content: bytes, *, needs_numba: bool) -> bytes:
    """An object file, and whether it calls functions of Numba's, as `link` takes them."""
    return (_NEEDS_NUMBA if needs_numba else _ALONE) + content


def link(packed: bytes) -> LoadedObject:
    """Load what `pack` returned.

    Raises:
        ObjectError: it is something else.
    """
    header, content = packed[: len(_ALONE)], packed[len(_ALONE) :]
    if header == _NEEDS_NUMBA:
        from .compiler import make_ready

        make_ready()
    elif header != _ALONE:
        raise ObjectError("no packed object file")
    return LoadedObject(content)
