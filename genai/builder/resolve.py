"""A path that may be a checkpoint becomes a model folder: built into the cache the first time, found there later."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from ..errors import ModelFolderError
from .build import BuildPlan, execute, plan_build
from .checkpoint import is_checkpoint
from .options import ExportOptions
from .unfinished import locked

# Raised when the same checkpoint would be written differently.
_BUILDER_VERSION = 1
# Part of a checkpoint's identity beside its name: whatever the builder reads.
_READ = ("*.safetensors", "*.json", "*.jinja", "additional_chat_templates/*.jinja", "*.model")

Progress = Callable[[int], None]


def resolve_model_folder(
    path: str | Path,
    *,
    build: bool = True,
    ask: Callable[[str], bool] = lambda question: True,
    watch: Callable[[BuildPlan], Progress] = lambda plan: lambda count: None,
    waiting: Callable[[Path], None] = lambda folder: None,
    options: ExportOptions | None = None,
) -> Path:
    """The model folder that a path stands for.

    A path that is no Hugging Face checkpoint is returned as it is. A checkpoint is built into the cache folder
    ($GENAI_CACHE_DIR, $XDG_CACHE_HOME or ~/.cache; genai/models), under a name that changes with its files.

    Args:
        build: False refuses to build what is not there.
        ask: given the question, with the sizes, before a build; False ends it.
        watch: called when a build begins; what it returns is told the bytes of every tensor that is read.
        waiting: called with the cache folder, while another process builds there; one build runs at a time.
        options: None means INT4 in blocks of 32.

    Raises:
        ModelFolderError: it is not built, and is not to be; or see plan_build.
    """
    source = Path(path).expanduser()
    if not is_checkpoint(source):
        return source
    from genai.kernels.cpu.cache import cache_root

    options = options or ExportOptions()
    target = cache_root() / "models" / f"{source.resolve().name}-{_identity(source, options)}"
    if (target / "genai_config.json").is_file():
        return target
    if not build:
        raise ModelFolderError(
            f"{source} is a Hugging Face checkpoint that is not built yet",
            "it was asked not to build (--no-build)",
            f"leave that out, or build it yourself: genai build {source} -o FOLDER",
        )
    report: list[Progress] = []
    plan = plan_build(source, options, progress=lambda count: report[0](count))
    question = (
        f"{source} is a checkpoint ({_size(plan.read_bytes)}). Build an {options.precision.upper()} model of "
        f"{_size(plan.written_bytes)} in {target.parent}?"
    )
    if not ask(question):
        raise ModelFolderError(
            f"{source} was not built", "the answer was no", f"genai build {source} -o FOLDER builds it elsewhere"
        )
    _make_cache(target.parent)
    with _alone(target.parent, waiting):
        if (target / "genai_config.json").is_file():  # another process was faster
            return target
        report.append(watch(plan))
        return execute(plan, target)


def _make_cache(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ModelFolderError(
            f"cannot make {folder}", str(error), "set GENAI_CACHE_DIR to a folder that can be written"
        ) from error


@contextmanager
def _alone(folder: Path, waiting: Callable[[Path], None]) -> Iterator[None]:
    with locked(folder, wait=False) as free:
        if free:
            yield
            return
    waiting(folder)
    with locked(folder):
        yield


def _identity(source: Path, options: ExportOptions) -> str:
    """Changes with the files' names, sizes and times, with the options, and with what the builder writes."""
    files = sorted(path for pattern in _READ for path in source.glob(pattern))
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    text = json.dumps([_BUILDER_VERSION, str(source.resolve()), stats, asdict(options)])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
