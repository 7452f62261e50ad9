"""The same values from onnxruntime, which runs the model's own graph with every wanted value as an extra output.

onnxruntime is no dependency of this toolkit: it is imported here, and only when a comparison with it is asked for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from numpy.typing import NDArray

from ..errors import UnsupportedModelError
from .errors import MissingPackageError, ModelOutputError

if TYPE_CHECKING:
    from ..config import DecoderConfig
    from ..model import Model

_TYPES: dict[str, type[Any]] = {
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
}


def onnxruntime_values(
    model: Model, tokens: NDArray[np.int64], names: Collection[str], *, threads: int | None = None
) -> dict[str, NDArray[Any]]:
    """Values of the model's own graph for one prompt from an empty past, computed by onnxruntime on the CPU.

    Its graph optimisations are off, so that each operator is computed as the graph says. Nothing is written: the model
    file with its extra outputs stays in memory, and weights are read from the folder that it lies in.

    Args:
        tokens: int64 [T].
        names: values wanted; those that the graph does not compute are left out.
        threads: None = onnxruntime's own choice.

    Raises:
        MissingPackageError: onnxruntime is not installed.
        UnsupportedModelError: the graph wants inputs of unknown meaning.
        ModelOutputError: onnxruntime cannot load or run the model.
    """
    library = import_onnxruntime()
    decoder = model.config.model.decoder
    path = model.folder / decoder.filename
    try:
        proto = onnx.load(path, load_external_data=False)
        room = _past_room(proto, len(tokens))
        wanted = _wanted(proto, names, without=_present(decoder) if room else ())
        _add_outputs(proto, wanted)
        session = library.InferenceSession(
            proto.SerializeToString(), _options(library, path.parent, threads), providers=["CPUExecutionProvider"]
        )
        feeds = {value.name: _feed(value, tokens, decoder, room) for value in session.get_inputs()}
        results = session.run(wanted, feeds)
    except UnsupportedModelError:
        raise
    except Exception as error:  # onnxruntime's exceptions share no base class
        raise ModelOutputError(
            f"onnxruntime {library.__version__} cannot run {path}: {error}",
            f"it raised {type(error).__name__}",
            "check that this version of onnxruntime knows the model's operators",
        ) from error
    return dict(zip(wanted, results, strict=True))


def import_onnxruntime() -> Any:
    """The onnxruntime package, with its telemetry off.

    Raises:
        MissingPackageError: it is not installed, or does not load.
    """
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingPackageError(
            "onnxruntime cannot be imported",
            f"{error}; it is needed only for comparisons with it, so it is not installed with this toolkit",
            "pip install onnxruntime",
        ) from error
    return onnxruntime


def _wanted(proto: onnx.ModelProto, names: Collection[str], without: tuple[str, ...]) -> list[str]:
    """Those of `names` that the graph's nodes give, less those of the templates `without`."""
    computed = (name for node in proto.graph.node for name in node.output)
    return [name for name in computed if name in names and not _matches(name, without)]


def _add_outputs(proto: onnx.ModelProto, names: Collection[str]) -> None:
    present = {value.name for value in proto.graph.output}
    # A name is enough: onnxruntime infers the types.
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in present)


def _options(library: Any, folder: Path, threads: int | None) -> Any:
    options = library.SessionOptions()
    options.graph_optimization_level = library.GraphOptimizationLevel.ORT_DISABLE_ALL
    # What goes wrong is raised; only what is fatal is worth a line of its own.
    options.log_severity_level = 4
    options.intra_op_num_threads = threads or 0
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder.resolve()))
    return options


def _past_room(proto: onnx.ModelProto, num_tokens: int) -> int:
    """Length of the past tensors: onnxruntime wants room for an attention window even if none of it is in use yet.

    The mask tells that the past is empty. Presents then hold that room too, so they are not compared. Windows longer
    than this prompt hide nothing of it; they are cut to its length, for they may be of any.
    """
    room = 0
    for node in proto.graph.node:
        for attribute in node.attribute:
            if attribute.name == "local_window_size":
                attribute.i = min(attribute.i, num_tokens)
                room = max(room, attribute.i)
    return room


def _feed(value: Any, tokens: NDArray[np.int64], decoder: DecoderConfig, room: int) -> NDArray[Any]:
    """One input at prefill: the prompt, a mask of ones, positions from 0, or an empty past."""
    names, count = decoder.names, len(tokens)
    plain: dict[str, NDArray[Any]] = {
        names.input_ids: tokens[None, :],
        names.attention_mask: np.ones((1, count)),
        names.position_ids: np.arange(count)[None, :],
    }
    dtype, shape = _TYPES.get(value.type), value.shape
    if dtype is not None and value.name in plain:
        return plain[value.name].astype(dtype)
    if dtype is not None and len(shape) == 4 and _matches(value.name, (names.past_key, names.past_value)):
        heads = shape[1] if isinstance(shape[1], int) else decoder.num_key_value_heads
        head_size = shape[3] if isinstance(shape[3], int) else decoder.head_size
        return np.zeros((1, heads, room, head_size), dtype)
    raise UnsupportedModelError(
        f"the graph wants input {value.name!r}, {value.type} {shape}",
        "its meaning is not known, so it cannot be fed",
        "name it in genai_config.json (model.decoder.inputs) or export the decoder without it",
    )


def _present(decoder: DecoderConfig) -> tuple[str, str]:
    return decoder.names.present_key, decoder.names.present_value


def _matches(name: str, templates: tuple[str, ...]) -> bool:
    """Whether a name is one of the templates with a layer in place of %d."""
    return any(re.fullmatch(re.escape(template).replace("%d", r"\d+"), name) for template in templates)
