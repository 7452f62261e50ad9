"""Images in blocks of sixteen channels: conversions, convolutions and pools against sums over windows."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest

from genai.kernels.cpu.arrays.blocked.convolution import BlockedConvolution, Place, pack_blocked, tile_for
from genai.kernels.cpu.arrays.blocked.layout import from_blocked, to_blocked
from genai.kernels.cpu.arrays.blocked.pooling import mean_blocks, pooled_blocks
from genai.kernels.cpu.arrays.blocked.scaling import scaled_blocks
from genai.kernels.cpu.arrays.blocked.transposed import BlockedTransposed, pack_transposed
from genai.kernels.cpu.arrays.gemm.windows import Windows
from genai.kernels.cpu.program import thread_pool
from genai.kernels.cpu.program.thread_pool import Threads

# Form, groups, images, channels, extents, outputs, kernel, strides, dilations, pads, and width of the results' border.
CASES = [
    ("plain", 1, 2, 3, (9, 12), 20, (3, 3), (2, 2), (1, 1), 1, 0),
    ("blocked", 1, 2, 20, (5, 7), 40, (3, 3), (1, 1), (1, 1), 1, 1),
    ("blocked", 1, 1, 33, (4, 7), 90, (1, 1), (1, 1), (1, 1), 0, 0),
    ("blocked", 1, 1, 16, (9, 9), 16, (3, 2), (2, 1), (2, 1), 2, 0),
    ("blocked", 2, 1, 32, (5, 7), 96, (3, 3), (1, 1), (1, 1), 1, 0),
    ("depthwise", 5, 2, 40, (6, 9), 40, (3, 3), (1, 1), (1, 1), 1, 1),
    ("depthwise", 8, 1, 32, (9, 7), 32, (3, 3), (2, 2), (1, 1), 1, 0),
    ("depthwise", 9, 1, 18, (8, 5), 18, (1, 3), (1, 2), (2, 1), 0, 0),
    ("depthwise", 24, 2, 24, (7, 7), 24, (3, 3), (1, 1), (1, 1), 1, 1),
    ("depthwise", 32, 1, 32, (9, 15), 32, (5, 3), (2, 2), (1, 1), 1, 0),
    ("blocked", 1, 2, 16, (21,), 32, (4,), (1,), (2,), 3, 0),
    ("blocked", 1, 2, 16, (3, 5, 7), 40, (3, 2, 3), (1, 1, 1), (1, 2, 1), 1, 1),
    ("blocked", 1, 1, 32, (5, 4, 15), 32, (3, 3, 3), (2, 1, 2), (1, 1, 1), 1, 0),
    ("blocked", 1, 2, 20, (3, 2, 5), 16, (1, 1, 1), (1, 1, 1), (1, 1, 1), 0, 0),
    ("plain", 1, 2, 3, (4, 6, 15), 32, (3, 3, 3), (1, 2, 2), (1, 1, 1), 1, 2),
    ("depthwise", 32, 1, 32, (4, 5, 9), 32, (3, 3, 3), (1, 2, 1), (2, 1, 1), 2, 1),
    ("blocked", 1, 2, 20, (37, 1), 40, (5, 1), (1, 1), (1, 1), 0, 0),
    ("plain", 1, 2, 3, (37, 1), 20, (5, 1), (2, 1), (3, 1), 0, 0),
    ("depthwise", 32, 1, 32, (1, 29, 1), 32, (1, 3, 1), (1, 2, 1), (1, 1, 1), 0, 0),
]


@pytest.fixture
def shared_work(monkeypatch):
    """Threads share even the smallest piece of work."""
    monkeypatch.setattr(thread_pool, "_MIN_SHARED_WORK", 0.0)


def window_sums(x, kernels, windows, groups):
    """The definition, for padded x in its type."""
    per_group, outputs = kernels.shape[1], len(kernels) // groups
    total = np.zeros((len(x), len(kernels), *windows.counts), x.dtype)
    for tap in itertools.product(*map(range, windows.kernel)):
        inner = tuple(
            slice(t * d, t * d + (count - 1) * s + 1, s)
            for t, d, s, count in zip(tap, windows.dilations, windows.strides, windows.counts, strict=True)
        )
        for group in range(groups):
            part = x[(slice(None), slice(group * per_group, (group + 1) * per_group), *inner)]
            mine = slice(group * outputs, (group + 1) * outputs)
            total[:, mine] += np.einsum("nc...,mc->nm...", part, kernels[(mine, slice(None), *tap)])
    return total


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{len(case[4])}d-{case[6][0]}")
def test_convolution(case, normal, shared_work):
    form, groups, images, channels, extents, outputs, kernel, strides, dilations, pad, border = case
    x, kernels, bias = normal(images, channels, *extents), normal(outputs, channels // groups, *kernel), normal(outputs)
    counts = tuple(
        (size + 2 * pad - d * (k - 1) - 1) // s + 1
        for size, k, s, d in zip(extents, kernel, strides, dilations, strict=True)
    )
    windows, rank = Windows(kernel, strides, dilations, counts), len(extents)
    place = Place(windows, (pad,) * rank, ((0, 0),) * rank, ((border, border),) * rank)
    addend = normal(images, outputs, *counts)
    given = x if form == "plain" else to_blocked(x)
    packed = pack_blocked(kernels, groups, is_plain=form == "plain")
    assert packed.form == form
    one, several = (
        BlockedConvolution(Threads(n), packed, bias, "relu")(given, place, to_blocked(addend)) for n in (1, 3)
    )
    np.testing.assert_array_equal(one, several)
    padded = np.pad(x.astype(np.float64), [(0, 0), (0, 0), *[(pad, pad)] * rank])
    sums = window_sums(padded, kernels.astype(np.float64), windows, groups)
    expected = np.maximum(sums + bias.reshape(-1, *[1] * rank) + addend, 0)
    expected = np.pad(expected, [(0, 0), (0, 0), *[(border, border)] * rank])
    np.testing.assert_allclose(from_blocked(one, outputs), expected, rtol=1e-4, atol=1e-4)


def test_a_border_replaces_pads(normal):
    x, kernels = normal(1, 16, 5, 7), normal(32, 16, 3, 3)
    windows = Windows((3, 3), (1, 1), (1, 1), (5, 7))
    convolve = BlockedConvolution(Threads(1), pack_blocked(kernels))
    none, wide = ((0, 0),) * 2, ((2, 1), (1, 1))
    expected = convolve(to_blocked(x), Place(windows, (1, 1), none, none))
    bordered = to_blocked(np.pad(x, [(0, 0), (0, 0), *wide]))
    np.testing.assert_array_equal(convolve(bordered, Place(windows, (1, 1), wide, none)), expected)


@pytest.mark.parametrize("axes", [(-1,), (0,), (0, -1)])
def test_axes_of_size_1_do_not_change_the_results(axes, normal):
    kernels, x = pack_blocked(normal(32, 16, 5)), to_blocked(normal(2, 16, 37))
    one = BlockedConvolution(Threads(1), kernels, function="silu")
    expected = one(x, Place(Windows((5,), (2,), (1,), (17,)), (0,), ((0, 0),), ((0, 0),)))

    def placed(number, single):
        sizes = [number]
        for axis in axes:
            sizes.insert(0 if axis == 0 else len(sizes), single)
        return tuple(sizes)

    windows = Windows(placed(5, 1), placed(2, 1), placed(1, 1), placed(17, 1))
    nones = ((0, 0),) * len(placed(0, 0))
    place = Place(windows, placed(0, 0), nones, nones)
    found = one(x.reshape(2, 1, *placed(37, 1), 16), place)
    np.testing.assert_array_equal(found.reshape(expected.shape), expected)


@pytest.mark.parametrize("outputs", [32, 20])
@pytest.mark.parametrize("function", ["copy", "relu", "hard_swish"])
def test_a_scale_after_the_function(function, outputs, normal):
    kernels, bias, x = pack_blocked(normal(outputs, 16, 3)), normal(outputs), to_blocked(normal(1, 16, 9))
    place = Place(Windows((3,), (1,), (1,), (9,)), (1,), ((0, 0),), ((2, 1),))
    plain = BlockedConvolution(Threads(1), kernels, bias, function)(x, place)
    scaled = BlockedConvolution(Threads(1), kernels, bias, function, scale=-1.5, shift=0.25)(x, place)
    expected = from_blocked(plain, outputs) * np.float32(-1.5) + np.float32(0.25)
    np.testing.assert_allclose(from_blocked(scaled, outputs)[..., 2:-1], expected[..., 2:-1], rtol=1e-6, atol=1e-6)
    assert not from_blocked(scaled, outputs)[..., [0, 1, -1]].any()
    assert not scaled[:, -1, :, outputs % 16 or 16 :].any()


def test_small_groups_ignore_infinities_of_other_groups(normal):
    x = normal(1, 16, 5)
    x[:, 4:] = np.inf
    place = Place(Windows((3,), (1,), (1,), (3,)), (0,), ((0, 0),), ((0, 0),))
    found = BlockedConvolution(Threads(1), pack_blocked(normal(16, 4, 3), 4))(to_blocked(x), place)
    assert np.isfinite(found[..., :4]).all() and not np.isfinite(found[..., 4:]).any()


@pytest.mark.parametrize("function", ["copy", "leaky_relu"])
@pytest.mark.parametrize("images", [1, 2])
def test_a_number_for_each_channel(function, images, normal, shared_work):
    x, scale, shift = normal(2, 40, 23, 30), normal(images, 40, 1, 1), normal(1, 40, 1, 1)
    numbers = (0.25,) if function == "leaky_relu" else ()
    blocked = [to_blocked(array) for array in (x, scale, shift)]
    one, several = (scaled_blocks(*blocked, function, numbers, Threads(count)) for count in (1, 3))
    np.testing.assert_array_equal(one, several)
    expected = x * scale + shift
    if function == "leaky_relu":
        expected = np.where(expected < 0, expected * np.float32(0.25), expected)
    np.testing.assert_allclose(from_blocked(one, 40), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(from_blocked(scaled_blocks(*blocked[:2]), 40), x * scale)


def test_numbers_for_channels_that_do_not_fit(normal):
    x = to_blocked(normal(2, 20, 3, 3))
    with pytest.raises(ValueError, match="scale has 3 images, expected 1 or 2"):
        scaled_blocks(x, to_blocked(normal(3, 20, 1, 1)))
    with pytest.raises(ValueError, match="shift"):
        scaled_blocks(x, to_blocked(normal(1, 20, 1, 1)), to_blocked(normal(1, 20, 3, 1)))


def test_slopes_of_channels(normal):
    x, kernels, slopes = normal(1, 16, 2, 7), normal(20, 16, 1, 1), normal(20)
    place = Place(Windows((1, 1), (1, 1), (1, 1), (2, 7)), (0, 0), ((0, 0),) * 2, ((0, 0),) * 2)
    packed = pack_blocked(kernels)
    sums = from_blocked(BlockedConvolution(Threads(1), packed)(to_blocked(x), place), 20)
    found = BlockedConvolution(Threads(1), packed, None, "leaky_relu", (0.0,), slopes)(to_blocked(x), place)
    np.testing.assert_array_equal(from_blocked(found, 20), np.where(sums < 0, sums * slopes[:, None, None], sums))
    with pytest.raises(ValueError, match="slopes"):
        BlockedConvolution(Threads(1), packed, None, "leaky_relu", (0.0,), slopes[:16])


@pytest.mark.parametrize(("form", "groups"), [("plain", 1), ("blocked", 1), ("blocked", 2), ("depthwise", 32)])
@pytest.mark.parametrize(
    ("extents", "kernel", "strides", "dilations", "pads"),
    [
        ((9, 30), (3, 3), (1, 1), (6, 12), (6, 12)),
        ((9, 30), (3, 3), (2, 1), (12, 40), (12, 40)),  # only the middle taps are inside
        ((5, 40), (2, 5), (1, 2), (1, 7), (4, 20)),  # some results have no taps
        ((40,), (5,), (1,), (9,), (18,)),
        ((2, 3, 9), (3, 3, 3), (1, 1, 1), (1, 2, 1), (1, 2, 1)),
    ],
)
def test_taps_outside_the_image(form, groups, extents, kernel, strides, dilations, pads, normal, shared_work):
    x, kernels, rank = normal(2, 32, *extents), normal(32, 32 // groups, *kernel), len(extents)
    ends = (20,) * rank
    counts = tuple(
        (size + before + after - d * (k - 1) - 1) // s + 1
        for size, k, s, d, before, after in zip(extents, kernel, strides, dilations, pads, ends, strict=True)
    )
    windows = Windows(kernel, strides, dilations, counts)
    place = Place(windows, pads, ((0, 0),) * rank, ((0, 0),) * rank)
    packed = pack_blocked(kernels, groups, is_plain=form == "plain")
    given = x if form == "plain" else to_blocked(x)
    one, several = (BlockedConvolution(Threads(n), packed)(given, place) for n in (1, 3))
    np.testing.assert_array_equal(one, several)
    padded = np.pad(x.astype(np.float64), [(0, 0), (0, 0), *zip(pads, ends, strict=True)])
    expected = window_sums(padded, kernels.astype(np.float64), windows, groups)
    np.testing.assert_allclose(from_blocked(one, 32), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("function", ["relu", "silu"])
@pytest.mark.parametrize(
    ("extents", "kernel", "strides", "omitted", "counts", "outputs", "border"),
    [
        ((5, 7), (2, 2), (2, 2), (0, 0), (10, 14), 32, 0),
        ((5, 16), (3, 4), (2, 3), (1, 2), (9, 50), 40, 1),
        ((4, 5), (3, 5), (1, 1), (2, 4), (2, 1), 16, 0),
        ((2, 3), (4, 3), (4, 1), (3, 0), (2, 3), 20, 2),  # some remainders have no results
        ((11,), (16,), (8,), (4,), (90,), 32, 0),  # the last results have no input
        ((2, 3, 9), (2, 3, 2), (2, 2, 1), (0, 1, 0), (4, 5, 10), 32, 1),
    ],
)
def test_transposed_convolution(
    extents, kernel, strides, omitted, counts, outputs, border, function, normal, shared_work
):
    x, kernels, bias, rank = normal(2, 24, *extents), normal(24, outputs, *kernel), normal(outputs), len(extents)
    place = Place(Windows(kernel, strides, (1,) * rank, counts), omitted, ((0, 0),) * rank, ((border, border),) * rank)
    packed = pack_transposed(kernels, strides)
    one, several = (BlockedTransposed(Threads(n), packed, bias, function)(to_blocked(x), place) for n in (1, 3))
    np.testing.assert_array_equal(one, several)
    whole = np.zeros((2, outputs, *[120] * rank))
    for tap in itertools.product(*map(range, kernel)):
        places = (slice(t, t + s * size, s) for t, s, size in zip(tap, strides, extents, strict=True))
        whole[(slice(None), slice(None), *places)] += np.einsum("nc...,cm->nm...", x, kernels[(..., *tap)])
    inner = (slice(begin, begin + size) for begin, size in zip(omitted, counts, strict=True))
    sums = whole[(slice(None), slice(None), *inner)] + bias.reshape(-1, *[1] * rank)
    expected = np.maximum(sums, 0) if function == "relu" else sums / (1 + np.exp(-sums))
    expected = np.pad(expected, [(0, 0), (0, 0), *[(border, border)] * rank])
    np.testing.assert_allclose(from_blocked(one, outputs), expected, rtol=1e-4, atol=1e-4)


def test_a_transposed_convolution_without_taps(normal):
    with pytest.raises(ValueError, match=r"the strides \[2, 3\] are larger than the kernel \[3, 2\]"):
        pack_transposed(normal(16, 16, 3, 2), (2, 3))


def test_images_reuse_memory(normal):
    x, kernels = to_blocked(normal(1, 16, 96, 96)), normal(32, 16, 1, 1)
    place = Place(Windows((1, 1), (1, 1), (1, 1), (96, 96)), (0, 0), ((0, 0),) * 2, ((0, 0),) * 2)
    convolve = BlockedConvolution(Threads(1), pack_blocked(kernels))
    first = convolve(x, place)
    expected, where = first.copy(), first.ctypes.data
    second = convolve(-x, place)
    np.testing.assert_array_equal(first, expected)
    assert second.ctypes.data != where
    del first
    if sys.platform.startswith("linux"):
        assert convolve(x, place).ctypes.data == where


def test_weights_that_are_not_finite_reach_the_pads(normal):
    x, kernels = normal(1, 16, 3, 5), normal(16, 16, 3, 3)
    kernels[2, 0, 0, 0] = np.inf
    place = Place(Windows((3, 3), (1, 1), (1, 1), (3, 5)), (1, 1), ((0, 0),) * 2, ((0, 0),) * 2)
    found = from_blocked(BlockedConvolution(Threads(1), pack_blocked(kernels))(to_blocked(x), place), 16)
    assert np.isnan(found[0, 2, 0]).all() and np.isfinite(found[0, 1]).all()


@pytest.mark.parametrize(("channels", "read"), [(20, 20), (33, 36), (64, 64)])
def test_padding_channels_are_not_read(channels, read, normal):
    kernels, x = normal(16, channels, 3, 3), to_blocked(normal(1, channels, 5, 7))
    place = Place(Windows((3, 3), (1, 1), (1, 1), (5, 7)), (1, 1), ((0, 0),) * 2, ((0, 0),) * 2)
    convolve = BlockedConvolution(Threads(1), pack_blocked(kernels))
    expected = convolve(x, place)
    x[:, read // 16 :, ..., read % 16 :] = np.nan
    np.testing.assert_array_equal(convolve(x, place), expected)


def test_infinities_stay_out_of_padding_channels(normal):
    x, kernels = normal(1, 16, 1, 7), normal(20, 16, 1, 1)
    x[0, 3, 0, 2] = np.inf
    place = Place(Windows((1, 1), (1, 1), (1, 1), (1, 7)), (0, 0), ((0, 0),) * 2, ((0, 0),) * 2)
    found = BlockedConvolution(Threads(1), pack_blocked(kernels))(to_blocked(x), place)
    assert not found[0, 1, ..., 4:].any() and np.isinf(found[0, 0, 0, 2]).all()


@pytest.mark.parametrize("channels", [1, 16, 37])
def test_conversion(channels, normal, shared_work):
    x = normal(2, channels, 5, 7)
    blocked = to_blocked(x, Threads(2))
    assert blocked.shape == (2, -(-channels // 16), 5, 7, 16) and blocked.ctypes.data % 64 == 0
    np.testing.assert_array_equal(from_blocked(blocked, channels, Threads(2)), x)
    wide = np.zeros((2, blocked.shape[1] * 16, 5, 7), np.float32)
    wide[:, :channels] = x
    np.testing.assert_array_equal(blocked, wide.reshape(2, -1, 16, 5, 7).transpose(0, 1, 3, 4, 2))


@pytest.mark.parametrize(
    ("kernel", "strides", "gaps", "pads"), [((3, 3), (2, 2), (1, 1), (1, 1)), ((2, 3), (1, 1), (2, 1), (0, 2))]
)
def test_pools(kernel, strides, gaps, pads, normal, shared_work):
    x = normal(2, 20, 8, 11)
    x[0, 0, 0, 0], x[1, 19, -1, -1] = np.nan, np.inf
    counts = tuple(
        (size + 2 * p - g * (k - 1) - 1) // s + 1
        for size, k, s, g, p in zip((8, 11), kernel, strides, gaps, pads, strict=True)
    )
    windows = Windows(kernel, strides, gaps, counts)
    for is_max in (True, False):
        padded = np.pad(x, [(0, 0), (0, 0), *((p, p) for p in pads)], constant_values=-np.inf if is_max else 0)
        parts = [
            padded[:, :, i * gaps[0] :, j * gaps[1] :][:, :, :: strides[0], :: strides[1]][
                :, :, : counts[0], : counts[1]
            ]
            for i in range(kernel[0])
            for j in range(kernel[1])
        ]
        expected = np.max(parts, axis=0) if is_max else np.sum(parts, axis=0) / 4
        divisors = None if is_max else np.full(counts, 4, np.float32)
        found = pooled_blocks(to_blocked(x), windows, pads, counts=divisors, threads=Threads(2))
        np.testing.assert_allclose(from_blocked(found, 20), expected, rtol=1e-5, atol=1e-6)


def test_mean(normal):
    x = normal(2, 20, 9, 13)
    np.testing.assert_allclose(
        from_blocked(mean_blocks(to_blocked(x), Threads(2)), 20), x.mean((2, 3), keepdims=True), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("width", [1, 5, 7, 14, 20, 56, 3136])
@pytest.mark.parametrize("blocks", [1, 3, 8])
def test_tiles_fit(width, blocks):
    for form in ("blocked", "depthwise"):
        tile = tile_for(form, 64, width, blocks)
        assert 1 <= tile.columns <= min(width, 14) and 1 <= tile.blocks <= blocks
        assert form == "blocked" or tile.blocks == 1


def test_what_does_not_fit(normal):
    place = Place(Windows((1, 1), (1, 1), (1, 1), (5, 5)), (0, 0), ((0, 0),) * 2, ((0, 0),) * 2)
    convolve = BlockedConvolution(Threads(1), pack_blocked(normal(16, 16, 1, 1)))
    with pytest.raises(ValueError, match="does not match kernels of 16 channels"):
        convolve(to_blocked(normal(1, 17, 5, 5)), place)
    with pytest.raises(ValueError, match="and addend is"):
        convolve(to_blocked(normal(1, 16, 5, 5)), place, to_blocked(normal(1, 16, 5, 4)))
    with pytest.raises(ValueError, match="not whole blocks"):
        pack_blocked(normal(32, 12, 1, 1), 2)
    with pytest.raises(ValueError, match="x is float64"):
        to_blocked(np.zeros((1, 16, 2, 2)))
    with pytest.raises(ValueError, match="expected float32 blocks of 17 channels"):
        from_blocked(to_blocked(normal(1, 16, 2, 2)), 17)
