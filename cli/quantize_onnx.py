"""`genai quantize-onnx`: quantises any ONNX model to small integers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from genai.common.memory_limits import format_bytes

from .model_names import graph_path
from .options import check_apart
from .terminal import emit, say


def quantize_onnx(
    model: Annotated[Path, typer.Argument(help="Float ONNX model.", metavar="MODEL.onnx", parser=graph_path)],
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write.")],
    calib: Annotated[
        list[Path] | None,
        typer.Option(help="Calibrate activation ranges with this .npz file of inputs; may be given several times."),
    ] = None,
    format: Annotated[str, typer.Option("--format", help="With --calib: QDQ or QOperator.")] = "QDQ",
    method: Annotated[str, typer.Option(help="With --calib: MinMax, Entropy or Percentile.")] = "MinMax",
    activation_type: Annotated[str, typer.Option(help="With --calib: QUInt8, QInt8, QUInt16 or QInt16.")] = "QUInt8",
    weight_type: Annotated[str, typer.Option(help="QInt8 or QUInt8; with --calib also QInt4 and QUInt4.")] = "QInt8",
    per_channel: Annotated[bool, typer.Option("--per-channel", help="Use one scale per output channel.")] = False,
    reduce_range: Annotated[
        bool, typer.Option("--reduce-range", help="Use 7 bits instead of 8, for CPUs without VNNI.")
    ] = False,
    exclude: Annotated[
        list[str] | None, typer.Option(help="Name of a node to keep in float; may be given several times.")
    ] = None,
    op_type: Annotated[
        list[str] | None, typer.Option(help="Quantise only this operator; may be given several times.")
    ] = None,
    external_data: Annotated[
        bool, typer.Option("--external-data", help="Write the weights to a separate file next to the model.")
    ] = False,
    prepare: Annotated[bool, typer.Option(help="Fold constants and batch norms before quantising.")] = True,
) -> None:
    """Quantise an ONNX model: its weights, and its activations dynamically or, with --calib, statically.

    Prints the path of the file.
    """
    from tempfile import TemporaryDirectory

    from genai.common.progress import task
    from genai.onnx.reader import read_model
    from genai.onnx.writer import write_model
    from genai.quantize.onnx_graph.dynamic import DynamicRequest, quantize_dynamically
    from genai.quantize.onnx_graph.preprocess import preprocess
    from genai.quantize.onnx_graph.static import StaticRequest, quantize_statically
    from genai.quantize.onnx_graph.types import QuantFormat, QuantType
    from genai.quantize.onnx_graph.writing import quantize_file

    check_apart([("MODEL", model), ("--output", output)])
    options: dict[str, Any] = {
        "per_channel": per_channel,
        "reduce_range": reduce_range,
        "weight_type": QuantType.from_string(weight_type),
        "exclude": exclude or None,
        "op_types": op_type or None,
    }
    with TemporaryDirectory() as folder, task(f"Quantising {model.name}"):
        source = model
        if prepare:
            source, prepared = Path(folder) / "prepared.onnx", read_model(model)
            preprocess(prepared)
            write_model(prepared, source, external_data=f"{source.name}.data")
        if calib:
            static = StaticRequest(
                reader=NpzReader(calib),
                format=QuantFormat.from_string(format),
                method=_method(method),
                activation_type=QuantType.from_string(activation_type),
                **options,
            )
            quantize_file(
                source, output, lambda found: quantize_statically(found, source, static), external=external_data
            )
        else:
            dynamic = DynamicRequest(**options)
            quantize_file(source, output, lambda found: quantize_dynamically(found, dynamic), external=external_data)
    before, after = (
        sum(file.stat().st_size for file in (path, path.with_name(f"{path.name}.data")) if file.exists())
        for path in (model, output)
    )
    say(f"{format_bytes(before)} -> {format_bytes(after)}")
    emit(str(output), "\n")


def _method(name: str) -> Any:
    from genai.errors import OptionError, did_you_mean
    from genai.quantize.onnx_graph.tensors_data import CalibrationMethod

    known = list(CalibrationMethod.__members__)
    if name not in known:
        raise OptionError(
            f"--method is {name!r}",
            f"allowed: {', '.join(known)}",
            did_you_mean(name, known, "use one of these methods"),
        )
    return CalibrationMethod[name]


class NpzReader:
    """A calibration data reader for .npz files, with one feed per file."""

    def __init__(self, paths: list[Path]) -> None:
        self._count, self._feeds = len(paths), self._read(paths)

    def __len__(self) -> int:
        return self._count

    def get_next(self) -> dict[str, Any] | None:
        """Return the next feed, or None at the end."""
        return next(self._feeds, None)

    def _read(self, paths: list[Path]) -> Iterator[dict[str, Any]]:
        import numpy as np

        from genai.errors import InputError

        for path in paths:
            try:
                arrays = np.load(path, allow_pickle=False)
                if isinstance(arrays, np.ndarray):
                    raise ValueError("the file contains a single array without a name")
                with arrays:
                    feed = {name: arrays[name] for name in arrays}
            except Exception as error:
                raise InputError(
                    f"{str(path)!r} cannot be read as an .npz file of inputs",
                    f"{type(error).__name__}: {error}",
                    "write the file with numpy.savez(path, NAME=array, ...)",
                ) from error
            yield feed
