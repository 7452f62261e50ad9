"""Mixtures of experts against float64, for every kind of weight. Results do not depend on other tokens."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from genai.kernels.cpu.linear.decode import SwigluArguments
from genai.kernels.cpu.moe.mixture import ExpertLayer, Mixture
from genai.kernels.cpu.moe.products import pack_dense_experts, pack_experts
from genai.kernels.ir import DenseWeight, MoE, Projection
from genai.kernels.reference.weights import mixture as reference
from tests.instructions import other_instructions

EXPERTS, HIDDEN, WIDTH = 6, 96, 80
# Variants of the cases that every run has.
DRAWN = (pytest.mark.slow, pytest.mark.drawn(4))
Run = Callable[..., np.ndarray]
MakeLayer = Callable[..., Any]


def rounded(x: np.ndarray, block_size: int) -> np.ndarray:
    """The values of a row as 8-bit activations, in float64."""
    result = np.zeros(x.shape)
    for first in range(0, len(x), block_size):
        block = x[first : first + block_size]
        largest = np.abs(block).max()
        if largest > 0:
            result[first : first + block_size] = np.rint(block * (127 / largest)) * (largest / 127)
    return result


def definition(
    x: np.ndarray, scores: np.ndarray, first: Any, second: Any, mixture: Mixture, block_size: int = 0
) -> np.ndarray:
    """The mixture by the reference. `block_size` is that of quantised activations; 0 = not quantised."""
    layers = {"first": first, "second": second}
    projections = [
        Projection(DenseWeight(name, layer.values.shape[1], layer.values.shape[2], True, len(layer.values)))
        for name, layer in layers.items()
    ]
    swiglu = mixture.swiglu
    parameters = (swiglu.alpha, swiglu.beta, swiglu.limit) if mixture.activation == "swiglu" else ()
    op = MoE(
        "x", "scores", "out", mixture.per_token, mixture.normalized, *projections, mixture.activation, mixture.exact,
        parameters,
    )  # fmt: skip

    def product(rows: np.ndarray, branch: Projection, expert: int) -> np.ndarray:
        layer = layers[branch.weight.data]
        seen = np.stack([rounded(row, block_size) for row in rows]) if block_size else rows
        return seen @ layer.values[expert].T + (0 if layer.bias is None else layer.bias[expert])

    return reference(op, x, scores, product)


def close(actual: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= tolerance * np.abs(expected).max()


def mixture_of(first: Any, second: Any, per_token: int, **options: Any) -> Mixture:
    """The first layer is gated if the activation is SWIGLU."""
    options = {"normalized": True, "activation": "swiglu", **options}
    wide = pack_experts(**first.constants, gated=options["activation"] == "swiglu")
    return Mixture(
        ExpertLayer(wide, first.bias), ExpertLayer(pack_experts(**second.constants), second.bias), per_token, **options
    )


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bits": 8, "points": "packed", "scale_type": np.float32, "bias": True},
        {"block_size": 16, "points": "packed", "bias": True},
        pytest.param({"block_size": 128, "points": "fractions"}, marks=DRAWN),
        pytest.param({"block_size": 64, "scale_type": np.float32, "points": "fractions"}, marks=DRAWN),
        pytest.param({"bits": 8, "block_size": 256, "bias": True}, marks=DRAWN),
    ],
)
def test_against_float64(
    layer: MakeLayer, run: Run, normal: Callable[..., np.ndarray], options: dict[str, Any], exact: bool
) -> None:
    first, second = layer(EXPERTS, 2 * WIDTH, HIDDEN, **options), layer(EXPERTS, HIDDEN, WIDTH, **options)
    mixture = mixture_of(first, second, 2, exact=exact)
    x, scores = normal(21, HIDDEN), normal(21, EXPERTS)
    block_size = 0 if exact else options.get("block_size", 32)
    # A hidden number near the middle of two integers may round to either.
    close(run(mixture, x, scores), definition(x, scores, first, second, mixture, block_size), 1e-5 if exact else 1e-2)


@pytest.mark.parametrize(
    "experts, per_token, normalized", [(1, 1, True), (EXPERTS, 1, False), (EXPERTS, EXPERTS, True), (40, 20, False)]
)
def test_any_number_of_experts(
    layer: MakeLayer, run: Run, normal: Callable[..., np.ndarray], experts: int, per_token: int, normalized: bool
) -> None:
    first, second = layer(experts, 64, 32), layer(experts, 40, 32)
    mixture = mixture_of(first, second, per_token, normalized=normalized, exact=True)
    x, scores = normal(9, 32), normal(9, experts)
    close(run(mixture, x, scores), definition(x, scores, first, second, mixture), 1e-5)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("activation", ["relu", "silu", "copy"])
def test_activations_without_gates(
    layer: MakeLayer, run: Run, normal: Callable[..., np.ndarray], activation: str, exact: bool
) -> None:
    first, second = layer(EXPERTS, WIDTH, HIDDEN, bias=True), layer(EXPERTS, HIDDEN, WIDTH)
    mixture = mixture_of(first, second, 2, activation=activation, exact=exact)
    x, scores = normal(9, HIDDEN), normal(9, EXPERTS)
    expected = definition(x, scores, first, second, mixture, 0 if exact else 32)
    close(run(mixture, x, scores), expected, 1e-5 if exact else 1e-2)


@pytest.mark.parametrize("parameters", [(1.702, 1.0, 7.0), (1.0, 0.0, 0.5), (1.5, 0.25, np.inf)])
def test_parameters_of_swiglu(
    layer: MakeLayer, run: Run, normal: Callable[..., np.ndarray], parameters: tuple[float, float, float]
) -> None:
    swiglu = SwigluArguments(**dict(zip(("alpha", "beta", "limit"), parameters, strict=True)))
    first, second = layer(EXPERTS, 2 * WIDTH, HIDDEN, bias=True), layer(EXPERTS, HIDDEN, WIDTH)
    mixture = mixture_of(first, second, 2, swiglu=swiglu, exact=True)
    x, scores = 4 * normal(9, HIDDEN), normal(9, EXPERTS)
    close(run(mixture, x, scores), definition(x, scores, first, second, mixture), 1e-5)


def test_parameters_of_swiglu_with_rounded_activations(
    layer: MakeLayer, run: Run, normal: Callable[..., np.ndarray]
) -> None:
    """One expert with enough rows for tiles, where the machine has them."""
    swiglu = SwigluArguments(alpha=1.702, beta=1.0, limit=7.0)
    first, second = layer(2, 2 * WIDTH, HIDDEN, bias=True), layer(2, HIDDEN, WIDTH, bias=True)
    mixture = mixture_of(first, second, 2, swiglu=swiglu)
    x, scores = 4 * normal(19, HIDDEN), normal(19, 2)
    close(run(mixture, x, scores), definition(x, scores, first, second, mixture, 32), 1e-2)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_dense(run: Run, normal: Callable[..., np.ndarray], dtype: Any) -> None:
    """Sizes that are no multiple of a step, an item or a tile."""
    stored = [(normal(EXPERTS, 2 * 37, 51) / 4).astype(dtype), (normal(EXPERTS, 51, 37) / 4).astype(dtype)]
    first, second = (
        SimpleNamespace(values=array.astype(np.float64), bias=normal(*array.shape[:2])) for array in stored
    )
    mixture = Mixture(
        ExpertLayer(pack_dense_experts(stored[0], gated=True), first.bias),
        ExpertLayer(pack_dense_experts(stored[1]), second.bias),
        3,
        normalized=False,
        activation="swiglu",
        exact=True,
    )
    x, scores = normal(10, 51), normal(10, EXPERTS)
    close(run(mixture, x, scores), definition(x, scores, first, second, mixture), 1e-5)


@pytest.mark.parametrize("exact", [False, True])
def test_a_token_does_not_depend_on_its_company(
    layer: MakeLayer, run: Run, normal: Callable[..., np.ndarray], exact: bool
) -> None:
    """1 to 45 tokens in memory for 45, difficult ones included. Some experts get all tokens, some none."""
    first, second = layer(EXPERTS, 2 * WIDTH, HIDDEN, bias=True), layer(EXPERTS, HIDDEN, WIDTH, bias=True)
    mixture = mixture_of(first, second, 2, exact=exact)
    x, scores = normal(45, HIDDEN), normal(45, EXPERTS)
    scores[:, 3] += 5
    scores[:, 4] = -9
    x[2], x[3], x[4] = 0, 1e-42, x[4] * np.float32(1e15)
    x[5, 7], x[6, 9] = np.nan, np.inf
    scores[8, 2], scores[9, 0], scores[10] = np.nan, np.inf, -np.inf
    alone = np.concatenate([run(mixture, x[t : t + 1], scores[t : t + 1], 45) for t in range(45)])
    assert np.isfinite(np.delete(alone, [5, 6, 9, 10], axis=0)).all()
    assert not np.isfinite(alone[[5, 6, 9, 10]]).any()
    for tokens in (2, 3, 5, 16, 21, 45):
        together = run(mixture, x[:tokens], scores[:tokens], 45)
        np.testing.assert_array_equal(together.view(np.uint32), alone[:tokens].view(np.uint32))
    order = np.argsort(scores[:, 0], kind="stable")
    np.testing.assert_array_equal(run(mixture, x[order], scores[order]).view(np.uint32), alone[order].view(np.uint32))


def test_all_tokens_to_one_expert(layer: MakeLayer, run: Run, normal: Callable[..., np.ndarray]) -> None:
    first, second = layer(EXPERTS, 2 * WIDTH, HIDDEN), layer(EXPERTS, HIDDEN, WIDTH)
    mixture = mixture_of(first, second, 1)
    x, scores = normal(37, HIDDEN), np.zeros((37, EXPERTS), np.float32)
    scores[:, 5] = 1
    out = run(mixture, x, scores)
    close(out, definition(x, scores, first, second, mixture, 32), 1e-2)


def test_experts_that_no_token_is_sent_to_take_no_part(run: Run, normal: Callable[..., np.ndarray]) -> None:
    fc1, fc2 = normal(EXPERTS, 64, 32), normal(EXPERTS, 32, 32)
    scores = np.full((7, EXPERTS), -1e30, np.float32)
    scores[:, 1:3] = 0
    fc1[[0, 3, 4, 5]] = np.nan
    first, second = ExpertLayer(pack_dense_experts(fc1, gated=True)), ExpertLayer(pack_dense_experts(fc2))
    mixture = Mixture(first, second, 2, normalized=True, activation="swiglu", exact=True)
    assert np.isfinite(run(mixture, normal(7, 32), scores)).all()


def test_refusals(layer: MakeLayer, run: Run, normal: Callable[..., np.ndarray]) -> None:
    first, second = layer(EXPERTS, 64, 32), layer(EXPERTS, 32, 32)
    gated, plain = pack_experts(**first.constants, gated=True), pack_experts(**second.constants)
    with pytest.raises(ValueError, match="per_token is 7"):
        Mixture(ExpertLayer(gated), ExpertLayer(plain), 7, normalized=True)
    with pytest.raises(ValueError, match="the second layer has"):
        Mixture(ExpertLayer(gated), ExpertLayer(gated), 2, normalized=True)
    with pytest.raises(ValueError, match="without gates cannot be 'swiglu'"):
        Mixture(ExpertLayer(plain), ExpertLayer(plain), 2, normalized=True, activation="swiglu")
    with pytest.raises(ValueError, match="with gates cannot be 'clip'"):
        Mixture(ExpertLayer(gated), ExpertLayer(plain), 2, normalized=True, activation="clip")
    with pytest.raises(ValueError, match=r"bias is float32 \[6, 32\], expected float32 \[6, 64\]"):
        ExpertLayer(gated, normal(EXPERTS, 32))
    dense = pack_dense_experts(normal(EXPERTS, 32, 32))
    with pytest.raises(ValueError, match="exact=True"):
        Mixture(ExpertLayer(gated), ExpertLayer(dense), 2, normalized=True)
    mixture = Mixture(ExpertLayer(gated), ExpertLayer(plain), 2, normalized=True)
    with pytest.raises(ValueError, match=r"scores is \[TOKENS, 5\], expected \[TOKENS, 6\]"):
        run(mixture, normal(3, 32), normal(3, 5))
    with pytest.raises(ValueError, match=r"x is \[TOKENS, 33\]"):
        run(mixture, normal(3, 33), normal(3, 6))


@other_instructions
def test_other_instruction_sets(name: str, with_instructions: Callable[..., None]) -> None:
    """Run this file again with the kernels of another instruction set (if the machine has it)."""
    with_instructions(name, __file__)
