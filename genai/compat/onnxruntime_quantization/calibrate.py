"""onnxruntime.quantization.calibrate: calibrators by method, over `genai.quantize.onnx_graph.calibrate`."""

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
        found = self.get_next()
        if found is None:
            raise StopIteration
        return found

    def set_range(self, start_index: int, end_index: int) -> None:
        """Give only these feeds. Raises NotSupportedYetError: this reader has no such choice."""
        raise NotSupportedYetError(
            "this reader gives all its feeds", "it has no set_range", "write one in the subclass"
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
        source = model_path if isinstance(model_path, onnx.ModelProto) else str(model_path)
        self._calibrator = Calibrator(source, lambda: self._calibration().observer())
        self._is_open = self._has_data = False

    def _calibration(self) -> Calibration:
        raise NotImplementedError

    def augment_graph(self) -> None:
        """Does nothing: values are looked at while the model runs."""

    def get_augment_model(self) -> onnx.ModelProto:
        """The model, which is run as it is."""
        return to_proto(self._calibrator.model)

    def set_execution_providers(self, execution_providers: Sequence[Any] = ("CPUExecutionProvider",)) -> None:
        """Where the model runs; see `InferenceSession`."""
        self.execution_providers = execution_providers
        self._is_open = False

    def create_inference_session(self) -> None:
        """Make the session that the model is run in; `collect_data` does so itself."""
        providers = before_the_cpu(chosen_providers(list(self.execution_providers)))
        with named_as_in_onnxruntime():
            self._calibrator.open(providers)
        self._is_open = True

    def select_tensors_to_calibrate(self, model: Any = None) -> tuple[set[str], dict[str, Any]]:
        """The float activations of the chosen operators, and what is known of their types."""
        names = self._calibrator.activations(self.op_types_to_calibrate)
        return set(names), {name: self._calibrator.model.graph.type_of(name) for name in names}

    def collect_data(self, data_reader: Any) -> None:
        """Run the model on all feeds of a reader, and look at the values. May be called again with more.

        Raises:
            InputError: no data, feeds that do not fit the model, or NaN; the message names item and value.
        """
        if not self._is_open:
            self.create_inference_session()
        if not self._has_data:
            self._calibrator.only(sorted(self.select_tensors_to_calibrate()[0]))
        self._has_data = True
        self._calibrator.collect(data_reader)

    def compute_data(self) -> TensorsData:
        """The ranges. Values that were infinite have none.

        Raises:
            StateError: no data was collected.
        """
        return self._calibrator.ranges(self._calibration())

    def clear_collected_data(self) -> None:
        """Forget what was collected."""
        self._calibrator.clear()
        self._has_data = False


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

    def _calibration(self) -> Calibration:
        return Calibration(CalibrationMethod.MinMax, self.symmetric, self._constant)

    def merge_range(self, old_range: Any, new_range: Any) -> NoReturn:
        """Not supported: ranges are joined as values come."""
        raise NotSupportedYetError(
            "MinMaxCalibrater.merge_range is not supported",
            "ranges are joined as values come",
            "call collect_data again",
        )


_HISTOGRAM_METHODS = {"entropy": CalibrationMethod.Entropy, "percentile": CalibrationMethod.Percentile}


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
        if method == "distribution":
            raise refused_distribution()
        if method not in _HISTOGRAM_METHODS:
            raise OptionError(f"method is {method!r}", "it is 'entropy' or 'percentile'", "pass one of these")
        if not 0 < percentile <= 100:
            raise OptionError(f"percentile is {percentile}", "it is above 0 and at most 100", "pass 99.999")
        self._method, self._bins = _HISTOGRAM_METHODS[method], max(BINS, -(-num_bins // 4) * 4)
        self._levels, self.percentile = max(256, num_quantized_bins), percentile

    def _calibration(self) -> Calibration:
        return Calibration(
            self._method, self.symmetric, bins=self._bins, levels=self._levels, percentile=self.percentile
        )


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
