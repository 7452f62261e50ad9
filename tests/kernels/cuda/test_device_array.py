"""Memory of the emulated GPU refuses what a GPU's would; what may be asked of it works on both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

HOST = np.arange(24, dtype=np.float32).reshape(4, 6)
REFUSED: dict[str, Callable[[Any], object]] = {
    "asarray": np.asarray,
    "array": np.array,
    "ascontiguousarray": np.ascontiguousarray,
    "a list's element": lambda array: np.array([array, array]),
    "assignment from the host": lambda array: array.__setitem__(0, HOST[0]),
    "assignment to the host": lambda array: np.zeros((4, 6), np.float32).__setitem__(..., array),
    "sum with the host's": lambda array: array + HOST,
    "the host's sum with it": lambda array: HOST + array,
    "comparison with the host's": lambda array: array == HOST,
}


@pytest.fixture
def array(driver: Any) -> Any:
    return driver.upload(HOST)


@pytest.mark.gpu
@pytest.mark.parametrize("what", REFUSED)
def test_the_host_takes_nothing_and_gives_nothing(driver: Any, array: Any, what: str) -> None:
    with pytest.raises((TypeError, ValueError)):
        REFUSED[what](array)
    assert np.array_equal(driver.download(array), HOST)


@pytest.mark.gpu
def test_what_may_be_asked(driver: Any, array: Any) -> None:
    assert (array.shape, array.ndim, array.size, len(array)) == ((4, 6), 2, 24, 4)
    assert (array.dtype, array.itemsize, array.nbytes, array.strides) == (np.float32, 4, 96, (24, 4))
    part = array[1:3, 2:]
    assert array.flags.c_contiguous and not part.flags.c_contiguous and part.strides == (24, 4)
    assert driver.address(part) == driver.address(array) + 24 + 8
    assert np.array_equal(driver.download(part), HOST[1:3, 2:])
    assert np.array_equal(driver.download(part.reshape(2, 2, 2)), HOST[1:3, 2:].reshape(2, 2, 2))
    assert array[2, 3].shape == () and float(driver.download(array[2, 3])) == HOST[2, 3]
    assert np.array_equal(driver.download(array.view(np.uint8)), HOST.view(np.uint8))
    driver.write(array.reshape(24)[4:6], np.array([7, 8], np.float32))
    assert driver.download(array[0]).tolist() == [0, 1, 2, 3, 7, 8]
    driver.copy(array[0], array[3])
    driver.copy_row(array, 3, 1)
    assert np.array_equal(driver.download(array)[1], driver.download(array[0]))
    with pytest.raises(ValueError, match="memory is float32"):
        driver.write(array, HOST.astype(np.float64))
    with pytest.raises(ValueError, match="memory is float32"):
        driver.write(part, HOST[1:3, 2:])


def test_what_a_gpu_does_on_its_own_is_refused_here(driver: Any, array: Any) -> None:
    """Copies in another stream, and what waits for the device."""
    for asked in (
        lambda: np.stack([array, array]),
        lambda: np.copyto(np.zeros((4, 6), np.float32), array),
        lambda: array.__setitem__(0, array[1]),
        lambda: array[:, :4].reshape(16),
        lambda: array[:, :4].view(np.uint8),
        lambda: array.view(np.dtype([("a", np.float32)])),
        lambda: array[[0, 1]],
        lambda: array[np.array([0, 1])],
        lambda: array[HOST[:, 0] > 3],
        lambda: array[True],
        lambda: list(array),
        lambda: float(array[0, 0]),
        lambda: bool(array[0, 0]),
        lambda: memoryview(array),
        lambda: driver.address(HOST),
        lambda: driver.download(HOST),
        lambda: driver.write(array, array),
        lambda: driver.write(HOST, HOST),
    ):
        with pytest.raises((TypeError, ValueError)):
            asked()
