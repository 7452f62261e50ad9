"""`genai doctor`: what this machine is, what the toolkit makes of it, and what to repair."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options as opt
from .layout import printable
from .terminal import emit

if TYPE_CHECKING:
    from genai.machine.checkup import Place
    from genai.machine.findings import Finding, Mark

_WIDTH = 118


def doctor(
    as_json: opt.AsJson = False,
    clean_cache: Annotated[
        bool, typer.Option("--clean-cache", help="Remove compiled kernels of other versions, and nothing else.")
    ] = False,
) -> None:
    """Examine this machine: processor, kernels, memory, GPU, caches, versions. Exits with 1 if models cannot be run."""
    if clean_cache:
        raise typer.Exit(clean(as_json=as_json))
    raise typer.Exit(report(as_json=as_json))


def report(place: Place | None = None, *, as_json: bool) -> int:
    """Print what was found; returns the exit code."""
    from genai.machine.checkup import examine
    from genai.machine.findings import Mark, usable

    findings = examine(place)
    is_usable = usable(findings)
    if as_json:
        _emit_json({"usable": is_usable, "findings": [finding.as_dict() for finding in findings]})
        return 0 if is_usable else 1
    emit("\n".join(_lines(findings)), "\n")
    counts = ", ".join(_count(findings, mark) for mark in (Mark.PROBLEM, Mark.NOTE))
    emit(f"{'usable' if is_usable else 'not usable'}: {counts}", "\n")
    return 0 if is_usable else 1


def _count(findings: list[Finding], mark: Mark) -> str:
    count = sum(finding.mark is mark for finding in findings)
    return f"{count} {mark}{'' if count == 1 else 's'}"


def clean(*, as_json: bool) -> int:
    """Remove stale kernels and say which; returns the exit code, 1 if some could not be removed."""
    from genai.kvcache.budget import format_bytes
    from genai.machine.caches import inspect_caches, remove_stale

    removed, kept = remove_stale(inspect_caches())
    if as_json:
        _emit_json(
            {
                "removed": [{"path": str(stale.path), "num_bytes": stale.num_bytes} for stale in removed],
                "kept": [{"path": str(stale.path), "reason": reason} for stale, reason in kept],
            }
        )
        return 1 if kept else 0
    for stale in removed:
        emit(printable(f"removed {stale.path} ({format_bytes(stale.num_bytes)})"), "\n")
    for stale, reason in kept:
        emit(printable(f"kept {stale.path}: {reason}"), "\n")
    if not removed and not kept:
        emit("nothing to remove: no compiled kernels of other versions", "\n")
    return 1 if kept else 0


def _lines(findings: list[Finding]) -> list[str]:
    """Mark, name and text in columns; long texts go on below their beginning."""
    marks = max(len(finding.mark) for finding in findings)
    names = max(len(finding.name) for finding in findings)
    margin = " " * (marks + names + 4)
    lines = []
    for finding in findings:
        head = f"{finding.mark:<{marks}}  {finding.name:<{names}}  "
        lines += _wrapped(finding.text, head, margin)
        if finding.fix:
            lines += _wrapped(f"fix: {finding.fix}", margin, margin)
    return lines


def _wrapped(text: str, head: str, margin: str) -> list[str]:
    return textwrap.wrap(
        printable(text),
        _WIDTH,
        initial_indent=head,
        subsequent_indent=margin,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _emit_json(value: dict[str, Any]) -> None:
    emit(json.dumps(value, indent=2), "\n")
