"""Ranges of activations, from data that the caller's reader gives: the classes and functions of onnxruntime's API.

The model itself is run, in a session that shows every value as it comes about; nothing is kept of the values but
extremes or a histogram, so that memory does not grow with the data. No augmented model is written.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import onnx

from genai.common.progress import task
from genai.quant.histograms import BINS, EntropyRange, Extremes, PercentileRange, RangeObserver

from ...compat.onnxruntime.inference_session import InferenceSession
from ...compat.onnxruntime.options import GraphOptimizationLevel, SessionOptions
from ...errors import GenaiError, InputError, NotSupportedYetError, OptionError, StateError, did_you_mean
from ...onnx.ir import Graph
from ...onnx.reader import read_model
from ...onnx.types import DataType, TensorType
from ...optimize.base import Level, run_rewrites
from ...optimize.constant_folding import lift_constants
from ...optimize.shapes import infer_shapes
from ...session.observing import observed_run
from .tensors_data import CalibrationMethod as CalibrationMethod, TensorData as TensorData, TensorsData as TensorsData


class CalibrationDataReader(metaclass=abc.ABCMeta):
    """What gives calibration data; subclasses write `get_next`."""

    @classmethod
    def __subclasshook__(cls, subclass: type) -> bool:
        return callable(getattr(subclass, "get_next", None))

    @abc.abstractmethod
    def get_next(self) -> dict[str, Any] | None:
        """The next feed of the model, {input: array}; None where there is no more."""

    def __iter__(self) -> CalibrationDataReader:
        return self

    def __next__(self) -> dict[str, Any]:
        feed = self.get_next()
        if feed is None:
            raise StopIteration
        return feed

    def set_range(self, start_index: int, end_index: int) -> None:
        """Give only these feeds. Raises NotSupportedYetError: this reader has no such choice."""
        raise NotSupportedYetError(
            "this reader gives all its feeds", "it has no set_range", "write one in the subclass"
        )


def feeds_of(reader: Any) -> Any:
    """The feeds of a reader, checked to be such, one after another.

    Raises:
        OptionError: no reader. InputError: not a feed, or none at all.
    """
    get_next = getattr(reader, "get_next", None)
    if not callable(get_next):
        raise OptionError(
            f"calibration_data_reader is {type(reader).__name__}",
            "a reader has get_next(), which returns {input: array}, and None at the end",
            "pass a CalibrationDataReader",
        )
    count = 0
    while (feed := get_next()) is not None:
        if not isinstance(feed, Mapping):
            raise InputError(
                f"item {count} of the calibration data is a {type(feed).__name__}",
                "a reader gives one dict {input: array} at a time",
                "correct get_next()",
            )
        yield feed
        count += 1
    if not count:
        raise InputError(
            "the calibration data reader gives no data",
            "ranges of activations come from what is seen; a reader that was read to its end gives nothing any more",
            "make a new reader, with at least one feed",
        )


# Masks hold such numbers so that exp() makes 0 of them; with one scale for these, nothing else would be left.
MOST = 1e30


class Observations:
    """Observers of values by name, and what stands in the way of those that have no range.

    Attributes:
        observers: of each value. unbounded: values that were infinite somewhere, or as good as that.
    """

    def __init__(self, names: Sequence[str], make: Callable[[], RangeObserver]) -> None:
        self.observers = {name: make() for name in names}
        self.unbounded: dict[str, float] = {}
        self.not_a_number: str | None = None

    def __call__(self, name: str, values: Any) -> None:
        observer = self.observers.get(name)
        if observer is None or name in self.unbounded or not values.size:
            return
        values = np.asarray(values, np.float32)
        largest = max(float(values.max()), -float(values.min()))  # either is NaN if any value is
        if not largest < MOST:
            if np.isnan(values).any():
                self.not_a_number = self.not_a_number or name
            else:
                self.unbounded[name] = largest
            return
        observer.observe(values)

    def require_numbers(self, graph: Graph, item: int) -> None:
        """Raise InputError if a value was NaN; the first one is named, since the others come of it."""
        if self.not_a_number is None:
            return
        node = graph.producer(self.not_a_number)
        made_by = "an input" if node is None else f"made by node {node.name!r} ({node.op_type})"
        raise InputError(
            f"value {self.not_a_number!r}, {made_by}, is NaN for item {item} of the calibration data",
            "a range cannot be found for it, and nothing after it would be right",
            "look at that item of the data, and whether the float model gives NaN for it too",
        )


class CalibraterBase:
    """Collects ranges of activations; subclasses say how.

    Args:
        model_path: of the float model; an onnx.ModelProto too.
        op_types_to_calibrate: values of these operators only; None or [] = of all.
        augmented_model_path, use_external_data_format: without effect, since no other model is written.
        symmetric: ranges are the same on both sides of 0.
        per_channel: refused; activations have one scale.
    """

    def __init__(
        self,
        model_path: str | Path | onnx.ModelProto,
        op_types_to_calibrate: Sequence[str] | None = None,
        augmented_model_path: str | Path = "augmented_model.onnx",
        symmetric: bool = False,
        use_external_data_format: bool = False,
        per_channel: bool = False,
    ) -> None:
        if per_channel:
            raise NotSupportedYetError(
                "per_channel=True for activations", "QuantizeLinear of an activation has one scale here", "leave it out"
            )
        self.model_path, self.symmetric = model_path, symmetric
        self.op_types_to_calibrate = tuple(op_types_to_calibrate or ())
        self.execution_providers: Sequence[Any] = ["CPUExecutionProvider"]
        self._model = read_model(model_path)
        run_rewrites(self._model, (lift_constants,), Level.BASIC)
        infer_shapes(self._model)
        self._session: InferenceSession | None = None
        self._observations: Observations | None = None
        self._names: Sequence[str] | None = None

    _method = CalibrationMethod.MinMax

    def _observer(self) -> RangeObserver:
        raise NotImplementedError

    def augment_graph(self) -> None:
        """Does nothing: values are looked at while the model runs."""

    def get_augment_model(self) -> onnx.ModelProto:
        """The model, which is run as it is."""
        from ...onnx.writer import to_proto

        return to_proto(self._model)

    def set_execution_providers(self, execution_providers: Sequence[Any] = ("CPUExecutionProvider",)) -> None:
        """Where the model runs; see `InferenceSession`."""
        self.execution_providers = execution_providers
        self._session = None

    def create_inference_session(self) -> None:
        """Make the session that the model is run in; `collect_data` does so itself."""
        options = SessionOptions()
        options.graph_optimization_level = GraphOptimizationLevel.ORT_DISABLE_ALL
        source = self.model_path if isinstance(self.model_path, onnx.ModelProto) else str(self.model_path)
        self._session = InferenceSession(source, options, providers=list(self.execution_providers))

    def select_tensors_to_calibrate(self, model: Any = None) -> tuple[set[str], dict[str, Any]]:
        """The float activations of the chosen operators, and what is known of their types."""
        graph = self._model.graph
        chosen = [
            node for node in graph.nodes if not self.op_types_to_calibrate or node.op_type in self.op_types_to_calibrate
        ]
        names = {name for node in chosen for name in (*node.inputs, *node.outputs) if name}
        names = {name for name in names if not graph.constant_tensor(name) and is_float(graph, name)}
        return names, {name: graph.type_of(name) for name in names}

    def only(self, names: Sequence[str]) -> None:
        """Look at these values, whatever the operators."""
        self._names = names

    def collect_data(self, data_reader: Any) -> None:
        """Run the model on all feeds of a reader, and look at the values. May be called again with more.

        Raises:
            InputError: no data, feeds that do not fit the model, or NaN; the message names item and value.
        """
        if self._session is None:
            self.create_inference_session()
        session = self._session
        assert session is not None
        if self._observations is None:
            names = sorted(self.select_tensors_to_calibrate()[0]) if self._names is None else self._names
            self._observations = Observations(names, self._observer)
        inputs = [value.name for value in session.get_inputs()]
        with task("Calibrating", after=0.5) as progress:
            total = _length(data_reader)
            for item, feed in enumerate(feeds_of(data_reader)):
                progress.show(item, max(total, item + 1), f"{item} of {total or '?'} inputs")
                _require_names(item, feed, inputs)
                try:
                    observed_run(session, feed, self._observations)
                except GenaiError as error:
                    raise InputError(
                        f"item {item} of the calibration data cannot be run: {error.what}", error.why, error.fix
                    ) from error
                self._observations.require_numbers(self._model.graph, item)

    def compute_data(self) -> TensorsData:
        """The ranges. Values that were infinite have none.

        Raises:
            StateError: no data was collected.
        """
        if self._observations is None:
            raise StateError("no data was collected", "ranges come from data", "call collect_data(reader) first")
        ranges = {}
        for name, observer in self._observations.observers.items():
            if name in self._observations.unbounded:
                continue
            try:
                low, high = observer.range()
            except ValueError:  # a branch that no feed took, or no elements
                continue
            if self.symmetric:
                high = max(-low, high)
                low = -high
            ranges[name] = TensorData(lowest=np.float32(low), highest=np.float32(high))
        return TensorsData(self._method, ranges)

    def clear_collected_data(self) -> None:
        """Forget what was collected."""
        self._observations = None

    @property
    def unbounded(self) -> dict[str, float]:
        """Values that have no range, because they were infinite or beyond 1e30: the largest magnitude."""
        return {} if self._observations is None else dict(self._observations.unbounded)


def is_float(graph: Graph, name: str, otherwise: int | None = None) -> bool:
    """Whether a value is float32; where nothing is known, whether `otherwise` is.

    The type of float16 values would be that of their scales, which few runtimes read.
    """
    known = graph.type_of(name)
    if not isinstance(known, TensorType) or known.dtype is DataType.UNDEFINED:
        return otherwise == DataType.FLOAT
    return known.dtype is DataType.FLOAT


def _length(reader: Any) -> int:
    try:
        return len(reader)
    except (TypeError, NotImplementedError):  # what onnxruntime's readers raise
        return 0


def _require_names(item: int, feed: Mapping[str, Any], inputs: Sequence[str]) -> None:
    unknown = [name for name in feed if name not in inputs]
    missing = [name for name in inputs if name not in feed]
    # Defaults may be overridden, so unknown names are the session's to judge where nothing is missing.
    if missing:
        rename = f"rename {str(unknown[0])!r} to {missing[0]!r}" if len(unknown) == len(missing) == 1 else ""
        fix = rename or did_you_mean(missing[0], [str(name) for name in unknown], f"give {missing}")
        raise InputError(
            f"item {item} of the calibration data has no {missing[0]!r}",
            f"the model's inputs are {', '.join(inputs)}, and the item has {', '.join(map(str, feed)) or 'nothing'}",
            fix,
        )


class MinMaxCalibrater(CalibraterBase):
    """The least and the largest value seen.

    Args:
        moving_average: use the moving averages of those of each feed instead.
        averaging_constant: how much the next feed weighs.
        max_intermediate_outputs: without effect; extremes are joined as they come.
    """

    def __init__(
        self,
        model_path: str | Path | onnx.ModelProto,
        op_types_to_calibrate: Sequence[str] | None = None,
        augmented_model_path: str | Path = "augmented_model.onnx",
        symmetric: bool = False,
        use_external_data_format: bool = False,
        moving_average: bool = False,
        averaging_constant: float = 0.01,
        max_intermediate_outputs: int | None = None,
        per_channel: bool = False,
    ) -> None:
        super().__init__(model_path, op_types_to_calibrate, symmetric=symmetric, per_channel=per_channel)
        if not 0 < averaging_constant <= 1:
            raise OptionError(
                f"averaging_constant is {averaging_constant}", "it is a weight above 0, at most 1", "pass 0.01"
            )
        self._constant = averaging_constant if moving_average else None

    def _observer(self) -> RangeObserver:
        return Extremes(self._constant)

    def merge_range(self, old_range: Any, new_range: Any) -> NoReturn:
        """Not supported: ranges are joined as values come."""
        raise NotSupportedYetError(
            "MinMaxCalibrater.merge_range is not supported",
            "ranges are joined as values come",
            "call collect_data again",
        )


class HistogramCalibrater(CalibraterBase):
    """Ranges from histograms.

    Args:
        method: "entropy" or "percentile".
        num_bins: of a histogram; 4096 where fewer are asked for, since it takes no longer.
        num_quantized_bins: for entropy, the number of levels; at least 256, which is what 8 bits have.
        percentile: for percentile, how many of the values the range holds.
        scenario: belongs to float8, which is not supported.
    """

    def __init__(
        self,
        model_path: str | Path | onnx.ModelProto,
        op_types_to_calibrate: Sequence[str] | None = None,
        augmented_model_path: str | Path = "augmented_model.onnx",
        use_external_data_format: bool = False,
        method: str = "percentile",
        symmetric: bool = False,
        num_bins: int = 128,
        num_quantized_bins: int = 2048,
        percentile: float = 99.999,
        scenario: str = "same",
    ) -> None:
        super().__init__(model_path, op_types_to_calibrate, symmetric=symmetric)
        makers: dict[str, tuple[CalibrationMethod, Callable[[], RangeObserver]]] = {
            "entropy": (CalibrationMethod.Entropy, self._entropy),
            "percentile": (CalibrationMethod.Percentile, self._percentile),
        }
        if method == "distribution":
            raise refused_distribution()
        if method not in makers:
            raise OptionError(f"method is {method!r}", "it is 'entropy' or 'percentile'", "pass one of these")
        if not 0 < percentile <= 100:
            raise OptionError(f"percentile is {percentile}", "it is above 0 and at most 100", "pass 99.999")
        self._method, self._make = makers[method]
        self._bins = max(BINS, -(-num_bins // 4) * 4)
        self._levels, self.percentile = max(256, num_quantized_bins), percentile

    def _observer(self) -> RangeObserver:
        return self._make()

    def _entropy(self) -> RangeObserver:
        return EntropyRange(self._levels, symmetric=self.symmetric, bins=self._bins)

    def _percentile(self) -> RangeObserver:
        return PercentileRange(self.percentile, symmetric=self.symmetric, bins=self._bins)


class EntropyCalibrater(HistogramCalibrater):
    """The range whose quantised values are distributed most like the float ones (KL divergence)."""

    def __init__(
        self,
        model_path: str | Path | onnx.ModelProto,
        op_types_to_calibrate: Sequence[str] | None = None,
        augmented_model_path: str | Path = "augmented_model.onnx",
        use_external_data_format: bool = False,
        method: str = "entropy",
        symmetric: bool = False,
        num_bins: int = 128,
        num_quantized_bins: int = 128,
    ) -> None:
        super().__init__(
            model_path,
            op_types_to_calibrate,
            method=method,
            symmetric=symmetric,
            num_bins=num_bins,
            num_quantized_bins=num_quantized_bins,
        )


class PercentileCalibrater(HistogramCalibrater):
    """The range that holds all values but the outermost few."""

    def __init__(
        self,
        model_path: str | Path | onnx.ModelProto,
        op_types_to_calibrate: Sequence[str] | None = None,
        augmented_model_path: str | Path = "augmented_model.onnx",
        use_external_data_format: bool = False,
        method: str = "percentile",
        symmetric: bool = False,
        num_bins: int = 2048,
        percentile: float = 99.999,
    ) -> None:
        super().__init__(
            model_path,
            op_types_to_calibrate,
            method=method,
            symmetric=symmetric,
            num_bins=num_bins,
            percentile=percentile,
        )


def refused_distribution() -> NotSupportedYetError:
    """The error of CalibrationMethod.Distribution."""
    return NotSupportedYetError(
        "CalibrationMethod.Distribution is not supported",
        "it fits float8 to a mean and a deviation, and no float8 is made here",
        "use MinMax, Entropy or Percentile",
    )


_CALIBRATERS: dict[CalibrationMethod, tuple[type[CalibraterBase], tuple[str, ...]]] = {
    CalibrationMethod.MinMax: (
        MinMaxCalibrater,
        ("symmetric", "moving_average", "averaging_constant", "max_intermediate_outputs", "per_channel"),
    ),
    CalibrationMethod.Entropy: (EntropyCalibrater, ("symmetric", "num_bins", "num_quantized_bins")),
    CalibrationMethod.Percentile: (PercentileCalibrater, ("symmetric", "num_bins", "percentile")),
}


def create_calibrator(
    model: str | Path | onnx.ModelProto,
    op_types_to_calibrate: Sequence[str] | None = None,
    augmented_model_path: str | Path = "augmented_model.onnx",
    calibrate_method: CalibrationMethod = CalibrationMethod.MinMax,
    use_external_data_format: bool = False,
    providers: Sequence[Any] | None = None,
    extra_options: Mapping[str, Any] | None = None,
) -> CalibraterBase:
    """A calibrator of a method.

    Args:
        augmented_model_path, use_external_data_format: without effect; no model is written.
        providers: see `InferenceSession`.
        extra_options: keywords of the method's class.

    Raises:
        OptionError: no such method or option.
        NotSupportedYetError: Distribution.
    """
    if calibrate_method is CalibrationMethod.Distribution:
        raise refused_distribution()
    if calibrate_method not in _CALIBRATERS:
        raise OptionError(
            f"calibrate_method is {calibrate_method!r}", "it is a CalibrationMethod", "pass CalibrationMethod.MinMax"
        )
    kind, known = _CALIBRATERS[calibrate_method]
    options = dict(extra_options or {})
    if unknown := sorted(set(options) - set(known)):
        raise OptionError(
            f"extra_options has {unknown[0]!r}",
            f"{kind.__name__} knows {', '.join(known)}",
            did_you_mean(unknown[0], known, "leave it out"),
        )
    calibrator = kind(model, op_types_to_calibrate, **options)
    if providers:
        calibrator.set_execution_providers(providers)
    return calibrator
