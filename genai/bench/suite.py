"""The comparison of a folder of models with onnxruntime: `genai bench session --suite FOLDER`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import genai

from ..common.cores import default_threads
from ..common.reading import json_object, read_text_file
from ..errors import InputError, OptionError, did_you_mean, kind_of
from ..onnx.ir import Value
from ..session.arrays import peer_module
from ..session.dimensions import Sizes
from .speed import Progress, silent

SETTINGS = "suite.json"
CLASSES = ("fp32", "fp16", "int8", "tiny")
REPEAT = 10
# Sizes of dimensions, by the words that their names contain; the first match counts. Other dimensions have the size 1.
SIZES = (
    (r"batch", 1),
    (r"past", 128),
    (r"sequence|seq|length|tokens", 128),
    (r"height|width|^[hw]$", 224),
    (r"samples|audio", 16_000),
    (r"frames|time", 100),
)
# The number of a model's processes: the comparison, and the memory of each runtime.
_STEPS = 3
_MEMORY = Path(__file__).with_name("session_memory.py")


@dataclass(frozen=True)
class SuiteModel:
    """One model of a suite.

    Attributes:
        path: the .onnx file.
        dims: sizes that suite.json gives for dimensions of this model.
        inputs: an .npz file of inputs; None = random inputs.
        kind: the class that suite.json names; None = the class that the graph and the measured time determine.
    """

    path: Path
    dims: Mapping[str, int] = field(default_factory=dict)
    inputs: Path | None = None
    kind: str | None = None


@dataclass(frozen=True)
class Suite:
    """The models of a folder and the settings of its suite.json.

    Attributes:
        models: the models, in the order of their names.
        dims: sizes of dimensions, for the models that have them.
        threads: the numbers of threads to measure.
        repeat: number of measurements per model.
    """

    models: Sequence[SuiteModel]
    dims: Mapping[str, int]
    threads: Sequence[int]
    repeat: int


def read_suite(folder: Path, only: Sequence[str] = ()) -> Suite:
    """Read a folder of .onnx files and its optional suite.json.

    Args:
        folder: the folder.
        only: patterns such as "resnet*"; models whose names match none of them are left out. () = all models.

    Raises:
        InputError: the folder has no models, or suite.json is malformed.
        OptionError: a pattern matches no model.
    """
    paths = {path.stem: path for path in sorted(folder.glob("*.onnx"))} if folder.is_dir() else {}
    if not paths:
        raise InputError(
            f"{folder} contains no models",
            "a suite is a folder of .onnx files",
            "pass another folder, or write models with python -m tools.session_models in a checkout",
        )
    settings = _Settings(folder / SETTINGS)
    for pattern in only:
        if not any(fnmatch(name, pattern) for name in paths):
            raise OptionError(
                f"--only {pattern} matches no model",
                f"the models are {', '.join(paths)}",
                did_you_mean(pattern, paths, "use the name of a model, or a pattern such as 'resnet*'"),
            )
    own = settings.models(paths)
    models = [
        own.get(name, SuiteModel(path))
        for name, path in paths.items()
        if not only or any(fnmatch(name, pattern) for pattern in only)
    ]
    threads = settings.threads() or sorted({1, min(2, default_threads())})
    return Suite(models, settings.dims(), threads, settings.repeat() or REPEAT)


class _Settings:
    """The content of suite.json, which may be absent."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values = json_object(read_text_file(path), path, InputError) if path.exists() else {}
        self._check_keys(self.values, ("dims", "threads", "repeat", "models"), "")

    def dims(self) -> dict[str, int]:
        return self._sizes(self.values, "")

    def threads(self) -> list[int]:
        found = self.values.get("threads", [])
        if not isinstance(found, list) or not all(_is_count(item) for item in found):
            raise self._error(f'"threads" is {found!r:.100}', "a list of whole numbers from 1 is expected", "[1, 2]")
        return found

    def repeat(self) -> int | None:
        found = self.values.get("repeat")
        if found is not None and not _is_count(found):
            raise self._error(f'"repeat" is {found!r:.100}', "a whole number from 1 is expected", "10")
        return found

    def models(self, paths: Mapping[str, Path]) -> dict[str, SuiteModel]:
        found = self._object(self.values, "models", "")
        made = {}
        for name in found:
            stem = name.removesuffix(".onnx")
            if stem not in paths:
                raise InputError(
                    f'{self.path}: "models" names {name!r:.100}',
                    f"the folder has no {stem:.100}.onnx",
                    did_you_mean(stem, paths, "remove the entry"),
                )
            about = f"{name}: "
            entry = self._object(found, name, "")
            self._check_keys(entry, ("dims", "inputs", "class"), about)
            inputs, kind = entry.get("inputs"), entry.get("class")
            if inputs is not None and not isinstance(inputs, str):
                raise self._error(f'{about}"inputs" is {inputs!r:.100}', "the name of a file is expected", '"x.npz"')
            if kind is not None and kind not in CLASSES:
                raise self._error(f'{about}"class" is {kind!r:.100}', f"the classes are {', '.join(CLASSES)}", '"fp32"')
            file = None if inputs is None else self.path.parent / inputs
            made[stem] = SuiteModel(paths[stem], self._sizes(entry, about), file, kind)
        return made

    def _sizes(self, owner: Mapping[str, Any], about: str) -> dict[str, int]:
        found = self._object(owner, "dims", about)
        for name, size in found.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 0:
                raise self._error(
                    f"{about}the size of {name!r:.100} is {size!r:.100}", "a whole number from 0 is expected", "128"
                )
        return found

    def _object(self, owner: Mapping[str, Any], key: str, about: str) -> dict[str, Any]:
        found = owner.get(key, {})
        if not isinstance(found, dict):
            raise self._error(f'{about}"{key}" is {kind_of(found)}', "a JSON object is expected", "{}")
        return found

    def _check_keys(self, found: Mapping[str, Any], known: Sequence[str], about: str) -> None:
        for key in found:
            if key not in known:
                raise InputError(
                    f"{self.path}: {about}the key {key!r:.100} is unknown",
                    f"the keys are {', '.join(known)}",
                    did_you_mean(key, known, "remove the key"),
                )

    def _error(self, what: str, why: str, example: str) -> InputError:
        return InputError(f"{self.path}: {what}", why, f"write {example}, for example")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def default_sizes(inputs: Sequence[Value], chosen: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of a model's dimensions: those of `chosen`, and by the words of the names for the others."""
    sizes = {}
    for name in Sizes(inputs, {}).free:
        words = (size for pattern, size in SIZES if re.search(pattern, name.lower()))
        sizes[name] = chosen[name] if name in chosen else next(words, 1)
    return sizes


def bench_suite(
    suite: Suite,
    *,
    dims: Mapping[str, int] | None = None,
    threads: Sequence[int] = (),
    repeat: int | None = None,
    cpu: bool = False,
    progress: Progress = silent,
) -> Iterator[dict[str, Any]]:
    """Compare the models of a suite with onnxruntime, each in new processes; yield a row for each number of threads.

    Args:
        suite: the models; see read_suite.
        dims: sizes of dimensions, for the models that have them; they take precedence over the suite's sizes.
        threads: numbers of threads; () = those of the suite.
        repeat: number of measurements; None = that of the suite.
        cpu: True to measure the CPU time of one thread; see bench_session.
        progress: called with the number of finished processes, and the number of all processes.

    Yields:
        The result of bench_session with "threads", "class", "dims", the peak memory of a process with either runtime
        ("peak_mb"), and the time to create the first session of a process ("first_ms"). If the model cannot be
        measured, the row has "error" instead.

    Raises:
        MissingPackageError: onnxruntime is not installed.
    """
    peer_module()
    counts = [1] if cpu else list(threads or suite.threads)
    done, total = 0, len(suite.models) * len(counts) * _STEPS
    for model in suite.models:
        kind = model.kind
        for count in counts:
            progress(done, total)
            measure = _Measurement(model, {**suite.dims, **(dims or {})}, count, repeat or suite.repeat, cpu)
            row = measure(partial(_show_step, progress, done, total))
            if "error" not in row:
                row["class"] = kind = kind or _class_of(row)
            done += _STEPS
            yield row


def _show_step(progress: Progress, done: int, total: int, step: int) -> None:
    progress(done + step, total)


def _class_of(row: Mapping[str, Any]) -> str:
    return "tiny" if row["onnxruntime_run_ms"] < 1 else str(row["class"])


class _ProcessFailed(Exception):
    pass


@dataclass(frozen=True)
class _Measurement:
    model: SuiteModel
    dims: Mapping[str, int]
    threads: int
    repeat: int
    cpu: bool

    def __call__(self, step: Callable[[int], None]) -> dict[str, Any]:
        row: dict[str, Any] = {"model": self.model.path.stem, "threads": self.threads}
        with tempfile.TemporaryDirectory() as folder:
            feed = Path(folder) / "inputs.pickle"
            try:
                row |= self._compared(feed)
                for index, runtime in enumerate(("genai", "onnxruntime"), 1):
                    step(index)
                    row |= self._memory(runtime, feed)
            except _ProcessFailed as failed:
                return {"model": row["model"], "threads": self.threads, "error": str(failed)}
        row["first_ratio"] = row["first_ms"] / row["onnxruntime_first_ms"]
        row["memory_ratio"] = row["peak_mb"] / row["onnxruntime_peak_mb"] if row["onnxruntime_peak_mb"] else None
        return row

    def _compared(self, feed: Path) -> dict[str, Any]:
        task = {
            "path": str(self.model.path), "dims": dict(self.dims), "own": dict(self.model.dims),
            "inputs": str(self.model.inputs or ""), "threads": self.threads, "repeat": self.repeat, "cpu": self.cpu,
            "feed": str(feed),
        }  # fmt: skip
        found = _result_of(["-m", "genai.bench.suite_worker"], json.dumps(task))
        return {name: value for name, value in found.items() if name != "model"}

    def _memory(self, runtime: str, feed: Path) -> dict[str, float]:
        found = _result_of(["-P", str(_MEMORY), runtime, str(self.model.path), str(feed), str(self.threads)])
        prefix = "" if runtime == "genai" else "onnxruntime_"
        return {f"{prefix}first_ms": found["first_ms"], f"{prefix}peak_mb": found["peak_bytes"] / 1e6}


def _result_of(arguments: Sequence[str], stdin: str = "") -> dict[str, Any]:
    """Run a Python process and return the JSON object that it prints last. Raises _ProcessFailed."""
    paths = [str(Path(genai.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "ORT_DISABLE_TELEMETRY": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], input=stdin, capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode != 0:
        last = done.stderr.strip().splitlines() or [f"the process ended with code {done.returncode}"]
        raise _ProcessFailed(last[-1][:400])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "error" in found:
        raise _ProcessFailed(found["error"])
    return found
