"""Operators without a record run on the host between kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from genai.kernels.cuda.executor import CudaExecutor
from genai.kernels.ir import HostNode, Ids, OpProgram, Unary

from .host_driver import HostDriver
from .programs import MadeUpConstants, rows_of, step_of

pytestmark = pytest.mark.gpu


def node(function: Any, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> HostNode:
    values = tuple(None if name else np.float32(3) for name in inputs)
    return HostNode("Made", "made up", lambda given: function(*given), inputs, outputs, values)


def whole() -> OpProgram:
    """Kernels, two nodes of which the second reads what the first one made, kernels again, and a node at the end."""
    parts = (
        Unary("neg", "x", "a"),
        node(lambda a, three: (a * three, a.sum(axis=2, keepdims=True)), ("a", ""), ("b", "sums")),
        node(lambda sums, b, positions: (b + sums + positions[..., None],), ("sums", "b", "positions"), ("c",)),
        Unary("abs", "c", "d"),
        Unary("neg", "a", "e"),
        node(lambda d, a, tokens: (d - a, tokens + 1), ("d", "a", "tokens"), ("f", "next")),
    )
    types = dict.fromkeys(("x", "a", "c", "d", "e"), rows_of(5))
    ids = {"positions": (Ids.POSITIONS, np.dtype(np.float32)), "tokens": (Ids.TOKENS, np.dtype(np.int64))}
    return OpProgram(parts, types, MadeUpConstants(), ("d", "e", "f", "next"), ids, ("x",))


@pytest.mark.parametrize("tokens", [(3,), (3, 40, 2)])
def test_between_kernels(driver: HostDriver, tokens: tuple[int, ...]) -> None:
    """In several steps, the second of which needs more memory."""
    rng, step = np.random.default_rng(0), CudaExecutor(driver, 1).compile(whole())
    for count in tokens:
        x, of = rng.standard_normal((count, 5)).astype(np.float32), step_of([count], [count], rng=rng)
        found = step.run(of, {"x": x})
        d = np.abs(-3 * x - x.sum(axis=1, keepdims=True) + of.positions[:, None])
        np.testing.assert_allclose(found["d"].reshape(d.shape), d, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(found["e"].reshape(x.shape), x)
        np.testing.assert_allclose(found["f"].reshape(x.shape), d + x, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(found["next"], of.tokens[None] + 1)
    driver.check()


def test_what_only_the_host_reads_needs_no_memory_of_the_device(driver: HostDriver) -> None:
    program = replace(whole(), parts=(node(lambda y: (y + 1,), ("y",), ("z",)),), outputs=("z",), given=("y",))
    found = CudaExecutor(driver, 1).compile(program).run(step_of([2], [2]), {"y": np.arange(4)})
    np.testing.assert_array_equal(found["z"], np.arange(1, 5))
    assert not driver.launched
