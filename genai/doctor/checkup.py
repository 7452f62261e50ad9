"""The checks of `genai doctor`, in the order in which the report lists them.

Modules that need NumPy or Numba are imported inside their checks, so that a broken installation becomes a finding.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

import genai
from genai.common.cores import request_tiles
from genai.common.memory_limits import format_bytes, memory_bounds, tightest_bound

from ..models.folders import bundled_model
from . import PROGRAM_BYTES
from .processor import KernelPath, find_gpus, find_kernel_path, read_processor


class Mark(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    NOTE = "note"
    """Models run, but the user should know about the finding."""
    PROBLEM = "problem"
    """Models cannot run until this is fixed."""


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: name of the check.
        mark: severity.
        text: the result.
        fix: instruction for the user; empty if there is nothing to do.
        facts: the figures, as str, int, float, bool, None, and lists and dicts of these types.
    """

    name: str
    mark: Mark
    text: str
    fix: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


def usable(findings: Iterable[Finding]) -> bool:
    """Return True if no finding is a problem, so that models can run."""
    return all(finding.mark is not Mark.PROBLEM for finding in findings)


PACKAGES = ("numpy", "numba", "llvmlite", "onnx", "tokenizers", "safetensors", "jinja2", "ml_dtypes", "typer")
_OLDEST_PYTHON = (3, 11)
_MODEL_FILES = ("genai_config.json", "model.onnx", "model.onnx.data", "tokenizer.json")
# Memory of the bundled model with its activations and full context, excluding the program.
_SMALLEST_MODEL_BYTES = 16 * 2**20
_EXAMPLE_WEIGHT_BYTES = 4e9
_MEASURING_SECONDS = 0.3
_IMPORT_SECONDS = 60


@dataclass(frozen=True)
class Machine:
    """The machine that the checks examine; tests can simulate every part of the machine.

    Attributes:
        root: folder that contains /proc, /sys and /dev.
        environment: environment variables of the process.
        output: stream to which the report is written.
        model_folder: the bundled model.
        threads: number of threads that read memory; None = the number that kernels use.
    """

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    output: TextIO = field(default_factory=lambda: sys.stdout)
    model_folder: Path = field(default_factory=bundled_model)
    threads: int | None = None


def examine(machine: Machine | None = None) -> list[Finding]:
    """Run every check. A check that fails becomes a note with the error; no exception is raised."""
    machine = machine or Machine()
    findings = []
    for name, check in CHECKS.items():
        try:
            findings.append(check(machine))
        except Exception as error:
            findings.append(Finding(name, Mark.NOTE, f"the check failed: {type(error).__name__}: {error}"))
    return findings


def check_versions(machine: Machine) -> Finding:
    """Check Python, this toolkit and its dependencies; a missing or broken package is a problem."""
    versions = {name: _version(name) for name in PACKAGES}
    python = platform.python_version()
    facts = {"genai": genai.__version__, "python": python, "platform": platform.platform(), **versions}
    text = f"genai {genai.__version__}, Python {python} on {platform.platform()}; " + ", ".join(
        f"{name} {number or 'missing'}" for name, number in versions.items()
    )
    missing = [name for name, number in versions.items() if number is None]
    if missing:
        return Finding("versions", Mark.PROBLEM, text, f"pip install {' '.join(missing)}", facts)
    broken = {}
    for name in versions:
        try:
            import_module(name)
        except Exception as error:
            broken[name] = f"{name} ({type(error).__name__}: {error})"
    if broken:
        fix = f"pip install --force-reinstall {' '.join(broken)}"
        return Finding("versions", Mark.PROBLEM, f"{text}; broken: {', '.join(broken.values())}", fix, facts)
    if sys.version_info[:2] < _OLDEST_PYTHON:
        return Finding(
            "versions", Mark.PROBLEM, text, f"use Python {'.'.join(map(str, _OLDEST_PYTHON))} or newer", facts
        )
    return Finding("versions", Mark.OK, text, facts=facts)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def check_processor(machine: Machine) -> Finding:
    """Report the processor's name and cores, and the share of the cores that this process may use."""
    cpu = read_processor(machine.root)
    hardware = "" if cpu.physical_cores == cpu.logical_cores else f" with {cpu.logical_cores} hardware threads"
    text = f"{cpu.name} ({cpu.architecture}), {cpu.physical_cores} cores{hardware}; {_threads(cpu.threads)}"
    limits = []
    if cpu.allowed_cores < cpu.logical_cores:
        limits.append(f"the CPU affinity allows {cpu.allowed_cores} of {cpu.logical_cores} logical cores")
    if cpu.quota is not None and cpu.quota < cpu.physical_cores:
        limits.append(f"the control group allows the CPU time of {cpu.quota:g} cores")
    if limits:
        return Finding("processor", Mark.NOTE, f"{text}; {' and '.join(limits)}", facts=asdict(cpu))
    return Finding("processor", Mark.OK, text, facts=asdict(cpu))


def check_features(machine: Machine) -> Finding:
    """Report the instruction sets, and whether the operating system grants AMX tiles."""
    cpu = read_processor(machine.root)
    facts: dict[str, Any] = {"features": list(cpu.features), "missing": list(cpu.missing_features)}
    text = ", ".join(cpu.features) or "no known instruction sets"
    if any(name.startswith("AMX") for name in cpu.features):
        granted = facts["amx_tiles_granted"] = request_tiles()
        text += f"; AMX tiles {'granted' if granted else 'refused by the system'}"
    if cpu.missing_features:
        text += f"; missing: {', '.join(cpu.missing_features)}"
    return Finding("features", Mark.OK, text, facts=facts)


def check_kernels(machine: Machine) -> Finding:
    """Report the registers and the processor for which kernels are compiled."""
    try:
        path = find_kernel_path(machine.environment)
    except Exception as error:
        return Finding(
            "kernels",
            Mark.PROBLEM,
            f"Numba cannot be used: {type(error).__name__}: {error}",
            "pip install --force-reinstall numba llvmlite",
        )
    return _kernel_finding(path)


def _kernel_finding(path: KernelPath) -> Finding:
    facts = asdict(path)
    halves = (
        "conversion instructions" if path.half_instructions else "conversion with integer arithmetic (portable path)"
    )
    origin = "set by NUMBA_CPU_NAME" if "NUMBA_CPU_NAME" in path.overrides else "LLVM's name for this processor"
    text = f"{path.registers} for {path.processor} ({origin}): {path.lanes}; float16 {halves}"
    if path.overrides:
        text += f"; set: {', '.join(f'{name}={value}' for name, value in path.overrides.items())}"
    if not path.compiled:
        return Finding(
            "kernels", Mark.PROBLEM, f"{text}; Numba's compiler is disabled", "unset NUMBA_DISABLE_JIT", facts
        )
    if path.vector_bits < path.host_vector_bits:
        text += f"; the processor has registers of {path.host_vector_bits} bits"
        fix = f"unset {' and '.join(path.overrides)}" if path.overrides else "check Numba's .numba_config.yaml"
        return Finding("kernels", Mark.NOTE, text, fix, facts)
    return Finding("kernels", Mark.OK, text, facts=facts)


def check_memory(machine: Machine) -> Finding:
    """Report the total and available memory, and the tightest limit."""
    bounds = memory_bounds(machine.root)
    nearest = tightest_bound(bounds)
    free = max(nearest.free, 0)
    facts = {"available_bytes": free, "limited_by": nearest.source, "bounds": [asdict(bound) for bound in bounds]}
    said = (f"{one.source} {format_bytes(max(one.free, 0))} of {format_bytes(one.limit)}" for one in bounds)
    text = f"{format_bytes(free)} available: {'; '.join(said)}"
    if free < PROGRAM_BYTES + _SMALLEST_MODEL_BYTES:
        needed = format_bytes(PROGRAM_BYTES + _SMALLEST_MODEL_BYTES)
        fix = f"free memory, or raise the limit of the {nearest.source}: even the bundled model needs {needed}"
        return Finding("memory", Mark.PROBLEM, text, fix, facts)
    if nearest.source != "system":
        return Finding("memory", Mark.NOTE, f"{text}; the tightest limit is the {nearest.source}", facts=facts)
    return Finding("memory", Mark.OK, text, facts=facts)


def check_bandwidth(machine: Machine) -> Finding:
    """Measure the memory read bandwidth, and report the decode speed that it allows."""
    from .speeds import buffer_size, measure_bandwidth  # needs Numba, unlike other checks

    cpu = read_processor(machine.root)
    free = max(tightest_bound(memory_bounds(machine.root)).free, 0)
    size = buffer_size(cpu.last_level_cache, free)
    if size < 2**20:
        return Finding("bandwidth", Mark.NOTE, "not measured: too little free memory")
    bandwidth = measure_bandwidth(size, threads=machine.threads or cpu.threads, seconds=_MEASURING_SECONDS)
    ceiling = bandwidth.tokens_per_second(_EXAMPLE_WEIGHT_BYTES)
    text = (
        f"{bandwidth.bytes_per_second / 1e9:.1f} GB/s read with {_threads(bandwidth.threads)}: a model of N GB "
        f"decodes at most {bandwidth.bytes_per_second / 1e9:.1f}/N tokens/s ({ceiling:.1f} at "
        f"{_EXAMPLE_WEIGHT_BYTES / 1e9:g} GB)"
    )
    facts = {**asdict(bandwidth), "last_level_cache": cpu.last_level_cache}
    if bandwidth.slowest < bandwidth.fastest / 2:
        text += f"; passes varied from {bandwidth.slowest / 1e9:.1f} to {bandwidth.fastest / 1e9:.1f} GB/s: other "
        text += "programs may be running"
    if cpu.last_level_cache >= size // 2:
        text += (
            f"; the {format_bytes(cpu.last_level_cache)} cache may contain part of the {format_bytes(size)} of data, "
            "so the memory may be slower"
        )
    return Finding("bandwidth", Mark.OK, text, facts=facts)


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _end_of_importing_cupy() -> str:
    """Import cupy in a separate process; return a description of that process's crash, or "" if it did not crash."""
    code = "try:\n import cupy\nexcept BaseException:\n pass\nprint('alive')"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, timeout=_IMPORT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"no result in {_IMPORT_SECONDS} seconds"
    if b"alive" in done.stdout:
        return ""
    return f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"


def check_gpu(machine: Machine) -> Finding:
    """Report the GPUs, or the reason why no GPU can be used, in the words of the error that using a GPU would raise."""
    gpus = find_gpus(machine.root)
    facts, named = asdict(gpus), f"{', '.join(gpus.names)} (driver {gpus.driver})" if gpus.names else "none"
    if not gpus.cupy:
        text = f"{named}: {'; '.join([*gpus.hints, 'cupy is not installed'])}; models run on the CPU"
        fix = "pip install cupy-cuda13x (or cupy-cuda12x, for a driver older than 580), and then use --device cuda"
        return Finding("gpu", Mark.NOTE, text, fix, facts) if gpus.names else Finding("gpu", Mark.OK, text, facts=facts)
    if how := _end_of_importing_cupy():
        text = f"{named}: importing cupy fails with {how}; models run on the CPU without cupy"
        return Finding("gpu", Mark.NOTE, text, "uninstall or reinstall cupy with pip", facts)
    from genai.kernels.cuda.driver import NoDevice

    from ..devices import first_gpu  # needs Numba

    try:
        device = first_gpu()
    except NoDevice as error:
        text = f"{named}: {'; '.join([*gpus.hints, str(error)])}; models run on the CPU"
        return Finding("gpu", Mark.NOTE if gpus.names else Mark.OK, text, facts=facts)
    if not gpus.names:  # for example in a container
        named = "an NVIDIA GPU"
    return Finding("gpu", Mark.OK, f"{named}; to run models on the GPU, pass --device {device}", facts=facts)


def check_cache(machine: Machine) -> Finding:
    """Report the folder of compiled kernels and its contents."""
    from genai.kernels.cuda.kernel_cache import UNUSED_DAYS, unused

    from .caches import inspect_caches

    caches = inspect_caches(machine.environment)
    stale_bytes, gpu_bytes = sum(caches.stale.values()), sum(one.nbytes for one in caches.for_gpus)
    old = [one.nbytes for one in unused(caches.for_gpus)]
    facts = {
        "folder": None if caches.folder is None else str(caches.folder),
        "writable": not caches.reason,
        "num_files": caches.num_files,
        "num_bytes": caches.num_bytes,
        "stale": list(map(str, caches.stale)),
        "stale_bytes": stale_bytes,
        "num_gpu_files": len(caches.for_gpus),
        "num_gpu_bytes": gpu_bytes,
        "unused_gpu_bytes": sum(old),
    }
    text = f"{caches.folder or 'no folder'}: {caches.num_files} kernels, {format_bytes(caches.num_bytes)}"
    if caches.reason:
        fix = "to avoid recompilation at every start, set GENAI_CACHE_DIR to a folder that only you own and can write"
        return Finding("cache", Mark.NOTE, f"{text}; kernels are not stored: {caches.reason}", fix, facts)
    if not caches.num_files:
        text += " (kernels are compiled at the first start)"
    if caches.for_gpus:
        text += f"; {len(caches.for_gpus)} GPU kernels, {format_bytes(gpu_bytes)}"
    if old:
        text += f", of which {len(old)} ({format_bytes(sum(old))}) have not been used for {UNUSED_DAYS} days"
    if caches.stale:
        text += f"; {len(caches.stale)} folders from other versions, {format_bytes(stale_bytes)}"
    if caches.removable:
        return Finding("cache", Mark.NOTE, text, "to delete these, run genai doctor --clean-cache", facts)
    return Finding("cache", Mark.OK, text, facts=facts)


def check_model(machine: Machine) -> Finding:
    """Check the bundled model, which commands use if no MODEL is specified."""
    missing = [name for name in _MODEL_FILES if not (machine.model_folder / name).is_file()]
    facts = {"folder": str(machine.model_folder), "missing": missing}
    if missing:
        text = f"{machine.model_folder}: missing files: {', '.join(missing)}"
        return Finding(
            "bundled model", Mark.NOTE, text, "reinstall the toolkit, or pass a model folder to each command", facts
        )
    return Finding("bundled model", Mark.OK, str(machine.model_folder), facts=facts)


def check_terminal(machine: Machine) -> Finding:
    """Check that the output can show every character."""
    encoding = getattr(machine.output, "encoding", None) or "unknown"
    locale = next(
        (machine.environment[name] for name in ("LC_ALL", "LC_CTYPE", "LANG") if machine.environment.get(name)), ""
    )
    is_terminal = bool(getattr(machine.output, "isatty", lambda: False)())
    kind = f"a terminal ({machine.environment.get('TERM', 'TERM not set')})" if is_terminal else "not a terminal"
    facts = {"encoding": encoding, "locale": locale or None, "is_terminal": is_terminal}
    text = f"{encoding}, locale {locale or 'not set'}, stdout is {kind}"
    if encoding.lower().replace("-", "").replace("_", "") != "utf8":
        fix = "to print characters outside this encoding, set LANG=C.UTF-8 or PYTHONUTF8=1"
        return Finding("terminal", Mark.NOTE, text, fix, facts)
    return Finding("terminal", Mark.OK, text, facts=facts)


CHECKS: Mapping[str, Callable[[Machine], Finding]] = {
    "versions": check_versions,
    "processor": check_processor,
    "features": check_features,
    "kernels": check_kernels,
    "memory": check_memory,
    "bandwidth": check_bandwidth,
    "gpu": check_gpu,
    "cache": check_cache,
    "bundled model": check_model,
    "terminal": check_terminal,
}
