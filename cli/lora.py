"""`genai lora`: lists, describes, checks and converts adapter files, and merges them into a base model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genai.common.progress import task
from genai.errors import OptionError

from . import options as opt
from .build import checkpoint_of, interruptible, say_remarks
from .commands import App
from .info import shown
from .terminal import emit, emit_figures, say

if TYPE_CHECKING:
    from genai.lora.parameters import AdapterParameters

app = App(help="Work with LoRA adapters: list, describe, check, convert and merge them.", no_args_is_help=True)
AdapterArgument = Annotated[Path, typer.Argument(help="Folder of PEFT or mlx-lm, .onnx_adapter file or GGUF file.")]
_DTYPES = ("float32", "float16")
# Endings of files in formats that `genai lora convert` does not write. Other names are names of folders.
_ENDINGS_OF_FILES = (".gguf", ".safetensors", ".npz", ".bin", ".onnx")


@app.command()
def ls(
    folder: Annotated[
        Path | None, typer.Argument(help="Folder to search [default: the bundled model's adapters].")
    ] = None,
    as_json: opt.AsJson = False,
) -> None:
    """List the adapters in a folder and its direct subfolders."""
    from genai.lora.describe import find_adapters
    from genai.models.folders import bundled_adapter

    with task("Reading adapters"):
        adapters = [describe_briefly(path) for path in find_adapters(folder or bundled_adapter(""))]
    if as_json:
        emit(json.dumps(adapters), "\n")
        return
    if not adapters:
        say(f"genai: no adapters in {folder}")
        return
    emit_figures((str(row["path"]), _brief(row)) for row in adapters)


def describe_briefly(path: Path) -> dict[str, Any]:
    """Return an adapter's facts, or the error if the adapter cannot be read."""
    from genai.errors import GenaiError
    from genai.lora.describe import describe
    from genai.lora.read import read_adapter

    try:
        return {"path": str(path), **describe(read_adapter(path))}
    except GenaiError as error:
        return {"path": str(path), "error": error.what}


def _brief(row: dict[str, Any]) -> str:
    from genai.common.memory_limits import format_bytes

    if "error" in row:
        return f"cannot be read: {row['error']}"
    ranks = ", ".join(map(str, row["ranks"])) or "-"
    return f"{row['kind']}, rank {ranks}, {row['modules']} modules, {format_bytes(row['bytes'])}"


@app.command()
def info(adapter: AdapterArgument, as_json: opt.AsJson = False) -> None:
    """Describe an adapter: ranks, target modules, scales, size and base model."""
    from genai.lora.describe import describe
    from genai.lora.read import read_adapter

    with task(f"Reading {adapter.name}"):
        facts = describe(read_adapter(adapter))
    rows = ((name.replace("_", " "), shown(name, value)) for name, value in facts.items())
    emit_figures(json.dumps(facts, indent=2) if as_json else rows)


@app.command()
@opt.flag_groups
def check(adapter: AdapterArgument, model: opt.ModelArgument = None, *, flags: opt.ModelFlags) -> None:
    """Check that an adapter fits a model. If the adapter does not fit, the error gives the reason."""
    from genai.common.memory_limits import format_bytes
    from genai.lora.store import Adapters

    with flags.load(model, lora=True) as loaded, Adapters(loaded) as adapters:
        adapters.load(adapter, "adapter")
        facts, targets = adapters.info("adapter"), loaded.lora_targets()
        size = format_bytes(facts["bytes"])
        emit(f"fits {loaded.folder.name}: changes {facts['modules']} of {len(targets.parts)} projections, {size}", "\n")


@app.command()
def convert(
    adapter: AdapterArgument,
    output: Annotated[Path, typer.Option("-o", "--output", help="The .onnx_adapter file or PEFT folder to write.")],
    dtype: Annotated[str, typer.Option(help="Data type: float32 or float16.")] = "float32",
    model: Annotated[
        Path | None,
        typer.Option("--model", help="Base model that defines the input names and is recorded in a PEFT folder."),
    ] = None,
) -> None:
    """Convert an adapter to an .onnx_adapter file or a PEFT folder."""
    from genai.lora.gguf import in_our_order, require_our_order
    from genai.lora.parameters import SUFFIX, input_names, write_onnx_adapter
    from genai.lora.peft import write_peft
    from genai.lora.read import read_adapter
    from genai.lora.store import base_identity
    from genai.models.config import Config

    if dtype not in _DTYPES:
        raise OptionError(f"--dtype is {dtype}", f"allowed: {', '.join(_DTYPES)}", "use one of these types")
    if output.suffix.lower() in _ENDINGS_OF_FILES:
        raise OptionError(
            f"--output {output}: {output.suffix} files are not written",
            f"adapters are written as {SUFFIX} files and as PEFT folders",
            f"use a name that ends in {SUFFIX}, or the name of a folder",
        )
    with task(f"Converting {adapter.name}"):
        read = read_adapter(adapter)
        if model is not None:
            decoder = Config(model).model.decoder
            read = in_our_order(read, decoder.num_attention_heads, decoder.num_key_value_heads)
            read = replace(read, base=model.name, base_hash=base_identity(model))
        require_our_order(read)
        if output.suffix == SUFFIX:
            write_onnx_adapter(read, output, dtype, names=input_names(read, _inputs_of(model)))
        else:
            write_peft(read, output, dtype)
    emit(str(output), "\n")


def _inputs_of(model: Path | None) -> dict[str, str] | None:
    """Return the adapter inputs of a model's graph, with the names that its exporter chose."""
    if model is None:
        return None
    from genai.models.config import Config
    from genai.models.decoder_graph import read_decoder

    return dict(read_decoder(Config(model)).info.adapter_inputs)


@app.command()
def merge(
    checkpoint: Annotated[Path, typer.Argument(help="Base model: a Hugging Face checkpoint folder.")],
    adapter: AdapterArgument,
    output: Annotated[Path, typer.Option("-o", "--output", help="Model folder to create.")],
    weight: Annotated[float, typer.Option(help="Factor for the adapter's contribution.")] = 1.0,
    precision: Annotated[str, typer.Option(help="Weight precision: int4, int8, fp16 or fp32.")] = "int4",
    block_size: Annotated[int, typer.Option(help="Number of weights per scale: 16, 32, 64, 128 or 256.")] = 32,
) -> None:
    """Merge an adapter into a base model's float weights, and build a model folder."""
    from genai.convert.build import execute, plan_build
    from genai.convert.options import ExportOptions

    read = _finite(weight, adapter)
    options = ExportOptions(precision=precision, block_size=block_size)  # type: ignore[arg-type]  # ExportOptions checks it
    plan = plan_build(checkpoint_of(checkpoint), options, merge=(read, weight))
    say_remarks(plan)
    with interruptible():
        emit(str(execute(plan, output)), "\n")


def _finite(weight: float, adapter: Path) -> AdapterParameters:
    from math import isfinite

    from genai.lora.read import read_adapter

    if not isfinite(weight):
        raise OptionError(f"--weight is {weight}", "a finite number is expected", "pass a number, such as --weight 0.5")
    return read_adapter(adapter)
