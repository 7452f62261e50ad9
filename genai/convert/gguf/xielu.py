"""llama.cpp's metadata of Apertus, whose learned activations are not tensors in GGUF files."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...weight_files.gguf import GgufModel
from ..architectures.common import Rule
from . import recurrent
from .metadata import Metadata

# The constants of xIELU; eps only matters for numbers between eps and 0.
_BETA, _MOST_EPSILON = 0.5, 1e-5
RULES = (Rule(r"mlp\.act_fn\.(alpha_[pn])", r"xielu.\1"),)


def activations(data: Metadata, model: GgufModel) -> dict[str, NDArray[Any]]:
    """Return the learned numbers of all layers as tensors. Raise ConfigError for other constants."""
    count = recurrent.without_drafts(data)
    own = Metadata(data.values, "xielu", model.path)  # these keys have no architecture's name
    for beta in _of_layers(own, "beta", count):
        if beta != _BETA:
            raise own.wrong("beta", beta, f"{_BETA}")
    for epsilon in _of_layers(own, "eps", count):
        if abs(epsilon) > _MOST_EPSILON:
            raise own.wrong("eps", epsilon, f"a number from {-_MOST_EPSILON:g} to {_MOST_EPSILON:g}")
    return {
        f"blk.{layer}.xielu.{name}": np.array([value], np.float32)
        for name in ("alpha_p", "alpha_n")
        for layer, value in enumerate(_of_layers(own, name, count))
    }


def _of_layers(data: Metadata, name: str, count: int) -> list[float]:
    """Return a number for each layer: of a list, or the same for all layers."""
    value = data.get(name)
    if not isinstance(value, np.ndarray):
        return [data.number(name)] * count
    if value.dtype.kind != "f" or len(value) != count or not np.isfinite(value).all():
        raise data.wrong(name, value.tolist(), f"a finite number for each of the {count} layers")
    return [float(number) for number in value]
