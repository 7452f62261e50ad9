"""Choices that meet a target for size or divergence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import OptionError
from .allocation import Candidate, Candidates, cheapest, smallest, total_bytes, total_loss
from .choices import UNIFORM, FormatChoice
from .options import QuantizeOptions
from .sites import Site
from .source import FloatGraph

# Candidates, smallest first: uniform formats (bits, block size) for which onnxruntime has kernels, and the most
# accurate format of every size for any runtime.
_FOREIGN = ((2, 32), (2, 16), (4, 128), (4, 64), (4, 32), (4, 16), (8, 128), (8, 32))
_ANY = ("nl2", "q2_k", "nl3", "q3_k", "nl4", "q4_k", "q5_k", "q6_k")


def candidate_choices(options: QuantizeOptions, site: Site) -> dict[str, FormatChoice]:
    """Return the candidate formats for a matrix by label, smallest first."""
    start = options.choice
    uniform = [start.changed({"bits": bits, "block_size": size}) for bits, size in _FOREIGN]
    if site.experts:  # both matrices of a mixture must have the same block size
        choices = [choice for choice in uniform if choice.block_size == 32]
    elif options.target_runtime == "any":
        start = replace(start, symmetric=True)
        choices = [*(start.changed({"format": name}) for name in _ANY), start.changed({"bits": 8})]
    else:
        choices = [choice for choice in uniform if choice.has_foreign_kernel(site)]
    return {_candidate_label(choice): choice for choice in choices}


def _candidate_label(choice: FormatChoice) -> str:
    return f"{choice.bits} bits/{choice.block_size}" if choice.format == UNIFORM else choice.format


def choose(options: QuantizeOptions, candidates: Candidates, *, beside: int, weights: int) -> dict[str, Candidate]:
    """Return the candidate of each matrix with which the model meets the target, as the matrices' losses predict.

    Args:
        options: options with the target.
        candidates: the candidates of each matrix.
        beside: size in bytes of all other tensors.
        weights: number of weights of the model.

    Raises:
        OptionError: no choices meet the target; the message contains the closest target that can be met.
    """
    least = sum(min(candidate.nbytes for candidate in alternatives) for alternatives in candidates.values()) + beside
    if options.target_kld is not None:
        allocation = smallest(candidates, options.target_kld)
        best = total_loss(
            {name: min(alternatives, key=lambda candidate: candidate.loss) for name, alternatives in candidates.items()}
        )
        if allocation is None:
            raise OptionError(
                f"target_kld is {options.target_kld:g}",
                f"with the most bits, the divergence is about {best:.3g} nats per token",
                f"use --target-kld {best * 1.05:.3g} or more",
            )
    else:
        most = options.target_size if options.target_size is not None else int((options.target_bits or 0) * weights / 8)
        allocation = cheapest(candidates, most - beside)
        if allocation is None:
            nearest = (
                f"--target-size {-(-least // 10**4) / 100:.2f}MB"
                if options.target_size is not None
                else f"--target-bits {-(-least * 8 * 1000 // weights) / 1000:.3f}"
            )
            raise OptionError(
                f"target_size is {most} bytes"
                if options.target_size is not None
                else f"target_bits is {options.target_bits}",
                f"with the fewest bits, the model has {least} bytes, which is {least * 8 / weights:.3f} bits per "
                "weight",
                f"use {nearest} or more",
            )
    return allocation


def beside_bytes(source: FloatGraph) -> int:
    """Return the size in bytes of the tensors that are not quantised and not shared: norms, biases, tables."""
    names = source.shared.union(site.name for site in (*source.sites, *source.shared_sites))
    return sum(tensor.nbytes for name, tensor in source.model.graph.initializers.items() if name not in names)


def curve(candidates: Candidates, *, beside: int, weights: int, points: int = 24) -> list[tuple[float, float]]:
    """Return the bits per weight and the predicted divergence of the best choices, from smallest to largest.

    Args:
        candidates: the candidates of each matrix.
        beside: size in bytes of all other tensors.
        weights: number of weights of the model.
        points: maximum number of choices.
    """
    low = sum(min(candidate.nbytes for candidate in alternatives) for alternatives in candidates.values())
    high = sum(max(candidate.nbytes for candidate in alternatives) for alternatives in candidates.values())
    allocations = [cheapest(candidates, int(most)) for most in np.linspace(low, high, points)]
    return [
        ((total_bytes(allocation) + beside) * 8 / weights, total_loss(allocation))
        for allocation in allocations
        if allocation is not None
    ]


def sensitivity_table(candidates: Candidates) -> dict[str, dict[str, Any]]:
    """Return the divergence of each candidate of each matrix, for the report."""
    return {name: {one.label: one.loss for one in some} for name, some in candidates.items()}
