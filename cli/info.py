"""`genai info`: what a model folder holds and needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from . import options as opt
from .terminal import emit


def info(
    model: opt.ModelArgument = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Describe a model: architecture, parameters, bits per weight, cache per token; or what an .onnx file holds."""
    description = _description(model)
    if as_json:
        emit(json.dumps(description, indent=2), "\n")
        return
    width = max(len(name) for name in description)
    for name, value in description.items():
        emit(f"{name.replace('_', ' '):<{width}}  {value if value is not None else '-'}", "\n")


def _description(model: Path | None) -> dict[str, Any]:
    if model is not None and model.suffix == ".onnx":
        from genai.session_info import describe_onnx

        return describe_onnx(model)
    from genai.model_info import describe

    return describe(opt.load(model, threads=None))
