"""Kernels over rows give what the reference gives: look-ups, norms, functions, products."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from genai.kernels.cuda.executor import CudaExecutor
from genai.kernels.cuda.lowering import BINARY, UNARY
from genai.kernels.ir import (
    Binary,
    DenseWeight,
    Embedding,
    Gate,
    GatedLinear,
    Ids,
    JoinColumns,
    Linear,
    LogitsRows,
    Norm,
    Op,
    Projection,
    SliceColumns,
    Unary,
)
from genai.kernels.reference.executor import ReferenceExecutor
from genai.kernels.reference.functions import BINARY as REFERENCE_BINARY, UNARY as REFERENCE_UNARY

from .host_driver import HostDriver
from .programs import MadeUpConstants, choose_gemm, program, relative_error, step_of

pytestmark = pytest.mark.gpu

WIDTH = 80
PARAMETERS = {
    "clip": (-0.5, 0.75), "elu": (0.5,), "hard_sigmoid": (0.2, 0.5), "leaky_relu": (0.1,), "quick_gelu": (1.702,),
    "softcap": (2.0,),
}  # fmt: skip
POSITIVE = {"log", "sqrt", "power"}


def both(
    driver: HostDriver, ops: list[Op], widths: dict[str, int], constants: MadeUpConstants,
    given: dict[str, np.ndarray], tokens: int, prefill: int = 0,
) -> dict[str, tuple[np.ndarray, np.ndarray]]:  # fmt: skip
    """Every output by both executors; the last `prefill` tokens have prefill numerics."""
    outputs = [name for op in ops for name in op.outputs]
    whole = program(ops, widths, constants, outputs)
    parts = [count for count in (tokens - prefill, prefill) if count]
    step = step_of(parts, parts, prefill=int(prefill > 0))
    ours = CudaExecutor(driver, 1).compile(whole).run(step, given)
    theirs = ReferenceExecutor().compile(whole).run(step, {name: array[None] for name, array in given.items()})
    driver.check()
    return {name: (ours[name].reshape(-1, widths[name]), theirs[name].reshape(-1, widths[name])) for name in outputs}


def test_all_functions_are_there() -> None:
    assert set(UNARY) == set(REFERENCE_UNARY)
    assert set(BINARY) == set(REFERENCE_BINARY)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_functions_and_norms(driver: HostDriver, order: int) -> None:
    driver.order = order
    rng = np.random.default_rng(order)
    given = {name: rng.standard_normal((5, WIDTH)).astype(np.float32) * 2 for name in ("x", "y")}
    given["p"] = np.abs(given["x"]) + 0.1
    widths = {"x": WIDTH, "y": WIDTH, "p": WIDTH}
    constants = MadeUpConstants(
        {"one": np.array([0.3], np.float32), "row": rng.standard_normal(WIDTH).astype(np.float32),
         "part": rng.standard_normal(20).astype(np.float32), "groups": rng.standard_normal(16).astype(np.float32)}
    )  # fmt: skip
    ops: list[Op] = []
    for name in UNARY:
        x = "p" if name in POSITIVE else "x"
        ops.append(Unary(name, x, f"unary {name}", PARAMETERS.get(name, ())))
    for name in BINARY:
        x = "p" if name in POSITIVE else "x"
        ops.append(Binary(name, x, "y", f"binary {name}"))
        ops.append(Binary(name, x, "", f"binary {name} one", b_constant="one"))
        ops.append(Binary(name, "", x, f"binary {name} part", a_constant="part" if x == "x" else "one"))
    ops += [
        Gate("silu", "x", "y", "gate"),
        Norm("x", "row", 1e-5, "rms"),
        Norm("x", "groups", 1e-5, "rms of groups"),
        Norm("x", "row", 1e-5, "rms of sum", skip="y", input_bias="row", total="sum"),
        Norm("x", "row", 1e-5, "layer norm", centred=True, bias="row", skip="y"),
        SliceColumns("x", 13, "columns"),
        SliceColumns("x", 7, "one column"),
        Binary("multiply", "x", "one column", "scaled"),
        JoinColumns(("columns", "x", "one column", "columns"), "joined"),
        Unary("neg", "columns", "neg of columns"),
        Norm("y", "groups", 1e-5, "norm of columns"),
    ]
    widths |= {name: WIDTH for op in ops for name in op.outputs}
    widths |= {"columns": 32, "neg of columns": 32, "one column": 1, "joined": WIDTH + 65}
    for name, (ours, theirs) in both(driver, ops, widths, constants, given, 5).items():
        assert relative_error(ours, theirs) < 2e-6, name
    assert np.array_equal(*both(driver, [SliceColumns("x", 13, "columns")], widths, constants, given, 5)["columns"])


def products(rng: np.random.Generator, constants: MadeUpConstants) -> tuple[list[Op], dict[str, int]]:
    """Products of every form, with and without what is added."""
    constants.arrays["bias"] = rng.standard_normal(37).astype(np.float32)
    forms: list[dict[str, Any]] = [
        {"bits": 4}, {"bits": 8}, {"bits": 4, "points": True}, {"bits": 8, "points": True, "block_size": 64},
        {"bits": 4, "block_size": 128, "scales": "float32"}, {"bits": 4, "per_row": True},
    ]  # fmt: skip
    ops: list[Op] = []
    for number, form in enumerate(forms):
        weight = constants.block_weight(rng, 37, 1100, **form)
        for exact in (True, False):
            plain = Projection(weight, "bias" if number % 2 else "", "added" if number % 3 else "")
            ops.append(Linear("x", plain, f"{'exact' if exact else 'bytes'} {form}", exact))
    for dtype, transposed in (("float32", True), ("float16", False)):
        name = f"dense {dtype}"
        constants.arrays[name] = (rng.standard_normal((37, 1100) if transposed else (1100, 37)) / 33).astype(dtype)
        ops.append(Linear("x", Projection(DenseWeight(name, 37, 1100, transposed), "bias"), name, True))
    gate, up = (Projection(constants.block_weight(rng, 37, 1100)) for _ in range(2))
    ops.append(GatedLinear("x", gate, up, "silu", "exact gated", True))
    return ops, {"x": 1100, "added": 37} | {op.outputs[0]: 37 for op in ops}


@pytest.mark.parametrize(("tokens", "order"), [(1, 0), (2, 1), (3, 2), (8, 0), (11, 3)])
def test_products(driver: HostDriver, tokens: int, order: int) -> None:
    driver.order = order
    rng, constants = np.random.default_rng(tokens), MadeUpConstants()
    ops, widths = products(rng, constants)
    given = {name: rng.standard_normal((tokens, widths[name])).astype(np.float32) for name in ("x", "added")}
    for name, (ours, theirs) in both(driver, ops, widths, constants, given, tokens).items():
        assert relative_error(ours, theirs) < (1e-2 if name.startswith("bytes") else 2e-6), name


def test_bits_of_a_row_do_not_depend_on_company(driver: HostDriver) -> None:
    rng, constants = np.random.default_rng(0), MadeUpConstants()
    ops, widths = products(rng, constants)
    given = {name: rng.standard_normal((19, widths[name])).astype(np.float32) for name in ("x", "added")}
    together = both(driver, ops, widths, constants, given, 19)
    for first, count in ((0, 1), (5, 2), (7, 4), (10, 9)):
        part = {name: array[first : first + count] for name, array in given.items()}
        for name, (ours, _) in both(driver, ops, widths, constants, part, count).items():
            assert np.array_equal(ours, together[name][0][first : first + count]), name


@pytest.mark.parametrize(
    ("order", "gemm"), [(0, "small"), (1, "small"), (2, "small"), (0, "64"), (1, "128"), (2, "256")]
)
def test_many_rows(driver: HostDriver, order: int, gemm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of long prompts, by tensor cores, behind a few that are decoded; their bits do not depend on company."""
    driver.order = order
    choose_gemm(driver, gemm, monkeypatch)
    rng, constants = np.random.default_rng(order), MadeUpConstants()
    ops, widths = products(rng, constants)
    ops = [op for op in ops if not op.exact]
    constants.arrays["floats"] = (rng.standard_normal((70, 1100)) / 33).astype(np.float16)
    weight = DenseWeight("floats", 70, 1100, transposed=True)
    ops.append(Linear("x", Projection(weight), "bytes floats", False))
    ops.append(GatedLinear("x", *(op.projection for op in ops[:2]), "silu", "bytes gated", False))
    widths |= {"bytes floats": 70, "bytes gated": 37}
    given = {name: rng.standard_normal((73, widths[name])).astype(np.float32) for name in ("x", "added")}
    together = both(driver, ops, widths, constants, given, 73, prefill=68)
    for name, (ours, theirs) in together.items():
        assert relative_error(ours, theirs) < 1e-2 and relative_error(ours[5:], theirs[5:]) < 6e-3, name
    given = {name: array[60:] for name, array in given.items()}
    for name, (ours, _) in both(driver, ops, widths, constants, given, 13, prefill=13).items():
        assert np.array_equal(ours, together[name][0][60:]), name


def test_zeros_and_large_numbers(driver: HostDriver) -> None:
    """Rounding activations to bytes: a chunk of zeros has no scale, one large number leaves the others nothing."""
    rng, constants = np.random.default_rng(0), MadeUpConstants()
    weight = constants.block_weight(rng, 8, 64, points=True)
    x = np.zeros((2, 64), np.float32)
    x[1, 40:] = 1e30
    op = Linear("x", Projection(weight), "out", False)
    ours, theirs = both(driver, [op], {"x": 64, "out": 8}, constants, {"x": x}, 2)["out"]
    assert np.array_equal(ours[0], np.zeros(8)) and relative_error(ours[1], theirs[1]) < 1e-5


@pytest.mark.parametrize("form", ["4 bits", "8 bits", "float32", "float16"])
def test_lookup(driver: HostDriver, form: str) -> None:
    rng, constants = np.random.default_rng(0), MadeUpConstants()
    if form.endswith("bits"):
        table: Any = constants.block_weight(rng, 16, 200, bits=int(form[0]), points=form[0] == "4")
    else:
        constants.arrays["table"] = rng.standard_normal((16, 200)).astype(form)
        table = DenseWeight("table", 16, 200, transposed=True)
    ops = [Embedding(table, Ids.TOKENS, "out"), Embedding(table, Ids.POSITIONS, "positions"), LogitsRows("out", "last")]
    found = both(driver, ops, dict.fromkeys(("out", "positions", "last"), 200), constants, {}, 7)
    for name in ("out", "positions"):
        assert np.array_equal(*found[name]), name
    assert np.array_equal(found["last"][0][0], found["out"][1][-1])
