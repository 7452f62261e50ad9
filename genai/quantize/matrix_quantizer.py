"""The matrices of a model, one after the other: with statistics of their inputs where a method wants them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.weights import ROW, QuantizationError, QuantizedWeight
from genai.quant.grids import in_parallel, rounded_to_half, row_slices
from genai.quant.methods import METHODS, InputStatistics, Method, MethodResult
from genai.quant.methods.awq import find_factors
from genai.quant.methods.base import output_error

from ..errors import InputError
from .calibration import CalibrationText
from .choices import FormatChoice
from .folding import Fold, find_fold
from .sites import Site
from .source import FloatModel
from .stage_values import StageValues
from .statistics import gather
from .streaming import ProgramStage, StreamedDecoder, batches_of
from .workspace import FinishedMatrices, FinishedMatrix

Progress = Callable[[Site], None]
# Tokens per column of a tied matrix.
_TIED_TOKENS = 8
# Rows that errors of the outputs are estimated from, drawn evenly.
_ERROR_ROWS = 1024


class MatrixQuantizer:
    """One run over a model.

    Args:
        source: the float model. choices: what is to become of each site. workspace: where results go.
        progress: told each matrix that is finished. prefix: of the names in the workspace.
    """

    def __init__(
        self, source: FloatModel, choices: Mapping[Site, FormatChoice], workspace: FinishedMatrices,
        progress: Progress = lambda site: None, *, prefix: str = "",
    ) -> None:  # fmt: skip
        self._prefix = prefix
        self.source, self.choices, self.workspace, self._progress = source, choices, workspace, progress
        self._of_products = {node.output(0): site for site in source.sites for node in site.products}
        self._folds: dict[str, Fold | None] = {}

    @property
    def methods(self) -> list[Method]:
        """Those in use."""
        return [METHODS[choice.method] for choice in self.choices.values() if choice.bits]

    @property
    def needs_data(self) -> bool:
        """Whether any method wants statistics."""
        return any(method.needs != "nothing" for method in self.methods)

    # What there is

    def stored(self, site: Site) -> FinishedMatrix | None:
        """A finished site as it is in the workspace."""
        return self.workspace.get(self._prefix + site.name)

    def fold(self, site: Site) -> Fold | None:
        """Where the columns of a site can be scaled; None where its method does not want that, or nothing can."""
        if site.name not in self._folds:
            group = self._group(site)
            folds = all(self._choice_folds(other) for other in group)
            fold = find_fold(self.source.model.graph, self.source.config, group, self._of_products) if folds else None
            self._folds.update((other.name, fold) for other in group)
        return self._folds[site.name]

    def _choice_folds(self, site: Site) -> bool:
        choice = self.choices[site]
        return bool(choice.bits) and METHODS[choice.method].folds

    def _group(self, site: Site) -> list[Site]:
        """The sites that read the same input."""
        if not site.products:
            return [site]
        value = site.products[0].input(0)
        return [other for other in self.source.sites if any(node.input(0) == value for node in other.products)]

    def packed(self, site: Site) -> QuantizedWeight | None:
        """A finished site as it will be written: with its rows scaled where a later matrix's factors ask for it."""
        stored = self.stored(site)
        if stored is None:
            return None
        packed = stored.packed
        for other in self.source.sites:
            fold = self.fold(other)
            if fold is None or fold.rows is None or fold.rows[0] != site:
                continue
            after = self.stored(other)
            if after is not None and after.factors is not None:
                _, first, count = fold.rows
                factors = _unshared(after.factors, fold, count)
                narrow = self.choices[site].half_scales and packed.format.group_size != ROW
                packed = _with_rows_divided(packed, first, count, factors, narrow=narrow)
                break
        return packed

    def vectors(self) -> dict[str, NDArray[np.float32]]:
        """Norms' weights that are not those of the float model any more."""
        changed = {}
        for site in self.source.sites:
            fold, stored = self.fold(site), self.stored(site)
            if fold is not None and stored is not None and stored.factors is not None:
                for name in fold.vectors:
                    tensor = self.source.model.graph.initializers[name]
                    changed[name] = (tensor.array().astype(np.float32) / stored.factors).astype(np.float32)
        return changed

    def effective(self, site: Site) -> NDArray[np.float32] | None:
        """The matrix that stands for a finished site in the float graph, whose norms are as they were."""
        packed = self.packed(site)
        if packed is None:
            return None
        matrix = packed.dequantize()
        stored, fold = self.stored(site), self.fold(site)
        if stored is not None and stored.factors is not None and (fold is None or fold.rows is None):
            matrix /= stored.factors
        return matrix

    def effective_so_far(self, site: Site) -> NDArray[np.float32] | None:
        """As `effective`, while what comes after may not be finished: nothing is scaled for it yet."""
        stored = self.stored(site)
        if stored is None:
            return None
        matrix = stored.packed.dequantize()
        if stored.factors is not None:
            matrix /= stored.factors
        return matrix

    # The run

    def quantize_without_data(self) -> None:
        """All sites, in order."""
        for site in self.source.sites:
            self._finish(site, None)

    def quantize_with_data(self, decoder: StreamedDecoder, text: CalibrationText) -> None:
        """All sites, stage by stage, each with the inputs that the quantised layers before it give."""
        crossed = any(self.choices[use.site].method == "distill" for use in decoder.uses)
        batches = batches_of(text.tokens)
        self._finish_tied(decoder, text)
        flow = StageValues(batches, self.workspace.folder / "texts")
        exact = StageValues(batches, self.workspace.folder / "float-texts") if crossed else None
        for stage in decoder.stages:
            for site in stage.lookups:
                self._finish(site, None)
            for value, sites in _by_input(stage).items():
                self._finish_group(decoder, stage, value, sites, flow, exact)
            if stage is not decoder.stages[-1]:
                flow.advance(decoder, stage, instead=self.effective_so_far, narrow=True)
                if exact is not None:
                    exact.advance(decoder, stage, narrow=True)
        flow.close()
        if exact is not None:
            exact.close()

    def _finish_tied(self, decoder: StreamedDecoder, text: CalibrationText) -> None:
        """Matrices that are looked up before they are multiplied with: the float model says with what.

        A part of the texts will do, as they pass all layers for one matrix.
        """
        tied = [site for site in self.source.sites if site.lookups and site.products and self._is_unfinished(site)]
        tied = [site for site in tied if METHODS[self.choices[site].method].needs != "nothing"]
        if not tied:
            return
        enough = _TIED_TOKENS * max(site.columns for site in tied)
        part = text.tokens[: -(-enough // text.tokens.shape[1])]
        flow = StageValues(batches_of(part), self.workspace.folder / "texts")
        for stage in decoder.stages:
            for value, sites in _by_input(stage).items():
                if tied_sites := [site for site in sites if site in tied]:
                    statistics = gather(decoder, stage, [value], flow, None, gram=True)[value]
                    for site in tied_sites:
                        self._finish(site, _as_table(statistics))
            if stage is not decoder.stages[-1]:
                flow.advance(decoder, stage, narrow=True)
        flow.close()

    def _is_unfinished(self, site: Site) -> bool:
        return bool(self.choices[site].bits) and self.stored(site) is None

    def _finish_group(
        self,
        decoder: StreamedDecoder,
        stage: ProgramStage,
        value: str,
        sites: Sequence[Site],
        flow: StageValues,
        exact: StageValues | None,
    ) -> None:
        waiting = [site for site in sites if self._is_unfinished(site)]
        if not waiting:
            for site in sites:
                self._finish(site, None)
            return
        needs = {METHODS[self.choices[site].method].needs for site in waiting}
        if needs == {"nothing"}:
            for site in sites:
                self._finish(site, None)
            return
        statistics = gather(
            decoder, stage, [value], flow, exact, gram="gram" in needs, instead=self.effective_so_far
        )[value]  # fmt: skip
        factors = self._factors(sites, replace(statistics, cross=None))
        for site in sites:
            self._finish(site, statistics, *factors)

    def _factors(
        self, sites: Sequence[Site], inputs: InputStatistics
    ) -> tuple[NDArray[np.float32] | None, Mapping[str, Any]]:
        """By which the columns of some matrices with one input are multiplied first, and notes."""
        fold = self.fold(sites[0])
        if fold is None:
            folds = any(self._choice_folds(site) for site in sites)
            return None, {"folded": "nowhere: others read the same input"} if folds else {}
        done = [stored.factors for site in sites if (stored := self.stored(site)) is not None]
        if done:  # of the same group, in an interrupted run
            return done[0], {}
        weights = [self.source.weight(site) for site in sites]
        grids = [self.choices[site].grid(site.columns) for site in sites]
        factors, notes = find_factors(weights, grids, inputs, sharing=fold.sharing)
        return factors.astype(np.float32), notes

    def _finish(
        self, site: Site, inputs: InputStatistics | None, factors: NDArray[np.float32] | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Quantise a site, unless that is done."""
        choice = self.choices[site]
        if self._is_unfinished(site):
            start = time.perf_counter()
            method = METHODS[choice.method]
            if inputs is None and method.needs != "nothing":
                method = METHODS["search"]  # a table whose rows are only looked up, or experts
                notes = {**(notes or {}), "method": "search"}
            weight = self.source.narrow_weight(site) if factors is None else self.source.weight(site)
            try:
                result = _quantized(weight, choice, method, inputs, factors)
            except QuantizationError as error:
                raise InputError(f"{site.name}: {error}", f"method {method.name}", "choose another method") from error
            packed = result.packed
            said = {**result.notes, **(notes or {}), **_errors(weight, packed, factors, inputs)}
            self.workspace.put(
                self._prefix + site.name, FinishedMatrix(packed, factors, said, time.perf_counter() - start)
            )
            self.source.release(site.name)
            self._progress(site)


def _quantized(
    weight: NDArray[Any], choice: FormatChoice, method: Method, inputs: InputStatistics | None,
    factors: NDArray[np.float32] | None,
) -> MethodResult:  # fmt: skip
    if factors is None:
        return method.quantize(weight, choice.grid(weight.shape[1]), inputs)
    scaled = None if inputs is None else inputs.scaled(1 / factors.astype(np.float64))
    return method.quantize(weight * factors, choice.grid(weight.shape[1]), scaled)


def _errors(
    weight: NDArray[Any], packed: QuantizedWeight, factors: NDArray[np.float32] | None,
    inputs: InputStatistics | None,
) -> dict[str, float]:  # fmt: skip
    """Relative squared errors of the weights, and (from some of the rows) of the outputs where inputs are known."""

    def both(rows: slice) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        exact, stored = np.asarray(weight[rows], np.float32), packed.dequantize_rows(rows)
        if factors is not None:
            stored /= factors
        return exact, stored

    def squares(rows: slice) -> tuple[float, float]:
        exact, lost = both(rows)
        np.subtract(exact, lost, out=lost)
        return float(np.vdot(lost, lost)), float(np.vdot(exact, exact))

    lost, exact = np.sum([*in_parallel(squares, row_slices(*weight.shape))], axis=0).tolist()
    errors = {"weight_error": lost / exact if exact else 0.0}
    if inputs is not None:
        errors["output_error"] = output_error(*both(slice(None, None, -(-len(weight) // _ERROR_ROWS))), inputs)
    return errors


def _with_rows_divided(
    packed: QuantizedWeight, first: int, count: int, factors: NDArray[np.float32], *, narrow: bool
) -> QuantizedWeight:
    """Some rows divided by factors [count]; scales are rounded to float16 again if `narrow`."""

    def divided(scales: NDArray[np.float32]) -> NDArray[np.float32]:
        changed = np.array(scales)
        changed[first : first + count] /= factors[:, None]
        return rounded_to_half(changed) if narrow else changed

    scales, offset_scales = divided(packed.scales), packed.offset_scales
    if offset_scales is not None:
        offset_scales = scales if offset_scales is packed.scales else divided(offset_scales)
    return replace(packed, scales=scales, offset_scales=offset_scales)


def _as_table(inputs: InputStatistics) -> InputStatistics:
    """For a head that is a table as well: what its rows are in themselves counts as much as their products."""
    mean = float(inputs.squares.mean())
    gram = None if inputs.gram is None else inputs.gram + np.eye(len(inputs.gram)) * mean
    return InputStatistics(inputs.count, inputs.squares + mean, gram)


def _by_input(stage: ProgramStage) -> dict[str, list[Site]]:
    """The sites that a stage multiplies with, by the value that they are multiplied with, in order."""
    sites_of: dict[str, list[Site]] = {}
    for use in stage.uses:
        sites = sites_of.setdefault(use.value, [])
        if use.site not in sites:
            sites.append(use.site)
    return sites_of


def _unshared(factors: NDArray[np.float32], fold: Fold, count: int) -> NDArray[np.float32]:
    """Factors of rows, from those of the columns that read them."""
    if fold.sharing is None:
        return factors
    rows = np.empty(count, np.float32)
    rows[fold.sharing] = factors
    return rows
