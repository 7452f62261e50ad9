"""Builds the folder of an encoder: onnx/model.onnx with its data, and the files that describe the model."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from glob import escape
from pathlib import Path
from typing import Any, cast

from genai.common.log import logger
from genai.common.memory_limits import format_bytes
from genai.common.progress import task
from genai.kernels.cpu.jit.kernel_cache import cache_root

from ...errors import ModelFolderError, OptionError, UnsupportedModelError, did_you_mean
from ...hub.built import note_build, note_use
from ...hub.store import BUILT, hub_folder
from ...weight_files.safetensors import SafetensorsFile
from ...weight_files.tensor_files import TensorFile, TensorFiles
from ...weight_files.torch_file import TorchFile
from ..build import identity_of
from ..checkpoint import CONFIG, INDEX, SINGLE, read_json, tensor_files
from ..folder import copy_tokenizer, locked, require_absent, require_tokenizer, unfinished_folder
from ..graph_writer import DataFile, Export, GraphWriter
from ..options import PRECISIONS, ExportOptions
from ..weights import Weights
from .families import EncoderConfig, adapter_tasks, describe, is_encoder
from .graph import EncoderWeights, EncoderWriter, TaskAdapter
from .score import token_score
from .spec import TokenScore

_log = logger(__name__)
PYTORCH = "pytorch_model.bin"
_COPIED = (
    "config.json", "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json",
    "special_tokens_map.json", "tokenizer_config.json", "chat_template.jinja", "sparse_linear.pt",
    "sparse_linear.safetensors", "colbert_linear.pt", "colbert_linear.safetensors",
)  # fmt: skip


class _Tensors(TensorFiles[TensorFile]):
    def __init__(self, folder: Path, progress: Callable[[int], None]) -> None:
        super().__init__()
        self._progress = progress
        self._files = _weight_files(folder)
        for file in self._files:
            self._add(file, "download the checkpoint again")

    def __getitem__(self, name: str) -> Any:
        array = super().__getitem__(name)
        self._progress(array.nbytes)
        return array


def _has_safetensors(folder: Path) -> bool:
    return (folder / SINGLE).is_file() or (folder / INDEX).is_file()


def weight_bytes(folder: Path) -> int:
    """Return the size of a checkpoint's files of weights."""
    pattern = "*.safetensors" if _has_safetensors(folder) else PYTORCH
    return sum(path.stat().st_size for path in folder.glob(pattern))


def _weight_files(folder: Path) -> list[TensorFile]:
    """Open the files of a checkpoint's weights: safetensors, or pytorch_model.bin if there is no such file."""
    if not _has_safetensors(folder) and (folder / PYTORCH).is_file():
        return [TorchFile(folder / PYTORCH)]
    return [SafetensorsFile(path) for path in tensor_files(folder)]


def build_encoder(
    checkpoint: Path, output: Path, options: ExportOptions, *, score: TokenScore | None = None, task_name: str = "",
    progress: Callable[[int], None] = lambda count: None,
) -> Path:  # fmt: skip
    """Write an encoder's folder from a Hugging Face checkpoint and return it. The folder appears when it is complete.

    Args:
        checkpoint: folder with config.json, *.safetensors or pytorch_model.bin, and a tokenizer.
        output: the folder to create.
        options: the precision of the weights, and their blocks.
        score: if given, the checkpoint is a decoder, of which only this score is computed [default: as modules.json
            says].
        task_name: name of the task whose adapter is merged into the weights; "" = none.
        progress: called with the size in bytes of every tensor that is read.

    Raises:
        ModelFolderError: a file is missing, or the folder exists or cannot be written.
        UnsupportedModelError, ConfigError: the model is not a known encoder, or its configuration is malformed.
        InputError: a tensor is missing, has the wrong shape, or contains NaN or infinity.
    """
    if options.mtp:
        raise UnsupportedModelError(
            f"{checkpoint} is an encoder, which has no MTP head",
            "an MTP head proposes tokens for decoders",
            "omit --mtp (in Python: ExportOptions(mtp=True))",
        )
    config = read_json(checkpoint, CONFIG)
    spec = describe(config, score or token_score(checkpoint))
    adapter = _adapter(config, task_name)
    require_tokenizer(checkpoint)
    require_absent(output)
    tensors = _Tensors(checkpoint, progress)
    weights = EncoderWeights(tensors, spec.prefixes, adapter)
    try:
        with unfinished_folder(output) as unfinished:
            folder = unfinished / "onnx"
            folder.mkdir()
            with DataFile(folder / "model.onnx.data") as data:
                graph = GraphWriter(data)
                export = Export(graph, cast(Any, spec), options, Weights(weights))
                EncoderWriter(export, spec, weights).write()
            (folder / "model.onnx").write_bytes(graph.model().SerializeToString(deterministic=True))
            copy_tokenizer(checkpoint, unfinished)
            _copy_description(checkpoint, unfinished)
            require_absent(output)
            unfinished.rename(output)
    except OSError as error:
        raise ModelFolderError(
            f"cannot write the model folder {output}",
            str(error),
            "check that the parent folder exists, is writable and has enough free space",
        ) from error
    return output


def _copy_description(source: Path, target: Path) -> None:
    """Copy the files of sentence-transformers, and the folders of its modules."""
    for name in _COPIED:
        if (source / name).is_file() and not (target / name).exists():
            shutil.copyfile(source / name, target / name)
    for folder in sorted(source.glob("[0-9]*_*")):
        if folder.is_dir() and not folder.is_symlink():
            (target / folder.name).mkdir()
            for name in ("config.json", "model.safetensors", PYTORCH):
                if (folder / name).is_file():
                    shutil.copyfile(folder / name, target / folder.name / name)


def is_encoder_checkpoint(folder: Path) -> bool:
    """Return True if a folder is the checkpoint of an encoder, so that `build_encoder` can build it."""
    has_weights = _has_safetensors(folder) or (folder / PYTORCH).is_file()
    if not (folder / CONFIG).is_file() or not has_weights:
        return False
    return is_encoder(read_json(folder, CONFIG), has_modules=(folder / "modules.json").is_file())


def _adapter(config: Mapping[str, Any], task_name: str) -> TaskAdapter | None:
    tasks = adapter_tasks(config)
    if not task_name:
        return None
    if task_name not in tasks:
        raise OptionError(
            f"task = {task_name!r:.80}",
            f"the model has adapters for {', '.join(tasks) or 'no tasks'}",
            did_you_mean(task_name, tasks, "choose one of them") if tasks else "leave the task out",
        )
    values = EncoderConfig(config)
    return TaskAdapter(
        tasks.index(task_name), values.number("lora_alpha", default=1.0) / values.whole("lora_rank", default=4)
    )


def _built_folder(checkpoint: Path) -> Path:
    """Return the folder for builds: beside a pulled model, which is removed with its builds, or the shared folder."""
    if checkpoint.is_relative_to(hub_folder()) and checkpoint != hub_folder():
        return hub_folder() / checkpoint.relative_to(hub_folder()).parts[0] / BUILT
    return cache_root() / "models"


def _options(precision: str) -> ExportOptions:
    """Return the options of a build in the cache.

    INT4 weights have small blocks with zero points: an encoder's layers are small beside its embedding table, which
    stays float32, and the order of similarities depends on each of them (docs/explanation/encoders.md has figures).
    """
    blocks: dict[str, Any] = {"block_size": 16, "symmetric": False} if precision == "int4" else {}
    return ExportOptions(precision=precision, **blocks)  # type: ignore[arg-type]  # checked there


def builds_of(checkpoint: Path) -> list[Path]:
    """Return the folders in the cache that were built from an encoder's checkpoint, as it is now."""
    found: list[Path] = []
    for precision in PRECISIONS:
        name = f"{checkpoint.resolve().name}-{identity_of(checkpoint, _options(precision))}"
        found += sorted(_built_folder(checkpoint).glob(f"{escape(name)}*"))
    return [folder for folder in found if (folder / "onnx" / "model.onnx").is_file()]


def built_encoder(
    checkpoint: Path, precision: str = "fp32", *, score: TokenScore | None = None, task_name: str = ""
) -> Path:
    """Return the folder of an encoder in the cache, which is built first if it does not exist.

    Args:
        checkpoint, score, task_name: see `build_encoder`.
        precision: storage format of the weights.

    Raises:
        GenaiError: see `build_encoder`.
    """
    options = _options(precision)
    name = f"{checkpoint.resolve().name}-{identity_of(checkpoint, options)}"
    if score is not None:
        name += f"-score-{score.true_id}" + ("" if score.false_id is None else f"-{score.false_id}")
    if task_name:
        _adapter(read_json(checkpoint, CONFIG), task_name)  # a name that is safe in a path
        name += f"-{task_name.replace('/', '-')}"
    target = _built_folder(checkpoint) / name
    if (target / "onnx" / "model.onnx").is_file():
        note_use(target)
        return target
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    size = weight_bytes(checkpoint)
    with locked(target.parent):
        if not (target / "onnx" / "model.onnx").is_file():
            with task("Building", size, amount=lambda count: format_bytes(int(count))) as building:
                build_encoder(checkpoint, target, options, score=score, task_name=task_name, progress=building.add)
            note_build(target, checkpoint, precision)
            _log.info("built %s in %s", checkpoint, target)
    note_use(target)
    return target
