"""The divergence caused by storing a single matrix in each of its possible formats.

Divergence grows with the square of a small change (its second derivative is the Fisher information, its first
derivative is zero), so it is proportional to the relative squared error of the weights. Only large errors have to be
measured: the coarsest candidate, then each candidate whose error is at most a third of the last measured candidate's
error, until an error is below a hundredth. Between two measured candidates a power law is interpolated; below the
finest measured candidate, divergence is assumed to be proportional to the error. This method needs two to four runs of
the model per matrix instead of one run per candidate.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.quant.methods import METHODS

from ..common.reading import read_text_file
from ..errors import InputError
from .allocation import Candidate, Candidates
from .choices import FormatChoice
from .quality import Evaluation
from .sites import Site
from .source import FloatModel
from .streaming import Override
from .workspace import FinishedMatrices

_REMEMBERED = "sensitivity"
_STEP, _SMALL = 1 / 3, 0.01
# Number of evenly spaced rows from which errors are estimated, and the minimum divergence and error for logarithms.
_ROWS, _LEAST = 512, 1e-12

Losses = Mapping[str, float]


def measure_candidates(
    source: FloatModel, choices: Callable[[Site], Mapping[str, FormatChoice]], evaluation: Evaluation,
    workspace: FinishedMatrices, progress: Callable[[], None] = lambda: None,
) -> Candidates:  # fmt: skip
    """Return the candidates of each matrix with their losses; losses measured before an interruption are reused.

    Args:
        choices: returns the formats for a matrix, by label.
        evaluation: evaluation with a short text, because every matrix needs several passes.
        progress: called before each matrix.
    """
    known: dict[str, dict[str, dict[str, float]]] = workspace.remembered(_REMEMBERED) or {}

    def trials(site: Site) -> Iterator[tuple[str, Override]]:
        progress()
        if site.name in known:
            return
        errors = {label: _error(source.weight(site), choice) for label, choice in choices(site).items()}
        costs: dict[str, dict[str, float]] = {"errors": errors, "losses": {}}
        for label in anchors(errors):
            known[site.name] = costs
            yield label, _override_one(site, _rounded(source.weight(site), choices(site)[label]))
        workspace.remember(_REMEMBERED, known)

    for site, label, loss in evaluation.sensitivities(trials):
        known[site.name]["losses"][label] = loss
    return {site.name: _candidates(site, choices(site), known[site.name]) for site in source.sites}


def from_report(path: Path, source: FloatModel, choices: Callable[[Site], Mapping[str, FormatChoice]]) -> Candidates:
    """Return the candidates of each matrix with the losses in the report of an earlier output of the model.

    Raises:
        InputError: the file is not a report, or it lacks a candidate.
    """
    try:
        content: Any = json.loads(read_text_file(path))
        known = {row["name"]: dict(row["sensitivity"]) for row in content["matrices"]}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"{path} is not a report of a quantised model", f"{type(error).__name__}: {error}",
            "use the quantization_report.json of a quantised output",
        ) from error  # fmt: skip
    candidates = {}
    for site in source.sites:
        losses, site_choices = known.get(site.base_name, {}), choices(site)
        for label in site_choices:
            loss = losses.get(label)
            if isinstance(loss, bool) or not isinstance(loss, int | float) or not 0 <= loss < math.inf:
                raise InputError(
                    f"{path} has no sensitivity for {site.base_name} as {label}",
                    "the report is for another model or other formats, or the output was made without a target",
                    "use the report of an output that was made for a target with the same --target-runtime",
                )
        candidates[site.name] = [
            Candidate(label, choice.nbytes(site), float(losses[label])) for label, choice in site_choices.items()
        ]
    return candidates


def anchors(errors: Losses) -> list[str]:
    """Return the labels of the candidates to measure, coarsest first."""
    labels: list[str] = []
    for label, error in sorted(errors.items(), key=lambda item: -item[1]):
        if not labels or (errors[labels[-1]] > _SMALL and error <= _STEP * errors[labels[-1]]):
            labels.append(label)
    return labels


def interpolated_losses(errors: Losses, losses: Losses) -> dict[str, float]:
    """Return the divergence of every candidate, estimated from the measured divergences.

    Args:
        errors: relative squared errors of the weights, by label.
        losses: measured divergences by label, including the divergence of the coarsest candidate.
    """
    points = sorted((max(errors[label], _LEAST), max(loss, _LEAST)) for label, loss in losses.items())
    x, y = np.log([one for one, _ in points]), np.log([one for _, one in points])
    estimated = {}
    for label, error in errors.items():
        at = float(np.log(max(error, _LEAST)))
        value = y[0] + (at - x[0]) if at < x[0] else np.interp(at, x, y)
        estimated[label] = losses.get(label, float(np.exp(value)))
    return estimated


def _candidates(site: Site, choices: Mapping[str, FormatChoice], costs: Mapping[str, Losses]) -> list[Candidate]:
    losses = interpolated_losses(costs["errors"], costs["losses"])
    return [Candidate(label, choice.nbytes(site), losses[label]) for label, choice in choices.items()]


def _error(weight: NDArray[np.float32], choice: FormatChoice) -> float:
    rows = weight[:: max(1, len(weight) // _ROWS)]
    total = float(np.vdot(rows, rows))
    lost = rows - _rounded(rows, choice)
    return float(np.vdot(lost, lost)) / total if total else 0.0


def _rounded(weight: NDArray[np.float32], choice: FormatChoice) -> NDArray[np.float32]:
    """Quantise with searched scales, whatever the method: a search needs no data and ranks matrices the same way."""
    return METHODS["search"].quantize(weight, choice.grid(weight.shape[1]), None).packed.dequantize()


def _override_one(site: Site, matrix: NDArray[Any]) -> Override:
    return lambda other: matrix if other == site else None
