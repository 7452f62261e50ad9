"""`genai bench session --suite`: compares the models of a folder with onnxruntime."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from genai.common.progress import task

from .bench_tables import printed
from .options import check_apart
from .terminal import emit, emit_line, say, termination_raises

if TYPE_CHECKING:
    from genai.bench.suite_report import SuiteResult


def measure_suite(
    folder: Path,
    *,
    dims: Mapping[str, int],
    repeat: int | None,
    threads: int | None,
    cpu: bool,
    only: Sequence[str],
    outputs: Sequence[Path],
    against: Path | None,
    as_json: bool,
) -> None:
    """Measure, print a row per model, and write the files. What was measured before an interrupt is written, too.

    Raises:
        typer.Exit: with 1, if a model could not be measured, or a ratio grew.
    """
    from genai.bench.suite import bench_suite, read_suite
    from genai.bench.suite_report import SuiteResult, check_comparable, check_file, grown, read_result
    from genai.session.arrays import peer_module

    peer_module()  # before anything that takes long
    for path in outputs:
        check_file(path)
    check_apart([("--against", against), *(("--output", path) for path in outputs)])
    old = None if against is None else read_result(against)
    if old is not None:
        check_comparable(cpu, old)
    suite = read_suite(folder, only)
    rows: list[dict[str, Any]] = []
    finished = False
    try:
        with termination_raises(), task("Measuring") as line:
            measured = bench_suite(
                suite, dims=dims, threads=[threads] if threads else (), repeat=repeat, cpu=cpu, progress=line.show
            )
            for _ in printed(_shown(measured, rows), as_json):
                pass
        finished = True
    finally:
        result = SuiteResult(cpu, rows, interrupted=not finished)
        if rows:
            _finish(result, outputs, as_json)
    worse = grown(result, old) if old is not None else []
    for sentence in worse:
        say(f"grown by more than 5 %: {sentence}")
    if old is not None and old.processor != result.processor:
        say(f"note: {against} was measured on another processor: {old.processor}")
    if worse or result.failed:
        raise typer.Exit(1)


def _shown(measured: Iterator[dict[str, Any]], rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Append each row to `rows`, and yield its columns for a terminal; report models that cannot be measured."""
    for row in measured:
        rows.append(row)
        if "error" in row:
            say(f"{row['model']} cannot be measured: {row['error']}")
            continue
        yield {
            "model": row["model"],
            "threads": row["threads"],
            "run ms": row["run_ms"],
            "onnxruntime ms": row["onnxruntime_run_ms"],
            "run ratio": row["run_ratio"],
            "create ratio": row["create_ratio"],
            "memory ratio": row["memory_ratio"],
            "difference": row["difference"],
        }


def _finish(result: SuiteResult, outputs: Sequence[Path], as_json: bool) -> None:
    """Write the files, and print the means."""
    for path in outputs:
        result.write(path)
    if as_json:
        emit(result.to_json())
        return
    emit("\ngeometric means", "\n")
    for _ in printed([{name.replace("_", " "): value for name, value in row.items()} for row in result.means()], False):
        pass
    for path in outputs:
        emit_line(str(path))
