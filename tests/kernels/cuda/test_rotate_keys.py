"""Keys that a GPU turns in their pages are those that the host turns there, and exact arithmetic gives, rounded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from genai.kernels.cache_layout import PAGE_TOKENS, PagedLayer
from genai.kernels.cuda.attention import KINDS
from genai.kernels.cuda.executor import CudaExecutor
from genai.kernels.device import KeyRotation
from genai.kernels.host_memory import HostMemory
from genai.kernels.reference.attention import rotate
from genai.kernels.reference.pages import read_pages

from .host_driver import HostDriver, LaunchError
from .programs import layer_of, packed_layer_of
from .test_host_shim import PlantingDriver

pytestmark = pytest.mark.gpu

BLOCKS, CHOSEN = 7, [5, 0, 3]
# Head size, KV heads, pairs that are turned: the usual ones, part of a head, sizes and parts that no vector divides.
SHAPES = {
    "a head": (64, 2, 32), "part of a head": (80, 3, 10), "an odd part": (96, 1, 7), "wide": (256, 2, 128),
    "narrow": (32, 5, 16), "less than a warp": (24, 2, 12), "odd": (10, 3, 5), "one pair": (100, 2, 1),
    "more than a block at once": (128, 1, 64),
}  # fmt: skip
CASES = [
    (kind, shape)
    for kind in KINDS
    for shape, (size, _, _) in SHAPES.items()
    if (kind != "int8" or size % 8 == 0) and (kind != "int4" or size in (32, 64, 128, 256))
]
# How far turned keys may be from exact ones, in parts of the largest.
NEAR = {"float32": 1e-6, "float16": 6e-4, "bfloat16": 4e-3, "float8": 0.07, "int8": 6e-3, "int4": 0.2}
EVERY = np.arange(BLOCKS)


def made_layer(kind: str, size: int, heads: int, rng: np.random.Generator) -> PagedLayer:
    if kind.startswith("int"):
        return packed_layer_of(rng, BLOCKS, heads, size, 64, int(kind.removeprefix("int")))
    return layer_of(rng, BLOCKS, heads, size, 40, kind)


def copy_of(layer: PagedLayer) -> PagedLayer:
    return PagedLayer(layer.keys.copy(), layer.values.copy(), layer.packed)


def a_turn(pairs: int, rng: np.random.Generator, *, interleaved: bool = False) -> KeyRotation:
    angles = rng.uniform(-3, 3, pairs)
    return KeyRotation(np.cos(angles), np.sin(angles), interleaved)


def turned(driver: Any, turns: list[tuple[PagedLayer, KeyRotation]], blocks: list[int]) -> list[PagedLayer]:
    """Copies of layers whose keys the device has turned."""
    uploaded = [
        PagedLayer(*(driver.upload(array) for array in (layer.keys, layer.values)), layer.packed) for layer, _ in turns
    ]
    CudaExecutor(driver, 1).rotate_keys(
        blocks, [(layer, turn) for layer, (_, turn) in zip(uploaded, turns, strict=True)]
    )
    back = [PagedLayer(driver.download(one.keys), driver.download(one.values), one.packed) for one in uploaded]
    for mine, (before, _) in zip(back, turns, strict=True):
        assert mine.values.tobytes() == before.values.tobytes()
        untouched = np.setdiff1d(EVERY, blocks)
        assert mine.keys[untouched].tobytes() == before.keys[untouched].tobytes()
    return back


def check(driver: Any, mine: PagedLayer, before: PagedLayer, turn: KeyRotation, blocks: list[int]) -> None:
    """Against exact arithmetic, and against what the host does."""
    keys, exact = read_pages(before, np.array(blocks))[0], read_pages(mine, np.array(blocks))[0]
    wanted = rotate(keys.astype(np.float64), turn.cosine, turn.sine, turn.interleaved)
    assert np.abs(exact - wanted).max() <= NEAR[before.kind] * np.abs(wanted).max()
    assert np.abs(keys - wanted).max() > 0.1
    theirs = copy_of(before)
    HostMemory().rotate_keys(blocks, [(theirs, turn)])
    if before.packed is None and isinstance(driver, HostDriver):
        assert np.array_equal(mine.keys, theirs.keys)
    else:  # numbers on the edge between two
        assert np.mean(mine.keys != theirs.keys) < (1e-3 if before.packed else 1e-2)
        assert np.abs(exact - read_pages(theirs, np.array(blocks))[0]).max() <= NEAR[before.kind] * np.abs(wanted).max()


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize(("kind", "shape"), CASES)
def test_against_exact_arithmetic_and_the_host(driver: HostDriver, kind: str, shape: str, interleaved: bool) -> None:
    (size, heads, pairs), rng = SHAPES[shape], np.random.default_rng(len(shape))
    before, turn = made_layer(kind, size, heads, rng), a_turn(pairs, rng, interleaved=interleaved)
    found = []
    for order in range(3):
        driver.order = order
        (mine,) = turned(driver, [(before, turn)], CHOSEN)
        found.append(mine.keys.tobytes())
    assert found[0] == found[1] == found[2]
    check(driver, mine, before, turn, CHOSEN)
    driver.check()


def test_layers_that_differ_are_turned_each_in_its_own_way(driver: HostDriver) -> None:
    """One list of blocks, tables that some layers share, types and sizes that differ."""
    rng = np.random.default_rng(1)
    shared, other = a_turn(16, rng), a_turn(5, rng, interleaved=True)
    turns = [
        (made_layer("float16", 64, 2, rng), shared), (made_layer("int8", 32, 4, rng), other),
        (made_layer("float8", 33, 3, rng), shared), (made_layer("int4", 128, 1, rng), shared),
    ]  # fmt: skip
    for mine, (before, turn) in zip(turned(driver, turns, [6]), turns, strict=True):
        check(driver, mine, before, turn, [6])
    assert sum("rotate_keys" in name for name in driver.launched) == len(turns)


def test_without_blocks_kernels_are_made_ready_and_nothing_is_started(
    driver: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, loaded, load = np.random.default_rng(2), list[Any](), driver.load

    def loading(kernels: Any) -> Any:
        loaded.append(kernels)
        return load(kernels)

    monkeypatch.setattr(driver, "load", loading)
    before, turn = made_layer("float16", 32, 1, rng), a_turn(16, rng)
    layer = PagedLayer(*(driver.upload(array) for array in (before.keys, before.values)))
    executor = CudaExecutor(driver, 1)
    executor.rotate_keys([], [(layer, turn)])
    assert len(loaded) == 1 and not driver.launched
    executor.rotate_keys([1], [(layer, turn)])
    assert len(loaded) == 1 and len(driver.launched) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_behind_the_last_token_may_be_anything(driver: HostDriver, kind: str) -> None:
    rng, last = np.random.default_rng(3), 19
    layer, turn = made_layer(kind, 64, 2, rng), a_turn(32, rng)
    (expected,) = turned(driver, [(layer, turn)], [4])
    keys, packed = layer.keys, layer.packed
    if packed is None:
        keys[4, :, :, last:] = {"uint16": 0x7FC0, "uint8": 0x7F}.get(str(keys.dtype), np.nan)
    else:
        columns = packed.key_columns
        keys[4, :, : PAGE_TOKENS * columns].reshape(2, -1, PAGE_TOKENS, 4)[:, :, last:] = 0x85
        scales = keys[4, :, PAGE_TOKENS * columns :].view(np.float16).reshape(2, -1, PAGE_TOKENS)
        scales[:, :, last:] = [np.nan, np.inf, -np.inf, np.nan, 6e4, 6e-8, 0, np.nan, *[np.inf] * 5]
    (found,) = turned(driver, [(layer, turn)], [4])
    with np.errstate(invalid="ignore"):
        ours, theirs = (read_pages(one, np.array([4]))[0][:last] for one in (found, expected))
    assert np.array_equal(ours, theirs) and np.isfinite(ours).all()


# --- what the emulated GPU finds -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "old", "new", "found"),
    [
        ("int8", "    __syncwarp();  // the page has also been read\n", "", "wrong"),
        ("int4", "    __syncwarp();  // the page has also been read\n", "", "wrong"),
        ("int4", "(two >> lane / 16 * 4 & 15)", "(two >> lane % 2 * 4 & 15)", "wrong"),
        ("int8", "ROTATE_WARPS * MOST_NUMBERS * WARP);", "ROTATE_WARPS * (MOST_NUMBERS - 1) * WARP);",
         "shared memory was written out of bounds"),
        ("int8", "given.keys + given.blocks", "given.keys - 64 + given.blocks", "memory was written out of bounds"),
        ("float16", "b * cos + a * sin", "b * cos - a * sin", "wrong"),
    ],
)  # fmt: skip
def test_planted_bugs_are_found(driver: HostDriver, kind: str, old: str, new: str, found: str) -> None:
    if not isinstance(driver, HostDriver):
        pytest.skip("faults are planted into what the host compiles")
    rng = np.random.default_rng(4)
    before, turn = made_layer(kind, 64, 2, rng), a_turn(16, rng)  # lanes need each other's numbers
    for order in (0, 1, 2):
        planted = PlantingDriver(order=order, change=(old, new))
        if found != "wrong":
            with pytest.raises(LaunchError, match=found):
                turned(planted, [(before, turn)], CHOSEN)
        else:
            (mine,) = turned(planted, [(before, turn)], CHOSEN)
            with pytest.raises(AssertionError):
                check(planted, mine, before, turn, CHOSEN)
        assert planted.planted
