"""Calibration: ranges of activations, from the data of the caller's reader.

The model runs in a session that reports every value when it is computed. Only extremes or histograms are stored, so
memory use does not grow with the amount of data. No augmented model is written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from genai.common.progress import task
from genai.quant.histograms import BINS, EntropyRange, Extremes, PercentileRange, RangeObserver

from ...errors import GenaiError, InputError, NotSupportedYetError, OptionError, StateError, did_you_mean
from ...onnx.ir import Graph
from ...onnx.reader import read_model
from ...onnx.types import DataType, TensorType
from ...optimize.base import Level, run_rewrites
from ...optimize.constant_folding import lift_constants
from ...optimize.shapes import infer_shapes
from ...session.config import SessionConfig
from ...session.execution_providers import ChosenProvider
from ...session.session import Session
from .tensors_data import CalibrationMethod, TensorData, TensorsData


@dataclass(frozen=True)
class Calibration:
    """The method for finding the range of an activation from its values.

    Attributes:
        symmetric: True for a range that is symmetric around 0.
        averaging_constant: for MinMax, the weight of the next feed's extremes in a moving average; None means the
            extremes over all feeds.
        bins: number of bins of a histogram, a multiple of 4.
        levels: for Entropy, the number of quantisation levels.
        percentile: for Percentile, the percentage of the values that the range contains.

    Raises:
        OptionError: the method is unknown.
        NotSupportedYetError: the method is Distribution.
    """

    method: CalibrationMethod = CalibrationMethod.MinMax
    symmetric: bool = False
    averaging_constant: float | None = None
    bins: int = BINS
    levels: int = 256
    percentile: float = 99.999

    def __post_init__(self) -> None:
        if not isinstance(self.method, CalibrationMethod):
            raise OptionError(
                f"calibrate_method is {self.method!r}",
                "calibrate_method must be a CalibrationMethod",
                "pass CalibrationMethod.MinMax",
            )
        if self.method is CalibrationMethod.Distribution:
            raise refused_distribution()

    def observer(self) -> RangeObserver:
        """Return a new observer for the values of one activation."""
        if self.method is CalibrationMethod.Entropy:
            return EntropyRange(self.levels, symmetric=self.symmetric, bins=self.bins)
        if self.method is CalibrationMethod.Percentile:
            return PercentileRange(self.percentile, symmetric=self.symmetric, bins=self.bins)
        return Extremes(self.averaging_constant)


def refused_distribution() -> NotSupportedYetError:
    """Return the error for CalibrationMethod.Distribution."""
    return NotSupportedYetError(
        "CalibrationMethod.Distribution is not supported",
        "this method fits float8 to a mean and a deviation, and float8 is not supported",
        "use MinMax, Entropy or Percentile",
    )


def feeds_of(reader: Any) -> Any:
    """Yield the feeds of a reader one after another, and validate each feed.

    Raises:
        OptionError: `reader` has no get_next().
        InputError: an item is not a feed, or there are no feeds.
    """
    get_next = getattr(reader, "get_next", None)
    if not callable(get_next):
        raise OptionError(
            f"calibration_data_reader has the type {type(reader).__name__}",
            "a reader must have a method get_next() that returns {input: array}, and None after the last item",
            "pass a CalibrationDataReader",
        )
    count = 0
    while (feed := get_next()) is not None:
        if not isinstance(feed, Mapping):
            raise InputError(
                f"item {count} of the calibration data is a {type(feed).__name__}",
                "get_next() must return one dict {input: array} at a time",
                "return a dict from get_next()",
            )
        yield feed
        count += 1
    if not count:
        raise InputError(
            "the calibration data reader returns no data",
            "activation ranges are computed from data, and a reader that was read to its end returns no more data",
            "create a new reader with at least one feed",
        )


# Masks contain larger values so that exp() maps them to 0; a scale that covers them would round all others to 0.
MOST = 1e30


class Observations:
    """Observers by the name of their value, and the values that cannot have a range.

    Attributes:
        observers: the observer of each value.
        unbounded: values that were infinite or exceeded MOST, each with the largest number observed.
        not_a_number: the first value that was NaN.
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
        largest = max(float(values.max()), -float(values.min()))  # both are NaN if any value is NaN
        if not largest < MOST:
            if np.isnan(values).any():
                self.not_a_number = self.not_a_number or name
            else:
                self.unbounded[name] = largest
            return
        observer.observe(values)

    def require_numbers(self, graph: Graph, item: int) -> None:
        """Raise InputError if a value was NaN. The error names the first NaN value, which causes all others."""
        if self.not_a_number is None:
            return
        node = graph.producer(self.not_a_number)
        made_by = "an input" if node is None else f"computed by node {node.name!r} ({node.op_type})"
        raise InputError(
            f"value {self.not_a_number!r}, {made_by}, is NaN for item {item} of the calibration data",
            "a NaN value has no range, and all values that depend on it would be wrong",
            "check this item of the data, and check whether the float model also computes NaN for the item",
        )


class Calibrator:
    """A runner of a float model on data, which observes the model's activations.

    Args:
        source: path of the model, or an onnx.ModelProto.
        make_observer: returns a new observer for the values of one activation.
        providers: see `SessionConfig`.

    Raises:
        GenaiError: the model cannot be read.
    """

    def __init__(
        self, source: Any, make_observer: Callable[[], RangeObserver], providers: Sequence[ChosenProvider] = ()
    ) -> None:
        self._source, self._make_observer = source, make_observer
        self._providers = providers
        self.model = read_model(source)
        run_rewrites(self.model, (lift_constants,), Level.BASIC)
        infer_shapes(self.model)
        self._session: Session | None = None
        self._observations: Observations | None = None
        self._names: Sequence[str] | None = None

    def open(self, providers: Sequence[ChosenProvider] | None = None) -> None:
        """Create the session; `providers` replaces the providers. `collect` calls this method if necessary.

        Raises:
            GenaiError: see `Session`.
        """
        self._providers = self._providers if providers is None else providers
        self._session = Session(self._source, SessionConfig(level=Level.NONE, providers=self._providers))

    def activations(self, op_types: Collection[str] = ()) -> list[str]:
        """Return the names of the float activations of these operators, or of all operators."""
        graph = self.model.graph
        chosen = [node for node in graph.nodes if not op_types or node.op_type in op_types]
        names = {name for node in chosen for name in (*node.inputs, *node.outputs) if name}
        return sorted(name for name in names if not graph.constant_tensor(name) and is_float(graph, name))

    def only(self, names: Sequence[str]) -> None:
        """Observe only these values instead of all float activations."""
        self._names = names

    def collect(self, reader: Any) -> None:
        """Run the model on all feeds of a reader, and observe the values. Further calls may add more data.

        Raises:
            InputError: there is no data, a feed does not fit the model, or a value is NaN; the message names the item.
        """
        if self._session is None:
            self.open()
        session = self._session
        assert session is not None
        if self._observations is None:
            names = self.activations() if self._names is None else self._names
            self._observations = Observations(names, self._make_observer)
        inputs = [value.name for value in session.inputs]
        with task("Calibrating") as progress:
            total = _length(reader)
            for item, feed in enumerate(feeds_of(reader)):
                progress.show(item, max(total, item + 1), f"{item} of {total or '?'} inputs")
                _require_names(item, feed, inputs)
                try:
                    session.observe(feed, self._observations)
                except GenaiError as error:
                    raise InputError(
                        f"item {item} of the calibration data cannot be run: {error.what}", error.why, error.fix
                    ) from error
                self._observations.require_numbers(self.model.graph, item)

    @property
    def observations(self) -> Observations:
        """The observations; raises StateError if no data was collected."""
        if self._observations is None:
            raise StateError(
                "no data was collected", "ranges are computed from collected data", "call collect_data(reader) first"
            )
        return self._observations

    def ranges(self, calibration: Calibration) -> TensorsData:
        """Return the ranges that the observers found. Infinite values have no range.

        Raises:
            StateError: no data was collected.
        """
        data = {}
        for name, observer in self.observations.observers.items():
            if name in self.observations.unbounded:
                continue
            try:
                low, high = observer.range()
            except ValueError:  # a branch that no feed took, or a value without elements
                continue
            if calibration.symmetric:
                high = max(-low, high)
                low = -high
            data[name] = TensorData(lowest=np.float32(low), highest=np.float32(high))
        return TensorsData(calibration.method, data)

    def clear(self) -> None:
        """Discard the observations."""
        self._observations = None


def is_float(graph: Graph, name: str, otherwise: int | None = None) -> bool:
    """Return True if a value is float32; if the type is unknown, return True if the type `otherwise` is float32.

    float16 values are not quantised, because their scales would be float16, which few runtimes support.
    """
    known = graph.type_of(name)
    if not isinstance(known, TensorType) or known.dtype is DataType.UNDEFINED:
        return otherwise == DataType.FLOAT
    return known.dtype is DataType.FLOAT


def _length(reader: Any) -> int:
    try:
        return len(reader)
    except (TypeError, NotImplementedError):  # these are raised by onnxruntime's readers
        return 0


def _require_names(item: int, feed: Mapping[str, Any], inputs: Sequence[str]) -> None:
    unknown = [name for name in feed if name not in inputs]
    missing = [name for name in inputs if name not in feed]
    # Unknown names may override defaults, so the session checks them if nothing is missing.
    if missing:
        rename = f"rename {str(unknown[0])!r} to {missing[0]!r}" if len(unknown) == len(missing) == 1 else ""
        fix = rename or did_you_mean(missing[0], [str(name) for name in unknown], f"add {missing} to each item")
        raise InputError(
            f"item {item} of the calibration data has no {missing[0]!r}",
            f"the model's inputs are {', '.join(inputs)}, and the item has {', '.join(map(str, feed)) or 'nothing'}",
            fix,
        )
