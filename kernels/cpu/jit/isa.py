"""The processor that kernels are compiled for: its instructions for matmuls and attention, and its prefetch distance.

From best to most basic, the instruction sets are "amx" (tiles of int8 and bfloat16), "vnni" (AVX-512 with vpdpbusd),
"avx2", and "portable" (only LLVM's generic vectors: any processor). The best set of this machine is used unless
GENAI_CPU_ISA selects another.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from genai.common.cores import request_tiles

from .host import host

ISAS = ("amx", "vnni", "avx2", "portable")
_VARIABLE = "GENAI_CPU_ISA"

_AVX2 = {"avx2", "fma", "f16c"}
_VNNI = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni"}
_NEEDED = {
    "amx": _VNNI | {"avx512bf16", "avx512fp16", "gfni", "amx-tile", "amx-int8", "amx-bf16"},
    "vnni": _VNNI,
    "avx2": _AVX2,
    "portable": set(),
}


class IsaError(ValueError):
    """GENAI_CPU_ISA has an unknown value, or names instructions that this machine does not have."""


@cache
def isa() -> str:
    """Return the instruction set of this process, fixed at first use.

    Raises:
        IsaError: GENAI_CPU_ISA names an instruction set that cannot be used.
    """
    return choose(os.environ, available(processor().feature_set))


def choose(environment: Mapping[str, str], usable: tuple[str, ...]) -> str:
    """Return the instruction set that the environment selects, or else the best of the usable ones."""
    wanted = environment.get(_VARIABLE, "")
    if not wanted:
        return usable[0]
    if wanted not in usable:
        why = (
            "the processor does not support this instruction set"
            if wanted in ISAS
            else "the instruction set is unknown"
        )
        raise IsaError(f"{_VARIABLE} is {wanted!r}: {why}; the usable instruction sets are {', '.join(usable)}")
    return wanted


def available(features: frozenset[str]) -> tuple[str, ...]:
    """Return the instruction sets of a machine with these LLVM features, best first."""
    usable = tuple(name for name in ISAS if _NEEDED[name] <= features)
    return usable if "amx" not in usable or request_tiles() else usable[1:]


@dataclass(frozen=True)
class CpuTarget:
    """A processor, described by LLVM's names. `features` has the form "+avx2,-avx512f"."""

    triple: str
    name: str
    features: str

    @property
    def feature_set(self) -> frozenset[str]:
        """The names of the features that the processor has."""
        return frozenset(item[1:] for item in self.features.split(",") if item.startswith("+"))


def processor(environment: Mapping[str, str] = os.environ) -> CpuTarget:
    """Return the processor that kernels are compiled for."""
    triple, name, features = host()
    given = environment.get("NUMBA_CPU_FEATURES")
    if given is not None:
        features = given
    elif environment.get("NUMBA_ENABLE_AVX", "1") == "0":
        features = features.replace("+avx", "-avx")
    return CpuTarget(triple, environment.get("NUMBA_CPU_NAME") or name, features)


class Prefetch(NamedTuple):
    """The cache level into which weights that are read once are prefetched, and the distance in bytes.

    Prefetching does not change results. A core can have only a limited number of lines in flight to its first-level
    cache. Zen 4 can have more lines in flight to the second-level cache: with prefetching to it, decoding 4-bit weights
    is 17 to 40% faster (two cores, 1B and 0.5B shapes). Zen 3 and Sapphire Rapids gain nothing from it, and Zen 5
    loses 3%.
    """

    level: int = 1
    distance: int = 2048


# Measured settings, by LLVM's name for the processor.
_MEASURED = {"znver4": Prefetch(2, 4096)}


def stream_prefetch(name: str | None = None) -> Prefetch:
    """Return the best setting for a processor (default: the one that kernels are compiled for)."""
    return _MEASURED.get(name or processor().name, Prefetch())
