"""The emulated GPU finds what is planted: barriers that are missing or diverge, lanes that do not meet, copies that are
not waited for, memory written out of bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from genai.kernels.cuda.executor import CudaExecutor
from genai.kernels.cuda.sources import CudaKernel
from genai.kernels.ir import Linear, Projection
from genai.kernels.reference.executor import ReferenceExecutor

from .host_driver import HostDriver, LaunchError
from .programs import MadeUpConstants, program, relative_error, step_of
from .test_attention import attention, copy_of, layer_of, made_layer, rows_for, run


@dataclass(eq=False)
class PlantingDriver(HostDriver):
    """Changes the source of kernels: (what stands there, what stands there instead)."""

    change: tuple[str, str] = ("", "")
    planted: bool = False

    def text(self, source: str) -> str:
        self.planted |= self.change[0] in source
        return source.replace(*self.change, 1)


def attended(driver: HostDriver) -> float:
    """The relative error of attention."""
    record, rng = attention(), np.random.default_rng(0)
    layer, step = layer_of(rng, 8, 2, 64, 64, "float32"), step_of([200], [1], num_blocks=8, rng=rng)
    rows = rows_for(record, 1, rng)
    ours = run(CudaExecutor(driver, 1), record, MadeUpConstants(), layer, step, rows)
    driver.check()
    return relative_error(ours, run(ReferenceExecutor(), record, MadeUpConstants(), layer, step, rows))


def prompted(driver: HostDriver, kind: str = "float16") -> float:
    """The relative error of attention in tiles. Tokens that no row sees are NaN, and so are those of the last rows."""
    record, rng = attention(head_size=32, v_head_size=32), np.random.default_rng(0)
    layer, step = made_layer(record, kind, rng), step_of([150], [60], num_blocks=8, rng=rng, prefill=1)
    for block in set(range(8)) - set(step.groups[0].block_tables[0].tolist()):
        layer.keys[block], layer.values[block] = (np.nan, np.nan) if kind == "float16" else (255, 255)
    rows = rows_for(record, 60, rng)
    rows["v"][50:] = np.nan
    other = copy_of(layer)
    ours = run(CudaExecutor(driver, 1), record, MadeUpConstants(), layer, step, rows)
    driver.check()
    return relative_error(ours[:50], run(ReferenceExecutor(), record, MadeUpConstants(), other, step, rows)[:50])


def prompted_bytes(driver: HostDriver) -> float:
    """The same over pages of bytes."""
    return prompted(driver, "int8")


def prompted_floats(driver: HostDriver) -> float:
    """The same over pages of floats of 8 bits."""
    return prompted(driver, "float8")


def multiplied(driver: HostDriver) -> float:
    """The relative error of a product of many rows."""
    rng, constants = np.random.default_rng(0), MadeUpConstants()
    weight = constants.block_weight(rng, 64, 512)
    whole = program([Linear("x", Projection(weight), "out", False)], {"x": 512, "out": 64}, constants, ["out"])
    x, step = rng.standard_normal((64, 512)).astype(np.float32), step_of([64], [64], prefill=1)
    ours = CudaExecutor(driver, 1).compile(whole).run(step, {"x": x})["out"]
    driver.check()
    return relative_error(ours, ReferenceExecutor().compile(whole).run(step, {"x": x[None]})["out"])


def multiplied_by_warpgroups(driver: HostDriver) -> float:
    """The same by warpgroups."""
    driver.capability = 90
    return multiplied(driver)


def decoded(driver: HostDriver, rows: int = 12) -> float:
    """The relative error of a product of some rows as bytes."""
    rng, constants = np.random.default_rng(0), MadeUpConstants()
    weight = constants.block_weight(rng, 36, 4200)
    whole = program([Linear("x", Projection(weight), "out", False)], {"x": 4200, "out": 36}, constants, ["out"])
    x, step = rng.standard_normal((rows, 4200)).astype(np.float32), step_of([1] * rows, [1] * rows)
    ours = CudaExecutor(driver, 1).compile(whole).run(step, {"x": x})["out"]
    driver.check()
    return relative_error(ours, ReferenceExecutor().compile(whole).run(step, {"x": x[None]})["out"])


def decoded_by_lanes(driver: HostDriver) -> float:
    """The same of one row."""
    return decoded(driver, 1)


def decoded_by_many(driver: HostDriver) -> float:
    """The same of many rows, which come through shared memory as well."""
    return decoded(driver, 40)


BARRIER = "  __syncthreads();\n  auto result = "
IN_LOOP = "  for (int i = threadIdx.x; i < together * v_head_size; i += SPLIT_THREADS) {"


@pytest.mark.parametrize(
    ("compute", "old", "new", "found"),
    [
        (attended, BARRIER, "  auto result = ", "wrong"),  # warps are put together before they are done
        (attended, "    wait_groups<0>();\n", "", "wrong"),  # values are computed before they have come
        (attended, IN_LOOP, "  if (threadIdx.x < 64) __syncthreads();\n" + IN_LOOP,
         "threads of the block meet at different barriers"),
        (attended, "  sums.clear();\n", "  sums.clear();\n  if (lane < 16) __syncwarp();\n",
         "lanes meet in different operations"),
        (attended, "count_up(arrived) + 1 ==", "count_up(arrived) ==", "wrong"),  # nobody comes last
        (attended, "memory, SPLIT_WARPS * OWN_BYTES)", "memory, SPLIT_WARPS * OWN_BYTES - 64)",
         "shared memory was written out of bounds"),
        (attended, "float* part = given.parts + index", "float* part = given.parts - 8 + index",
         "memory was written out of bounds"),
        (prompted, "{ wait_groups<0>(); }", "{ wait_groups<1>(); }", "wrong"),
        (prompted, "__syncthreads();  // the tokens of this step", "// the tokens of this step", "wrong"),
        (prompted, "load_transposed(pairs, keys + ", "load_transposed(pairs, (const char*)keys + 8 + ", "not aligned"),
        (prompted_bytes, "    wait_groups<0>();\n#pragma unroll", "    wait_groups<1>();\n#pragma unroll", "wrong"),
        (prompted_floats, "wait_groups<0>();  // wait for", "wait_groups<1>();  // wait for", "wrong"),
        (multiplied, "wait_groups<1>();", "wait_groups<2>();", "wrong"),  # the newest copies may still be under way
        (multiplied, "__syncthreads();  // the part and", "// the part and", "wrong"),
        (multiplied, "copy_later(stage + offset", "copy_later(stage + 1 + offset", "not aligned"),
        (decoded, "wait_groups<Own::COUNT - 2>();", "wait_groups<Own::COUNT - 1>();", "wrong"),
        (decoded, "__syncthreads();  // the stage and its", "// the stage and its", "wrong"),
        (decoded, "(chunk ^ row % 8)", "(chunk ^ row % 4 ^ threadIdx.x % 2)", "wrong"),
        (decoded, "own + i % 2 * 8, chunk)", "own + i / 2 * 8, chunk)", "wrong"),
        (decoded_by_many, "COUNT == 2 ? 0 : 1>", "COUNT == 2 ? 1 : 2>", "wrong"),
        (decoded_by_many, "    end_group();  // in a stage", "    // in a stage", "wrong"),
        (decoded_by_many, "[lane % 4]", "[lane / 8]", "wrong"),
        (decoded_by_lanes, "were requested earlier\n  __syncthreads();", "were requested earlier", "wrong"),
        (decoded_by_lanes, "wait_groups<AHEAD>();", "wait_groups<AHEAD + 1>();", "wrong"),
        (decoded_by_lanes, "wait_groups<AHEAD - 1>();", "wait_groups<AHEAD>();", "wrong"),
        (decoded_by_lanes, "part * PHASES) % WARP", "part * PHASES / 2) % WARP", "wrong"),
        (decoded_by_lanes, "array = memory + before;", "array = memory;", "wrong"),
        (decoded_by_lanes, "(blockIdx.x + 1) - first_unit", "(blockIdx.x + 1) - first_unit - 1", "wrong"),
        (multiplied_by_warpgroups, "      begin_products();\n", "", "since the last begin_products"),
        (multiplied_by_warpgroups, "wait_products<1>();", "wait_products<2>();", "products read"),
        (multiplied_by_warpgroups, "  wait_products<0>();\n", "", "a thread ends with products under way"),
        (multiplied_by_warpgroups, "tiles[(number + 1) % 2]", "tiles[number % 2]", "registers are written while"),
        (multiplied_by_warpgroups, "activations.ask(part + BEFORE, (number + BEFORE) % STAGES)",
         "activations.ask(part + STAGES, number)", "read what is there"),
        (multiplied_by_warpgroups, "left + stage, Shape::WARPS)", "left + stage, 1)", "not ended|read what is"),
        (multiplied_by_warpgroups, "prepare_arrival(arrivals + stage), ", "", "is not prepared"),
        (multiplied_by_warpgroups, "    wait_arrival(arrivals + stage, part / STAGES % 2);\n", "",
         "the phase before has not ended"),
        (multiplied_by_warpgroups, "part / STAGES % 2)", "0)", "ends with copies under way|has not ended"),
        (multiplied_by_warpgroups, "right + 2 * tile", "right + tile", "wrong"),
        (multiplied_by_warpgroups, "(1024 / 16) << 32", "(512 / 16) << 32", "wrong"),
        (multiplied_by_warpgroups, "1ull << 62", "2ull << 62", "a descriptor of another form"),
        (multiplied_by_warpgroups, "(piece ^ swizzle)", "(piece ^ swizzle / 2)", "wrong"),
        (multiplied_by_warpgroups, "(0u - shared_address(memory)) % bytes", "0", "wrong"),
    ],
)  # fmt: skip
def test_planted_bugs_are_found(driver: HostDriver, compute: Any, old: str, new: str, found: str) -> None:
    for order in (0, 1, 2):
        planted = PlantingDriver(order=order, change=(old, new))
        if found == "wrong":
            assert not compute(planted) < 1e-2  # NaN, too
        else:
            with pytest.raises(LaunchError, match=found):
                compute(planted)
        assert planted.planted


@pytest.mark.parametrize(
    "compute",
    [
        attended,
        prompted,
        prompted_bytes,
        prompted_floats,
        multiplied,
        multiplied_by_warpgroups,
        decoded,
        decoded_by_lanes,
        decoded_by_many,
    ],
)
def test_what_is_not_planted_is_right(driver: HostDriver, compute: Any) -> None:
    assert compute(driver) < 1e-2


def test_a_kernel_is_launched_with_the_threads_it_was_made_for(driver: HostDriver) -> None:
    kernel = CudaKernel("norm.cu", "norm<false>", "NormArguments", 256)
    other = CudaKernel("norm.cu", "norm<false>", "NormArguments", 128)
    function = driver.load([kernel])[kernel]
    with pytest.raises(LaunchError, match="other threads"):
        driver.launch(function, other, (1, 1, 1), np.zeros((), kernel.layout))
