"""onnxruntime.quantization.shape_inference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx

from ...errors import NotSupportedYetError, OptionError, did_you_mean
from ...onnx.reader import read_model
from ...onnx.writer import write_model
from ...quantize.onnx_graph.preprocess import preprocess
from ...quantize.onnx_graph.writing import require_writable_path

_RENAMED = {"input_model_path": "input_model"}


def quant_pre_process(
    input_model: str | Path | onnx.ModelProto | None = None,
    output_model_path: str | Path | None = None,
    skip_optimization: bool = False,
    skip_onnx_shape: bool = False,
    skip_symbolic_shape: bool = False,
    auto_merge: bool = False,
    int_max: int = 2**31 - 1,
    guess_output_rank: bool = False,
    verbose: int = 0,
    save_as_external_data: bool = False,
    all_tensors_to_one_file: bool = False,
    external_data_location: str | None = None,
    external_data_size_threshold: int = 1024,
    **deprecated_kwargs: Any,
) -> None:
    """Simplify a model, using only standard operators, infer its types, and write the model.

    Args:
        input_model: path or onnx.ModelProto.
        output_model_path: path to write to.
        skip_optimization: True to leave the nodes unchanged.
        skip_onnx_shape, skip_symbolic_shape: one inference covers both; it is skipped only if both arguments are True.
        auto_merge, int_max, verbose: ignored, because contradictory symbols stay unresolved, extents have no such
            limit, and nothing is logged.
        guess_output_rank: not supported; unknown ranks stay unknown.
        save_as_external_data: True to write weights to one separate file, even if `all_tensors_to_one_file` is False.
        external_data_location: name of that file; None = `output_model_path` + ".data".
        external_data_size_threshold: size in bytes below which tensors stay in the model's file.
        deprecated_kwargs: `input_model_path`, the former name of the first argument.

    Raises:
        OptionError: the model or the output path is missing, or an argument is unknown.
        NotSupportedYetError: guess_output_rank is True.
        GraphError: the input is not a model.
    """
    for name, value in deprecated_kwargs.items():
        if name not in _RENAMED:
            raise OptionError(
                f"quant_pre_process takes no {name!r}",
                "the arguments are the same as in onnxruntime",
                did_you_mean(name, quant_pre_process.__annotations__, "remove this argument"),
            )
        input_model = value if input_model is None else input_model
    if guess_output_rank:
        raise NotSupportedYetError(
            "guess_output_rank=True is not supported",
            "values of unknown type remain floats, which is always correct",
            "omit guess_output_rank",
        )
    if input_model is None or output_model_path is None:
        raise OptionError(
            "the argument is missing: " + ("input_model" if input_model is None else "output_model_path"),
            "the model is read from input_model and written to output_model_path",
            "pass both arguments",
        )
    require_writable_path(output_model_path)
    model = read_model(input_model)
    preprocess(model, simplify=not skip_optimization, infer=not (skip_onnx_shape and skip_symbolic_shape))
    path = Path(output_model_path)
    location = (external_data_location or f"{path.name}.data") if save_as_external_data else None
    write_model(model, path, external_data=location, size_threshold=external_data_size_threshold)
