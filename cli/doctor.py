"""`genai doctor`: reports on this machine, how the toolkit uses it, and what to fix."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genai.common.progress import task

from . import options as opt
from .terminal import emit, interrupts_end_the_process
from .wrapping import printable, table, width_of

if TYPE_CHECKING:
    from genai.doctor.checkup import Finding, Machine

_WIDTH = 119


def doctor(
    as_json: opt.AsJson = False,
    clean_cache: Annotated[
        bool,
        typer.Option(
            "--clean-cache",
            help="Delete kernels compiled with other versions, and GPU kernels unused for 30 days.",
        ),
    ] = False,
    compile_all: Annotated[
        bool,
        typer.Option(
            "--compile", help="Compile all kernels for this machine now, so that later runs do not compile any."
        ),
    ] = False,
) -> None:
    """Check this machine: processor, kernels, memory, GPU, caches, versions. Exits with 1 if models cannot run."""
    act = clean if clean_cache else compile_kernels if compile_all else report
    raise typer.Exit(act(as_json=as_json))


def report(machine: Machine | None = None, *, as_json: bool) -> int:
    """Print the findings and return the exit code."""
    from genai.doctor.checkup import Mark, examine, usable

    with task("Examining this machine"):
        findings = examine(machine)
    is_usable = usable(findings)
    if as_json:
        _emit_json({"usable": is_usable, "findings": [asdict(finding) for finding in findings]})
        return 0 if is_usable else 1
    emit(_text(findings), "\n")
    numbers = {mark: sum(finding.mark is mark for finding in findings) for mark in (Mark.PROBLEM, Mark.NOTE)}
    counts = ", ".join(f"{count} {mark}{'' if count == 1 else 's'}" for mark, count in numbers.items())
    emit(f"{'usable' if is_usable else 'not usable'}: {counts}", "\n")
    return 0 if is_usable else 1


def compile_kernels(*, as_json: bool) -> int:
    """Compile every kernel that common models need, print how many were compiled, and return the exit code."""
    from genai.kernels.cpu.jit.native import LIBRARY
    from genai.kernels.cpu.warmup import all_kernels

    with interrupts_end_the_process():
        result = LIBRARY.prepare(all_kernels())
    if as_json:
        _emit_json({"folder": str(LIBRARY.folder.path), **asdict(result)})
    else:
        emit(f"compiled {result.compiled} kernels in {result.seconds:.0f} s; {result.loaded} were already cached", "\n")
    return 0 if LIBRARY.folder.path is not None else 1


def clean(*, as_json: bool) -> int:
    """Delete stale kernels, print their paths, and return the exit code: 1 if a kernel could not be deleted."""
    from genai.common.memory_limits import format_bytes
    from genai.doctor.caches import inspect_caches, remove_stale

    with task("Deleting kernels"):
        removed, errors = remove_stale(inspect_caches())
    if as_json:
        _emit_json(
            {
                "removed": [{"path": str(path), "num_bytes": num_bytes} for path, num_bytes in removed.items()],
                "kept": [{"path": str(path), "reason": reason} for path, reason in errors.items()],
            }
        )
        return 1 if errors else 0
    for path, num_bytes in removed.items():
        emit(printable(f"removed {path} ({format_bytes(num_bytes)})"), "\n")
    for path, reason in errors.items():
        emit(printable(f"kept {path}: {reason}"), "\n")
    if not removed and not errors:
        emit("nothing to remove: there are no kernels compiled with other versions, and no unused GPU kernels", "\n")
    return 1 if errors else 0


def _text(findings: list[Finding]) -> str:
    """Return the findings' marks, names and texts in columns."""
    marks = max(len(finding.mark) for finding in findings)
    rows = []
    for finding in findings:
        rows.append((f"{finding.mark:<{marks}}  {finding.name}", printable(finding.text)))
        if finding.fix:
            rows.append(("", printable(f"fix: {finding.fix}")))
    return table(rows, min(width_of(sys.stdout) or _WIDTH, _WIDTH))


def _emit_json(value: dict[str, Any]) -> None:
    emit(json.dumps(value, indent=2), "\n")
