"""Quantisation of a model's matrices one by one, with statistics of their inputs if a method needs statistics."""

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
from .source import FloatGraph
from .stage_values import StageValues
from .statistics import gather
from .streaming import ProgramStage, StreamedDecoder, batches_of
from .workspace import FinishedMatrices, FinishedMatrix

Progress = Callable[[Site], None]
# Tokens per column of a tied matrix.
_TIED_TOKENS = 8
# Number of evenly spaced rows from which output errors are estimated.
_ERROR_ROWS = 1024


class MatrixQuantizer:
    """A quantiser for all matrices of a decoder or an MTP head.

    Args:
        source: the float graph.
        choices: the choice for each site.
        workspace: store for finished matrices.
        progress: called with each matrix that is finished.
        prefix: prefix of the names in the workspace, if several models are made from one source.
    """

    def __init__(
        self, source: FloatGraph, choices: Mapping[Site, FormatChoice], workspace: FinishedMatrices,
        progress: Progress = lambda site: None, *, prefix: str = "",
    ) -> None:  # fmt: skip
        self._prefix = prefix
        self.source, self.choices, self.workspace, self._progress = source, choices, workspace, progress
        self._of_products = {node.output(0): site for site in source.sites for node in site.products}
        self._folds: dict[str, Fold | None] = {}

    @property
    def methods(self) -> list[Method]:
        """The methods in use."""
        return [METHODS[choice.method] for choice in self.choices.values() if choice.bits]

    @property
    def needs_data(self) -> bool:
        """True if any method needs statistics."""
        return any(method.needs != "nothing" for method in self.methods)

    # Results

    def stored(self, site: Site) -> FinishedMatrix | None:
        """Return a finished site from the workspace, or None."""
        return self.workspace.get(self._key(site))

    def _key(self, site: Site) -> str:
        """Return a site's name in the workspace. Without data, equal choices for a site give equal matrices."""
        if self._prefix and not self.needs_data:
            return f"{self.choices[site].label()}/{site.name}"
        return self._prefix + site.name

    def fold(self, site: Site) -> Fold | None:
        """Return the tensors that absorb the scaling of a site's columns; None without scaling or such tensors."""
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
        """Return the sites that read the same input."""
        if not site.products:
            return [site]
        value = site.products[0].input(0)
        return [other for other in self.source.sites if any(node.input(0) == value for node in other.products)]

    def packed(self, site: Site) -> QuantizedWeight | None:
        """Return a finished site in its final form, with rows divided by the factors of a later matrix."""
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
        """Return the norm weights that differ from the float model's norm weights, by name."""
        changed = {}
        for site in self.source.sites:
            fold, stored = self.fold(site), self.stored(site)
            if fold is not None and stored is not None and stored.factors is not None:
                for name in fold.vectors:
                    tensor = self.source.model.graph.initializers[name]
                    changed[name] = (tensor.array().astype(np.float32) / stored.factors).astype(np.float32)
        return changed

    def effective(self, site: Site) -> NDArray[np.float32] | None:
        """Return the matrix to use for a finished site in the float graph, which keeps the original norms."""
        packed = self.packed(site)
        if packed is None:
            return None
        matrix = packed.dequantize()
        stored, fold = self.stored(site), self.fold(site)
        if stored is not None and stored.factors is not None and (fold is None or fold.rows is None):
            matrix /= stored.factors
        return matrix

    def effective_so_far(self, site: Site) -> NDArray[np.float32] | None:
        """Return the result of `effective` before later matrices are finished, without those matrices' factors."""
        stored = self.stored(site)
        if stored is None:
            return None
        matrix = stored.packed.dequantize()
        if stored.factors is not None:
            matrix /= stored.factors
        return matrix

    # Quantisation

    def quantize_without_data(self) -> None:
        """Quantise all sites in order."""
        for site in self.source.sites:
            self._finish(site, None)

    def quantize_with_data(self, decoder: StreamedDecoder, text: CalibrationText) -> None:
        """Quantise all sites, stage by stage; the quantised earlier stages compute the inputs of each stage."""
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
        """Quantise matrices that are both looked up and multiplied, with inputs from the float model.

        Only a part of the texts is used, because passing it through all layers benefits only this matrix.
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
        """Return notes, and the factors to multiply by the columns of matrices that read the same input."""
        fold = self.fold(sites[0])
        if fold is None:
            folds = any(self._choice_folds(site) for site in sites)
            return None, {"folded": "nowhere: other nodes read the same input"} if folds else {}
        done = [stored.factors for site in sites if (stored := self.stored(site)) is not None]
        if done:  # from an interrupted run
            return done[0], {}
        weights = [self.source.weight(site) for site in sites]
        grids = [self.choices[site].grid(site.columns) for site in sites]
        factors, notes = find_factors(weights, grids, inputs, sharing=fold.sharing)
        return factors.astype(np.float32), notes

    def _finish(
        self, site: Site, inputs: InputStatistics | None, factors: NDArray[np.float32] | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Quantise a site unless it is finished."""
        choice = self.choices[site]
        if self._is_unfinished(site):
            start = time.perf_counter()
            method = METHODS[choice.method]
            if inputs is None and method.needs != "nothing":
                method = METHODS["search"]  # experts, or a table that is used only for look-ups
                notes = {**(notes or {}), "method": "search"}
            weight = self.source.narrow_weight(site) if factors is None else self.source.weight(site)
            try:
                result = _quantized(weight, choice, method, inputs, factors)
            except QuantizationError as error:
                raise InputError(
                    f"{site.name}: {error}",
                    f"the method {method.name} cannot quantise this matrix",
                    "choose another --method",
                ) from error
            packed = result.packed
            said = {**result.notes, **(notes or {}), **_errors(weight, packed, factors, inputs)}
            self.workspace.put(self._key(site), FinishedMatrix(packed, factors, said, time.perf_counter() - start))
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
    """Return relative squared errors of the weights and, if inputs are known, of some rows of the outputs."""

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
    """Divide rows by factors [count]; if `narrow` is True, round the scales to float16 again."""

    def divided(scales: NDArray[np.float32]) -> NDArray[np.float32]:
        changed = np.array(scales)
        changed[first : first + count] /= factors[:, None]
        return rounded_to_half(changed) if narrow else changed

    scales, offset_scales = divided(packed.scales), packed.offset_scales
    if offset_scales is not None:
        offset_scales = scales if offset_scales is packed.scales else divided(offset_scales)
    return replace(packed, scales=scales, offset_scales=offset_scales)


def _as_table(inputs: InputStatistics) -> InputStatistics:
    """Return statistics for a tied head, in which errors of looked-up rows count as much as errors of matmuls."""
    mean = float(inputs.squares.mean())
    gram = None if inputs.gram is None else inputs.gram + np.eye(len(inputs.gram)) * mean
    return InputStatistics(inputs.count, inputs.squares + mean, gram)


def _by_input(stage: ProgramStage) -> dict[str, list[Site]]:
    """Return the sites of a stage's matmuls, in order, by the name of the value that they are multiplied by."""
    sites_of: dict[str, list[Site]] = {}
    for use in stage.uses:
        sites = sites_of.setdefault(use.value, [])
        if use.site not in sites:
            sites.append(use.site)
    return sites_of


def _unshared(factors: NDArray[np.float32], fold: Fold, count: int) -> NDArray[np.float32]:
    """Return the factors of rows, given the factors of the columns that read the rows."""
    if fold.sharing is None:
        return factors
    rows = np.empty(count, np.float32)
    rows[fold.sharing] = factors
    return rows
