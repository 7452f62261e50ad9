"""Mixtures of experts on the emulated GPU give what the reference gives: for every form of weights, in any company."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from genai.kernels.cuda.executor import CudaExecutor
from genai.kernels.cuda.launches import bind
from genai.kernels.cuda.moe import route_kernels
from genai.kernels.device import UnsupportedOp
from genai.kernels.ir import BlockWeight, DenseWeight, LoraDelta, MoE, Projection
from genai.kernels.reference.executor import ReferenceExecutor
from genai.kernels.reference.weights import routing_weights

from .host_driver import HostDriver, LaunchError
from .programs import MadeUpConstants, program, relative_error, step_of

pytestmark = pytest.mark.gpu

EXPERTS, HIDDEN, WIDTH = 6, 96, 80


@dataclass(frozen=True)
class Layers:
    """The two layers of a mixture, and what its experts are."""

    constants: MadeUpConstants
    first: Projection
    second: Projection


def layers(
    rng: np.random.Generator, *, experts: int = EXPERTS, hidden: int = HIDDEN, width: int = WIDTH, gated: bool = True,
    bias: bool = False, dtype: str = "", **form: Any,
) -> Layers:  # fmt: skip
    """Random ones; of floats if `dtype`, otherwise of codes of a form that `block_weight` takes."""
    constants = MadeUpConstants()

    def branch(name: str, rows: int, columns: int) -> Projection:
        weight: BlockWeight | DenseWeight
        if dtype:
            constants.arrays[name] = (rng.standard_normal((experts, rows, columns)) / columns**0.5).astype(dtype)
            weight = DenseWeight(name, rows, columns, True, experts, gated)
        else:
            whole = constants.block_weight(rng, experts * rows, columns, **form)
            weight = replace(whole, rows=rows, experts=experts, interleaved=gated)
        if bias:
            constants.arrays[f"{name} bias"] = rng.standard_normal((experts, rows)).astype(np.float32)
        return Projection(weight, f"{name} bias" if bias else "")

    return Layers(constants, branch("first", width * (1 + gated), hidden), branch("second", hidden, width))


def moe_op(of: Layers, per_token: int = 2, *, exact: bool, normalized: bool = True, **options: Any) -> MoE:
    options = {"activation": "swiglu", **options}
    return MoE("x", "scores", "out", per_token, normalized, of.first, of.second, exact=exact, **options)


def both(
    driver: HostDriver, of: Layers, op: MoE, x: NDArray[Any], scores: NDArray[Any], prefill: int = 0
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The mixture by both executors; the last `prefill` tokens have prefill numerics."""
    widths = {"x": x.shape[1], "scores": scores.shape[1], "out": x.shape[1]}
    whole = program([op], widths, of.constants, ["out"])
    lengths = [count for count in (len(x) - prefill, prefill) if count]
    step, given = step_of(lengths, lengths, prefill=int(prefill > 0)), {"x": x, "scores": scores}
    ours = CudaExecutor(driver, 1).compile(whole).run(step, given)["out"]
    driver.check()
    theirs = ReferenceExecutor().compile(whole).run(step, {name: array[None] for name, array in given.items()})["out"]
    return ours.reshape(x.shape), theirs.reshape(x.shape)


def normal(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    return rng.standard_normal(shape).astype(np.float32)


FORMS: list[dict[str, Any]] = [
    {"bits": 4}, {"bits": 8, "points": True, "scales": "float32", "bias": True},
    {"bits": 4, "block_size": 64, "points": True, "bias": True}, {"bits": 8, "per_row": True}, {"bits": 2},
    {"bits": 3, "block_size": 16, "points": True}, {"bits": 5, "scales": "bfloat16"}, {"bits": 6, "block_size": 128},
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("tokens", "order"), [(1, 0), (2, 1), (4, 2), (21, 0)])
def test_codes(driver: HostDriver, form: dict[str, Any], tokens: int, order: int) -> None:
    driver.order = order
    rng = np.random.default_rng(tokens)
    of = layers(rng, **form)
    x, scores = normal(rng, tokens, HIDDEN), normal(rng, tokens, EXPERTS)
    for exact in (True, False):
        ours, theirs = both(driver, of, moe_op(of, exact=exact), x, scores)
        assert relative_error(ours, theirs) < (2e-6 if exact else 2e-2)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("tokens", [1, 10])
def test_floats(driver: HostDriver, dtype: str, tokens: int) -> None:
    """Sizes that fill no step, chunk or tile."""
    rng = np.random.default_rng(0)
    of = layers(rng, hidden=51, width=37, bias=True, dtype=dtype)
    x, scores = normal(rng, tokens, 51), normal(rng, tokens, EXPERTS)
    ours, theirs = both(driver, of, moe_op(of, 3, exact=True, normalized=False), x, scores)
    assert relative_error(ours, theirs) < 2e-6


@pytest.mark.parametrize("activation", ["relu", "relu_squared", "silu", "gelu_tanh", "copy", "geglu"])
def test_activations_without_parameters(driver: HostDriver, activation: str) -> None:
    rng = np.random.default_rng(0)
    of = layers(rng, width=37, gated=activation == "geglu", bias=True)
    x, scores = normal(rng, 5, HIDDEN), normal(rng, 5, EXPERTS)
    ours, theirs = both(driver, of, moe_op(of, exact=True, activation=activation), x, scores)
    assert relative_error(ours, theirs) < 2e-6


@pytest.mark.parametrize("parameters", [(1.702, 1.0, 7.0), (1.0, 0.0, 0.5), (1.5, 0.25, np.inf)])
def test_parameters_of_swiglu(driver: HostDriver, parameters: tuple[float, float, float]) -> None:
    rng = np.random.default_rng(0)
    of = layers(rng, bias=True)
    x, scores = 4 * normal(rng, 9, HIDDEN), normal(rng, 9, EXPERTS)
    ours, theirs = both(driver, of, moe_op(of, exact=True, parameters=parameters), x, scores)
    assert relative_error(ours, theirs) < 2e-6


@pytest.mark.parametrize(("experts", "per_token", "normalized"), [(1, 1, True), (5, 5, True), (40, 20, False)])
def test_any_number_of_experts(driver: HostDriver, experts: int, per_token: int, normalized: bool) -> None:
    rng = np.random.default_rng(0)
    of = layers(rng, experts=experts, hidden=32, width=32)
    x, scores = normal(rng, 9, 32), normal(rng, 9, experts)
    ours, theirs = both(driver, of, moe_op(of, per_token, exact=True, normalized=normalized), x, scores)
    assert relative_error(ours, theirs) < 2e-6


@pytest.mark.parametrize("form", [*FORMS[:2], {"dtype": "float16"}], ids=str)
@pytest.mark.parametrize("order", [0, 1, 2])
def test_many_rows(driver: HostDriver, form: dict[str, Any], order: int) -> None:
    """Rows of long prompts, by tensor cores, after a few decode rows; their bits do not depend on the other rows."""
    driver.order = order
    rng = np.random.default_rng(order)
    of = layers(rng, hidden=100, width=70, experts=3, **form)
    x, scores = normal(rng, 93, 100), normal(rng, 93, 3)
    scores[:, 1] += 2  # more than a tile goes there
    op = moe_op(of, exact=False)
    together, theirs = both(driver, of, op, x, scores, prefill=88)
    assert relative_error(together, theirs) < 2e-2 and relative_error(together[5:], theirs[5:]) < 1e-2
    alone, _ = both(driver, of, op, x[80:], scores[80:], prefill=13)
    np.testing.assert_array_equal(alone, together[80:])


@pytest.mark.parametrize("exact", [False, True])
def test_a_token_does_not_depend_on_its_company(driver: HostDriver, exact: bool) -> None:
    """Hard tokens among them; some experts get all tokens, some none; what no number comes of is none for all."""
    rng = np.random.default_rng(0)
    of = layers(rng, bias=True, block_size=32)
    op = moe_op(of, exact=exact)
    x, scores = normal(rng, 27, HIDDEN), normal(rng, 27, EXPERTS)
    scores[:, 3] += 5
    scores[:, 4] = -9
    x[2], x[4] = 0, x[4] * np.float32(1e15)
    x[5, 7], x[6, 9] = np.nan, np.inf
    scores[8, 2], scores[9, 0], scores[10], scores[11] = np.nan, np.inf, -np.inf, np.nan
    together, theirs = both(driver, of, op, x, scores)
    numbers = np.delete(np.arange(27), [5, 6, 9, 10, 11])
    assert np.isfinite(together[numbers]).all() and not np.isfinite(theirs[[5, 6, 9, 10, 11]]).any()
    assert np.isnan(together[[9, 10, 11]]).all()
    for first, count in ((0, 1), (3, 2), (8, 4), (9, 7), (1, 20)):
        part, _ = both(driver, of, op, x[first : first + count], scores[first : first + count])
        np.testing.assert_array_equal(part, together[first : first + count])


def test_experts_that_no_token_is_sent_to_take_no_part(driver: HostDriver) -> None:
    rng = np.random.default_rng(0)
    of = layers(rng, dtype="float32")
    of.constants.arrays["first"][[0, 3, 4, 5]] = np.nan
    scores = np.full((7, EXPERTS), -1e30, np.float32)
    scores[:, 1:3] = 0
    ours, theirs = both(driver, of, moe_op(of, exact=True), normal(rng, 7, HIDDEN), scores)
    assert relative_error(ours, theirs) < 2e-6


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("per_token", [1, 2, 7, 24])
def test_routing(driver: HostDriver, per_token: int, normalized: bool) -> None:
    """Ties, infinities and NaNs included: a NaN comes last, and makes NaN of the shares whose softmax it is in."""
    rng = np.random.default_rng(per_token)
    scores = rng.integers(-3, 4, (120, 24)).astype(np.float32)
    scores[30:] += normal(rng, 90, 24) * 10
    hard = rng.random((120, 24)) < 0.05
    hard[:60] = False
    scores[hard] = rng.choice([np.nan, np.inf, -np.inf, -1e38, -0.0], int(hard.sum())).astype(np.float32)
    scores[90], scores[91] = -np.inf, np.nan
    routed = route(driver, scores, per_token, normalized=normalized)
    with np.errstate(all="ignore"):
        chosen, shares = routing_weights(scores, per_token, normalized=normalized)
    np.testing.assert_array_equal(routed.chosen, chosen)
    np.testing.assert_allclose(routed.shares, shares, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize(
    ("rows", "first", "experts", "per_token", "group"),
    [(1, 0, 9, 3, 8), (8, 0, 9, 3, 8), (8, 3, 300, 7, 8), (9, 1, 1024, 2, 8), (150, 20, 9, 3, 64), (700, 0, 2, 1, 64)],
)
def test_pairs_in_order(
    driver: HostDriver, order: int, rows: int, first: int, experts: int, per_token: int, group: int
) -> None:
    """A stable sort by expert, in groups of one expert, of which there are no more than are looked at."""
    driver.order = order
    rng = np.random.default_rng(rows)
    scores = normal(rng, rows + first, experts) + (np.arange(experts) % 3 == 0)
    routed = route(driver, scores, per_token, first=first, group=group)
    pairs = first * per_token + np.argsort(routed.chosen[first:].reshape(-1), kind="stable")
    np.testing.assert_array_equal(routed.ordered[first * per_token :], pairs)
    of_pairs, found = routed.chosen.reshape(-1), list[int]()
    for expert, begin, count, _ in routed.groups[first * per_token :]:
        assert 0 <= count <= group
        found += routed.ordered[begin : begin + count].tolist()
        assert (of_pairs[found[len(found) - count :]] == expert).all()
    assert found == pairs.tolist()
    counts = np.bincount(of_pairs[first * per_token :])
    assert (routed.groups[first * per_token :, 2] > 0).sum() == (-(-counts // group)).sum()


@dataclass(frozen=True)
class Routed:
    chosen: NDArray[np.int32]
    shares: NDArray[np.float32]
    ordered: NDArray[np.int32]
    groups: NDArray[np.int32]


# Numbers before and behind what kernels of routing write: what is planted there does no harm.
_ROOM = 1 << 14


def route(
    driver: HostDriver, scores: NDArray[np.float32], per_token: int, *, normalized: bool = True, first: int = 0,
    group: int = 8,
) -> Routed:  # fmt: skip
    """What the kernels of routing write, for the rows from `first` on."""
    rows, experts = scores.shape
    pairs, before = rows * per_token, first * per_token
    sizes = {"chosen": pairs, "shares": pairs, "ordered": pairs, "groups": 4 * pairs}
    memory = {name: driver.upload(np.full(size + 2 * _ROOM, -1, np.int32)) for name, size in sizes.items()}
    held, few = driver.upload(scores), rows - first <= 8
    one, two, both_at_once = route_kernels()
    for kernel, blocks in ((both_at_once, int(few)), (one, 0 if few else -(-(rows - first) // 4)), (two, int(not few))):
        arguments = bind(
            kernel, scores=driver.address(held), scores_stride=experts, first_row=first, rows=rows, experts=experts,
            per_token=per_token, normalized=int(normalized), group=group,
            **{name: driver.address(array) + 4 * _ROOM for name, array in memory.items()},
        )  # fmt: skip
        if blocks:
            driver.launch(driver.load([kernel])[kernel], kernel, (blocks, 1, 1), arguments)
    found = {name: driver.download(array) for name, array in memory.items()}
    looked_at = (pairs - before + (group - 1) * min(experts, pairs - before)) // group
    ends = dict.fromkeys(sizes, pairs) | {"groups": 4 * (before + looked_at)}
    for name, array in found.items():
        begin = 4 * before if name == "groups" else before
        if (array[: _ROOM + begin] != -1).any() or (array[_ROOM + ends[name] :] != -1).any():
            raise LaunchError(f"memory was written out of bounds: {name}")
    inside = {name: array[_ROOM : _ROOM + ends[name]] for name, array in found.items()}
    chosen, shares = inside["chosen"].reshape(-1, per_token), inside["shares"].view(np.float32).reshape(-1, per_token)
    return Routed(chosen, shares, inside["ordered"], inside["groups"].reshape(-1, 4))


def test_many_pairs_are_arranged_in_parts(driver: HostDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genai.kernels.cuda.moe.MOST_IN_GRID", 7)
    rng = np.random.default_rng(0)
    of = layers(rng)
    x, scores = normal(rng, 21, HIDDEN), normal(rng, 21, EXPERTS)
    ours, theirs = both(driver, of, moe_op(of, exact=True), x, scores)
    assert relative_error(ours, theirs) < 2e-6
    assert sum("arrange_floats" in name for name in driver.launched) == 1 + 6


def test_what_there_is_no_kernel_for_is_refused_by_name(driver: HostDriver) -> None:
    rng = np.random.default_rng(0)
    few, many = layers(rng), layers(rng, experts=1025, hidden=32, width=32)
    wrong = [
        (many, moe_op(many, exact=True), "1025 experts: at most 1024"),
        (few, moe_op(few, exact=True, activation="sin"), "the function sin"),
        (few, replace(moe_op(few, exact=True), first=replace(few.first, delta=LoraDelta("hidden", 0))), "adapters"),
    ]
    for of, op, text in wrong:
        widths = {"x": HIDDEN, "scores": EXPERTS, "out": HIDDEN, "hidden": 1}
        with pytest.raises(UnsupportedOp, match=text):
            CudaExecutor(driver, 1).compile(program([op], widths, of.constants, ["out"]))


def test_its_arithmetic_has_a_name(driver: HostDriver) -> None:
    of, executor = layers(np.random.default_rng(0)), CudaExecutor(driver, 1)
    named = [
        executor.arithmetic(moe_op(of, exact=exact), of.constants, prefill=prefill)
        for exact in (False, True)
        for prefill in (False, True)
    ]
    assert named == ["dp4a int8", "mma bf16", "fp32", None]
