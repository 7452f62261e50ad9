"""The emulated GPU finds what is planted into the kernels of experts: barriers that are missing or diverge, lanes that
do not meet, copies that are not waited for, memory written out of bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from .host_driver import HostDriver, LaunchError
from .programs import relative_error
from .test_experts import both, layers, moe_op, normal, route
from .test_host_shim import PlantingDriver


def sorted_pairs(driver: HostDriver) -> float:
    """The part of many pairs that is not where it belongs; there are experts for every thread."""
    scores = normal(np.random.default_rng(0), 60, 1000)
    scores[:20, 500] += 9
    routed = route(driver, scores, 3, group=8)
    expected = np.argsort(routed.chosen.reshape(-1), kind="stable")
    counts = np.bincount(routed.chosen.reshape(-1), minlength=1000)
    firsts = [first + i for first, n in zip(np.cumsum(counts) - counts, counts, strict=True) for i in range(0, n, 8)]
    found = routed.groups[: len(firsts), 1]
    return float((routed.ordered != expected).mean() + (found != firsts).mean())


def mixed(driver: HostDriver) -> float:
    """Whether a mixture of many tokens, some of them decoded, is further off than its numbers are."""
    rng = np.random.default_rng(0)
    of = layers(rng, hidden=200, width=160, experts=3)
    x, scores = normal(rng, 80, 200), normal(rng, 80, 3)
    error = relative_error(*both(driver, of, moe_op(of, exact=False), x, scores, prefill=60))
    return 0.0 if error < 2e-2 else 1.0


COUNTED, KNOWN = "  __syncthreads();  // all warps have counted", "  __syncthreads();  // all positions are known"


@pytest.mark.parametrize(
    ("compute", "old", "new", "found"),
    [
        (sorted_pairs, COUNTED, "", "wrong"),  # counts are added up before all warps have counted
        (sorted_pairs, KNOWN, "", "wrong"),  # pairs are put down before it is known where
        (sorted_pairs, "  __syncthreads();  // the sums of all warps are written", "", "wrong"),
        (sorted_pairs, "    __syncwarp();  // all lanes have read their position\n", "", "wrong"),
        (sorted_pairs, KNOWN, "  if (threadIdx.x < 64) __syncthreads();",
         "a thread ends while others wait|have ended already"),
        (sorted_pairs, "const unsigned same = __match_any_sync(ALL_LANES, expert);",
         "const unsigned same = there ? __match_any_sync(ALL_LANES, expert) : 0;", "for ever|has ended|different"),
        (sorted_pairs, "SHARED(int, positions, ORDER_WARPS * MOST_EXPERTS)", "SHARED(int, positions, 7 * MOST_EXPERTS)",
         "shared memory was written out of bounds"),
        (sorted_pairs, "for (int i = all_groups + threadIdx.x; i < most;", "for (int i = threadIdx.x - 1; i < 0;",
         "memory was written out of bounds"),
        (mixed, "wait_groups<1>();", "wait_groups<2>();", "wrong"),  # the newest copies may still be under way
        (mixed, "__syncthreads();  // the part and", "// the part and", "wrong"),
        (mixed, "sources[token] = __shfl_sync(ALL_LANES, source, token)", "sources[token] = source", "wrong"),
    ],
)  # fmt: skip
def test_planted_bugs_are_found(driver: HostDriver, compute: Any, old: str, new: str, found: str) -> None:
    for order in (0, 1, 2):
        planted = PlantingDriver(order=order, change=(old, new))
        if found != "wrong":
            with pytest.raises(LaunchError, match=found):
                compute(planted)
            assert planted.planted
            continue
        try:
            assert compute(planted) != 0
        except LaunchError as error:
            assert "out of bounds" in str(error)  # where a wrong position leads
        assert planted.planted


@pytest.mark.parametrize("compute", [sorted_pairs, mixed])
def test_what_is_not_planted_is_right(driver: HostDriver, compute: Any) -> None:
    assert compute(driver) == 0
