"""Settings of a session."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import OptionError
from ..optimize.base import Level
from .execution_providers import ChosenProvider


def _never() -> bool:
    return False


@dataclass(frozen=True)
class SessionConfig:
    """Settings for loading and running a model.

    Attributes:
        level: graph optimisation level.
        keep_qdq: True to leave sequences of DequantizeLinear, an operator and QuantizeLinear unfused at every level.
        disabled_rules: names of rewrites that are not applied at any level; unknown names have no effect.
        threads: number of threads that share a kernel's work; 0 = the physical cores.
        max_value_bytes: maximum size of a single value; None = the machine's free memory, at most 16 GiB.
        dims: fixed sizes of symbolic dimensions by name.
        dims_by_denotation: fixed sizes of symbolic dimensions by denotation (DATA_BATCH).
        initializers: arrays that replace the initializers with these names.
        external_data: contents of external data files by name; the files then need not exist.
        external_folder: folder of the external data; None = the model's folder.
        optimized_path: path of the file to which the rewritten model is written; None = do not write it.
        optimized_weights: name of a file for its weights in the same folder; None = they are in the model's file.
        optimized_weights_min_bytes: size below which weights stay in the model's file.
        providers: providers besides the CPU that may compute nodes: names with options, in order of preference.
        record_assignment: True to record in `Session.assignment` which provider computes which nodes.
        profile_prefix: prefix of the file names of traces, which record every node; None = record nothing.
        is_cancelled: function called between the steps of loading; if it returns True, LoadCancelledError is raised.

    Raises:
        OptionError: a number is negative.
    """

    level: Level = Level.ALL
    keep_qdq: bool = False
    disabled_rules: frozenset[str] = frozenset()
    threads: int = 0
    max_value_bytes: int | None = None
    dims: Mapping[str, int] = field(default_factory=dict)
    dims_by_denotation: Mapping[str, int] = field(default_factory=dict)
    initializers: Mapping[str, Any] = field(default_factory=dict)
    external_data: Mapping[str, bytes] = field(default_factory=dict)
    external_folder: Path | None = None
    optimized_path: Path | None = None
    optimized_weights: str | None = None
    optimized_weights_min_bytes: int = 1024
    providers: Sequence[ChosenProvider] = ()
    record_assignment: bool = False
    profile_prefix: str | None = None
    is_cancelled: Callable[[], bool] = _never

    def __post_init__(self) -> None:
        numbers = {"threads": self.threads, "max_value_bytes": self.max_value_bytes or 0, **self.dims}
        for name, number in {**numbers, **self.dims_by_denotation}.items():
            if number < 0:
                raise OptionError(f"{name} = {number}", "the number cannot be negative", "use 0 or a positive number")
