"""Products that add what a norm would have added, and norms of the rows that logits are made of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from genai.kernels.fusion import add_early, fuse_activations, norm_late
from genai.kernels.ir import (
    DenseWeight,
    Linear,
    LogitsRows,
    LoraDelta,
    Norm,
    Op,
    OpProgram,
    Per,
    Projection,
    RowsType,
    Unary,
)
from genai.kernels.reference.executor import ReferenceExecutor

from .cuda.programs import MadeUpConstants, program, relative_error, step_of

WIDTH = 64


def end_of_a_model() -> tuple[MadeUpConstants, list[Op], dict[str, int]]:
    """A residual that two products add to, norms between them, and the logits of some rows."""
    rng, constants = np.random.default_rng(0), MadeUpConstants()
    constants.arrays |= {name: rng.uniform(0.5, 1.5, WIDTH).astype(np.float32) for name in ("w1", "w2")}
    weights = [constants.block_weight(rng, WIDTH, WIDTH) for _ in range(3)]
    ops: list[Op] = [
        Linear("x", Projection(weights[0]), "first", False),
        Norm("rest", "w1", 1e-5, "normed", skip="first", total="total"),
        Linear("normed", Projection(weights[1]), "second", False),
        Norm("total", "w2", 1e-5, "last", skip="second"),
        LogitsRows("last", "rows"),
        Linear("rows", Projection(weights[2]), "logits", False),
    ]
    return constants, ops, dict.fromkeys(("x", "rest", "first", "normed", "total", "second", "last"), WIDTH)


def made(constants: MadeUpConstants, ops: list[Op], widths: dict[str, int], outputs: list[str]) -> OpProgram:
    what = program(ops, widths, constants, outputs)
    logits = RowsType((-1, WIDTH), WIDTH, Per.LOGITS)
    return replace(what, types={**what.types, "rows": logits, "logits": logits})


def run(what: OpProgram) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    given = {name: rng.standard_normal((7, WIDTH)).astype(np.float32) for name in ("x", "rest")}
    found = ReferenceExecutor(1).compile(what).run(step_of([3, 4], [3, 4]), given)
    return {name: np.asarray(rows) for name, rows in found.items()}


@pytest.mark.parametrize("outputs", [["logits"], ["logits", "total"], ["logits", "first"], ["logits", "last"]])
def test_a_program_means_the_same(outputs: list[str]) -> None:
    constants, ops, widths = end_of_a_model()
    what = made(constants, ops, widths, outputs)
    parts, types = norm_late(add_early(what.parts, outputs), outputs, what.types)
    changed = run(replace(what, parts=tuple(parts), types=types))
    for name, rows in run(what).items():
        assert relative_error(changed[name], rows) < 1e-6, name  # the reference rounds sums only where they are stored
    norms = [part for part in parts if isinstance(part, Norm)]
    assert [bool(norm.skip) for norm in norms] == [outputs[-1] == "first", False]
    kinds = [type(part).__name__ for part in parts]
    late = outputs[-1] != "last"
    assert kinds[-3:] == (["LogitsRows", "Norm", "Linear"] if late else ["Norm", "LogitsRows", "Linear"])
    assert (types["last"].per is Per.LOGITS) == late


def first_pair(**changes: Any) -> list[Op]:
    """A product and the norm behind it, the product with another branch."""
    _, ops, _ = end_of_a_model()
    product, norm = ops[:2]
    assert isinstance(product, Linear)
    return [replace(product, projection=replace(product.projection, **changes)), norm]


def test_what_stays_as_it_is() -> None:
    """Sums that others read, that adapters change later, that are two already, or whose other half comes later."""
    _, ops, _ = end_of_a_model()
    product, norm = ops[:2]
    assert isinstance(norm, Norm)
    biased = replace(norm, input_bias="b")
    assert isinstance(product, Linear)
    maker = Linear("x", product.projection, "rest", False)
    for parts in (
        [product, norm, Norm("first", "w2", 1e-5, "other")],
        first_pair(delta=LoraDelta("hidden", 0)),
        first_pair(addend="rest"),
        [product, biased],
        [product, maker, norm],
        [norm],
    ):
        assert add_early(parts, []) == parts
    assert add_early([maker, product, norm], [])[1] != product


def test_activations_of_linear_layers() -> None:
    """They are fused if nothing else reads the sums, the function has no parameters, and the device has a kernel."""
    first, second = (Linear("x", Projection(DenseWeight("w", WIDTH, WIDTH)), name, True) for name in ("a", "b"))
    gelu, relu = Unary("gelu", "a", "c"), Unary("relu", "b", "d")
    parts = [first, gelu, second, relu]
    fused = [replace(first, out="c", activation="gelu"), replace(second, out="d", activation="relu")]
    assert fuse_activations(parts, ["c", "d"], lambda linear: True) == fused
    assert fuse_activations(parts, ["c", "d"], lambda linear: linear.out == "b") == [first, gelu, fused[1]]
    for others in (
        [first, Unary("leaky_relu", "a", "c", (0.1,))],
        [first, gelu, Unary("relu", "a", "e")],
        [fused[0], Unary("relu", "c", "e")],
        [gelu],
    ):
        assert fuse_activations(others, ["c", "e"], lambda linear: True) == others
    assert fuse_activations([first, gelu], ["a", "c"], lambda linear: True) == [first, gelu]
