"""Compare models quantised by us and by onnxruntime: `python -m tools.onnx_quantisation FOLDER [NAME ...]`.

FOLDER holds the models that tools/session_models.py writes. Each row is a model and a quantisation method. For either
quantiser, it shows the distance from the float model's results in onnxruntime and in our session (RMS, in per cent of
the float results' RMS). It also shows the distance between the two sessions on the model that we quantised. The
quantised models are stored in the same folder as the float model.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import genai
import genai.compat.onnxruntime_quantization as ours

ITEMS, TRIALS = 8, 4
HEADER = (
    "| model | method | onnxruntime's, run there | run here | ours, run there | here | apart | s theirs | s ours |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


class Feeds(ours.CalibrationDataReader):
    """Random inputs for a model: token ids for integer inputs, normally distributed numbers for all others."""

    def __init__(self, session: Any, count: int, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self._left = iter([{one.name: _value(one, generator) for one in session.get_inputs()} for _ in range(count)])

    def get_next(self) -> dict[str, Any] | None:
        """Return the next feed, or None."""
        return next(self._left, None)


def _value(argument: Any, generator: np.random.Generator) -> Any:
    shape = [dim if isinstance(dim, int) else 64 if "seq" in str(dim) else 1 for dim in argument.shape]
    if "int64" not in argument.type:
        return generator.standard_normal(shape, np.float32)
    return np.ones(shape, np.int64) if "mask" in argument.name else generator.integers(0, 30000, shape)


def ways(library: Any) -> Iterator[tuple[str, Callable[[Path, Path, Any], None]]]:
    """Yield name and function of each quantisation method of a library."""
    kinds, forms, methods = library.QuantType, library.QuantFormat, library.CalibrationMethod

    def static(**options: Any) -> Callable[[Path, Path, Any], None]:
        return lambda source, target, reader: library.quantize_static(
            str(source), str(target), reader, activation_type=kinds.QUInt8, weight_type=kinds.QInt8, **options
        )

    yield "dynamic", lambda source, target, _: library.quantize_dynamic(str(source), str(target))
    yield "QDQ", static()
    yield "QDQ by channel", static(per_channel=True)
    yield "QOperator by channel", static(per_channel=True, quant_format=forms.QOperator)
    yield "QDQ entropy", static(calibrate_method=methods.Entropy)
    yield "QDQ percentile", static(calibrate_method=methods.Percentile)


def rows(path: Path, pattern: str) -> Iterator[str]:
    """Yield the table's rows for one model."""
    import onnxruntime
    import onnxruntime.quantization as theirs

    ready = path.with_name(f"{path.stem}_ready.onnx")
    if not ready.exists():
        theirs.quant_pre_process(str(path), str(ready), skip_symbolic_shape=True)
    float_session = onnxruntime.InferenceSession(str(ready))
    trials = list(Feeds(float_session, TRIALS, 99))
    expected = [float_session.run(None, feed) for feed in trials]
    for (name, quantise_theirs), (_, quantise_ours) in zip(ways(theirs), ways(ours), strict=True):
        if pattern and pattern not in name:
            continue
        cells, seconds = [], []
        for who, quantise in (("theirs", quantise_theirs), ("ours", quantise_ours)):
            target = path.with_name(f"{path.stem}_{name.replace(' ', '_')}_{who}.onnx")
            begin = time.perf_counter()
            quantise(ready, target, Feeds(float_session, ITEMS, 1))
            seconds.append(time.perf_counter() - begin)
            found: list[Any] = []
            for make in (onnxruntime.InferenceSession, genai.InferenceSession):
                try:
                    session = make(str(target))
                    found.append([session.run(None, feed) for feed in trials])
                    cells.append(f"{100 * apart(found[-1], expected):.3f} %")
                except Exception as error:  # a model that cannot run is a result of the comparison
                    found.append(None)
                    cells.append(f"fails: {str(error).splitlines()[0][:60]}")
        between = "" if None in found else f"{100 * apart(found[1], found[0]):.3f} %"
        yield f"| {path.stem} | {name} | {' | '.join(cells)} | {between} | {seconds[0]:.1f} | {seconds[1]:.1f} |"


def apart(found: list[list[Any]], expected: list[list[Any]]) -> float:
    """Return the RMS difference, relative to the RMS of the expected values."""
    a, b = (np.concatenate([np.ravel(value) for results in one for value in results]) for one in (found, expected))
    return float(np.linalg.norm(a.astype(np.float64) - b) / np.linalg.norm(b.astype(np.float64)))


def main() -> None:
    """Print the table."""
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    folder, names = Path(sys.argv[1]), sys.argv[2:] or ["mobilenet_v2", "resnet50", "bert_base"]
    print(HEADER, flush=True)
    for name in names:
        name, _, pattern = name.partition(":")
        for row in rows(folder / f"{name}.onnx", pattern):
            print(row, flush=True)


if __name__ == "__main__":
    main()
