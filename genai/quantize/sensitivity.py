"""What each way to store a matrix costs the model: its divergence, where that matrix alone is stored so.

Divergence grows with the square of a small change (its second derivative is the Fisher information, and the first is
zero), so with the relative squared error of the weights. Only large errors have to be measured: the coarsest candidate,
then each whose error is at most a third of the last measured one's, until one is below a hundredth. What lies between
two of them is read off the power law through both, and what is finer than all is in proportion to its error. That takes
two to four runs of the model per matrix instead of one per candidate.
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
# Rows that errors are estimated from, drawn evenly; and the least divergence and error, to take logarithms of.
_ROWS, _LEAST = 512, 1e-12

Losses = Mapping[str, float]


def measure_candidates(
    source: FloatModel, choices: Callable[[Site], Mapping[str, FormatChoice]], evaluation: Evaluation,
    workspace: FinishedMatrices, progress: Callable[[], None] = lambda: None,
) -> Candidates:  # fmt: skip
    """Per matrix its candidates with what each costs; those measured before an interrupt are not measured again.

    Args:
        choices: the ways to store a matrix, by label.
        evaluation: with a text of few tokens, as every matrix takes several passes.
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
    """Per matrix its candidates, with what the report of an earlier output of the model says of them.

    Raises:
        InputError: it is no report, or says nothing of a candidate.
    """
    try:
        content: Any = json.loads(read_text_file(path))
        known = {row["name"]: dict(row["sensitivity"]) for row in content["matrices"]}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"{path}: is no report of a quantised model", f"{type(error).__name__}: {error}",
            "give the quantization_report.json of an output",
        ) from error  # fmt: skip
    candidates = {}
    for site in source.sites:
        losses, site_choices = known.get(site.base_name, {}), choices(site)
        for label in site_choices:
            loss = losses.get(label)
            if isinstance(loss, bool) or not isinstance(loss, int | float) or not 0 <= loss < math.inf:
                raise InputError(
                    f"{path}: says nothing of {site.base_name} as {label}",
                    "it is the report of another model, of other formats, or of an output that had no target",
                    "give the report of an output that was made for a target, with the same --target-runtime",
                )
        candidates[site.name] = [
            Candidate(label, choice.nbytes(site), float(losses[label])) for label, choice in site_choices.items()
        ]
    return candidates


def anchors(errors: Losses) -> list[str]:
    """Labels of the candidates that are measured, the coarsest first."""
    labels: list[str] = []
    for label, error in sorted(errors.items(), key=lambda item: -item[1]):
        if not labels or (errors[labels[-1]] > _SMALL and error <= _STEP * errors[labels[-1]]):
            labels.append(label)
    return labels


def interpolated_losses(errors: Losses, losses: Losses) -> dict[str, float]:
    """The divergence of every candidate, from those of some of them.

    Args:
        errors: relative squared error of the weights, by label.
        losses: measured divergences, the coarsest candidate's among them.
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
    """With searched scales, whatever the method will be: it takes no data, and orders matrices alike."""
    return METHODS["search"].quantize(weight, choice.grid(weight.shape[1]), None).packed.dequantize()


def _override_one(site: Site, matrix: NDArray[Any]) -> Override:
    return lambda other: matrix if other == site else None
