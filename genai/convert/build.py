"""From a Hugging Face checkpoint folder to a model folder, which is found in the cache the next time."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from genai.kernels.cpu.jit.kernel_cache import cache_root

from ..common.paths import expanded
from ..common.renamed import renamed_fields
from ..engine.sampling.params import model_defaults
from ..engine.sampling.search_options import SEARCH_OPTIONS, checked
from ..errors import ConfigError, ModelFolderError, OptionError, UnsupportedModelError
from ..lora.parameters import AdapterParameters
from ..text.files import generation_defaults
from ..text.sources.choosing import PATTERNS
from ..weight_files.gguf import SUFFIX, gguf_parts, is_gguf
from .checkpoint import GENERATION_CONFIG, Checkpoint, MergedCheckpoint, is_checkpoint
from .folder import check_tokenizer, locked, tokenizer_files, write_model_folder
from .gguf.checkpoint import GgufCheckpoint
from .options import ExportOptions, Precision
from .prequantized.checkpoint import QuantisedCheckpoint, read_quantisation
from .rope_scaling import LongRope
from .spec import DecoderSpec
from .tensors import folder_bytes
from .weights import CheckpointWeights

# What onnxruntime's attention operator rotates at once.
_ROTATED_TOGETHER = 16


@renamed_fields(kept="prequantized")
@dataclass(frozen=True)
class BuildPlan:
    """What a build will do: the decoder, the options that fit it, and the bytes that it reads and writes.

    `remarks` is what a user should be told: keys of config.json that nothing here knows, tokens without vectors.
    """

    checkpoint: Checkpoint
    spec: DecoderSpec
    options: ExportOptions
    weights: CheckpointWeights
    search: Mapping[str, Any]
    read_bytes: int
    written_bytes: int
    remarks: list[str]

    @property
    def prequantized(self) -> list[str]:
        """After the build: what was kept exactly, in words, and which runtimes read it."""
        return [
            f"{count} {'matrix is' if count == 1 else 'matrices are'} kept exactly: {kind} (read by {readers})"
            for (kind, readers), count in self.weights.prequantized.items()
        ]

    @property
    def rounded(self) -> list[str]:
        """After the build: what could not be kept exactly, in words, with the error that was measured."""
        return [
            f"{kind} weights of experts are now integers of 8 bits, {math.sqrt(error / total):.2%} off (of their norm)"
            for kind, (error, total) in self.weights.rounded.items()
            if total
        ]


def plan_build(
    checkpoint_dir: str | Path,
    options: ExportOptions | None = None,
    *,
    force: bool = False,
    progress: Callable[[int], None] = lambda count: None,
    merge: tuple[AdapterParameters, float] | None = None,
) -> BuildPlan:
    """Read headers and configuration, and check all that can be checked before anything is written.

    Args:
        checkpoint_dir: folder with config.json, *.safetensors and a tokenizer; or a GGUF file.
        options: None means INT4 in blocks of 32; where weights are quantised already, as they are.
        force: NaN and infinity among the weights become 0.
        progress: told the bytes of every tensor that is read.
        merge: an adapter to add to the weights before they are stored, and a factor on it.

    Raises:
        ModelFolderError: files are missing. InputError, ConfigError: they contradict each other.
        UnsupportedModelError: an architecture or a part of one that is not known.
        TokenizerError: the tokenizer cannot be used.
    """
    checkpoint = open_checkpoint(checkpoint_dir)
    architecture = checkpoint.architecture
    if merge and checkpoint.precision != Checkpoint.precision:
        raise UnsupportedModelError(
            f"{checkpoint_dir}: adapters are not merged into weights that are quantised already",
            "the sum would have to be rounded once more",
            f"use it beside the model, with --lora NAME={merge[0].source}; or merge it into the float checkpoint",
        )
    if merge:  # as PEFT does: what lies there counts, not what the adapter says of it
        adapter = replace(merge[0], fan_in_fan_out=architecture.stores_transposed)
        checkpoint = MergedCheckpoint(checkpoint_dir, adapter, merge[1])
    spec = architecture.describe(checkpoint.config)
    remarks = [*checkpoint.remarks, *check_tokenizer(checkpoint.folder, spec.vocab_size)]
    if unread := checkpoint.config.unread:
        named = "config.json" if checkpoint.source == checkpoint.folder else checkpoint.source.name
        remarks.append(f"{named} has keys that {architecture.model_type} is not known for: {', '.join(unread)}")
    weights = CheckpointWeights(checkpoint, architecture, spec, force=force, progress=progress)
    options = options or ExportOptions(precision=checkpoint.precision)
    # Tables that change with the length are known inside the operator only.
    fits = spec.rotary_size % _ROTATED_TOGETHER == 0 or isinstance(spec.rope_scaling, LongRope)
    if options.fused_rope and not fits:  # onnxruntime cannot rotate inside the attention operator
        options = replace(options, fused_rope=False)
    copied = sum(file.stat().st_size for file in tokenizer_files(checkpoint.folder))
    written = folder_bytes(spec, options, weights.kind) + copied
    search = _search(checkpoint, spec.vocab_size)
    return BuildPlan(checkpoint, spec, options, weights, search, weights.total_bytes, written, remarks)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """A Hugging Face checkpoint folder, whose weights may be quantised, or a GGUF file; raises as plan_build does."""
    if is_gguf(expanded(path)):
        return GgufCheckpoint(path)
    quantisation = read_quantisation(Path(path))
    return Checkpoint(path) if quantisation is None else QuantisedCheckpoint(path, quantisation)


def default_precision(path: Path) -> Precision:
    """How weights are stored unless somebody asks for another way: as they are, where they are quantised already.

    Raises:
        ModelFolderError, InputError, ConfigError, UnsupportedModelError: what config.json says cannot be read.
    """
    if is_gguf(path):
        return GgufCheckpoint.precision
    quantisation = read_quantisation(path)
    return Checkpoint.precision if quantisation is None else quantisation.precision


def _search(checkpoint: Checkpoint, vocab_size: int) -> dict[str, Any]:
    """Search options out of generation_config.json, if the engine will take them when the model is loaded."""
    sampling = generation_defaults(checkpoint.folder).sampling
    try:
        model_defaults(sampling, vocab_size)
        return {name: checked(name, value) for name, value in sampling.items() if name in SEARCH_OPTIONS}
    except OptionError as error:
        raise ConfigError(
            f"{GENERATION_CONFIG}: {error.what}", error.why, "correct the file, or remove the key"
        ) from error


def build_model(
    checkpoint_dir: str | Path,
    output: str | Path,
    options: ExportOptions | None = None,
    *,
    force: bool = False,
    progress: Callable[[int], None] = lambda count: None,
) -> Path:
    """Build a model folder from a checkpoint; returns it. See plan_build for arguments and errors.

    The folder appears when it is whole. Memory stays within twice the largest tensor, whatever the model's size.
    """
    plan = plan_build(checkpoint_dir, options, force=force, progress=progress)
    return execute(plan, Path(output))


def execute(plan: BuildPlan, output: Path) -> Path:
    """Write what was planned; raises as write_model_folder does, and ModelFolderError where there is no room."""
    _require_room(output, plan.written_bytes)
    return write_model_folder(
        output, plan.spec, plan.options, plan.weights, tokenizer_dir=plan.checkpoint.folder, search=plan.search
    )


def _require_room(output: Path, needed: int) -> None:
    if not output.parent.is_dir():
        raise ModelFolderError(
            f"{output.parent} is no folder", f"{output.name} is to be made in it", "make it first, or choose another"
        )
    free = shutil.disk_usage(output.parent).free
    if free < needed:
        raise ModelFolderError(
            f"{output.parent} has {free / 1e9:.2f} GB free, the model needs {needed / 1e9:.2f} GB",
            "a build that fills the disk fails at its end",
            "free some space, choose another place, or a smaller precision",
        )


# Raised when the same checkpoint would be written differently.
_BUILDER_VERSION = 1
# Part of a checkpoint's identity beside its name: whatever the builder reads.
_READ = ("*.safetensors", "*.json", "*.jinja", "additional_chat_templates/*.jinja", *PATTERNS)

Progress = Callable[[int], None]


def resolve_model_folder(
    path: str | Path,
    *,
    build: bool = True,
    ask: Callable[[str], bool] = lambda question: True,
    watch: Callable[[BuildPlan], Progress] = lambda plan: lambda count: None,
    waiting: Callable[[Path], None] = lambda folder: None,
    options: ExportOptions | None = None,
    into: Path | None = None,
) -> Path:
    """The model folder that a path stands for.

    A path that is neither a Hugging Face checkpoint nor a GGUF file is returned as it is. Those are built into the
    cache folder ($GENAI_CACHE_DIR, $XDG_CACHE_HOME or ~/.cache; genai/models); the name changes with their files.

    Args:
        build: False refuses to build what is not there.
        ask: given the question, with the sizes, before a build; False ends it.
        watch: called when a build begins; what it returns is told the bytes of every tensor that is read.
        waiting: called with the cache folder, while another process builds there; one build runs at a time.
        options: None means INT4 in blocks of 32; where weights are quantised already, as they are.
        into: the folder to build into instead; names in it say the precision.

    Raises:
        ModelFolderError: it is not built, and is not to be; or see plan_build.
    """
    source = expanded(path)
    if not is_checkpoint(source):
        return source
    is_file = is_gguf(source)
    options = options or ExportOptions(precision=default_precision(source))
    name = source.resolve().name.removesuffix(SUFFIX) if is_file else source.resolve().name
    identity = _identity(source, options)
    if into is not None:
        target = into / f"{name}-{options.precision}-{identity}"
    else:
        target = cache_root() / "models" / f"{name}-{identity}"
    if (target / "genai_config.json").is_file():
        return target
    if not build:
        raise ModelFolderError(
            f"{source} is a {'GGUF file' if is_file else 'Hugging Face checkpoint'} that is not built yet",
            "it was asked not to build (--no-build)",
            f"leave that out, or build it yourself: genai build {source} -o FOLDER",
        )
    report: list[Progress] = []
    plan = plan_build(source, options, progress=lambda count: report[0](count))
    kind = "a GGUF file" if is_file else "a checkpoint"
    keeps_weights = options.precision == "kept"
    result = "a model with its weights as they are," if keeps_weights else f"an {options.precision.upper()} model"
    question = (
        f"{source} is {kind} ({_size(plan.read_bytes)}). Build {result} of {_size(plan.written_bytes)} in "
        f"{target.parent}?"
    )
    if not ask(question):
        raise ModelFolderError(
            f"{source} was not built", "the answer was no", f"genai build {source} -o FOLDER builds it elsewhere"
        )
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ModelFolderError(
            f"cannot make {target.parent}", str(error), "set GENAI_CACHE_DIR to a folder that can be written"
        ) from error
    with _alone(target.parent, waiting):
        if (target / "genai_config.json").is_file():  # another process was faster
            return target
        report.append(watch(plan))
        return execute(plan, target)


@contextmanager
def _alone(folder: Path, waiting: Callable[[Path], None]) -> Iterator[None]:
    with locked(folder, wait=False) as free:
        if free is not False:
            yield
            return
    waiting(folder)
    with locked(folder):
        yield


def _identity(source: Path, options: ExportOptions) -> str:
    """Changes with the files' names, sizes and times, with the options, and with what the builder writes."""
    paths = gguf_parts(source) if is_gguf(source) else (path for pattern in _READ for path in source.glob(pattern))
    files = sorted(paths)
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    text = json.dumps([_BUILDER_VERSION, str(source.resolve()), stats, asdict(options)])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
