"""The processor that kernels are compiled for: this one, unless NUMBA_CPU_NAME and NUMBA_CPU_FEATURES name another.

It says what Numba's compiler says, but needs LLVM only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from llvmlite import binding


@dataclass(frozen=True)
class Processor:
    """A processor in LLVM's names; features such as "+avx2,-avx512f"."""

    triple: str
    name: str
    features: str

    def has(self, feature: str) -> bool:
        """Whether instructions of a feature may be used."""
        return feature in self.feature_set

    @property
    def feature_set(self) -> frozenset[str]:
        """The features that it has."""
        return frozenset(item[1:] for item in self.features.split(",") if item.startswith("+"))


def processor(environment: Mapping[str, str] = os.environ) -> Processor:
    """The processor that kernels are compiled for."""
    name = environment.get("NUMBA_CPU_NAME") or binding.get_host_cpu_name()
    features = environment.get("NUMBA_CPU_FEATURES")
    if features is None:
        features = _host_features(avx=environment.get("NUMBA_ENABLE_AVX", "1") != "0")
    return Processor(binding.get_process_triple(), name, features)


def _host_features(*, avx: bool) -> str:
    try:
        features = binding.get_host_cpu_features()
    except RuntimeError:
        return ""
    if not avx:
        for name in features:
            if name.startswith("avx"):
                features[name] = False
    return str(features.flatten())
