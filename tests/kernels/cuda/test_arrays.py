"""Arrays on a GPU: memory, layouts, products whose bits do not depend on the number of rows, CuPy's calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from genai.kernels.cuda.arrays.device import ArrayDevice, ArrayProgram, DeviceConstants, Status, taken_in
from genai.kernels.cuda.arrays.launches import Array, ArrayError, Recorder, joined
from genai.kernels.cuda.arrays.linear import Tail, WindowShape, convolution, product
from genai.kernels.cuda.arrays.memory import DeviceFull, DeviceTensor, Pool, Region, empty, rounded, to_host, upload
from genai.kernels.cuda.arrays.rows import normalised, reduced, softmax
from genai.kernels.cuda.cupy_driver import CupyDriver

from .devices import GPU
from .host_driver import HostDriver
from .test_cupy_driver import Array as CupyArray, fake_cupy

pytestmark = pytest.mark.gpu

Made = Array | list[Array]


def run(driver: Any, values: Sequence[np.ndarray], function: Callable[..., Made], device: Any = None) -> list[Any]:
    """What a function of arrays gives for these."""
    device = device or ArrayDevice(driver)
    constants = DeviceConstants(device)
    to = Recorder(constants)
    taken = [taken_in(value.shape, value.dtype) for value in values]
    made = function(to, *taken)
    results = made if isinstance(made, list) else [made]
    status = Status(to, IndexError)
    return ArrayProgram(device, to, constants, status, taken, results, [True] * len(results)).run(values)


def numbers(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def test_axes_that_lie_one_behind_the_other_are_joined() -> None:
    assert joined((2, 3, 4), (12, 4, 1), (12, 4, 1)) == ([24], [[1], [1]])
    assert joined((2, 3, 4), (12, 4, 1), (0, 4, 1)) == ([12, 2], [[1, 12], [1, 0]])
    assert joined((2, 1, 4), (4, 4, 1), (0, 0, 0)) == ([8], [[1], [0]])
    assert joined((), (), ()) == ([1], [[0], [0]])
    with pytest.raises(ArrayError, match="9 axes"):
        joined((2,) * 9, tuple(3**i for i in range(9)))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("order", [0, 1, 2, 7])
def test_products_of_views(driver: HostDriver, dtype: Any, order: int) -> None:
    """Heads of attention as they lie, without a copy: [b, t, h, d] read as [b, h, t, d] and [b, h, d, t]."""
    driver.order = order
    q, k, v = (numbers(2, 9, 3, 16, dtype=dtype, seed=seed) for seed in range(3))

    def attend(to: Recorder, q: Array, k: Array, v: Array) -> Made:
        scores = product(to, q.transposed((0, 2, 1, 3)), k.transposed((0, 2, 3, 1)), Tail(alpha=0.25))
        mixed = product(to, softmax(to, scores, -1), v.transposed((0, 2, 1, 3)))
        return [mixed, to.reshaped(mixed.transposed((0, 2, 1, 3)), (2, 9, 48))]

    found, flat = run(driver, [q, k, v], attend)
    assert sum("map" in name for name in driver.launched) == 1  # the last transposition
    wide = [x.astype(np.float64).transpose(0, 2, 1, 3) for x in (q, k, v)]
    scores = wide[0] @ wide[1].swapaxes(2, 3) * 0.25
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = weights / weights.sum(-1, keepdims=True) @ wide[2]
    tolerance = 2e-6 if dtype == np.float32 else 3e-3
    np.testing.assert_allclose(found, wanted, atol=tolerance, rtol=tolerance)
    np.testing.assert_array_equal(flat.reshape(2, 9, 3, 16).transpose(0, 2, 1, 3), found)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_row_has_the_same_bits_however_many_there_are(driver: HostDriver, dtype: Any) -> None:
    x, w = numbers(70, 70, dtype=dtype), numbers(70, 90, dtype=dtype)
    few = run(driver, [x[:3], w], product)[0]
    many = run(driver, [x[:70], w], product)[0]
    np.testing.assert_array_equal(many[:3], few)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("order", [0, 1, 4])
def test_large_tiles(driver: HostDriver, dtype: Any, order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 128, as large products have them, give the bits that those of 64 give; also over windows."""
    from genai.kernels.cuda.arrays import linear

    driver.order = order
    x, w, bias = numbers(2, 3, 9, 17, dtype=dtype), numbers(150, 3, 3, 3, dtype=dtype), numbers(150, dtype=dtype)
    a, b = numbers(140, 70, dtype=dtype), numbers(70, 150, dtype=dtype)

    def both(to: Recorder, x: Array, w: Array, bias: Array, a: Array, b: Array) -> Made:
        window = WindowShape((3, 3), pad=(1, 0))
        turned = product(to, b.transposed((1, 0)), a.transposed((1, 0)))
        return [
            convolution(to, x, w, window, (9, 15), 1, Tail(bias, function="relu")), product(to, a, b), turned,
        ]  # fmt: skip

    small = run(driver, [x, w, bias, a, b], both)
    assert all("_64_" in name for name in driver.launched)
    driver.launched.clear()
    monkeypatch.setattr(linear, "_FULL_GRID", 1)
    large = run(driver, [x, w, bias, a, b], both)
    assert all("_128_" in name for name in driver.launched)
    for mine, other in zip(large, small, strict=True):
        np.testing.assert_array_equal(mine, other)
    np.testing.assert_allclose(large[1], a.astype(np.float64) @ b, rtol=4e-3, atol=2e-2)


@pytest.mark.skipif(bool(GPU), reason="it is about the host that emulates a GPU")
def test_a_missing_barrier_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the shim is there for: without the barrier, results are wrong in some order of threads."""
    from genai.kernels.cuda import sources

    text = sources.text_of

    def without(file: str) -> str:
        found = text(file)
        return found.replace("__syncthreads();  // this step's", "//") if file == "arrays_product.cu" else found

    monkeypatch.setattr(sources, "text_of", without)
    a, b = numbers(20, 33), numbers(33, 20)
    wrong = 0
    for order in (0, 1, 3):
        driver = HostDriver(order=order)
        wrong += not np.allclose(run(driver, [a, b], product)[0], a @ b, atol=1e-4)
    assert wrong


def test_reductions_take_any_axes(driver: HostDriver) -> None:
    x = numbers(3, 40, 2, 5)
    for axes in ((0,), (1, 3), (0, 2), (0, 1, 2, 3)):
        kinds = ("sum", "mean", "max", "min", "prod")
        found = run(driver, [x], lambda to, x: [reduced(to, x, kind, axes, True) for kind in kinds])  # noqa: B023
        for kind, value in zip(kinds, found, strict=True):
            wanted = getattr(np, kind)(x.astype(np.float64), axes, keepdims=True)
            np.testing.assert_allclose(value, wanted, rtol=2e-5, atol=1e-6)


def test_rows_are_as_right_as_float32_can_be(driver: HostDriver) -> None:
    """Against float64, over numbers far from zero: squares are of distances from the mean."""
    x = numbers(5, 2000) + np.float32(1000)
    weight = numbers(2000)
    (found,) = run(driver, [x, weight], lambda to, x, w: normalised(to, x, 2000, w, None, 1e-5)[0])
    wide = x.astype(np.float64)
    wanted = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(found, wanted, atol=1e-3)


def test_memory_is_shared_by_values_that_live_at_different_times(driver: HostDriver) -> None:
    device = ArrayDevice(driver)
    constants = DeviceConstants(device)
    to = Recorder(constants)
    x = taken_in((1000,), np.dtype(np.float32))
    y = x
    for _ in range(20):
        y = to.map("unary::relu", [y], to.new(y.shape, y.dtype))
    program = ArrayProgram(device, to, constants, Status(to, IndexError), [x], [y], [True])
    assert program._program.own_bytes == 2 * 4096  # of 20 values two are alive at once
    value = numbers(1000)
    np.testing.assert_array_equal(program.run([value])[0], np.maximum(value, 0))


def test_results_that_stay_are_not_written_over(driver: HostDriver) -> None:
    device = ArrayDevice(driver)
    constants = DeviceConstants(device)
    to = Recorder(constants)
    x = taken_in((64,), np.dtype(np.float32))
    y = to.map("unary::relu", [x], to.new((64,), x.dtype))
    program = ArrayProgram(device, to, constants, Status(to, IndexError), [x], [y, x], [False, False])
    values = [numbers(64, seed=seed) for seed in range(3)]
    kept = [program.run([value]) for value in values]
    for (relu, same), value in zip(kept, values, strict=True):
        assert isinstance(relu, DeviceTensor)
        np.testing.assert_array_equal(relu.numpy(), np.maximum(value, 0))
        np.testing.assert_array_equal(same.numpy(), value)
    before = device.pool.allocations
    del kept, relu, same
    assert isinstance(program.run([values[0]])[0], DeviceTensor)
    assert device.pool.allocations == before


def test_memory_goes_back_without_waiting(driver: HostDriver) -> None:
    """The collector may give it back in a thread that holds what another one waits for."""
    pool = Pool(driver)
    memory = pool.take(100)
    with pool._lock:
        pool.give(memory)
    assert pool.take(100) is memory and pool.allocations == 1
    with pool._lock:
        pool.forget(memory)
    assert pool.take(100) is not memory and pool.allocations == 2


def test_a_pool_keeps_to_its_limit(driver: HostDriver) -> None:
    pool = Pool(driver, 1 << 16)
    taken = pool.take(40_000)
    with pytest.raises(DeviceFull, match=r"\d+ bytes requested, \d+ left of 65536 allowed"):
        pool.take(40_000)
    pool.give(taken)
    assert pool.take(60_000).nbytes >= 60_000  # what was kept in another size has been dropped
    for size in (0, 1, 255, 257, 4097, 10**6):
        assert size <= rounded(size) <= max(size * 1.13 + 256, 256) and rounded(rounded(size)) == rounded(size)


def test_tensors_of_one_region_come_at_once(driver: HostDriver) -> None:
    region = Region(driver, driver.zeros(1024))
    one = DeviceTensor(region, 0, (4,), np.dtype(np.float32))
    two = DeviceTensor(region, 256, (2, 2), np.dtype(np.int64))
    one.write(np.arange(4, dtype=np.float32))
    two.write(np.arange(4).reshape(2, 2))
    downloads: list[int] = []
    plain = driver.download
    driver.download = lambda array: (downloads.append(array.nbytes), plain(array))[1]  # type: ignore[method-assign]
    first, second = to_host([one, two])
    assert downloads == [288]
    np.testing.assert_array_equal(first, np.arange(4))
    np.testing.assert_array_equal(second, np.arange(4).reshape(2, 2))
    assert empty(driver, (0, 3), np.dtype(np.float32)).numpy().shape == (0, 3)


class Lent(CupyArray):
    """CuPy's array notes the stream that a consumer names."""

    streams: list[Any] = []  # noqa: RUF012

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        self.streams.append(stream)
        return self.host.__dlpack__()


def cupy_with_dlpack() -> Any:
    """The made-up CuPy, with what DLPack and memory of others need."""
    module = fake_cupy()
    place = SimpleNamespace(UnownedMemory=lambda address, nbytes, owner, index: (address, nbytes, index))
    module.cuda.UnownedMemory, module.cuda.MemoryPointer = place.UnownedMemory, lambda memory, offset: memory
    module.ndarray = lambda shape, dtype, pointer: Lent(HostDriver().borrow(pointer[0], math.prod(shape)).host)
    module.from_dlpack = lambda value: Lent(np.from_dlpack(value))
    module.ascontiguousarray = lambda array: Lent(np.ascontiguousarray(array.host))
    module.zeros = lambda size, dtype: Lent(HostDriver().zeros(size).host)
    return module


@pytest.mark.skipif(bool(GPU), reason="it is about a made-up CuPy")
def test_dlpack_and_memory_of_others_through_cupy_s_calls() -> None:
    driver = CupyDriver(cupy_with_dlpack(), 0)
    tensor = upload(driver, numbers(2, 3))
    Lent.streams.clear()
    capsule = tensor.__dlpack__(stream=7)
    assert type(capsule).__name__ == "PyCapsule" and Lent.streams == [7]
    other = upload(driver, numbers(2, 3, seed=1))
    tensor.copy_from(other)
    np.testing.assert_array_equal(tensor.numpy(), numbers(2, 3, seed=1))
    given = numbers(3, 4)
    adopted = driver.adopt(given)
    assert driver.address(adopted) == given.ctypes.data
    borrowed = driver.borrow(given.ctypes.data, given.nbytes)
    np.testing.assert_array_equal(driver.download(borrowed.view(np.float32).reshape(3, 4)), given)
    driver.settle()
    device = ArrayDevice(driver)
    (found,) = run(driver, [given], lambda to, x: to.map("unary::relu", [x], to.new(x.shape, x.dtype)), device)
    np.testing.assert_array_equal(found, np.maximum(given, 0))
