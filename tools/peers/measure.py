"""Run cases in turns: ceilings, our engine, each peer, and again, so that disturbances affect all engines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from .cases import Case, Job, Measured
from .engines import OURS
from .engines.base import WORKERS, Engine, last_json
from .processes import PeerError, run_measured, spinning
from .results import Ceiling, Results, Run
from .shapes import Shape

_TIMEOUT_SECONDS = 1800.0
_CEILING_TIMEOUT_SECONDS = 120.0
_REHEARSAL = Case("rehearsal", 128, 4)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Comparison:
    """A comparison of engines.

    Attributes:
        results: the results, to which each run is added.
        path: file that the results are written to after every process.
        work: folder with engines and models.
        cores: number of threads, unless a case specifies another number.
        repeat: processes per engine and case.
        say: function that prints a progress line.
    """

    results: Results
    path: Path
    work: Path
    cores: int
    repeat: int
    say: Say

    def run(self, shapes: Sequence[Shape], engines: Sequence[Engine], cases: Sequence[Case]) -> None:
        """Measure missing results. Record failures with their reasons; do not retry them."""
        installed = [engine for engine in engines if self._installed(engine)]
        for shape in shapes:
            ready = [engine for engine in installed if self._has_model(engine, shape)]
            self._rehearse(shape, ready, cases)
            for case in cases:
                taking_part = [engine for engine in ready if self._takes_part(engine, shape, case)]
                for repetition in range(1, self.repeat + 1):
                    self._round(shape, case, taking_part, repetition)

    def _installed(self, engine: Engine) -> bool:
        versions = engine.versions(self.work)
        if not versions:
            self.say(f"{engine.name}: skipped: not installed (`setup` installs it)")
            return False
        runs = (run for run in self.results.runs if run.engine == engine.name)
        if other := next((run for run in runs if run.versions != versions), None):
            before = f"{other.shape} {other.case} was measured with {other.versions}"
            self.say(f"{engine.name}: {before}, this is {versions} (`--again` repeats the measurement)")
        return True

    def _has_model(self, engine: Engine, shape: Shape) -> bool:
        if engine.model(self.work, shape.name).exists():
            return True
        self.say(f"{shape.name}: {engine.name} skipped: no model (`models` makes one)")
        return False

    def _takes_part(self, engine: Engine, shape: Shape, case: Case) -> bool:
        if case.adapter and not all(part.exists() for part in engine.adapted(self.work, shape.name)):
            self.say(f"{shape.name} {case.name}: {engine.name} skipped: no adapter (`models --adapter` makes one)")
            return False
        return case.peers or engine is OURS

    def _rehearse(self, shape: Shape, engines: Sequence[Engine], cases: Sequence[Case]) -> None:
        """Run one unmeasured process per engine, which loads files into memory and compiles kernels."""
        for engine in engines:
            if any(self._is_due(engine, shape, case, self.repeat) for case in cases):
                try:
                    self._process(engine, shape, _REHEARSAL)
                except PeerError as error:
                    self.say(f"{shape.name} {engine.name}: {error}")

    def _round(self, shape: Shape, case: Case, engines: Sequence[Engine], repetition: int) -> None:
        due = [engine for engine in engines if self._is_due(engine, shape, case, repetition)]
        if not due:
            return
        if len(self.results.ceilings_of(shape.name, case.name)) < repetition:
            self._measure_ceilings(shape, case)
        for engine in due:
            run = self._measured(engine, shape, case)
            self.results.runs.append(run)
            self.results.save(self.path)
            self.say(f"{shape.name} {case.name} {repetition}/{self.repeat} {engine.name}: {_summary(run)}")

    def _is_due(self, engine: Engine, shape: Shape, case: Case, repetition: int) -> bool:
        runs = self.results.of(engine.name, shape.name, case.name)
        failed = any(run.measured is None for run in runs)
        return len(runs) < repetition and not failed

    def _measured(self, engine: Engine, shape: Shape, case: Case) -> Run:
        run = Run(engine.name, shape.name, case.name, versions=engine.versions(self.work))
        try:
            with spinning(self.cores) if case.busy else nullcontext():
                return replace(run, measured=self._process(engine, shape, case))
        except PeerError as error:
            return replace(run, error=str(error))

    def _process(self, engine: Engine, shape: Shape, case: Case) -> Measured:
        model, adapter = (
            engine.adapted(self.work, shape.name) if case.adapter else (engine.model(self.work, shape.name), "")
        )
        job = Job.of(case, str(model), int(shape.config["vocab_size"]), self.cores, str(adapter))
        outcome = run_measured(engine.command(self.work, job), engine.environment(self.work), _TIMEOUT_SECONDS)
        return engine.measured(job, outcome)

    def _measure_ceilings(self, shape: Shape, case: Case) -> None:
        """Measure the machine's ceilings now, on a quiet machine: busy cases are also compared with quiet ceilings."""
        command = [sys.executable, str(WORKERS / "ceilings.py"), str(case.threads or self.cores)]
        try:
            outcome = run_measured(command, OURS.environment(self.work), _CEILING_TIMEOUT_SECONDS)
        except PeerError as error:
            self.say(f"{shape.name} {case.name}: ceilings: {error}")
            return
        found = {int(threads): values for threads, values in last_json(outcome.output).items()}
        read = {threads: values["read"] for threads, values in found.items()}
        products = {threads: values["products"] for threads, values in found.items()}
        self.results.ceilings.append(Ceiling(shape.name, case.name, read, products))


def make_models(
    work: Path, shapes: Sequence[Shape], engines: Sequence[Engine], say: Say, *, adapter: bool = False
) -> bool:
    """Make missing checkpoints and models; with `adapter`, also make the adapter in every engine's format.

    Returns:
        True if all of them could be made.
    """
    from .adapter import make_adapter
    from .checkpoint import make_checkpoint

    whole = True
    for shape in shapes:
        checkpoint = work / "checkpoints" / shape.name
        if not checkpoint.exists():
            say(f"{shape.name}: writing the checkpoint")
            make_checkpoint(checkpoint, shape)
        for engine in engines:
            try:
                if not engine.versions(work):
                    raise PeerError("not installed (`setup` installs it)")
                say(f"{shape.name}: {engine.name}")
                say(f"  {engine.make_model(work, checkpoint)}")
                if adapter and not all(part.exists() for part in engine.adapted(work, shape.name)):
                    engine.build_adapter(work, make_adapter(work / "adapters" / shape.name, shape), shape.name)
                    say(f"  {engine.adapted(work, shape.name)[1]}")
            except PeerError as error:
                whole = False
                say(f"{shape.name}: {engine.name}: {error}")
    return whole


def install(work: Path, engines: Sequence[Engine], say: Say) -> bool:
    """Install missing engines; return True if all are installed."""
    whole = True
    for engine in engines:
        say(f"{engine.name}: installing into {engine.folder(work)}")
        try:
            engine.install(work)
            say("  " + ", ".join(f"{name} {version}" for name, version in engine.versions(work).items()))
        except PeerError as error:
            whole = False
            say(f"{engine.name}: skipped: {error}")
    return whole


def _summary(run: Run) -> str:
    if run.measured is None:
        return run.error
    found = run.measured
    parts = [
        f"prefill {found.prefill:.0f} tok/s" if found.prefill else "",
        f"decode {found.decode:.1f} tok/s" if found.decode else "",
        f"first token {found.first_token:.2f} s" if found.first_token else "",
        f"{found.peak_bytes / 2**20:.0f} MiB",
    ]
    return ", ".join(part for part in parts if part)
