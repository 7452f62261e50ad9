"""The value of MODEL on the command line: a path, a name, or base+adapter; and of MODEL.onnx, the file of a graph."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from shlex import quote

from genai.errors import GenaiError, ModelFolderError

# Advice for the commands that run a model.
_ADVICE = {
    "chat": "to chat with the model, run `genai chat {}`",
    "embed": "to compute vectors, run `genai embed {}`",
    "rerank": "to compute scores, run `genai rerank {}`",
}


def model_path(text: str | Path) -> Path:
    """Return MODEL as a path object. Raises ModelFolderError if the text is both a path and the name of a model.

    A Path object does not keep a leading ./, which marks a path. If the path does not exist, the result is absolute, so
    that no command takes it for a name.
    """
    from genai.hub.local import check_unambiguous, exists, has_form_of_path

    given = str(text)
    check_unambiguous(given)
    if has_form_of_path(given) and not exists(Path(given)):
        return Path(given).expanduser().absolute()
    return Path(given)


def request_name(model: Path, *, with_hash: bool = False) -> str:
    """Return the name of a model in requests to `genai serve`: the last part of MODEL, without .gguf.

    Args:
        model: MODEL.
        with_hash: True to keep the hash at the end of the name of a built model.
    """
    from genai.hub.built import find_built, name_without_hash

    path = model.expanduser().absolute()
    if path.suffix == ".onnx":
        path = path.parent.parent if path.parent.name == "onnx" else path.parent
    if not with_hash:
        built = find_built(str(model))
        return name_without_hash(path if built is None else built.folder).removesuffix(".gguf")
    return path.name.removesuffix(".gguf")


def graph_path(text: str | Path) -> Path:
    """Return MODEL.onnx as a path. Raises ModelFolderError if the text is the name or the folder of a model."""
    path = Path(text)
    if not path.is_file() and (folder := _model_called(str(text))) is not None:
        fix = _ADVICE[_command_of(folder)].format(quote(str(text)))
        graphs = sorted([*folder.glob("*.onnx"), *folder.glob("onnx/*.onnx")]) if folder.is_dir() else []
        if graphs:
            fix += f"; for this command, pass a graph of the model, such as {graphs[0]}"
        raise ModelFolderError(
            f"{text} is a model, not an ONNX file",
            "the command reads a single graph; the name of an ONNX file ends in .onnx",
            fix,
        )
    return path


def _model_called(text: str) -> Path | None:
    """Return the folder or GGUF file of a model on the local disk, by its name or path; None if there is none."""
    from genai.hub.built import find_build
    from genai.hub.choosing import ONNX
    from genai.hub.known import BUNDLED_MODEL, bundled_model
    from genai.hub.local import pulled_model

    path = Path(text)
    if path.is_dir():
        is_model = any((path / name).is_file() for name in ("genai_config.json", "config.json"))
        return path if is_model else None
    if text == BUNDLED_MODEL:
        return bundled_model()
    with suppress(ModelFolderError):  # a malformed name is the name of a file that does not exist
        if (pulled := pulled_model(text)) is not None:
            return pulled.path if pulled.kind == ONNX else next(iter(pulled.built()), pulled.path)
    built = find_build(text)
    return None if built is None else built.folder


def _command_of(folder: Path) -> str:
    """Return the command that runs the model in a folder."""
    from genai.embed.describe import describe_encoder, is_encoder_folder

    with suppress(GenaiError):  # the other command reports a damaged folder
        if is_encoder_folder(folder):
            return "embed" if describe_encoder(folder)["kind"] == "encoder" else "rerank"
    return "chat"
