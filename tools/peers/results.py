"""The results of a comparison, in a JSON file to which each run is added, so that comparisons can resume."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from genai.doctor.processor import read_processor

from .cases import Measured

_FORMAT = 2


class ResultsError(Exception):
    """A results file cannot be used; the message gives the reason."""


@dataclass(frozen=True)
class Run:
    """The measurements of one process, or its error.

    Attributes:
        engine: name of the engine.
        shape: name of the shape.
        case: name of the case.
        measured: measurements; None if the process failed.
        error: reason for the failure.
        versions: names and versions of the engine's packages.
    """

    engine: str
    shape: str
    case: str
    measured: Measured | None = None
    error: str = ""
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ceiling:
    """The machine's ceilings by number of threads, measured during one round of a case."""

    shape: str
    case: str
    read: dict[int, float]
    products: dict[int, dict[str, float]]


@dataclass
class Results:
    """The contents of a results file.

    Attributes:
        machine: properties of the machine; see `this_machine`.
        runs: all runs.
        ceilings: all measurements of the machine's ceilings.
    """

    machine: dict[str, Any]
    runs: list[Run] = field(default_factory=list)
    ceilings: list[Ceiling] = field(default_factory=list)

    def of(self, engine: str, shape: str, case: str) -> list[Run]:
        """Return the runs of one engine, shape and case, in order."""
        return [run for run in self.runs if (run.engine, run.shape, run.case) == (engine, shape, case)]

    def ceilings_of(self, shape: str, case: str) -> list[Ceiling]:
        """Return the ceilings measured with a case."""
        return [ceiling for ceiling in self.ceilings if (ceiling.shape, ceiling.case) == (shape, case)]

    def median(self, engine: str, shape: str, case: str, value: Callable[[Measured], float | None]) -> float | None:
        """Return the median of one measured value, or None if there are no measurements."""
        return _median(value(run.measured) for run in self.of(engine, shape, case) if run.measured)

    def read_bandwidth(self, shape: str, case: str, threads: int) -> float | None:
        """Return the read bandwidth during a case, in bytes per second (the median of all measurements)."""
        return _median(ceiling.read.get(threads) for ceiling in self.ceilings_of(shape, case))

    def most_products(self, shape: str, case: str, threads: int) -> float | None:
        """Return the peak arithmetic rate during a case, in operations per second (the median of all measurements)."""
        rates = (ceiling.products.get(threads, {}).values() for ceiling in self.ceilings_of(shape, case))
        return _median(max(rate, default=None) for rate in rates)

    def forget(self, engines: Collection[str], shapes: Collection[str], cases: Collection[str]) -> None:
        """Remove the runs to measure again, and their ceilings."""
        self.runs = [
            run for run in self.runs if run.engine not in engines or run.shape not in shapes or run.case not in cases
        ]
        kept = {(run.shape, run.case) for run in self.runs}
        self.ceilings = [ceiling for ceiling in self.ceilings if (ceiling.shape, ceiling.case) in kept]

    def save(self, path: Path) -> None:
        """Replace the file atomically."""
        partial = path.with_name(f".{path.name}.partial")
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({"format": _FORMAT} | asdict(self), indent=1) + "\n", encoding="utf-8")
        partial.replace(path)


def load(path: Path) -> Results:
    """Read a results file.

    Raises:
        ResultsError: the file does not exist, or it is not a results file.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] != _FORMAT:
            raise ResultsError(f"{path} has format {values['format']!r}, expected {_FORMAT}: measure again")
        return Results(
            machine=values["machine"],
            runs=[_run(entry) for entry in values["runs"]],
            ceilings=[_ceiling(entry) for entry in values["ceilings"]],
        )
    except OSError as error:
        raise ResultsError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ResultsError(f"{path} is not a results file: {type(error).__name__}: {error}") from error


def load_or_begin(path: Path) -> Results:
    """Return the results in a file, or empty results if the file does not exist.

    Raises:
        ResultsError: the file is not a results file, or belongs to another machine.
    """
    here = this_machine()
    if not path.exists():
        return Results(here)
    results = load(path)
    if results.machine != here:
        raise ResultsError(f"{path} was measured on {results.machine}, this is {here}: choose another file")
    return results


def this_machine() -> dict[str, Any]:
    """Return the properties of this machine that influence speed."""
    processor = read_processor()
    return {
        "processor": processor.name,
        "cores": processor.threads,
        "features": list(processor.features),
        "last_level_cache": processor.last_level_cache,
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def _run(entry: dict[str, Any]) -> Run:
    measured = entry["measured"]
    return Run(
        entry["engine"],
        entry["shape"],
        entry["case"],
        None if measured is None else Measured.from_json(measured),
        entry["error"],
        dict(entry["versions"]),
    )


def _ceiling(entry: dict[str, Any]) -> Ceiling:
    """Return a ceiling from JSON, in which all keys are strings."""
    read = {int(threads): float(rate) for threads, rate in entry["read"].items()}
    products = {int(threads): rates for threads, rates in entry["products"].items()}
    return Ceiling(entry["shape"], entry["case"], read, products)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
