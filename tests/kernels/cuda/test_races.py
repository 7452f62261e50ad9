"""The emulated GPU that looks for races finds those that are planted, also where every number is right, and none in the
kernels as they are."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genai
from genai.kernels.cuda.executor import CudaExecutor
from genai.kernels.cuda.launches import bind
from genai.kernels.cuda.lowering import apply_kernel
from genai.kernels.ir import Linear, Norm, Projection
from genai.kernels.reference.executor import ReferenceExecutor
from genai.models import loading

from .host_driver import HostDriver, LaunchError
from .programs import MadeUpConstants, program, relative_error, step_of
from .race_driver import RaceDriver
from .test_experts_planted import mixed, sorted_pairs
from .test_host_shim import (
    PlantingDriver,
    attended,
    decoded,
    decoded_by_lanes,
    decoded_by_many,
    multiplied,
    multiplied_by_warpgroups,
    prompted,
    prompted_bytes,
)  # fmt: skip
from .test_sampling import PART, compare, random_batch


@dataclass(eq=False)
class PlantingRaceDriver(RaceDriver, PlantingDriver):
    """Both."""


def attended_by_blocks_apart(driver: HostDriver) -> float:
    """The relative error of attention whose blocks put keys and values into pages themselves."""
    driver.multiprocessors = 1000
    return attended(driver)


def normed(driver: HostDriver) -> float:
    """That of a product which norms a row itself, behind another product."""
    rng, constants = np.random.default_rng(0), MadeUpConstants()
    constants.arrays["norm"] = rng.uniform(0.5, 1.5, 96).astype(np.float32)
    first, second = constants.block_weight(rng, 96, 64), constants.block_weight(rng, 40, 96)
    ops = [
        Linear("x", Projection(first), "h", False), Norm("h", "norm", 1e-5, "n"),
        Linear("n", Projection(second), "out", False),
    ]  # fmt: skip
    whole = program(ops, {"x": 64, "h": 96, "n": 96, "out": 40}, constants, ["out"])
    x, step = rng.standard_normal((1, 64)).astype(np.float32), step_of([1], [1])
    ours = CudaExecutor(driver, 1).compile(whole).run(step, {"x": x})["out"]
    return relative_error(ours, ReferenceExecutor().compile(whole).run(step, {"x": x[None]})["out"])


def sampled(driver: HostDriver) -> float:
    """Rows of several blocks each."""
    for seed in range(3):
        compare(driver, *random_batch(np.random.default_rng(seed), 3 * PART - 5, 6))
    return 0.0


COMPUTED = (
    attended, attended_by_blocks_apart, prompted, prompted_bytes, multiplied, multiplied_by_warpgroups, decoded,
    decoded_by_lanes, decoded_by_many, normed, sorted_pairs, mixed, sampled,
)  # fmt: skip
NO_ORDER, UNWAITED = "in no order", "which writes it, was waited for"


@pytest.mark.parametrize("compute", COMPUTED)
def test_kernels_have_none(driver: HostDriver, compute: Any) -> None:
    assert compute(RaceDriver(order=2)) < 2e-2


@pytest.mark.parametrize(
    ("compute", "old", "new", "found"),
    [
        # Lanes that run in step are not ordered for that.
        (attended, "    __syncwarp();\n    sums.add(", "    sums.add(", NO_ORDER),
        # The last block of a row knows that the others are done, and sees nothing of what they made.
        (attended, "  publish();\n  __syncthreads();\n", "  __syncthreads();\n", NO_ORDER),
        (attended, "  publish();\n  __syncthreads();\n", "  if (!threadIdx.x) publish();\n  __syncthreads();\n",
         NO_ORDER),
        (attended, "count_up(arrived) + 1 ==", "++*arrived ==", NO_ORDER),
        (attended, "  __syncthreads();\n  if (!is_last[0]) return;", "  if (!is_last[0]) return;", NO_ORDER),
        (sampled, "  __threadfence();\n  __syncthreads();\n  if (thread", "  __syncthreads();\n  if (thread", NO_ORDER),
        # A page is read while other warps write its last token.
        (attended_by_blocks_apart, "if (sees && !has_newest) bring_page();", "if (sees) bring_page();", NO_ORDER),
        # Before a kernel has waited for the one before.
        (normed, "    wait_for_earlier();\n    slab.bring_normed(given, weights, first_row, rows);",
         "    slab.bring_normed(given, weights, first_row, rows);\n    wait_for_earlier();", UNWAITED),
        (decoded_by_lanes, "    wait_for_earlier();\n    slab.bring(x, first_row);",
         "    slab.bring(x, first_row);\n    wait_for_earlier();", UNWAITED),
        (decoded, "  wait_for_earlier();\n", "", f"{UNWAITED}|no thread of the block waits"),
        (attended, "#elif defined(HOST_SHIM)\n  shim::waited();", "", "kernels before were waited for|no thread"),
        # What kernels of older GPUs do the same way.
        (prompted, "__syncthreads();  // the tokens of this step", "// the tokens of this step", NO_ORDER),
        (multiplied, "__syncthreads();  // the part and", "// the part and", NO_ORDER),
        (decoded, "__syncthreads();  // the stage and its", "// the stage and its", NO_ORDER),
        (decoded_by_lanes, "were requested earlier\n  __syncthreads();", "were requested earlier", NO_ORDER),
        (sorted_pairs, "    __syncwarp();  // all lanes have read their position\n", "", NO_ORDER),
        (sorted_pairs, "  __syncthreads();  // all warps have counted", "", NO_ORDER),
    ],
)  # fmt: skip
def test_planted_ones_are_found(driver: HostDriver, compute: Any, old: str, new: str, found: str) -> None:
    planted = PlantingRaceDriver(order=0, change=(old, new))
    with pytest.raises(LaunchError, match=found):
        compute(planted)
    assert planted.planted


def test_a_race_is_told_with_its_lines(driver: HostDriver) -> None:
    planted = PlantingRaceDriver(change=("  publish();\n  __syncthreads();\n", "  __syncthreads();\n"))
    with pytest.raises(LaunchError) as raised:
        attended(planted)
    told = str(raised.value)
    assert "byte " in told and " is read by thread " in told and ", and written by thread " in told
    assert told.count("attention_rows.cu:") >= 2 and "+0x" not in told


@pytest.mark.parametrize(
    ("columns", "first", "found"),
    [
        (16, 0, ""),
        (17, 0, "is read or written .* 0 bytes behind an array of 64"),
        (16, -4, "is read or written .* 4 bytes before an array of 64"),
        (8, 2, "no multiple of 4 at elementwise.cu"),
    ],
)
def test_memory_that_a_gpu_cannot_read(driver: HostDriver, columns: int, first: int, found: str) -> None:
    """Behind an array's end, before its beginning, between two numbers."""
    looks = RaceDriver()
    kernel = apply_kernel("relu")
    x, out = looks.zeros(64), looks.zeros(4 * 32)
    arguments = bind(
        kernel, x=looks.address(x) + first, up=0, out=looks.address(out), x_stride=16, up_stride=0, out_stride=16,
        first_row=0, rows=1, width=columns, p=(0.0, 0.0, 0.0),
    )  # fmt: skip
    functions = looks.load([kernel])
    with pytest.raises(LaunchError, match=found) if found else nullcontext():
        looks.launch(functions[kernel], kernel, (1, 1, 1), arguments)


@pytest.mark.slow
@pytest.mark.drawn(3)  # the compiler takes two minutes for the kernels of each
@pytest.mark.parametrize(
    ("accuracy", "capability", "cache"), [("int8", 90, "fp16"), ("int8", 80, "int8"), ("fp32", 80, "fp32")]
)
def test_the_bundled_model_has_none(
    driver: HostDriver,
    monkeypatch: pytest.MonkeyPatch,
    bundled_folder: Path,
    accuracy: str,
    capability: int,
    cache: str,
) -> None:
    """Prompts, and steps that are captured, one kernel behind the other; with tokens that are drawn."""
    races = RaceDriver(order=3, capability=capability, multiprocessors=132)
    monkeypatch.setattr(loading, "open_executor", lambda device, threads: CudaExecutor(races, threads))
    options: dict[str, Any] = {"context_size": 256, "cache_bytes": 4 << 20, "accuracy": accuracy, "kv_dtype": cache}
    with genai.Model(bundled_folder, quiet=True, **options) as model, genai.LLM(model) as llm:
        for prompts, temperature in ((["a"], 0), (["12 + 7", "one two", "x"], 1)):
            llm.generate(prompts, max_tokens=5, temperature=temperature, ignore_eos=True, seed=0)
    assert races.graphs_launched
