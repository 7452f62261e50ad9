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
    """How a model is loaded and run.

    Attributes:
        level: how far the graph may be rewritten.
        keep_qdq: leave DequantizeLinear, operator, QuantizeLinear as they are, whatever the level.
        threads: that share a kernel's work; 0 = the physical cores.
        max_value_bytes: what a single value may take; None = what the machine has left, at most 16 GiB.
        dims: fixed extents of symbolic dimensions by name. dims_by_denotation: the same by denotation (DATA_BATCH).
        initializers: arrays in place of the initializers of these names.
        external_data: contents of external data files by name, which then need not exist.
        external_folder: where external data lies; None = beside the model.
        optimized_path: where to write the rewritten model; None = nowhere.
        optimized_weights: the name of a file beside it for its weights; None = they are in the model's file.
        optimized_weights_min_bytes: smaller weights stay in the model's file.
        providers: what else may compute nodes than the CPU: names with options, in order of preference.
        record_assignment: note which provider computes which nodes: `Session.assignment`.
        profile_prefix: record every node, in traces whose files' names begin so; None = record nothing.
        is_cancelled: asked between the steps of loading, which ends with LoadCancelledError where it says True.

    Raises:
        OptionError: a number is negative.
    """

    level: Level = Level.ALL
    keep_qdq: bool = False
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
                raise OptionError(f"{name} = {number}", "it must not be negative", "give a number from 0")
