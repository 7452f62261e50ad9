"""What an engine is to the comparison."""

from __future__ import annotations

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from ..cases import Job, Measured
from ..environment import VirtualEnvironment
from ..processes import Outcome, PeerError

WORKERS = Path(__file__).resolve().parent.parent / "workers"


class Engine(ABC):
    """An engine, its folder below the work folder, and its form of a model.

    Attributes:
        name: in options, results and folders.
        title: for people.
        form: how its models were made.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    form: ClassVar[str]

    @property
    def home(self) -> str:
        """Name of its folder."""
        return self.name

    def folder(self, work: Path) -> Path:
        """Where it lies."""
        return work / self.home

    def model(self, work: Path, shape: str) -> Path:
        """Where its form of a shape lies, or will."""
        return self.folder(work) / "models" / shape

    @abstractmethod
    def install(self, work: Path) -> None:
        """Make it ready, or find that it is.

        Raises:
            PeerError: it cannot be installed here.
        """

    @abstractmethod
    def versions(self, work: Path) -> dict[str, str]:
        """Names and versions of what is installed; empty if it is not."""

    @abstractmethod
    def build(self, work: Path, checkpoint: Path, output: Path) -> None:
        """Turn a checkpoint into its form at `output`, which does not exist.

        Raises:
            PeerError: that failed.
        """

    def adapted(self, work: Path, shape: str) -> tuple[Path, Path]:
        """Where the model that runs with an adapter lies, and the adapter, or will."""
        return self.model(work, shape), self.folder(work) / "adapters" / shape

    def build_adapter(self, work: Path, adapter: Path, shape: str) -> None:
        """Make what `adapted` names from an adapter in PEFT's form.

        Raises:
            PeerError: that failed.
        """
        raise PeerError(f"{self.name}: adapters are not measured")

    @abstractmethod
    def command(self, work: Path, job: Job) -> list[str]:
        """The process that measures."""

    def environment(self, work: Path) -> Mapping[str, str]:
        """What that process needs in its environment."""
        return {}

    def measured(self, job: Job, outcome: Outcome) -> Measured:
        """What the process said: the worker's JSON, see `workers/timing.py`.

        Raises:
            PeerError: it said something else.
        """
        said = last_json(outcome.output)
        try:
            return Measured(
                prefill=job.batch * job.prompt / said["prefill_seconds"] if job.warm else None,
                decode=job.batch * job.new / said["decode_seconds"] if job.warm else None,
                first_token=None if job.warm else said["first_token_at"] - outcome.started,
                peak_bytes=outcome.peak_bytes,
            )
        except (KeyError, TypeError, ZeroDivisionError) as error:
            raise PeerError(f"{self.name}: not what a worker says: {said}") from error

    def make_model(self, work: Path, checkpoint: Path) -> Path:
        """Its form of a checkpoint, built unless it is there; a build that fails leaves nothing."""
        output = self.model(work, checkpoint.name)
        if output.exists():
            return output
        partial = output.with_name(f".partial-{output.name}")
        partial.parent.mkdir(parents=True, exist_ok=True)
        _remove(partial)
        try:
            self.build(work, checkpoint, partial)
            return partial.rename(output)
        finally:
            _remove(partial)


class InEnvironment(Engine):
    """An engine of Python packages in a virtual environment of its own.

    Attributes:
        packages: what pip installs.
        worker: the script that measures.
    """

    packages: ClassVar[tuple[str, ...]]
    worker: ClassVar[str]

    def venv(self, work: Path) -> VirtualEnvironment:
        """Its virtual environment."""
        return VirtualEnvironment(self.folder(work))

    def install(self, work: Path) -> None:
        self.venv(work).install(self.packages)

    def versions(self, work: Path) -> dict[str, str]:
        return self.venv(work).versions()

    def command(self, work: Path, job: Job) -> list[str]:
        return [self.venv(work).python, str(WORKERS / self.worker), self.name, json.dumps(asdict(job))]


def last_json(text: str) -> Any:
    """The last line that is a JSON object; {} without one."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                return json.loads(line)
            except ValueError:
                continue
    return {}


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
