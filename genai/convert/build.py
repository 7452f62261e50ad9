"""Build a model folder from a Hugging Face checkpoint or a GGUF file, and cache the result."""

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

from genai.common.memory_limits import format_bytes
from genai.common.progress import task
from genai.kernels.cpu.jit.kernel_cache import cache_root

from ..common.paths import expanded
from ..common.renamed import renamed_fields
from ..engine.sampling.params import model_defaults
from ..engine.sampling.search_options import SEARCH_OPTIONS, checked
from ..errors import ConfigError, ModelFolderError, OptionError, UnsupportedModelError
from ..hub.built import note_build
from ..lora.parameters import AdapterParameters
from ..text.files import generation_defaults, older_generation_values
from ..text.sources.choosing import PATTERNS
from ..weight_files.gguf import SUFFIX, gguf_parts, is_gguf
from .checkpoint import GENERATION_CONFIG, Checkpoint, MergedCheckpoint, is_checkpoint
from .folder import check_tokenizer, locked, tokenizer_files, write_model_folder
from .gguf.checkpoint import GgufCheckpoint
from .mtp import with_mtp_head
from .options import ExportOptions, Precision
from .prequantized.checkpoint import QuantisedCheckpoint, read_quantisation
from .rope_scaling import LongRope
from .spec import DecoderSpec
from .tensors import folder_bytes
from .weights import CheckpointWeights

# Number of elements that onnxruntime's attention operator rotates in one step.
_ROTATED_TOGETHER = 16


@renamed_fields(kept="prequantized")
@dataclass(frozen=True)
class BuildPlan:
    """The plan of a build: the decoder, the options adapted to it, and the bytes to read and to write.

    Attributes:
        remarks: remarks to show to the user: unknown keys in config.json, tokens without embeddings.
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
        """One sentence per block type about the matrices that the build kept exactly and the runtimes that read it."""
        return [
            f"{count} {'matrix is' if count == 1 else 'matrices are'} kept exactly: {kind} (read by {readers})"
            for (kind, readers), count in self.weights.prequantized.items()
        ]

    @property
    def rounded(self) -> list[str]:
        """One sentence per type about the weights that the build rounded, with the measured error."""
        return [
            f"{kind} expert weights are quantised to 8-bit integers (relative error {math.sqrt(error / total):.2%})"
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
    """Read the headers and the configuration, and check everything that can be checked before the folder is written.

    Args:
        checkpoint_dir: folder with config.json, *.safetensors and a tokenizer; or a GGUF file.
        options: None means int4 in blocks of 32; weights that are already quantised stay as they are.
        force: True to replace NaN and infinity in the weights with 0.
        progress: called with the size in bytes of every tensor that is read.
        merge: an adapter to add to the weights before they are stored, and its factor.

    Raises:
        ModelFolderError: files are missing.
        InputError, ConfigError: files contradict each other.
        UnsupportedModelError: the architecture, or a part of it, is not supported.
        TokenizerError: the tokenizer cannot be used.
    """
    with task(f"Reading {Path(checkpoint_dir).name}"):
        return _planned(checkpoint_dir, options, force, progress, merge)


def _planned(
    checkpoint_dir: str | Path, options: ExportOptions | None, force: bool, progress: Callable[[int], None],
    merge: tuple[AdapterParameters, float] | None,
) -> BuildPlan:  # fmt: skip
    checkpoint = open_checkpoint(checkpoint_dir)
    architecture = checkpoint.architecture
    if merge and checkpoint.precision != Checkpoint.precision:
        raise UnsupportedModelError(
            f"{checkpoint_dir}: an adapter cannot be merged into weights that are already quantised",
            "the merged weights would have to be quantised a second time",
            f"load the adapter with the model (--lora NAME={merge[0].source}), or merge it into the float checkpoint",
        )
    if merge:  # as in PEFT, the checkpoint's layout decides, not the adapter's fan_in_fan_out
        adapter = replace(merge[0], fan_in_fan_out=architecture.stores_transposed)
        checkpoint = MergedCheckpoint(checkpoint_dir, adapter, merge[1])
    spec = architecture.describe(checkpoint.config)
    remarks = [*checkpoint.remarks, *check_tokenizer(checkpoint.folder, spec.vocab_size)]
    spec, more = with_mtp_head(spec, checkpoint, architecture, options or ExportOptions())
    remarks += more
    sampling = older_generation_values(checkpoint.folder) if not checkpoint.config.generation else {}
    if unread := [name for name in checkpoint.config.unread if name not in sampling]:
        named = "config.json" if checkpoint.source == checkpoint.folder else checkpoint.source.name
        remarks.append(f"{named} has keys that the {architecture.model_type} architecture ignores: {', '.join(unread)}")
    weights = CheckpointWeights(checkpoint, architecture, spec, force=force, progress=progress)
    options = options or ExportOptions(precision=checkpoint.precision)
    # LongRoPE's tables depend on the length, which is known only inside the operator.
    sizes = (spec.rotary_size, spec.local_rotary_size)
    fits = not any(size % _ROTATED_TOGETHER for size in sizes) or isinstance(spec.rope_scaling, LongRope)
    # onnxruntime cannot rotate inside the attention operator, or this operator has one table for queries and keys, or
    # norms are between the rotation and the operator.
    if options.fused_rope and (
        not fits or (spec.query_scaling is not None and spec.query_scaling.rotated) or spec.rotated_norms
    ):
        options = replace(options, fused_rope=False)
    copied = sum(file.stat().st_size for file in tokenizer_files(checkpoint.folder))
    written = folder_bytes(spec, options, weights.kind) + copied
    search = _search(checkpoint, spec.vocab_size, spec.context_length)
    return BuildPlan(checkpoint, spec, options, weights, search, weights.total_bytes, written, remarks)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a Hugging Face checkpoint folder, quantised or not, or a GGUF file. Raises as plan_build does."""
    if is_gguf(expanded(path)):
        return GgufCheckpoint(path)
    quantisation = read_quantisation(Path(path))
    return Checkpoint(path) if quantisation is None else QuantisedCheckpoint(path, quantisation)


def default_precision(path: Path) -> Precision:
    """Return the default storage format for a checkpoint's weights: "kept" if they are already quantised.

    Raises:
        ModelFolderError, InputError, ConfigError, UnsupportedModelError: config.json cannot be used.
    """
    if is_gguf(path):
        return GgufCheckpoint.precision
    quantisation = read_quantisation(path)
    return Checkpoint.precision if quantisation is None else quantisation.precision


def _search(checkpoint: Checkpoint, vocab_size: int, context_length: int) -> dict[str, Any]:
    """Return the search options of generation_config.json, validated as the engine does when it loads the model."""
    sampling = generation_defaults(checkpoint.folder).sampling
    # 0 or more than the context does not limit the length.
    search = {name: value for name, value in sampling.items() if name != "max_length" or 0 < value < context_length}
    try:
        model_defaults(sampling, vocab_size)
        return {name: checked(name, value) for name, value in search.items() if name in SEARCH_OPTIONS}
    except OptionError as error:
        raise ConfigError(
            f"{GENERATION_CONFIG}: {error.what}",
            error.why,
            "correct the value in generation_config.json, or remove the key",
        ) from error


def build_model(
    checkpoint_dir: str | Path,
    output: str | Path,
    options: ExportOptions | None = None,
    *,
    force: bool = False,
    progress: Callable[[int], None] = lambda count: None,
) -> Path:
    """Build a model folder from a checkpoint and return its path. See plan_build for arguments and errors.

    The folder appears under its name only when it is complete. Memory use is at most twice the size of the largest
    tensor, regardless of the model's size.
    """
    plan = plan_build(checkpoint_dir, options, force=force, progress=progress)
    return execute(plan, Path(output))


def execute(plan: BuildPlan, output: Path) -> Path:
    """Write the planned folder. Raises as write_model_folder does, and ModelFolderError if the disk is full."""
    _require_room(output, plan.written_bytes)
    with (
        task("Writing the model"),
        task("Building", plan.read_bytes, amount=lambda count: format_bytes(int(count))) as reading,
    ):
        plan.weights.reports.append(reading.add)
        return write_model_folder(
            output, plan.spec, plan.options, plan.weights, tokenizer_dir=plan.checkpoint.folder, search=plan.search
        )


def _require_room(output: Path, needed: int) -> None:
    if not output.parent.is_dir():
        raise ModelFolderError(
            f"{output.parent} is not a folder",
            f"{output.name} would be created in this folder",
            "create the folder, or choose another output folder",
        )
    free = shutil.disk_usage(output.parent).free
    if free < needed:
        raise ModelFolderError(
            f"{output.parent} has {format_bytes(free)} free, but the model needs {format_bytes(needed)}",
            "the build would fill the disk and fail",
            "free some disk space, choose a folder on another disk, or use a smaller precision",
        )


# Increase this number when the builder's output for the same checkpoint changes.
_BUILDER_VERSION = 2
# The files that the builder reads, which are part of a checkpoint's identity.
_READ = ("*.safetensors", "pytorch_model.bin", "*.json", "*.jinja", "additional_chat_templates/*.jinja", *PATTERNS)


def resolve_model_folder(
    path: str | Path,
    *,
    build: bool = True,
    ask: Callable[[str], bool] = lambda question: True,
    watch: Callable[[BuildPlan], None] = lambda plan: None,
    waiting: Callable[[Path], None] = lambda folder: None,
    options: ExportOptions | None = None,
    into: Path | None = None,
) -> Path:
    """Return the model folder for a path, and build it if necessary.

    A path that is neither a Hugging Face checkpoint nor a GGUF file is returned unchanged. Checkpoints and GGUF files
    are built in genai/models in the cache folder ($GENAI_CACHE_DIR, $XDG_CACHE_HOME or ~/.cache), under a name that
    changes if their files change.

    Args:
        build: False to raise an error instead of building.
        ask: called before a build with a question that states the sizes; the build is cancelled if the result is False.
        watch: called with the plan when the build starts.
        waiting: called with the cache folder if another process is building in it; only one build runs at a time.
        options: None means int4 in blocks of 32; weights that are already quantised stay as they are.
        into: folder to build in instead of the cache; the names of the folders built there contain the precision.

    Raises:
        ModelFolderError: the model is not built, and `build` or the result of `ask` is False. Other errors: see
            plan_build.
    """
    source = expanded(path)
    if not is_checkpoint(source):
        return source
    is_file = is_gguf(source)
    options = options or ExportOptions(precision=default_precision(source))
    name = source.resolve().name.removesuffix(SUFFIX) if is_file else source.resolve().name
    identity = identity_of(source, options)
    if into is not None:
        target = into / f"{name}-{options.precision}-{identity}"
    else:
        target = cache_root() / "models" / f"{name}-{identity}"
    if (target / "genai_config.json").is_file():
        return target
    if not build:
        raise ModelFolderError(
            f"{source} is a {'GGUF file' if is_file else 'Hugging Face checkpoint'} that has not been built",
            "builds are disabled (--no-build)",
            f"omit --no-build, or build the model first: genai build {source} -o FOLDER",
        )
    plan = plan_build(source, options)
    kind = "a GGUF file" if is_file else "a checkpoint"
    keeps_weights = options.precision == "kept"
    result = "a model with unchanged weights," if keeps_weights else f"an {options.precision.upper()} model"
    question = (
        f"{source} is {kind} ({format_bytes(plan.read_bytes)}). Build {result} of {format_bytes(plan.written_bytes)} "
        f"in {target.parent}?"
    )
    if not ask(question):
        raise ModelFolderError(
            f"{source} was not built",
            "the build was declined",
            f"run the command again and answer y; to build the model in another folder, run genai build {source} "
            "-o FOLDER",
        )
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ModelFolderError(
            f"the folder {target.parent} cannot be created", str(error), "set GENAI_CACHE_DIR to a writable folder"
        ) from error
    with _alone(target.parent, waiting):
        if (target / "genai_config.json").is_file():  # another process has built the model in the meantime
            return target
        watch(plan)
        folder = execute(plan, target)
        note_build(folder, source, options.precision)
        return folder


@contextmanager
def _alone(folder: Path, waiting: Callable[[Path], None]) -> Iterator[None]:
    with locked(folder, wait=False) as free:
        if free is not False:
            yield
            return
    waiting(folder)
    with locked(folder):
        yield


def identity_of(source: Path, options: ExportOptions) -> str:
    """Return a hash of the files' names, sizes and modification times, the options, and the builder's version."""
    paths = gguf_parts(source) if is_gguf(source) else (path for pattern in _READ for path in source.glob(pattern))
    files = sorted(paths)
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    text = json.dumps([_BUILDER_VERSION, str(source.resolve()), stats, asdict(options)])
    return hashlib.sha256(text.encode()).hexdigest()[:12]
