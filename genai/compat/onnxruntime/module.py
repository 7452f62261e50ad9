"""Small functions of onnxruntime's module that say what is here, and settings that hold for the process."""

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
    """This package's version."""
    return __version__


def get_build_info() -> str:
    """How this package was built: it is plain Python."""
    providers = ", ".join(get_available_providers())
    return f"Build Info: genai {get_version_string()}, NumPy {np.__version__}, providers {providers}"


@typed
def set_default_logger_severity(severity: int) -> None:
    """Accepted: sessions log nothing. Raises OptionError: outside 0 to 4."""
    if not 0 <= int(severity) <= 4:
        raise OptionError(f"log severity {severity}", "severities go from 0 (verbose) to 4 (fatal)", "give one of them")


def set_seed(seed: int) -> None:
    """Let random nodes without a seed of their own draw numbers that follow from this one, in sessions made later.

    Raises:
        OptionError: not a whole number.
    """
    if not isinstance(seed, int | np.integer) or isinstance(seed, bool):
        raise OptionError(f"seed {seed!r}", "a seed is a whole number", "give one")
    _seed_nodes(int(seed))


def set_global_thread_pool_sizes(intra_op_num_threads: int = 0, inter_op_num_threads: int = 0) -> None:
    """How many threads sessions with `use_per_session_threads = False` share their work among; 0 = physical cores.

    The second number has no effect: nodes run one after another.

    Raises:
        OptionError: not a whole number from 0.
    """
    for name, value in (("intra_op", intra_op_num_threads), ("inter_op", inter_op_num_threads)):
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 0:
            raise OptionError(f"{name}_num_threads {value!r}", "it is a whole number from 0", "give one")
    _global_threads[0] = int(intra_op_num_threads)


def global_threads() -> int:
    """What `set_global_thread_pool_sizes` said."""
    return _global_threads[0]


def has_collective_ops() -> bool:
    """False: nothing is spread over several machines."""
    return False


def preload_dlls(cuda: bool = True, cudnn: bool = True, msvc: bool = True, directory: str | None = None) -> None:
    """There are no libraries to load beforehand."""


def print_debug_info() -> None:
    """Print what this machine and package are."""
    print(f"{get_build_info()}\nPython {sys.version.split()[0]} on {platform.platform()}")


def set_default_logger_verbosity(verbosity: int) -> None:
    """Accepted: sessions log nothing."""


def disable_telemetry_events() -> None:
    """There is no telemetry."""


def enable_telemetry_events() -> None:
    """There is no telemetry, and this does not make any."""
