"""Mixtures of experts on the emulated GPU give what the reference gives: for every form of weights, in any company."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from genai.kernels.cuda.executor import CudaExecutor
from genai.kernels.records import BlockWeight, Branch, DenseWeight, Experts
from genai.kernels.reference.executor import ReferenceExecutor

from .host_driver import HostDriver
from .programs import MadeUpConstants, program, relative_error, step_of

EXPERTS, HIDDEN, WIDTH = 6, 96, 80


@dataclass(frozen=True)
class Layers:
    """The two layers of a mixture, and what its experts are."""

    constants: MadeUpConstants
    first: Branch
    second: Branch


def layers(
    rng: np.random.Generator, *, experts: int = EXPERTS, hidden: int = HIDDEN, width: int = WIDTH, gated: bool = True,
    bias: bool = False, dtype: str = "", **form: Any,
) -> Layers:  # fmt: skip
    """Random ones; of floats if `dtype`, otherwise of codes of a form that `block_weight` takes."""
    constants = MadeUpConstants()

    def branch(name: str, rows: int, columns: int) -> Branch:
        weight: BlockWeight | DenseWeight
        if dtype:
            constants.arrays[name] = (rng.standard_normal((experts, rows, columns)) / columns**0.5).astype(dtype)
            weight = DenseWeight(name, rows, columns, True, experts, gated)
        else:
            whole = constants.block_weight(rng, experts * rows, columns, **form)
            weight = replace(whole, rows=rows, experts=experts, interleaved=gated)
        if bias:
            constants.arrays[f"{name} bias"] = rng.standard_normal((experts, rows)).astype(np.float32)
        return Branch(weight, f"{name} bias" if bias else "")

    return Layers(constants, branch("first", width * (1 + gated), hidden), branch("second", hidden, width))


def record_of(of: Layers, per_token: int = 2, *, exact: bool, normalized: bool = True, **options: Any) -> Experts:
    options = {"activation": "swiglu", **options}
    return Experts("x", "scores", "out", per_token, normalized, of.first, of.second, exact=exact, **options)


def both(
    driver: HostDriver, of: Layers, record: Experts, x: NDArray[Any], scores: NDArray[Any], prefill: int = 0
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The mixture by both executors; the last `prefill` tokens have prefill numerics."""
    widths = {"x": x.shape[1], "scores": scores.shape[1], "out": x.shape[1]}
    whole = program([record], widths, of.constants, ["out"])
    lengths = [count for count in (len(x) - prefill, prefill) if count]
    step, given = step_of(lengths, lengths, prefill=int(prefill > 0)), {"x": x, "scores": scores}
    ours = CudaExecutor(driver, 1).compile(whole).run(step, given)["out"]
    driver.check()
    theirs = ReferenceExecutor().compile(whole).run(step, {name: array[None] for name, array in given.items()})["out"]
    return ours.reshape(x.shape), theirs.reshape(x.shape)


def normal(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    return rng.standard_normal(shape).astype(np.float32)


FORMS: list[dict[str, Any]] = [
    {"bits": 4}, {"bits": 8, "points": True, "scales": "float32", "bias": True},
    {"bits": 4, "block_size": 64, "points": True, "bias": True}, {"bits": 8, "per_row": True},
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("tokens", "order"), [(1, 0), (2, 1), (4, 2), (21, 0)])
def test_codes(driver: HostDriver, form: dict[str, Any], tokens: int, order: int) -> None:
    driver.order = order
    rng = np.random.default_rng(tokens)
    of = layers(rng, **form)
    x, scores = normal(rng, tokens, HIDDEN), normal(rng, tokens, EXPERTS)
    for exact in (True, False):
        ours, theirs = both(driver, of, record_of(of, exact=exact), x, scores)
        assert relative_error(ours, theirs) < (2e-6 if exact else 2e-2)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("tokens", [1, 10])
def test_floats(driver: HostDriver, dtype: str, tokens: int) -> None:
    """Sizes that fill no step, chunk or tile."""
    rng = np.random.default_rng(0)
    of = layers(rng, hidden=51, width=37, bias=True, dtype=dtype)
    x, scores = normal(rng, tokens, 51), normal(rng, tokens, EXPERTS)
    ours, theirs = both(driver, of, record_of(of, 3, exact=True, normalized=False), x, scores)
    assert relative_error(ours, theirs) < 2e-6
