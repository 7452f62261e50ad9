"""Which machine code the kernels become here, and why.

Kernels are written over vectors of TILE_ROWS numbers; LLVM cuts these into registers of the processor that Numba
compiles for. That is the processor at hand, unless NUMBA_* variables say otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

_SWITCHES = ("CPU_NAME", "CPU_FEATURES", "ENABLE_AVX", "OPT", "DISABLE_JIT", "LOOP_VECTORIZE", "SLP_VECTORIZE")


@dataclass(frozen=True)
class KernelPath:
    """What kernels are compiled for.

    Attributes:
        processor: LLVM's name of it.
        registers: such as "AVX-512".
        vector_bits: width of a register.
        half_instructions: whether float16 is converted by instructions; else by integer arithmetic.
        host_vector_bits: the width that the processor itself has.
        overrides: NUMBA_* variables that steer code generation, as set.
        compiled: False if Numba's compiler is switched off, so that kernels cannot run.
    """

    processor: str
    registers: str
    vector_bits: int
    half_instructions: bool
    host_vector_bits: int
    overrides: Mapping[str, str]
    compiled: bool = True

    @property
    def lanes(self) -> str:
        """How a kernel's vector lies in registers."""
        from genai.kernels.formats import TILE_ROWS

        return f"{TILE_ROWS} float32 lanes in {TILE_ROWS * 32 // self.vector_bits} registers of {self.vector_bits} bits"


def find_kernel_path(environment: Mapping[str, str]) -> KernelPath:
    """Ask Numba and LLVM; nothing is compiled.

    Raises:
        ImportError: Numba or llvmlite is missing or broken.
    """
    import llvmlite.binding
    import numba
    from numba.core.registry import cpu_target

    from genai.kernels.cpu.half import has_half_instructions

    triple, processor, features = cpu_target.target_context.codegen().magic_tuple()
    names = {name[1:] for name in features.split(",") if name.startswith("+")}
    host = {name for name, present in llvmlite.binding.get_host_cpu_features().items() if present}
    registers, bits = vector_registers(triple, names)
    return KernelPath(
        processor=processor,
        registers=registers,
        vector_bits=bits,
        half_instructions=has_half_instructions(cpu_target.target_context),
        host_vector_bits=vector_registers(triple, host)[1],
        overrides={f"NUMBA_{s}": environment[f"NUMBA_{s}"] for s in _SWITCHES if f"NUMBA_{s}" in environment},
        compiled=not numba.config.DISABLE_JIT,
    )


def vector_registers(triple: str, features: Collection[str]) -> tuple[str, int]:
    """Name and width in bits of the widest vector registers that LLVM may use."""
    if triple.startswith(("aarch64", "arm64")):
        return "NEON", 128
    for feature, name, bits in (("avx512f", "AVX-512", 512), ("avx2", "AVX2", 256), ("avx", "AVX", 256)):
        if feature in features:
            return name, bits
    return ("SSE2", 128) if triple.startswith(("x86_64", "i686")) else ("generic vectors", 128)
