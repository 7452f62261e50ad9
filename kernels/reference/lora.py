"""Low-rank adapters, computed directly by their definition (Hu et al., arXiv:2106.09685)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..device import Factors, StepContext
from .functions import Float64


@dataclass(frozen=True, eq=False)
class ReferenceAdapter:
    """See `genai.kernels.device.DeviceAdapter`. Holds the factors of each target unchanged."""

    factors: Sequence[Sequence[Factors]]

    @property
    def nbytes(self) -> int:
        """The number of bytes of the factors."""
        return sum(one.a.nbytes + one.b.nbytes for target in self.factors for one in target)


def lora_shrink(x: Float64, target: int, step: StepContext) -> Iterator[tuple[slice, slice, Float64]]:
    """Yield the terms that each sequence's adapters add to a linear layer of x [T, columns], with their locations.

    Each item consists of the rows, the columns and the numbers to add.
    """
    if not len(step.adapter_rows.ids):
        return
    owners = zip(pairwise(step.cu_seqlens_q.tolist()), pairwise(step.adapter_rows.offsets.tolist()), strict=True)
    for rows, own in owners:
        for index in range(*own):
            for one in step.adapter_rows.adapters[step.adapter_rows.ids[index]].factors[target]:
                hidden = x[slice(*rows)] @ one.a.astype(np.float64).T * float(step.adapter_rows.weights[index])
                yield slice(*rows), slice(one.first, one.first + len(one.b)), hidden @ one.b.astype(np.float64).T
