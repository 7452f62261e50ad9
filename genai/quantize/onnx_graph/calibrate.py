"""Ranges of activations, from data that the caller's reader gives.

The model itself is run, in a session that shows every value as it comes about; nothing is kept of the values but
extremes or a histogram, so that memory does not grow with the data. No augmented model is written.
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
    """How a range is found from the values of an activation.

    Attributes:
        symmetric: the range is the same on both sides of 0.
        averaging_constant: of MinMax, the weight of the next feed's extremes in their moving averages; None = the
            extremes of all feeds.
        bins: of a histogram, a multiple of 4.
        levels: of Entropy, how many there are. percentile: of Percentile, how many of the values the range holds.

    Raises:
        OptionError: no such method. NotSupportedYetError: Distribution.
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
                f"calibrate_method is {self.method!r}", "it is a CalibrationMethod", "pass CalibrationMethod.MinMax"
            )
        if self.method is CalibrationMethod.Distribution:
            raise refused_distribution()

    def observer(self) -> RangeObserver:
        """What looks at the values of one activation."""
        if self.method is CalibrationMethod.Entropy:
            return EntropyRange(self.levels, symmetric=self.symmetric, bins=self.bins)
        if self.method is CalibrationMethod.Percentile:
            return PercentileRange(self.percentile, symmetric=self.symmetric, bins=self.bins)
        return Extremes(self.averaging_constant)


def refused_distribution() -> NotSupportedYetError:
    """The error of CalibrationMethod.Distribution."""
    return NotSupportedYetError(
        "CalibrationMethod.Distribution is not supported",
        "it fits float8 to a mean and a deviation, and no float8 is made here",
        "use MinMax, Entropy or Percentile",
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


class Calibrator:
    """Runs a float model on data, and looks at its activations.

    Args:
        source: path of the model, or an onnx.ModelProto.
        make_observer: makes what looks at the values of one activation.
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
        """Make the session that the model runs in, with other providers if any are given. `collect` does so itself.

        Raises:
            GenaiError: see `Session`.
        """
        self._providers = self._providers if providers is None else providers
        self._session = Session(self._source, SessionConfig(level=Level.NONE, providers=self._providers))

    def activations(self, op_types: Collection[str] = ()) -> list[str]:
        """The float activations of these operators, or of all."""
        graph = self.model.graph
        chosen = [node for node in graph.nodes if not op_types or node.op_type in op_types]
        names = {name for node in chosen for name in (*node.inputs, *node.outputs) if name}
        return sorted(name for name in names if not graph.constant_tensor(name) and is_float(graph, name))

    def only(self, names: Sequence[str]) -> None:
        """Look at these values, and not at all float activations."""
        self._names = names

    def collect(self, reader: Any) -> None:
        """Run the model on all feeds of a reader, and look at the values. May be called again with more.

        Raises:
            InputError: no data, feeds that do not fit the model, or NaN; the message names item and value.
        """
        if self._session is None:
            self.open()
        session = self._session
        assert session is not None
        if self._observations is None:
            names = self.activations() if self._names is None else self._names
            self._observations = Observations(names, self._make_observer)
        inputs = [value.name for value in session.inputs]
        with task("Calibrating", after=0.5) as progress:
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
        """What was seen. Raises StateError: no data was collected."""
        if self._observations is None:
            raise StateError("no data was collected", "ranges come from data", "call collect_data(reader) first")
        return self._observations

    def ranges(self, calibration: Calibration) -> TensorsData:
        """The ranges that the observers of a calibration found. Values that were infinite have none.

        Raises:
            StateError: no data was collected.
        """
        data = {}
        for name, observer in self.observations.observers.items():
            if name in self.observations.unbounded:
                continue
            try:
                low, high = observer.range()
            except ValueError:  # a branch that no feed took, or no elements
                continue
            if calibration.symmetric:
                high = max(-low, high)
                low = -high
            data[name] = TensorData(lowest=np.float32(low), highest=np.float32(high))
        return TensorsData(calibration.method, data)

    def clear(self) -> None:
        """Forget what was seen."""
        self._observations = None


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
