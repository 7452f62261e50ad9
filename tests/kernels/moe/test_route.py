"""Routing: the rule of the reference with difficult scores, and the sort of tokens by expert."""

from __future__ import annotations

import numpy as np
import pytest

from genai.kernels.cpu.moe.routing import OrderArguments, RouteArguments, order_pairs, route
from genai.kernels.cpu.program.calls import Call, Items, Rows, program_of
from genai.kernels.cpu.program.step_table import ContextTable, StepField
from genai.kernels.cpu.program.thread_pool import Threads
from genai.kernels.reference.weights import routing_weights


def routed(scores: np.ndarray, per_token: int, normalized: bool) -> tuple[np.ndarray, np.ndarray]:
    tokens = len(scores)
    chosen = np.full((tokens, per_token), -1, np.int32)
    weights = np.full((tokens, per_token), -1, np.float32)
    told = RouteArguments(
        scores=Rows.of(scores), per_token=per_token, normalized=normalized, chosen=chosen, weights=weights
    )
    call = Call(route, told, Items(StepField.TOKENS))
    context = ContextTable()
    context.count(StepField.TOKENS, tokens)
    Threads(2).run(program_of([[call]]), context, nanoseconds=1e6)
    return chosen, weights


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("per_token", [1, 2, 7, 23, 24])
def test_route(rng: np.random.Generator, normalized: bool, per_token: int) -> None:
    """Includes ties, infinities and NaNs. A NaN comes last, and makes the weights NaN if the softmax includes it."""
    scores = rng.integers(-3, 4, (200, 24)).astype(np.float32)
    scores[50:] += rng.standard_normal((150, 24)).astype(np.float32) * 10
    hard = rng.random((200, 24)) < 0.05
    scores[100:][hard[100:]] = rng.choice([np.nan, np.inf, -np.inf, -1e38], int(hard[100:].sum())).astype(np.float32)
    scores[150] = -np.inf
    scores[151] = np.nan
    chosen, weights = routed(scores, per_token, normalized)
    with np.errstate(all="ignore"):
        expected, expected_weights = routing_weights(scores, per_token, normalized=normalized)
    order = np.argsort(expected, axis=1)
    np.testing.assert_array_equal(chosen, np.take_along_axis(expected, order, axis=1))
    np.testing.assert_allclose(weights, np.take_along_axis(expected_weights, order, axis=1), rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("tokens", [0, 1, 50])
def test_order(rng: np.random.Generator, tokens: int) -> None:
    experts, k = 9, 3
    chosen = np.stack([rng.permutation(experts - 1)[:k] for _ in range(tokens)] or [np.zeros(0, int)]).astype(np.int32)
    chosen = chosen.reshape(tokens, k)
    slots = np.full((experts, 3), -1, np.int64)
    sources, positions = np.full(tokens * k, -1, np.int32), np.full((tokens, k), -1, np.int32)
    told = OrderArguments(
        rows_field=StepField.TOKENS,
        chosen=chosen,
        per_token=k,
        experts=experts,
        slots=slots,
        sources=sources,
        positions=positions,
    )
    call = Call(order_pairs, told, scratch=8 * experts)
    context = ContextTable()
    context.count(StepField.TOKENS, tokens)
    Threads(2).run(program_of([[call]]), context, nanoseconds=1e6)
    used = np.unique(chosen)
    assert context.values[StepField.EXPERTS] == len(used)
    np.testing.assert_array_equal(slots[: len(used), 1], used)
    np.testing.assert_array_equal(slots[: len(used), 0], [(chosen == expert).sum() for expert in used])
    np.testing.assert_array_equal(slots[: len(used), 2], np.cumsum([0, *slots[: len(used), 0]])[:-1])
    assert (slots[len(used) :] == -1).all()
    # The sort is stable: tokens of an expert stay in order.
    expected = np.argsort(chosen.reshape(-1), kind="stable")
    np.testing.assert_array_equal(sources, expected // k)
    np.testing.assert_array_equal(positions.reshape(-1)[expected], np.arange(tokens * k))
