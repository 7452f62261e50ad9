"""Products of few rows as bytes: one set of bits however many rows there are, gates and norms that write what the next
product reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from genai.kernels.cuda.executor import CudaExecutor
from genai.kernels.ir import Gate, Linear, Norm, Op, Projection, Weight
from genai.kernels.reference.executor import ReferenceExecutor

from .host_driver import HostDriver
from .programs import MadeUpConstants, program, relative_error, step_of
from .test_weight_formats import compared, form_weight

pytestmark = pytest.mark.gpu

ROUNDED = 2e-2


def one_set_of_bits(
    driver: HostDriver, weights: dict[str, Weight], constants: MadeUpConstants, counts: tuple[int, ...], columns: int
) -> None:
    """Rows give the same alone as with others."""
    rows = next(iter(weights.values())).rows
    ops: list[Op] = [Linear("x", Projection(weight), name, False) for name, weight in weights.items()]
    widths = {"x": columns} | dict.fromkeys(weights, rows)
    x = np.random.default_rng(1).standard_normal((max(counts), columns)).astype(np.float32)
    found: list[dict[str, Any]] = []
    for count in counts:
        run = compared(driver, ops, widths, constants, {"x": x[:count]}, count)
        for name, (ours, theirs) in run.items():
            assert relative_error(ours, theirs) < ROUNDED, (name, count)
        found.append(run)
    for count, run in zip(counts, found, strict=True):
        for name, (ours, _) in run.items():
            assert np.array_equal(ours, found[0][name][0][:count]), (name, count)


@pytest.mark.parametrize("bits", [4, 8])
def test_lanes_and_tensor_cores_give_the_same_bits(driver: HostDriver, bits: int) -> None:
    """Of every number of groups of rows, and of rows that no kernel takes at once."""
    rng, constants = np.random.default_rng(0), MadeUpConstants()
    weights: dict[str, Weight] = {"blocks": constants.block_weight(rng, 35, 1070, bits=bits)}
    one_set_of_bits(driver, weights, constants, (70, 64, 33, 17, 16, 8, 3, 2, 1), 1070)
    names = {name.split("_BlockReader")[0] for name in driver.launched}
    assert {"decode_decode_few", "decode_decode", "activations_arrange_groups"} <= names


def test_blocks_share_many_outputs(driver: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 32 bits hold of outputs times blocks."""
    monkeypatch.setattr(driver, "multiprocessors", blocks := 33_000)
    rng, constants, rows = np.random.default_rng(0), MadeUpConstants(), 131_072
    assert rows * blocks > 1 << 32
    weight = constants.block_weight(rng, rows, 32)
    x = rng.standard_normal((1, 32)).astype(np.float32)
    run = compared(
        driver, [Linear("x", Projection(weight), "out", False)], {"x": 32, "out": rows}, constants, {"x": x}, 1
    )
    ours, theirs = run["out"]
    assert relative_error(ours, theirs) < ROUNDED


def test_the_same_of_other_forms(driver: HostDriver) -> None:
    """Halves, minima, two levels of scales, grids, planes of one and two words."""
    rng, constants = np.random.default_rng(0), MadeUpConstants()
    names = (
        "Q2_K", "Q3_K", "Q5_K", "Q6_K", "NF4", "zero points", "ternary", "zero between two codes",
        "8 bits from 0 on",
    )  # fmt: skip
    weights: dict[str, Weight] = {name: form_weight(constants, rng, name, 19, 300) for name in names}
    one_set_of_bits(driver, weights, constants, (9, 3, 2, 1), 300)


def layer(
    constants: MadeUpConstants, inner: int, bits: int, activation: str = "silu"
) -> tuple[list[Op], dict[str, int]]:
    """A norm, a gated pair and what reads it."""
    rng, hidden = np.random.default_rng(0), 96
    constants.arrays["norm"] = rng.uniform(0.5, 1.5, hidden).astype(np.float32)
    weights = [constants.block_weight(rng, inner, hidden, bits=bits) for _ in range(2)]
    down = constants.block_weight(rng, 24, inner, bits=bits)
    ops: list[Op] = [
        Norm("x", "norm", 1e-5, "normed", skip="skip", total="total"),
        Linear("normed", Projection(weights[0]), "gate", False), Linear("normed", Projection(weights[1]), "up", False),
        Gate(gate="gate", up="up", activation=activation, out="gated"),
        Linear("gated", Projection(down), "down", False),
    ]  # fmt: skip
    widths = {"x": hidden, "skip": hidden, "normed": hidden, "total": hidden}
    return ops, widths | {"gate": inner, "up": inner, "gated": inner, "down": 24}


@pytest.mark.parametrize(("inner", "bits", "tokens"), [(1024, 4, 1), (1024, 4, 12), (1024, 8, 2), (200, 4, 40)])
def test_a_gate_between_products(driver: HostDriver, inner: int, bits: int, tokens: int) -> None:
    """One kernel computes the pair. If rows are whole, no kernel converts the results of the norm and the gate."""
    constants, rng = MadeUpConstants(), np.random.default_rng(tokens)
    ops, widths = layer(constants, inner, bits)
    given = {name: rng.standard_normal((tokens, 96)).astype(np.float32) for name in ("x", "skip")}
    what, step = program(ops, widths, constants, ["total", "down"]), step_of([1] * tokens, [1] * tokens)
    ours, theirs = (
        executor.compile(what).run(step, given) for executor in (CudaExecutor(driver, 1), ReferenceExecutor(1))
    )
    driver.check()
    assert relative_error(np.asarray(ours["down"]).reshape(tokens, -1), np.asarray(theirs["down"])[0]) < ROUNDED
    assert relative_error(np.asarray(ours["total"]).reshape(tokens, -1), np.asarray(theirs["total"])[0]) < 1e-6
    launched = [name.split("_BlockReader")[0] for name in driver.launched]
    gated = "decode_decode_gated_few" if tokens < 3 else "decode_decode_gated"
    arranged = int(inner % 1024 > 0 or bits > 4)
    assert launched.count(gated) == 1 and launched.count("activations_arrange_groups") == arranged


def test_a_gate_that_others_read(driver: HostDriver) -> None:
    """What stands between the products is wanted: they stay two."""
    constants, rng = MadeUpConstants(), np.random.default_rng(0)
    ops, widths = layer(constants, 64, 4, "gelu_tanh")
    given = {name: rng.standard_normal((3, 96)).astype(np.float32) for name in ("x", "skip")}
    for name, (ours, theirs) in compared(driver, ops, widths, constants, given, 3).items():
        assert relative_error(ours, theirs) < ROUNDED, name
    assert not any("gated" in name for name in driver.launched)


def test_prompts_and_decoded_rows_side_by_side(driver: HostDriver) -> None:
    """Rows with prefill numerics go their own way, and leave the others as they are."""
    constants, rng = MadeUpConstants(), np.random.default_rng(0)
    ops, widths = layer(constants, 1024, 4)
    given = {name: rng.standard_normal((42, 96)).astype(np.float32) for name in ("x", "skip")}
    what = program(ops, widths, constants, ["down"])
    alone = (
        CudaExecutor(driver, 1).compile(what).run(step_of([1] * 2, [1] * 2), {name: x[:2] for name, x in given.items()})
    )
    step = step_of([1, 1, 40], [1, 1, 40], prefill=1)
    ours, theirs = (
        np.asarray(executor.compile(what).run(step, given)["down"]).reshape(42, -1)
        for executor in (CudaExecutor(driver, 1), ReferenceExecutor(1))
    )
    assert relative_error(ours, theirs) < ROUNDED
    assert np.array_equal(ours[:2], np.asarray(alone["down"]).reshape(2, -1))


def test_pairs_of_all_forms(driver: HostDriver) -> None:
    """Two levels of minima halve a block; where no two stages fit beside the numbers, products stay two."""
    rng, constants = np.random.default_rng(0), MadeUpConstants()
    points: dict[str, Any] = {"block_size": 16, "points": True}
    pairs: dict[str, list[Weight]] = {
        name: [form_weight(constants, rng, name, 64, 96) for _ in range(2)] for name in ("Q4_K", "Q6_K", "NF4")
    }
    pairs["wide"] = [constants.block_weight(rng, 64, 96, bits=8, **points) for _ in range(2)]
    ops: list[Op] = []
    widths = {"x": 96}
    for name, (gate, up) in pairs.items():
        sides = f"{name} gate", f"{name} up"
        ops += [Linear("x", Projection(gate), sides[0], False), Linear("x", Projection(up), sides[1], False)]
        ops.append(Gate(gate=sides[0], up=sides[1], activation="silu", out=name))
        widths |= dict.fromkeys((*sides, name), 64)
    given = {"x": rng.standard_normal((12, 96)).astype(np.float32)}
    what, step = program(ops, widths, constants, list(pairs)), step_of([1] * 12, [1] * 12)
    ours, theirs = (
        executor.compile(what).run(step, given) for executor in (CudaExecutor(driver, 1), ReferenceExecutor(1))
    )
    driver.check()
    for name in pairs:
        assert relative_error(np.asarray(ours[name]).reshape(12, -1), np.asarray(theirs[name])[0]) < ROUNDED, name
    assert sum("decode_gated" in name for name in driver.launched) == 3
