"""onnxruntime.quantization.calibrate: one class per method, based on `genai.quantize.onnx_graph.calibrate`."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import onnx

from genai.quant.histograms import BINS

from ...errors import NotSupportedYetError, OptionError, did_you_mean
from ...onnx.writer import to_proto
from ...quantize.onnx_graph.calibrate import Calibration, Calibrator, refused_distribution
from ...quantize.onnx_graph.tensors_data import (
    CalibrationMethod as CalibrationMethod,
    TensorData as TensorData,
    TensorsData as TensorsData,
)
from ..onnxruntime.errors import named_as_in_onnxruntime
from ..onnxruntime.providers import before_the_cpu, chosen_providers


class CalibrationDataReader(metaclass=abc.ABCMeta):
    """A source of calibration data. Subclasses implement `get_next`."""

    @classmethod
    def __subclasshook__(cls, subclass: type) -> bool:
        return callable(getattr(subclass, "get_next", None))

    @abc.abstractmethod
    def get_next(self) -> dict[str, Any] | None:
        """Return the next feed of the model, {input: array}; None at the end."""

    def __iter__(self) -> CalibrationDataReader:
        return self

    def __next__(self) -> dict[str, Any]:
        found = self.get_next()
        if found is None:
            raise StopIteration
        return found

    def set_range(self, start_index: int, end_index: int) -> None:
        """Restrict the reader to these feeds. Raises NotSupportedYetError: this reader does not implement it."""
        raise NotSupportedYetError(
            "set_range is not supported",
            "this reader always returns all feeds",
            "implement set_range in the subclass",
        )


class CalibraterBase:
    """The base class for collecting ranges of activations. Subclasses define the method.

    Args:
        model_path: path of the float model, or an onnx.ModelProto.
        op_types_to_calibrate: operators whose values are observed; None or [] = all.
        augmented_model_path, use_external_data_format: ignored, because no other model is written.
        symmetric: True to make ranges symmetric around 0.
        per_channel: not supported; activations have one scale.
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
                "per_channel=True is not supported for activations",
                "each activation has a single scale",
                "omit per_channel",
            )
        self.model_path, self.symmetric = model_path, symmetric
        self.op_types_to_calibrate = tuple(op_types_to_calibrate or ())
        self.execution_providers: Sequence[Any] = ["CPUExecutionProvider"]
        source = model_path if isinstance(model_path, onnx.ModelProto) else str(model_path)
        self._calibrator = Calibrator(source, lambda: self._calibration().observer())
        self._is_open = self._has_data = False

    def _calibration(self) -> Calibration:
        raise NotImplementedError

    def augment_graph(self) -> None:
        """Do nothing: values are observed while the model runs."""

    def get_augment_model(self) -> onnx.ModelProto:
        """Return the model unchanged; it needs no augmentation."""
        return to_proto(self._calibrator.model)

    def set_execution_providers(self, execution_providers: Sequence[Any] = ("CPUExecutionProvider",)) -> None:
        """Set the providers that run the model; see `InferenceSession`."""
        self.execution_providers = execution_providers
        self._is_open = False

    def create_inference_session(self) -> None:
        """Create the session that runs the model. `collect_data` also does this."""
        providers = before_the_cpu(chosen_providers(list(self.execution_providers)))
        with named_as_in_onnxruntime():
            self._calibrator.open(providers)
        self._is_open = True

    def select_tensors_to_calibrate(self, model: Any = None) -> tuple[set[str], dict[str, Any]]:
        """Return the float activations of the chosen operators, and their types if they are known."""
        names = self._calibrator.activations(self.op_types_to_calibrate)
        return set(names), {name: self._calibrator.model.graph.type_of(name) for name in names}

    def collect_data(self, data_reader: Any) -> None:
        """Run the model on all feeds of a reader and observe the values. Further calls add more data.

        Raises:
            InputError: there is no data, or a feed does not fit the model or contains NaN. The message names the item
                and the value.
        """
        if not self._is_open:
            self.create_inference_session()
        if not self._has_data:
            self._calibrator.only(sorted(self.select_tensors_to_calibrate()[0]))
        self._has_data = True
        self._calibrator.collect(data_reader)

    def compute_data(self) -> TensorsData:
        """Compute the ranges. Values that were infinite have no range.

        Raises:
            StateError: no data was collected.
        """
        return self._calibrator.ranges(self._calibration())

    def clear_collected_data(self) -> None:
        """Discard the collected data."""
        self._calibrator.clear()
        self._has_data = False


class MinMaxCalibrater(CalibraterBase):
    """Ranges from the minimum and maximum observed.

    Args:
        moving_average: True to use moving averages of each feed's minimum and maximum.
        averaging_constant: weight of the next feed.
        max_intermediate_outputs: ignored; extremes are merged as they are observed.
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
                f"averaging_constant is {averaging_constant}",
                "a weight above 0 and at most 1 is expected",
                "pass a weight such as 0.01",
            )
        self._constant = averaging_constant if moving_average else None

    def _calibration(self) -> Calibration:
        return Calibration(CalibrationMethod.MinMax, self.symmetric, self._constant)

    def merge_range(self, old_range: Any, new_range: Any) -> NoReturn:
        """Not supported: ranges are merged as values are observed."""
        raise NotSupportedYetError(
            "MinMaxCalibrater.merge_range is not supported",
            "ranges are merged as values are observed",
            "call collect_data again",
        )


_HISTOGRAM_METHODS = {"entropy": CalibrationMethod.Entropy, "percentile": CalibrationMethod.Percentile}


class HistogramCalibrater(CalibraterBase):
    """Ranges from histograms.

    Args:
        method: "entropy" or "percentile".
        num_bins: number of bins; at least 4,096 bins are used, because more bins take no longer.
        num_quantized_bins: for entropy, the number of levels; at least 256, the number for 8 bits.
        percentile: for percentile, the percentage of values inside the range.
        scenario: ignored; it applies to float8, which is not supported.
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
        if method == "distribution":
            raise refused_distribution()
        if method not in _HISTOGRAM_METHODS:
            raise OptionError(
                f"method is {method!r}", "'entropy' or 'percentile' is expected", "pass one of these methods"
            )
        if not 0 < percentile <= 100:
            raise OptionError(
                f"percentile is {percentile}",
                "a percentile above 0 and at most 100 is expected",
                "pass a number such as 99.999",
            )
        self._method, self._bins = _HISTOGRAM_METHODS[method], max(BINS, -(-num_bins // 4) * 4)
        self._levels, self.percentile = max(256, num_quantized_bins), percentile

    def _calibration(self) -> Calibration:
        return Calibration(
            self._method, self.symmetric, bins=self._bins, levels=self._levels, percentile=self.percentile
        )


class EntropyCalibrater(HistogramCalibrater):
    """The range with the smallest KL divergence between the quantised values and the float values."""

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
    """The range that contains the given percentage of values and cuts off the outliers."""

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
    """Create a calibrator for a method.

    Args:
        augmented_model_path, use_external_data_format: ignored; no model is written.
        providers: see `InferenceSession`.
        extra_options: keyword arguments of the method's class.

    Raises:
        OptionError: the method or an option is unknown.
        NotSupportedYetError: the method is Distribution.
    """
    if calibrate_method is CalibrationMethod.Distribution:
        raise refused_distribution()
    if calibrate_method not in _CALIBRATERS:
        raise OptionError(
            f"calibrate_method is {calibrate_method!r}",
            "a CalibrationMethod is expected",
            "pass a member such as CalibrationMethod.MinMax",
        )
    kind, known = _CALIBRATERS[calibrate_method]
    options = dict(extra_options or {})
    if unknown := sorted(set(options) - set(known)):
        raise OptionError(
            f"extra_options contains {unknown[0]!r}",
            f"the options of {kind.__name__} are {', '.join(known)}",
            did_you_mean(unknown[0], known, "remove this option"),
        )
    calibrator = kind(model, op_types_to_calibrate, **options)
    if providers:
        calibrator.set_execution_providers(providers)
    return calibrator
