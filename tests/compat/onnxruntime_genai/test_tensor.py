"""Tensor: a copy with onnxruntime-genai's accessors."""

import ml_dtypes
import numpy as np
import pytest

from genai.compat.onnxruntime_genai.tensor import Tensor
from genai.errors import InputError


@pytest.mark.parametrize("dtype", [np.int32, np.float16, np.float32, np.bool_, np.uint8, ml_dtypes.bfloat16])
def test_accessors(dtype):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    tensor = Tensor(array)
    assert tensor.shape() == [2, 3]
    assert tensor.type() == np.dtype(dtype)
    np.testing.assert_array_equal(tensor.as_numpy(), array)
    assert bytes(tensor.data()) == array.tobytes()


def test_it_is_a_copy_and_takes_any_memory_layout():
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    tensor = Tensor(array.T)
    array[0, 0] = 9
    np.testing.assert_array_equal(tensor.as_numpy(), [[0, 3], [1, 4], [2, 5]])
    assert tensor.as_numpy().flags.c_contiguous
    assert tensor.as_numpy() is tensor.as_numpy()


def test_scalars_and_empty_arrays():
    assert Tensor(np.array(3)).shape() == []
    assert Tensor(np.zeros((0, 4))).shape() == [0, 4]
    assert repr(Tensor(np.zeros((2, 1), np.int32))) == "Tensor(shape=[2, 1], dtype=int32)"


@pytest.mark.parametrize(
    "value", [[1, 2], 3, None, np.array(["a"]), np.array([None]), np.zeros(2, "V4"), np.zeros(1, "M8[s]")]
)
def test_what_is_not_a_numeric_array_is_refused(value):
    with pytest.raises(InputError, match="Tensor"):
        Tensor(value)


def test_numpy_makes_an_array_of_it():
    tensor = Tensor(np.arange(3, dtype=np.int32))
    assert np.asarray(tensor) is tensor.as_numpy()
    assert np.array(tensor, copy=True) is not tensor.as_numpy()
    assert np.asarray(tensor, np.float32).tolist() == [0, 1, 2]
