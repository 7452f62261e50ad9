"""The interface of an engine in the comparison."""

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
    """An engine, with its folder below the work folder and its models.

    Attributes:
        name: name in options, results and folders.
        title: name in tables.
        form: description of how the engine's models are made.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    form: ClassVar[str]

    @property
    def home(self) -> str:
        """The name of the engine's folder."""
        return self.name

    def folder(self, work: Path) -> Path:
        """Return the path of the engine's folder."""
        return work / self.home

    def model(self, work: Path, shape: str) -> Path:
        """Return the path of the engine's model of a shape; the model may not exist yet."""
        return self.folder(work) / "models" / shape

    @abstractmethod
    def install(self, work: Path) -> None:
        """Install the engine unless it is installed.

        Raises:
            PeerError: the engine cannot be installed here.
        """

    @abstractmethod
    def versions(self, work: Path) -> dict[str, str]:
        """Return names and versions of the installed packages; empty if the engine is not installed."""

    @abstractmethod
    def build(self, work: Path, checkpoint: Path, output: Path) -> None:
        """Convert a checkpoint to the engine's model at `output`, which does not exist.

        Raises:
            PeerError: the conversion failed.
        """

    def adapted(self, work: Path, shape: str) -> tuple[Path, Path]:
        """Return the paths of the model to run with an adapter, and of the adapter; both may not exist yet."""
        return self.model(work, shape), self.folder(work) / "adapters" / shape

    def build_adapter(self, work: Path, adapter: Path, shape: str) -> None:
        """Make the files that `adapted` names from an adapter in PEFT's format.

        Raises:
            PeerError: the conversion failed.
        """
        raise PeerError(f"{self.name}: adapters are not measured")

    @abstractmethod
    def command(self, work: Path, job: Job) -> list[str]:
        """Return the command line of the worker process that measures a job."""

    def environment(self, work: Path) -> Mapping[str, str]:
        """Return the environment variables that the worker process needs."""
        return {}

    def measured(self, job: Job, outcome: Outcome) -> Measured:
        """Parse the JSON that the worker process printed; see `workers/timing.py`.

        Raises:
            PeerError: the output has another format.
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
            raise PeerError(f"{self.name}: the output is not a worker's result: {said}") from error

    def make_model(self, work: Path, checkpoint: Path) -> Path:
        """Return the engine's model of a checkpoint, and build it unless it exists. A failed build leaves no files."""
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
    """An engine that consists of Python packages in a separate virtual environment.

    Attributes:
        packages: packages that pip installs.
        worker: name of the script that measures.
    """

    packages: ClassVar[tuple[str, ...]]
    worker: ClassVar[str]

    def venv(self, work: Path) -> VirtualEnvironment:
        """Return the engine's virtual environment."""
        return VirtualEnvironment(self.folder(work))

    def install(self, work: Path) -> None:
        self.venv(work).install(self.packages)

    def versions(self, work: Path) -> dict[str, str]:
        return self.venv(work).versions()

    def command(self, work: Path, job: Job) -> list[str]:
        return [self.venv(work).python, str(WORKERS / self.worker), self.name, json.dumps(asdict(job))]


def last_json(text: str) -> Any:
    """Return the last line that is a JSON object, or {}."""
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
