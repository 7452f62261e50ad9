"""Weights of every form: products and look-ups give what the reference gives, and read no more bytes than they need."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from genai.kernels.cuda.executor import CudaExecutor
from genai.kernels.cuda.weight_layout import lay_out
from genai.kernels.cuda.weights import DeviceWeights, check_weight
from genai.kernels.device import UnsupportedOp
from genai.kernels.ir import (
    BlockWeight,
    DenseWeight,
    Embedding,
    GatedLinear,
    Ids,
    Linear,
    Op,
    Projection,
    SelectColumns,
    Weight,
)
from genai.kernels.reference.executor import ReferenceExecutor
from genai.kernels.weights import ROW, WeightFormat, pack_bits, packed_bytes, uniform_format, uniform_grid
from genai.quant import formats
from genai.quant.formats import GRIDS, row_scaled_format

from .host_driver import HostDriver
from .programs import GEMMS, MadeUpConstants, choose_gemm, program, relative_error, step_of

pytestmark = pytest.mark.gpu

# Rounding activations (and a grid's values) to bytes loses so much; weights and activations to bfloat16 less.
ROUNDED, BFLOATS, EXACT = 2e-2, 6e-3, 2e-6
LEVELS = np.array([-7, 1, 9, 0, -9, -1, 7, 0], np.float32) / 8
FORMS: dict[str, tuple[WeightFormat, Any]] = {
    **{f"{bits} bits by {block}": (uniform_format(bits, block), None)
       for bits, block in ((2, 32), (3, 16), (4, 128), (5, 64), (6, ROW), (8, 256))},
    "zero points": (uniform_format(4, 16, zero_points=True), None),
    "zero points of 8 bits": (uniform_format(8, 32, zero_points=True), None),
    "Q2_K": (formats.Q2_K, None), "Q3_K": (formats.Q3_K, None), "Q4_K": (formats.Q4_K, None),
    "Q5_K": (formats.Q5_K, None), "Q6_K": (formats.Q6_K, None),
    "Q4_1": (WeightFormat(4, 32, 32, multiplier_bits=2, offset_bits=2), None),
    "IQ2_XS": (WeightFormat(3, 16, 256, multiplier_bits=5), LEVELS),
    "IQ4_XS": (formats.IQ4_XS, GRIDS["iq4"]), "NF4": (uniform_format(4, 64), GRIDS["nf4"]),
    "MXFP4": (formats.MXFP4, GRIDS["mxfp4"]), "NVFP4": (uniform_format(4, 16), GRIDS["mxfp4"]),
    "grid of 2 bits, float per row": (row_scaled_format(2, 32), GRIDS["iq2"]),
    "grid of 3 bits, float per row": (row_scaled_format(3, 16), GRIDS["iq3"]),
    "multipliers, group of a row, centred": (WeightFormat(5, 16, ROW, multiplier_bits=8, signed=True), None),
    "multipliers above 127": (WeightFormat(4, 64, 128, multiplier_bits=8), None),
    "groups of 96": (WeightFormat(4, 32, 96, multiplier_bits=6, offset_bits=6), None),
    "ternary": (uniform_format(2, 256), np.array([-1, 0, 1, 2], np.float32)),
    "zero between two codes": (uniform_format(2, 32), np.array([-1.5, -0.5, 0.5, 1.5], np.float32)),
    "8 bits from 0 on": (uniform_format(8, 32), np.arange(256, dtype=np.float32)),
    "minima and codes around zero": (WeightFormat(4, 32, 64, multiplier_bits=4, offset_bits=4), uniform_grid(4)),
    "minima and a grid": (WeightFormat(4, 16, 64, multiplier_bits=4, offset_bits=4), GRIDS["nf4"]),
}  # fmt: skip


def form_weight(
    constants: MadeUpConstants, rng: np.random.Generator, name: str, rows: int, columns: int, scales: str = "float16"
) -> BlockWeight:
    """A weight of random codes and numbers; its constants are added."""
    form, grid = FORMS[name]
    if grid is None:
        grid = uniform_grid(form.bits, centred=not form.offset_bits)
    prefix = f"{name} {len(constants.arrays)}"
    blocks, groups = form.blocks(columns), form.groups(columns)
    size = float(np.abs(grid).max()) * (1 << max(form.multiplier_bits - 1, 0))
    factors = rng.uniform(0.5, 1.5, (rows, groups)) / size
    arrays: dict[str, Any] = {
        "data": rng.integers(0, 256, (rows, form.padded(columns) * form.bits // 8), dtype=np.uint8),
        "grid": grid,
        "scales": np.exp2(np.rint(np.log2(factors))).astype(np.float32) if name == "MXFP4" else factors.astype(scales),
    }
    if name == "NVFP4":
        import ml_dtypes

        arrays["scales"] = factors.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    if form.multiplier_bits:
        packed = (rows, packed_bytes(blocks, form.multiplier_bits))
        arrays["multipliers"] = rng.integers(0, 256, packed, dtype=np.uint8)
    if form.offset_bits:
        one = name.startswith("zero points")
        arrays["offset_scales"] = arrays["scales"] if one else (factors * 3).astype(scales)
        arrays["offsets"] = rng.integers(0, 256, (rows, packed_bytes(blocks, form.offset_bits)), dtype=np.uint8)
    names = {kind: f"{prefix} {kind}" for kind in arrays}
    constants.arrays |= {names[kind]: array for kind, array in arrays.items()}
    kinds = ("data", "grid", "scales", "multipliers", "offset_scales", "offsets")
    return BlockWeight(rows=rows, columns=columns, format=form, **{kind: names.get(kind, "") for kind in kinds})


def block_weights(constants: MadeUpConstants, rng: np.random.Generator, rows: int, columns: int) -> dict[str, Weight]:
    """onnxruntime's blocks: sizes that are no powers of two, zero points that are floats, floats of other types."""
    made: dict[str, Weight] = {
        f"{bits} bits by {size}": constants.block_weight(rng, rows, columns, bits=bits, block_size=size, points=points)
        for bits, size, points in ((2, 16, True), (3, 48, True), (5, 96, False), (6, 112, True), (8, 16, True))
    }
    made["bfloat16"] = constants.block_weight(rng, rows, columns, bits=4, block_size=32, scales="bfloat16")
    for bits, kind in ((4, "float16"), (8, "float32"), (2, "bfloat16")):
        weight = constants.block_weight(rng, rows, columns, bits=bits, block_size=32, scales=kind)
        blocks = -(-columns // 32)
        points = rng.uniform(0, (1 << bits) - 1, (rows, blocks)).astype(kind)
        constants.arrays[f"{weight.data}.points"] = points
        made[f"{bits} bits, zero points of {kind}"] = BlockWeight(
            weight.data, weight.scales, f"{weight.data}.points", rows, columns,
            uniform_format(bits, 32, zero_points=True),
        )  # fmt: skip
    per_row = constants.block_weight(rng, rows, columns, bits=4, block_size=32, per_row=True, points=True)
    return made | {"a float per row, zero points per block": per_row}


def compared(
    driver: HostDriver, ops: list[Op], widths: dict[str, int], constants: MadeUpConstants,
    given: dict[str, Any], tokens: int, prefill: int = 0,
) -> dict[str, tuple[Any, Any]]:  # fmt: skip
    """Every output of both devices."""
    outputs = [name for op in ops for name in op.outputs]
    what = program(ops, widths, constants, outputs)
    new = [1] * (tokens - prefill) + [prefill] * (prefill > 0)
    step = step_of(new, new, prefill=int(prefill > 0))
    found, wanted = (
        executor.compile(what).run(step, given) for executor in (CudaExecutor(driver, 1), ReferenceExecutor(1))
    )
    driver.check()
    return {name: tuple(np.array(one[name]).reshape(-1, widths[name]) for one in (found, wanted)) for name in outputs}  # type: ignore[misc]


def products_of(weights: dict[str, Weight], columns: int) -> tuple[list[Op], dict[str, int]]:
    ops: list[Op] = [
        Linear("x", Projection(weight), f"{'exact' if exact else 'bytes'} {name}", exact)
        for name, weight in weights.items()
        for exact in (True, False)
    ]
    rows = next(iter(weights.values())).rows
    return ops, {"x": columns} | {op.outputs[0]: rows for op in ops}


SHAPES = ((1, 0, 18, 1088), (2, 1, 5, 1083), (4, 2, 17, 77), (9, 3, 6, 200))


@pytest.mark.parametrize(("tokens", "order", "rows", "columns"), SHAPES)
@pytest.mark.parametrize("which", ["forms", "blocks"])
def test_few_rows(driver: HostDriver, tokens: int, order: int, rows: int, columns: int, which: str) -> None:
    driver.order = order
    rng, constants = np.random.default_rng(tokens), MadeUpConstants()
    if which == "forms":
        weights: dict[str, Weight] = {name: form_weight(constants, rng, name, rows, columns) for name in FORMS}
    else:
        weights = block_weights(constants, rng, rows, columns)
    ops, widths = products_of(weights, columns)
    given = {"x": rng.standard_normal((tokens, columns)).astype(np.float32)}
    for name, (ours, theirs) in compared(driver, ops, widths, constants, given, tokens).items():
        assert relative_error(ours, theirs) < (EXACT if name.startswith("exact") else ROUNDED), name


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("which", ["forms", "blocks"])
def test_many_rows(driver: HostDriver, which: str, gemm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """70 rows of a prompt behind two that are decoded."""
    driver.order = 2
    choose_gemm(driver, gemm, monkeypatch)
    rng, constants, rows, columns = np.random.default_rng(0), MadeUpConstants(), 67, 333
    if which == "forms":
        weights: dict[str, Weight] = {name: form_weight(constants, rng, name, rows, columns) for name in FORMS}
    else:
        weights = block_weights(constants, rng, rows, columns)
    ops, widths = products_of(weights, columns)
    ops = [op for op in ops if not getattr(op, "exact", True)]
    given = {"x": rng.standard_normal((72, columns)).astype(np.float32)}
    for name, (ours, theirs) in compared(driver, ops, widths, constants, given, 72, prefill=70).items():
        assert relative_error(ours[2:], theirs[2:]) < BFLOATS, name
        assert relative_error(ours[:2], theirs[:2]) < ROUNDED, name


@pytest.mark.parametrize("gemms", [("large", "small"), ("256", "128", "64")])
def test_blocks_of_all_sizes_give_the_same_bits(
    driver: HostDriver, gemms: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever else is there, and wherever a row stands."""
    rng, constants = np.random.default_rng(0), MadeUpConstants()
    ops, widths = products_of({"4 bits": constants.block_weight(rng, 140, 600)}, 600)
    x, found = rng.standard_normal((290, 600)).astype(np.float32), []
    for gemm in gemms:
        for first, end in ((0, 290), (0, 40), (33, 140)):
            with monkeypatch.context() as patch:
                choose_gemm(driver, gemm, patch)
                part = {"x": x[first:end]}
                run = compared(driver, ops[1:], widths, constants, part, end - first, end - first)
            found.append((first, end, run["bytes 4 bits"][0]))
    assert all(np.array_equal(one, found[0][2][first:end]) for first, end, one in found)
    assert len({name for name in driver.launched if "gemm" in name}) == len(gemms)


@pytest.mark.parametrize("scales", ["float32", "bfloat16"])
def test_wider_floats(driver: HostDriver, scales: str) -> None:
    rng, constants = np.random.default_rng(0), MadeUpConstants()
    names = ("2 bits by 32", "zero points", "Q4_K", "NF4")
    ops, widths = products_of({name: form_weight(constants, rng, name, 7, 300, scales) for name in names}, 300)
    given = {"x": rng.standard_normal((2, 300)).astype(np.float32)}
    for name, (ours, theirs) in compared(driver, ops, widths, constants, given, 2).items():
        assert relative_error(ours, theirs) < (EXACT if name.startswith("exact") else ROUNDED), name


def test_bits_of_a_row_do_not_depend_on_company(driver: HostDriver) -> None:
    rng, constants = np.random.default_rng(0), MadeUpConstants()
    names = ("Q2_K", "Q5_K", "Q6_K", "NF4", "NVFP4", "zero points")
    ops, widths = products_of({name: form_weight(constants, rng, name, 11, 1070) for name in names}, 1070)
    x = rng.standard_normal((11, 1070)).astype(np.float32)
    together = compared(driver, ops, widths, constants, {"x": x}, 11)
    for first, count in ((0, 1), (3, 2), (4, 4), (2, 9)):
        part = compared(driver, ops, widths, constants, {"x": x[first : first + count]}, count)
        for name, (ours, _) in part.items():
            assert np.array_equal(ours, together[name][0][first : first + count]), name


@pytest.mark.parametrize("columns", [64, 203])
def test_lookups(driver: HostDriver, columns: int) -> None:
    rng, constants = np.random.default_rng(0), MadeUpConstants()
    tables: dict[str, Weight] = {name: form_weight(constants, rng, name, 16, columns) for name in FORMS}
    tables |= block_weights(constants, rng, 16, columns)
    ops: list[Op] = [Embedding(table, Ids.TOKENS, name) for name, table in tables.items()]
    found = compared(driver, ops, dict.fromkeys(tables, columns), constants, {}, 5)
    for name, (ours, theirs) in found.items():
        assert np.allclose(ours, theirs, rtol=1e-6, atol=1e-6 * np.abs(theirs).max()), name


def test_what_is_no_number_stays_none(driver: HostDriver) -> None:
    """A row with NaN or infinity gives NaN (or infinity), and no other row does."""
    rng, constants = np.random.default_rng(0), MadeUpConstants()
    weights: dict[str, Weight] = {
        "4 bits": constants.block_weight(rng, 5, 100),
        "NF4": form_weight(constants, rng, "NF4", 5, 100),
    }
    ops, widths = products_of(weights, 100)
    x = rng.standard_normal((3, 100)).astype(np.float32)
    x[0, 70], x[2, 3] = np.nan, np.inf
    with np.errstate(invalid="ignore"):
        for name, (ours, _) in compared(driver, ops, widths, constants, {"x": x}, 3).items():
            assert not np.isfinite(ours[[0, 2]]).any() and np.isfinite(ours[1]).all(), name


@pytest.mark.parametrize(("columns", "flat_block", "block"), [(128, 64, 64), (160, 64, 32), (144, 256, 16)])
def test_codes_of_bitsandbytes(driver: HostDriver, columns: int, flat_block: int, block: int) -> None:
    """The first nibble is high, no constant holds the grid, and blocks may extend over the end of a row."""
    rng, constants = np.random.default_rng(0), MadeUpConstants()
    constants.arrays |= {
        "codes": rng.integers(0, 256, 9 * columns // 2, dtype=np.uint8),
        "scales": rng.uniform(0.5, 1.5, -(-9 * columns // flat_block)).astype(np.float32),
    }
    values, format = tuple(GRIDS["nf4"].tolist()), WeightFormat(4, block, block)
    weight = BlockWeight("codes", "scales", "", 9, columns, format, values=values, flat_block=flat_block)
    ops, widths = products_of({"bnb4": weight}, columns)
    given = {"x": rng.standard_normal((3, columns)).astype(np.float32)}
    found = compared(driver, ops, widths, constants, given, 3)
    assert relative_error(*found["exact bnb4"]) < EXACT and relative_error(*found["bytes bnb4"]) < 2e-2


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("transposed", "gemm"), [(False, "small"), (False, "128"), (True, "large"), (True, "256")])
def test_floats(driver: HostDriver, dtype: str, transposed: bool, gemm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows, many rows and look-ups of floats, whose rows are no whole number of 16 bytes."""
    choose_gemm(driver, gemm, monkeypatch)
    rng, constants = np.random.default_rng(0), MadeUpConstants()
    stored = rng.standard_normal((70, 1101) if transposed else (1101, 70)) / 33
    constants.arrays["floats"] = stored.astype(dtype if dtype != "bfloat16" else _bfloat16())
    weight = DenseWeight("floats", 70, 1101, transposed)
    ops: list[Op] = [Linear("x", Projection(weight), f"{exact}", exact) for exact in (True, False)]
    ops.append(GatedLinear("x", Projection(weight), Projection(weight), "silu", "gated", True))
    ops.append(Embedding(weight, Ids.TOKENS, "rows"))
    widths = {"x": 1101, "True": 70, "False": 70, "gated": 70, "rows": 1101}
    for tokens, prefill in ((1, 0), (2, 0), (3, 0), (7, 0), (9, 0), (70, 68)):
        given = {"x": rng.standard_normal((tokens, 1101)).astype(np.float32)}
        found = compared(driver, ops, widths, constants, given, tokens, prefill)
        assert relative_error(*found["True"]) < EXACT and relative_error(*found["gated"]) < 2 * EXACT
        assert np.array_equal(*found["rows"])
        few = tokens - prefill
        assert relative_error(found["False"][0][:few], found["False"][1][:few]) < EXACT
        if prefill:
            assert relative_error(*found["False"]) < BFLOATS


def _bfloat16() -> Any:
    import ml_dtypes

    return ml_dtypes.bfloat16


def test_columns_in_another_order(driver: HostDriver) -> None:
    rng = np.random.default_rng(0)
    constants = MadeUpConstants({"order": rng.permutation(1500).astype(np.int64)[:1100]})
    weight = constants.block_weight(rng, 5, 1100)
    ops: list[Op] = [SelectColumns("x", "order", "y"), Linear("y", Projection(weight), "out", True)]
    given = {"x": rng.standard_normal((4, 1500)).astype(np.float32)}
    found = compared(driver, ops, {"x": 1500, "y": 1100, "out": 5}, constants, given, 4)
    assert np.array_equal(*found["y"]) and relative_error(*found["out"]) < EXACT


# Bits of a weight that a product reads: codes, and numbers of blocks that are not wider than they must be.
BITS = {
    "2 bits by 32": 2.5, "5 bits by 64": 5.25, "Q2_K": 2 + 8 / 16 + 32 / 256, "Q3_K": 3 + 8 / 16 + 16 / 256,
    "Q4_K": 4 + 16 / 32 + 32 / 256, "Q6_K": 6 + 8 / 16 + 16 / 256, "MXFP4": 4.25, "NVFP4": 4.5, "NF4": 4.25,
    "IQ4_XS": 4 + 8 / 32 + 16 / 256, "Q4_1": 5.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("bits", "first", "is_common"),
    [(4, -8, True), (4, 0, True), (6, -32, True), (4, 112, True), (4, 113, False), (4, -129, False), (4, -7.5, False),
     (8, -128, True), (8, -127, False), (8, 0, False)],
)  # fmt: skip
def test_zero_points_that_leave_bytes_are_the_matrix_s(bits: int, first: float, is_common: bool) -> None:
    """Others are stored for every row: tensor cores multiply codes less the zero point as bytes with a sign."""
    constants, rng = MadeUpConstants(), np.random.default_rng(0)
    weight = form_weight(constants, rng, f"{bits} bits by {128 if bits == 4 else 256 if bits == 8 else ROW}", 3, 128)
    constants.arrays[weight.grid] = np.arange(1 << bits, dtype=np.float32) + np.float32(first)
    reader, _, fields = lay_out(weight, constants)
    assert reader.offset.startswith("Constant" if is_common else "Point")
    assert fields["zero"] == -first


def test_bytes_that_are_read(driver: HostDriver) -> None:
    rng, constants = np.random.default_rng(0), MadeUpConstants()
    executor = CudaExecutor(driver, 1)
    for name, bits in BITS.items():
        scales = "float16"
        weight = form_weight(constants, rng, name, 8, 1024, scales)
        if name == "Q4_1":  # multipliers of one: floats of blocks stay halves
            for kind, width in (("multipliers", 2), ("offsets", 2)):
                constants.arrays[getattr(weight, kind)] = pack_bits(np.ones((8, 32), np.uint8), width)
        nbytes = executor.packed_bytes(weight, constants)
        assert nbytes * 8 / (8 * 1024) == bits, (name, lay_out(weight, constants)[0].name)


def test_weights_of_experts_are_one_matrix(driver: HostDriver) -> None:
    """The rows of one expert after another's."""
    rng, constants = np.random.default_rng(0), MadeUpConstants()
    one = constants.block_weight(rng, 12, 96, bits=3, block_size=16, points=True)
    weight = replace(one, rows=4, experts=3)
    check_weight(weight)
    weights = DeviceWeights(driver)
    matrix, same = weights._copy(weight, constants), weights._copy(one, constants)
    assert (matrix.rows, matrix.columns) == (12, 96)
    pairs = zip(matrix.held, same.held, strict=True)
    assert all(np.array_equal(driver.download(a), driver.download(b)) for a, b in pairs)
    constants.arrays["dense"] = rng.standard_normal((3, 5, 40)).astype(np.float32)
    dense = weights._copy(DenseWeight("dense", 5, 40, True, 3), constants)
    assert np.array_equal(driver.download(dense.held[0])[:, :40], constants.arrays["dense"].reshape(15, 40))


def test_what_no_kernel_reads_is_refused_by_name(driver: HostDriver) -> None:
    rng, constants = np.random.default_rng(0), MadeUpConstants()
    FORMS["odd"] = (uniform_format(5, 32), np.arange(32, dtype=np.float32) ** 2)
    try:
        odd = form_weight(constants, rng, "odd", 3, 64)
    finally:
        del FORMS["odd"]
    with pytest.raises(UnsupportedOp, match="a grid of 32 numbers"):
        CudaExecutor(driver, 1).compile(
            program([Linear("x", Projection(odd), "y", True)], {"x": 64, "y": 3}, constants, ["y"])
        )
