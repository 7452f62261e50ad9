"""Products that add what a norm would have added, and norms of the rows that logits are made of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from genai.kernels.cpu.executor import CpuExecutor
from genai.kernels.fusion import add_early, fuse_activations, fuse_halves, norm_late
from genai.kernels.ir import (
    Binary,
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
    SliceColumns,
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


def gate_of_halves(function: str = "gelu", *, gate_first: bool = True) -> list[Op]:
    """A gate whose activated half and other half are slices of one linear layer's result."""
    starts = (0, WIDTH) if gate_first else (WIDTH, 0)
    slices = [SliceColumns("both", first, name) for first, name in zip(starts, ("gate", "up"), strict=True)]
    active: list[Op] = [Unary(function, "gate", "active")]
    if function == "silu":
        active = [Unary("sigmoid", "gate", "squashed"), Binary("multiply", "gate", "squashed", "active")]
    linear = Linear("x", Projection(DenseWeight("w", 2 * WIDTH, WIDTH), "bias"), "both", True)
    return [linear, *slices, *active, Binary("multiply", "active", "up", "out")]


WIDTHS = dict.fromkeys(("x", "gate", "up", "squashed", "active", "out"), WIDTH) | {"both": 2 * WIDTH}


@pytest.mark.parametrize("function", ["gelu", "silu"])
@pytest.mark.parametrize("gate_first", [True, False])
def test_gates_of_halves(function: str, gate_first: bool) -> None:
    """The gate, the activation and the multiplication become one op, whose results are the reference's."""
    rng, parts = np.random.default_rng(2), gate_of_halves(function, gate_first=gate_first)
    linear, swapped = parts[0], [*parts[:-1], Binary("multiply", "up", "active", "out")]
    assert isinstance(linear, Linear)
    constants = MadeUpConstants()
    types = program(parts, WIDTHS, constants, ["out"]).types
    fused = replace(linear, out="out", activation=function, gate="first" if gate_first else "second")
    for ops in (parts, swapped):
        assert fuse_halves(ops, ["out"], types, lambda linear: True) == [fused]
    constants.arrays |= {"bias": rng.standard_normal(2 * WIDTH).astype(np.float32)}
    constants.arrays["w"] = rng.standard_normal((WIDTH, 2 * WIDTH)).astype(np.float32)
    whole = replace(program(parts, WIDTHS, constants, ["out"]), whole_sequences=True)
    given = {"x": rng.standard_normal((7, WIDTH)).astype(np.float32)}
    found, expected = (
        executor.compile(whole, []).run(step_of([3, 4], [3, 4], prefill=2), given)["out"]
        for executor in (CpuExecutor(1), ReferenceExecutor(1))
    )
    assert relative_error(found, expected) < 1e-6


@pytest.mark.parametrize(
    "position, other",
    [
        (0, Linear("x", Projection(DenseWeight("w", 2 * WIDTH, WIDTH)), "both", True, activation="relu")),
        (1, SliceColumns("both", WIDTH, "gate")),
        (1, SliceColumns("x", 0, "gate")),
        (3, Unary("leaky_relu", "gate", "active", (0.1,))),
        (3, Unary("gelu", "up", "active")),
        (4, Binary("add", "active", "up", "out")),
        (4, Binary("multiply", "active", "active", "out")),
        (4, Binary("multiply", "active", "", "out", b_constant="w")),
    ],
)
def test_gates_that_are_not_halves(position: int, other: Op) -> None:
    parts = gate_of_halves()
    types = program(parts, WIDTHS, MadeUpConstants(), ["out"]).types
    parts[position] = other
    assert fuse_halves(parts, ["out"], types, lambda linear: True) == parts


@pytest.mark.parametrize("kept", ["both", "gate", "up", "active", "squashed"])
def test_gates_whose_parts_are_read_elsewhere(kept: str) -> None:
    parts = gate_of_halves("silu")
    types = program(parts, WIDTHS, MadeUpConstants(), ["out"]).types
    assert fuse_halves(parts, ["out", kept], types, lambda linear: True) == parts
    assert fuse_halves(parts, ["out"], types, lambda linear: False) == parts
