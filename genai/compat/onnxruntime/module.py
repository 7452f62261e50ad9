"""Module-level functions of onnxruntime: information about this installation, and process-wide settings."""

from __future__ import annotations

import platform
import sys

import numpy as np

from genai import __version__
from genai.ops.filling import set_seed as _seed_nodes

from ...errors import OptionError
from .errors import typed
from .providers import get_available_providers

package_name = "onnx-genai-toolkit"
cuda_version = ""
_global_threads: list[int] = [0]


def get_version_string() -> str:
    """Return this package's version."""
    return __version__


def get_build_info() -> str:
    """Return a description of this package's build, which is plain Python."""
    providers = ", ".join(get_available_providers())
    return f"Build Info: genai {get_version_string()}, NumPy {np.__version__}, providers {providers}"


@typed
def set_default_logger_severity(severity: int) -> None:
    """Ignored: sessions do not log. Raises OptionError if the severity is not 0 to 4."""
    if not 0 <= int(severity) <= 4:
        raise OptionError(
            f"log severity {severity} is out of range",
            "severities are integers from 0 (verbose) to 4 (fatal)",
            "use a severity in this range",
        )


def set_seed(seed: int) -> None:
    """Set the seed of random nodes that have no seed attribute, in sessions created later.

    Raises:
        OptionError: the seed is not a whole number.
    """
    if not isinstance(seed, int | np.integer) or isinstance(seed, bool):
        raise OptionError(f"the seed is {seed!r}", "a seed must be an integer", "pass an int")
    _seed_nodes(int(seed))


def set_global_thread_pool_sizes(intra_op_num_threads: int = 0, inter_op_num_threads: int = 0) -> None:
    """Set the number of threads for sessions with `use_per_session_threads = False`; 0 = physical cores.

    `inter_op_num_threads` is ignored: nodes run one after another.

    Raises:
        OptionError: an argument is not a whole number of at least 0.
    """
    for name, value in (("intra_op", intra_op_num_threads), ("inter_op", inter_op_num_threads)):
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 0:
            raise OptionError(f"{name}_num_threads is {value!r}", "an integer of at least 0 is expected", "pass an int")
    _global_threads[0] = int(intra_op_num_threads)


def global_threads() -> int:
    """Return the number of threads set by `set_global_thread_pool_sizes`."""
    return _global_threads[0]


def has_collective_ops() -> bool:
    """Return False: collective operators are not supported."""
    return False


def preload_dlls(cuda: bool = True, cudnn: bool = True, msvc: bool = True, directory: str | None = None) -> None:
    """Do nothing: there are no libraries to preload."""


def print_debug_info() -> None:
    """Print information about this machine and package."""
    print(f"{get_build_info()}\nPython {sys.version.split()[0]} on {platform.platform()}")


def set_default_logger_verbosity(verbosity: int) -> None:
    """Ignored: sessions do not log."""


def disable_telemetry_events() -> None:
    """Do nothing: there is no telemetry."""


def enable_telemetry_events() -> None:
    """Do nothing: there is no telemetry to enable."""
