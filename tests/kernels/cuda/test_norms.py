"""Norms that products of one or two rows do themselves, and the ways in which such products are shared out."""

from __future__ import annotations

import numpy as np
import pytest

from genai.kernels.cuda.decode_lanes import CAPACITIES, Room, lanes
from genai.kernels.cuda.executor import CudaExecutor
from genai.kernels.cuda.weight_layout import BlockReader
from genai.kernels.cuda.weights import DeviceMatrix
from genai.kernels.ir import Gate, Linear, Norm, Op, Projection
from genai.kernels.reference.executor import ReferenceExecutor

from .host_driver import HostDriver
from .programs import MadeUpConstants, program, relative_error, step_of
from .test_decode import ROUNDED, one_set_of_bits

pytestmark = pytest.mark.gpu


def behind_a_norm(hidden: int, *, gated: bool = True) -> tuple[MadeUpConstants, list[Op], dict[str, int]]:
    """A norm, and products that read it."""
    constants, rng = MadeUpConstants(), np.random.default_rng(hidden)
    constants.arrays["norm"] = rng.uniform(0.5, 1.5, hidden).astype(np.float32)
    single, gate, up = (constants.block_weight(rng, 37, hidden) for _ in range(3))
    ops: list[Op] = [Norm("x", "norm", 1e-5, "normed"), Linear("normed", Projection(single), "y", False)]
    widths = {"x": hidden, "normed": hidden, "y": 37}
    if gated:
        ops += [Linear("normed", Projection(gate), "gate", False), Linear("normed", Projection(up), "up", False)]
        ops.append(Gate(gate="gate", up="up", activation="silu", out="z"))
        widths |= {"gate": 37, "up": 37, "z": 37}
    return constants, ops, widths


@pytest.mark.parametrize("hidden", [96, 4160])
def test_products_norm_few_rows_themselves(driver: HostDriver, hidden: int) -> None:
    """With the same bits as the kernel that norms more of them."""
    constants, ops, widths = behind_a_norm(hidden)
    what = program(ops, widths, constants, ["y", "z"])
    x = np.random.default_rng(1).standard_normal((9, hidden)).astype(np.float32)
    found = {}
    for count in (9, 3, 2, 1):
        step, given = step_of([1] * count, [1] * count), {"x": x[:count]}
        del driver.launched[:]
        found[count], theirs = (
            executor.compile(what).run(step, given) for executor in (CudaExecutor(driver, 1), ReferenceExecutor(1))
        )
        assert any(name.startswith("norm_") for name in driver.launched) == (count > 2)
        for name, rows in theirs.items():
            ours = np.asarray(found[count][name]).reshape(count, -1)
            assert relative_error(ours, np.asarray(rows).reshape(count, -1)) < ROUNDED, (name, count)
            assert np.array_equal(ours, np.asarray(found[9][name]).reshape(9, -1)[:count]), (name, count)
    driver.check()


def test_norms_that_others_need_as_well(driver: HostDriver) -> None:
    """Values that are wanted, columns that cannot be read four at a time, prompts beside decoded rows."""
    constants, ops, widths = behind_a_norm(96, gated=False)
    odd_constants, odd, odd_widths = behind_a_norm(98, gated=False)
    wanted = program(ops, widths, constants, ["y", "normed"])
    plain, other = program(ops, widths, constants, ["y"]), program(odd, odd_widths, odd_constants, ["y"])
    prompt = step_of([1, 5], [1, 5], prefill=1)
    for what, step in ((wanted, step_of([1], [1])), (other, step_of([1], [1])), (plain, prompt)):
        rows, width = len(step.tokens), what.types["x"].width
        x = np.random.default_rng(1).standard_normal((rows, width)).astype(np.float32)
        del driver.launched[:]
        ours, theirs = (
            executor.compile(what).run(step, {"x": x}) for executor in (CudaExecutor(driver, 1), ReferenceExecutor(1))
        )
        assert any(name.startswith("norm_") for name in driver.launched)
        for name in what.outputs:
            found, expected = (np.asarray(run[name]).reshape(rows, -1) for run in (ours, theirs))
            assert relative_error(found, expected) < (1e-6 if name == "normed" else ROUNDED), name


@pytest.mark.parametrize("columns", [5000, 32 * CAPACITIES[-1] + 32])
def test_wide_rows(driver: HostDriver, columns: int) -> None:
    """Rows that have room in larger blocks, or in none: then tensor cores multiply one row, too."""
    rng, constants = np.random.default_rng(0), MadeUpConstants()
    one_set_of_bits(driver, {"w": constants.block_weight(rng, 5, columns)}, constants, (3, 2, 1), columns)
    assert any("decode_few" in name for name in driver.launched) == (columns < 32 * CAPACITIES[-1])


@pytest.mark.drawn(3)
@pytest.mark.parametrize("rows", [1, 5, 63, 64, 65, 129, 300])
def test_outputs_are_shared_out(driver: HostDriver, rows: int) -> None:
    """Over as many blocks as there are multiprocessors, or twice as many; also numbers that begin anywhere."""
    rng, constants = np.random.default_rng(0), MadeUpConstants()
    weights = {"per row": constants.block_weight(rng, rows, 96, per_row=True)}
    one_set_of_bits(driver, weights, constants, (3, 1), 96)


def made(rows: int, columns: int, bits: int = 4, per_chunk: int = 2) -> DeviceMatrix:
    chunks = -(-columns // 32)
    return DeviceMatrix(rows, columns, {}, BlockReader(bits), "", rows * chunks * (4 * bits + per_chunk), ())


def test_what_a_block_has() -> None:
    """No more than its GPU gives; one row where two have no room; no way where one has none either."""
    large, small = Room.of(90, 132), Room.of(89, 128)
    assert (large.shared, small.shared) == (160 << 10, 96 << 10)
    for room in (large, small):
        for matrix in (made(4096, 4096), made(128256, 4096), made(4096, 14336), made(8192, 28672, 8), made(7, 64)):
            for gated in (False, True):
                for way in lanes(matrix, room, gated=gated):
                    assert way.shared <= room.shared and way.blocks * way.each >= matrix.rows
    assert [way.each for way in lanes(made(14336, 4096), large, gated=True)] == [64, 64]
    assert [way.each for way in lanes(made(14336, 4096), small, gated=True)] == [32, 32]
    assert [way.rows for way in lanes(made(8192, 28672), large, gated=False)] == [1]
    assert lanes(made(8192, 28672), small, gated=False) == lanes(made(8192, 1 << 20), large, gated=False) == ()
    assert [way.blocks for way in lanes(made(4096, 4096), large, gated=False)] == [132, 132]
    assert lanes(made(2048, 4096), large, gated=False)[0].streams == 1
