"""Quantisation methods against independent implementations of their definitions in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from genai.kernels.weights import QuantizationError, QuantizedWeight, unpack_bits
from genai.quant import formats
from genai.quant.formats import row_scaled_format
from genai.quant.grids import CodebookGrid, CodeGrid, UniformGrid, coded, in_blocks
from genai.quant.methods import METHODS, InputStatistics, base, gptq, method
from genai.quant.methods.awq import find_factors
from genai.quant.methods.base import output_error
from genai.quant.methods.distill import aim_of
from genai.quant.methods.gptq import DAMPING, block_order, inverse_factor, panels
from genai.quant.two_levels import TwoLevelGrid

Array = NDArray[Any]
GRIDS = [
    UniformGrid(4, 32, True), UniformGrid(4, 32, False), UniformGrid(4, 16, True, False), UniformGrid(8, 64, True),
    UniformGrid(8, 32, False), UniformGrid(4, 256, False),
]  # fmt: skip
# Every other kind of form, and the relative error of the outputs that rounding to nearest is below.
FORMS: dict[str, tuple[CodeGrid, float]] = {
    "2 bits": (UniformGrid(2, 32), 0.3),
    "3 bits": (UniformGrid(3, 64, False), 0.06),
    "5 bits": (UniformGrid(5, 16), 0.004),
    "6 bits": (UniformGrid(6, 128, False), 0.002),
    "8 bits by row": (UniformGrid(8, 160, by_row=True), 0.0005),
    "3 bits by row": (UniformGrid(3, 160, False, by_row=True), 0.1),
    "NF4": (CodebookGrid(formats.GRIDS["nf4"], 64), 0.02),
    "FP4": (CodebookGrid(formats.GRIDS["fp4"], 32), 0.03),
    "MXFP4": (CodebookGrid(formats.GRIDS["mxfp4"], 32, powers_of_two=True), 0.03),
    "Q2_K": (TwoLevelGrid(formats.Q2_K, UniformGrid(2, 16, False)), 0.2),
    "Q3_K": (TwoLevelGrid(formats.Q3_K, UniformGrid(3, 16)), 0.05),
    "Q4_K": (TwoLevelGrid(formats.Q4_K, UniformGrid(4, 32, False)), 0.01),
    "Q6_K": (TwoLevelGrid(formats.Q6_K, UniformGrid(6, 16)), 0.001),
    "IQ4_XS": (TwoLevelGrid(formats.IQ4_XS, CodebookGrid(formats.GRIDS["iq4"], 32)), 0.01),
    "2 bits, a float per row": (
        TwoLevelGrid(row_scaled_format(2, 32), CodebookGrid(formats.GRIDS["iq2"], 32), trains=True), 0.2
    ),
}  # fmt: skip


def matrix(rows: int, columns: int, seed: int = 0) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, columns)) * np.exp(rng.standard_normal((rows, 1)))).astype(np.float32)


def statistics(columns: int, seed: int = 1, tokens: int = 600) -> InputStatistics:
    """Statistics of correlated inputs with different magnitudes."""
    rng = np.random.default_rng(seed)
    mixed = np.eye(columns) + 0.4 * rng.standard_normal((columns, columns)) / np.sqrt(columns)
    x = rng.standard_normal((tokens, columns)) * np.exp(rng.standard_normal(columns)) @ mixed
    return InputStatistics(tokens, (x**2).mean(axis=0), x.T @ x / tokens)


def meant(packed: QuantizedWeight) -> Array:
    """Dequantise by the formula of `kernels.weights`, value by value in float64."""
    form, k = packed.format, packed.columns
    codes = unpack_bits(packed.data, form.bits, k)
    block, group = form.block_size or k, form.group_size or max(k, form.padded(k))
    values = np.zeros((packed.rows, k))
    for column in range(k):
        at, of = column // block, column // group
        factor = packed.scales[:, of].astype(np.float64)
        if packed.multipliers is not None:
            factor = factor * packed.multipliers[:, at]
        values[:, column] = factor * packed.grid[codes[:, column]]
        if packed.offset_scales is not None and packed.offsets is not None:
            values[:, column] -= packed.offset_scales[:, of].astype(np.float64) * packed.offsets[:, at]
    return values


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_what_is_packed_is_what_the_blocks_say(name: str, grid: UniformGrid) -> None:
    weight, inputs = matrix(24, 150), statistics(150)  # 150: no block size divides it
    result = METHODS[name].quantize(weight, grid, inputs)
    packed, values = result.packed, result.values
    np.testing.assert_allclose(meant(packed), values, rtol=1e-6, atol=1e-6 * np.abs(values).max())
    np.testing.assert_allclose(packed.dequantize(), values, rtol=1e-6, atol=1e-6 * np.abs(values).max())
    if grid.half_scales:
        np.testing.assert_array_equal(packed.scales.astype(np.float16).astype(np.float32), packed.scales)
    assert output_error(weight, values, inputs) < {4: 0.1, 8: 0.001}[grid.bits]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("form", FORMS)
def test_every_method_knows_every_form(name: str, form: str) -> None:
    """The packed weight is the method's choice, and methods that use more information have smaller errors."""
    grid, most = FORMS[form]
    weight, inputs = matrix(24, 150), statistics(150)
    result = METHODS[name].quantize(weight, grid, inputs)
    packed = result.packed
    assert packed.format == grid.format
    np.testing.assert_allclose(meant(packed), result.values, rtol=1e-5, atol=1e-6 * np.abs(weight).max())
    plain = METHODS["rtn"].quantize(weight, grid, None).values
    assert output_error(weight, plain, inputs) < most
    if name in ("gptq", "distill"):
        assert output_error(weight, result.values, inputs) < 0.8 * output_error(weight, plain, inputs)
    elif name == "search" and not isinstance(grid, TwoLevelGrid):  # else floats of groups differ
        assert np.square(weight - result.values).sum() <= np.square(weight - plain).sum() * (1 + 1e-5)


def test_blocks_wider_than_a_panel_keep_their_scale() -> None:
    order = block_order(np.arange(1, 1001, dtype=np.float64), 1000)
    assert panels(order, 1000)[0] == (0, 256) and panels(order, 1000)[-1] == (768, 1000)
    grid, inputs = UniformGrid(4, 1008, by_row=True), statistics(1000)
    packed = METHODS["gptq"].quantize(matrix(5, 1000), grid, inputs).packed
    assert packed.scales.shape == (5, 1)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(GRIDS), st.booleans())
def test_searched_scales_are_never_worse_in_any_block(seed: int, grid: UniformGrid, weighted: bool) -> None:
    rng = np.random.default_rng(seed)
    weight = (rng.standard_normal((5, 96)) ** rng.integers(1, 4)).astype(np.float32)
    weight[0, :32] = 0
    inputs = InputStatistics(1, np.exp(2 * rng.standard_normal(96)))
    weights = inputs.squares if weighted else np.ones(96)
    found = METHODS["importance" if weighted else "search"].quantize(weight, grid, inputs).blocks.values(grid)
    plain = METHODS["rtn"].quantize(weight, grid, None).blocks.values(grid)

    def errors(values: Array) -> Array:
        lost = (weight.astype(np.float64) - values) ** 2 * weights
        padded = np.zeros((5, -(-96 // grid.block_size) * grid.block_size))
        padded[:, :96] = lost
        return padded.reshape(5, -1, grid.block_size).sum(axis=2)

    assert (errors(found) <= errors(plain) * (1 + 1e-4) + 1e-12).all()
    assert (found[0, :32] == 0).all()


def test_searched_scales_are_nearly_the_best_of_all() -> None:
    """Against a fine grid of scales of both signs."""
    grid, weight = UniformGrid(4, 32, True, False), matrix(6, 32, 3)
    found = METHODS["search"].quantize(weight, grid, None).blocks.values(grid)
    for row in range(6):
        exact = weight[row].astype(np.float64)
        scales = np.concatenate([sign * np.linspace(0.6, 1.4, 4000) * np.abs(exact).max() / 8 for sign in (1, -1)])
        codes = np.clip(np.round(exact / scales[:, None]), -8, 7)
        best = ((exact - codes * scales[:, None]) ** 2).sum(axis=1).min()
        assert ((exact - found[row]) ** 2).sum() < 1.02 * best


@pytest.mark.parametrize(("grid", "most"), [(UniformGrid(4, 32, True), 0.99), (UniformGrid(4, 16, False), 0.98)])
def test_hqq_lowers_the_norm_that_it_is_about(grid: UniformGrid, most: float) -> None:
    """Without zeros the method can only change scales, and gains less."""
    weight = matrix(64, 128, 5)
    weight[::7, ::13] *= 6  # outliers

    def error(name: str) -> float:
        values = METHODS[name].quantize(weight, grid, None).blocks.values(grid)
        return float((np.abs(weight - values) ** 0.7).sum())

    assert error("hqq") < most * error("rtn")


def naive_gptq(weight: Array, gram: Array, scales: Array, zeros: Array, block_size: int, most: int) -> Array:
    """Column by column, with the inverse of the remaining matrix recomputed each time (Frantar et al. 2022, equation
    2).
    """
    left, columns = weight.astype(np.float64), weight.shape[1]
    codes = np.zeros(weight.shape, np.uint8)
    damped = gram + DAMPING * np.diag(gram).mean() * np.eye(columns)
    order = block_order(np.diag(gram), block_size).tolist()
    for place, j in enumerate(order):
        rest = order[place:]
        inverse = np.linalg.inv(damped[np.ix_(rest, rest)])
        scale, zero = scales[:, j // block_size], zeros[:, j // block_size]
        codes[:, j] = np.clip(np.floor(left[:, j] / scale + zero + 0.5), 0, most)
        lost = (left[:, j] - (codes[:, j] - zero) * scale) / inverse[0, 0]
        left[:, rest] -= np.outer(lost, inverse[0])
    return codes


@pytest.mark.parametrize("grid", [UniformGrid(4, 32, True), UniformGrid(4, 16, False), UniformGrid(8, 32)], ids=str)
def test_gptq_is_the_naive_one(grid: UniformGrid) -> None:
    columns = 200  # more than a panel, and no whole blocks
    weight, inputs = matrix(40, columns, 7), statistics(columns)
    blocks = METHODS["gptq"].quantize(weight, grid, inputs).blocks
    assert inputs.gram is not None
    wanted = naive_gptq(
        weight, inputs.gram, blocks.scales.astype(float), blocks.zeros.astype(float), grid.block_size, 2**grid.bits - 1
    )
    found = blocks.codes.reshape(40, -1)[:, :columns]
    # float32 rounds a number that lies halfway to the other side, and what follows in that row differs, too.
    assert (found == wanted).mean() > 0.99
    assert (found == wanted).all(axis=1).mean() > 0.6


def test_gptq_and_distillation_lower_the_error_of_the_outputs() -> None:
    weight, inputs, grid = matrix(96, 128, 9), statistics(128), UniformGrid(4, 32)
    error = {}
    for name in ("rtn", "importance", "gptq", "distill"):
        result = METHODS[name].quantize(weight, grid, inputs)
        error[name] = output_error(weight, result.blocks.values(grid), inputs)
    assert error["distill"] < error["gptq"] < error["importance"] < error["rtn"]
    notes = METHODS["distill"].quantize(weight, grid, inputs).notes
    assert notes["loss_after"] <= notes["loss_before"]


@pytest.mark.parametrize("method", ["gptq", "distill"])
def test_rows_may_come_in_parts(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processing a limited number of rows at a time gives the same result for each row."""
    inputs, weight = statistics(64), matrix(23, 64, 5)
    whole = METHODS[method].quantize(weight, UniformGrid(4, 32), inputs)
    monkeypatch.setattr(base, "_PART_FLOATS", 64 * 5)
    parts = METHODS[method].quantize(weight, UniformGrid(4, 32), inputs)
    np.testing.assert_allclose(parts.values, whole.values, atol=1e-6)
    assert set(parts.notes) == set(whole.notes)


def test_distillation_aims_at_what_the_float_model_gives() -> None:
    """The target compensates for errors in the quantised model's inputs."""
    rng = np.random.default_rng(0)
    exact = rng.standard_normal((2000, 32))
    seen = exact @ (np.eye(32) + 0.1 * rng.standard_normal((32, 32))) + 0.05 * rng.standard_normal((2000, 32))
    weight = matrix(16, 32, 11)
    inputs = InputStatistics(2000, (seen**2).mean(0), seen.T @ seen / 2000, exact.T @ seen / 2000)
    wanted = exact @ weight.T
    aim = aim_of(inputs)(weight)
    before, after = (((wanted - seen @ one.T) ** 2).sum() for one in (weight, aim))
    # The least squares solution itself, without the pull towards the float matrix.
    best = ((wanted - seen @ np.linalg.lstsq(seen, wanted, rcond=None)[0]) ** 2).sum()
    assert best <= after < 0.5 * before


def test_awq_finds_factors_that_lower_the_error() -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((800, 64))
    x[:, :4] *= 30  # a few channels are large: what AWQ is about
    inputs, grid = InputStatistics(800, (x**2).mean(0), x.T @ x / 800), UniformGrid(4, 32)
    weight = matrix(48, 64, 13)
    factors, notes = find_factors([weight], [grid], inputs)
    assert notes["power"] > 0
    assert notes["error"] < 0.7 * notes["error_unscaled"]
    assert factors[:4].min() > factors[4:].max()
    shared, _ = find_factors([weight], [grid], inputs, sharing=np.arange(64) // 32 * 16 + np.arange(64) % 16)
    np.testing.assert_array_equal(shared[:16], shared[16:32])


@pytest.mark.parametrize("panel", [7, 16, 512])
def test_the_factor_of_the_inverse(panel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With reordered columns, and panels that divide the matrix evenly or not."""
    monkeypatch.setattr(gptq, "_FACTORED", panel)
    gram = statistics(48).gram
    assert gram is not None
    order = np.random.default_rng(0).permutation(48)
    upper, damping = inverse_factor(gram, DAMPING, order)
    damped = (gram + DAMPING * np.diag(gram).mean() * np.eye(48))[np.ix_(order, order)]
    np.testing.assert_allclose(upper.T @ upper, np.linalg.inv(damped), rtol=1e-8, atol=1e-10)
    assert damping == DAMPING and np.array_equal(upper, np.triu(upper))


def test_a_raised_damping_is_said() -> None:
    inputs = statistics(32)
    assert inputs.gram is not None
    values, vectors = np.linalg.eigh(inputs.gram)
    values[0] = -0.05 * np.diag(inputs.gram).mean()  # what rounding may leave of a small one
    broken = InputStatistics(inputs.count, inputs.squares, (vectors * values) @ vectors.T)
    assert METHODS["gptq"].quantize(matrix(4, 32), UniformGrid(), broken).notes["damping"] == pytest.approx(0.1)
    assert "damping" not in METHODS["gptq"].quantize(matrix(4, 32), UniformGrid(), inputs).notes


def test_inputs_that_were_never_seen_are_no_harm() -> None:
    weight, inputs = matrix(8, 64), statistics(64)
    assert inputs.gram is not None
    inputs.gram[:, 5] = inputs.gram[5] = inputs.squares[5] = 0
    for name, one in METHODS.items():
        values = one.quantize(weight, UniformGrid(), inputs).blocks.values(UniformGrid())
        assert np.isfinite(values).all() and np.abs(values - weight).max() < 2 * np.abs(weight).max(), name


@pytest.mark.parametrize("name", METHODS)
def test_inputs_that_are_all_zero_are_no_harm(name: str) -> None:
    weight, nothing = matrix(8, 64), np.zeros((64, 64))
    inputs = InputStatistics(9, np.zeros(64), nothing, nothing.copy())
    values = METHODS[name].quantize(weight, UniformGrid(), inputs).values
    assert np.isfinite(values).all() and np.abs(values - weight).max() < 2 * np.abs(weight).max()


@pytest.mark.parametrize(
    "weight",
    [np.zeros(64, np.float32), np.zeros((2, 3, 32)), np.zeros((0, 64)), [[1.0] * 64], np.ones((2, 64), complex), "x"],
    ids=["one axis", "three axes", "no rows", "a list", "complex numbers", "a string"],
)
def test_what_is_no_matrix(weight: Any) -> None:
    for one in METHODS.values():
        with pytest.raises(QuantizationError, match=r"the weight (is|has)"):
            one.quantize(weight, UniformGrid(), None)


@pytest.mark.parametrize("name", METHODS)
def test_bad_input(name: str) -> None:
    grid, weight, inputs = UniformGrid(), matrix(6, 64), statistics(64)
    broken = weight.copy()
    broken[3, 40] = np.inf
    with pytest.raises(QuantizationError, match="row 3, block 1"):
        METHODS[name].quantize(broken, grid, inputs)
    if METHODS[name].needs != "nothing":
        with pytest.raises(QuantizationError, match="needs statistics"):
            METHODS[name].quantize(weight, grid, None)
        with pytest.raises(QuantizationError, match="the statistics are for 32 inputs"):
            METHODS[name].quantize(weight, grid, statistics(32))
    if METHODS[name].needs == "gram" and name != "awq":
        with pytest.raises(QuantizationError, match="the Gram matrix"):
            METHODS[name].quantize(weight, grid, InputStatistics(9, inputs.squares))


def test_unusable_statistics() -> None:
    inputs = statistics(32)
    assert inputs.gram is not None
    for bad in (inputs.gram * np.nan, -100 * inputs.gram):
        with pytest.raises(QuantizationError, match=r"NaN or infinity|cannot be factorised"):
            METHODS["gptq"].quantize(matrix(4, 32), UniformGrid(), InputStatistics(1, inputs.squares, bad))
    with pytest.raises(QuantizationError, match="contain NaN"):
        METHODS["importance"].quantize(matrix(4, 32), UniformGrid(), InputStatistics(1, inputs.squares * np.nan))


def test_unknown_names_and_formats() -> None:
    with pytest.raises(QuantizationError, match="'gtpq', but must be one of"):
        method("gtpq")
    with pytest.raises(QuantizationError, match="bits is 7"):
        UniformGrid(7, 32)
    with pytest.raises(QuantizationError, match="block_size is 48"):
        UniformGrid(4, 48)
    for wrong in ({"bits": 4.0}, {"bits": True}, {"block_size": 32.0}):
        with pytest.raises(QuantizationError, match=next(iter(wrong))):
            UniformGrid(**wrong)  # type: ignore[arg-type]


def test_codes_are_the_closest() -> None:
    grid = UniformGrid(4, 16, False)
    values = matrix(3, 32, 4)
    result = METHODS["search"].quantize(values, grid, None).blocks
    again = coded(in_blocks(values, 16), result.scales, result.zeros, grid)
    np.testing.assert_array_equal(again, result.codes)
    every = (np.arange(16)[:, None, None, None] - result.zeros[..., None]) * result.scales[..., None]
    distance = np.abs(every - in_blocks(values, 16)).min(axis=0)
    stored = result.values(grid).reshape(3, 2, 16)
    np.testing.assert_allclose(np.abs(stored - in_blocks(values, 16)), distance, atol=1e-6)
