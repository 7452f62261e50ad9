"""Mixtures of experts: kernel against reference, reference against onnxruntime, a token's result by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from genai.kernels.ops.experts import moe as moe_kernel
from genai.kernels.ops.experts import qmoe as qmoe_kernel
from genai.kernels.ops.experts import route
from genai.kernels.reference.experts import moe, qmoe, routing_weights
from genai.kernels.registry import KernelError, NodeSpec

EXPERTS, HIDDEN, WIDTH, TOKENS = 5, 64, 96, 7
SWIGLU = {"activation_type": "swiglu", "swiglu_fusion": 1, "activation_alpha": 1.0, "activation_beta": 0.0}


class Unshared:
    def packed(self, names: tuple[str, ...], layout: str, make: Callable[[], Any]) -> Any:
        return make()


def node(op_type: str, constants: list[Any], **attributes: Any) -> NodeSpec:
    arrays: list[Any] = [None, None, *constants]
    inputs = ("x", "r", *(f"c{i}" if array is not None else "" for i, array in enumerate(constants)))
    return NodeSpec("com.microsoft", op_type, 1, attributes, inputs, ("y",), tuple(arrays), Unshared())


@pytest.fixture
def floats(normal: Any) -> dict[str, np.ndarray]:
    return {
        "x": normal(1, TOKENS, HIDDEN),
        "scores": normal(TOKENS, EXPERTS),
        "fc1": normal(EXPERTS, 2 * WIDTH, HIDDEN) / 8,
        "fc2": normal(EXPERTS, HIDDEN, WIDTH) / 10,
    }


@pytest.fixture
def integers(rng: np.random.Generator, normal: Any) -> Callable[[int], dict[str, np.ndarray]]:
    def make(bits: int) -> dict[str, np.ndarray]:
        def layer(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            blocks = columns // 32
            data = rng.integers(0, 256, (EXPERTS, rows, columns * bits // 8), dtype=np.uint8)
            scales = (rng.random((EXPERTS, rows, blocks)) / (4 << bits)).astype(np.float32)
            return data, scales, rng.integers(0, 256, (EXPERTS, rows, -(-blocks * bits // 8)), dtype=np.uint8)

        (fc1, s1, z1), (fc2, s2, z2) = layer(2 * WIDTH, HIDDEN), layer(HIDDEN, WIDTH)
        return {"fc1": fc1, "fc1_scales": s1, "fc2": fc2, "fc2_scales": s2, "fc1_points": z1, "fc2_points": z2}

    return make


def close(actual: np.ndarray, expected: np.ndarray, tolerance: float = 2e-5) -> None:
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("normalized", [0, 1])
@pytest.mark.parametrize("k", [1, 2, EXPERTS])
def test_moe(floats: dict[str, np.ndarray], normalized: int, k: int) -> None:
    attributes = {"k": k, "normalize_routing_weights": normalized}
    spec = node("MoE", [floats["fc1"], None, floats["fc2"]], **attributes, **SWIGLU)
    (ours,) = moe_kernel(spec)(None, [floats["x"], floats["scores"]])
    close(ours, moe(floats["x"], floats["scores"], floats["fc1"], None, floats["fc2"], None, **attributes))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("points", [False, True])
def test_qmoe(floats: dict[str, np.ndarray], integers: Any, bits: int, points: bool) -> None:
    given = integers(bits)
    if not points:
        given |= {"fc1_points": None, "fc2_points": None}
    constants = [given["fc1"], given["fc1_scales"], None, given["fc2"], given["fc2_scales"], *[None] * 4]
    constants += [given["fc1_points"], given["fc2_points"]]
    attributes = {"k": 2, "expert_weight_bits": bits, "block_size": 32, **SWIGLU}
    expected = qmoe(floats["x"], floats["scores"], **given, k=2, bits=bits, block_size=32)
    (exact,) = qmoe_kernel(node("QMoE", constants, **attributes))(None, [floats["x"], floats["scores"]])
    close(exact, expected)
    (rounded,) = qmoe_kernel(node("QMoE", constants, accuracy_level=4, **attributes))(
        None, [floats["x"], floats["scores"]]
    )
    close(rounded, expected, 0.05)


def test_a_token_does_not_depend_on_its_neighbours(floats: dict[str, np.ndarray], integers: Any) -> None:
    given = integers(4)
    constants = [given["fc1"], given["fc1_scales"], None, given["fc2"], given["fc2_scales"]]
    kernel = qmoe_kernel(node("QMoE", constants, k=2, block_size=32, accuracy_level=4, **SWIGLU))
    (together,) = kernel(None, [floats["x"], floats["scores"]])
    for token in range(TOKENS):
        (alone,) = kernel(None, [floats["x"][:, token : token + 1], floats["scores"][token : token + 1]])
        np.testing.assert_array_equal(alone[0, 0], together[0, token])


def test_unread_experts_may_hold_anything(floats: dict[str, np.ndarray]) -> None:
    """An expert that no token is sent to takes no part, not even with NaN."""
    scores = np.full((TOKENS, EXPERTS), -1e30, np.float32)
    scores[:, 1:3] = 0
    fc1 = floats["fc1"].copy()
    fc1[[0, 3, 4]] = np.nan
    (ours,) = moe_kernel(node("MoE", [fc1, None, floats["fc2"]], k=2, **SWIGLU))(None, [floats["x"], scores])
    assert np.isfinite(ours).all()


def test_ties_go_to_the_first() -> None:
    scores = np.array([[1, 2, 2, 2], [0, 0, 0, 0]], np.float32)
    for function in (route, routing_weights):
        chosen, weights = function(scores, 2, normalized=True)
        np.testing.assert_array_equal(chosen, [[1, 2], [0, 1]])
        np.testing.assert_allclose(weights, 0.5)


@pytest.mark.parametrize(
    ("op_type", "constants", "attributes"),
    [
        ("MoE", [0, None, 0, None, 0], {}),
        ("MoE", [0, None, 0], {"use_sparse_mixer": 1}),
        ("MoE", [0, None, 0], {"activation_type": "gelu"}),
        ("MoE", [0, None, 0], {"activation_type": "swiglu", "swiglu_fusion": 2}),
        ("QMoE", [0, 0, None, 0, 0, None, 0], {}),
        ("QMoE", [0, 0, None, 0, 0], {"quant_type": "fp4"}),
        ("QMoE", [0, 0, None, 0, 0], {"weights_prepacked": 1}),
        ("QMoE", [0, 0, None, 0, 0, *[None] * 7, 0], {}),
    ],
)
def test_refused(op_type: str, constants: list[Any], attributes: dict[str, Any]) -> None:
    arrays = [None if item is None else np.zeros((2, 64, 32), np.uint8) for item in constants]
    if op_type == "MoE":
        arrays = [None if array is None else array.astype(np.float32) for array in arrays]
    factory = moe_kernel if op_type == "MoE" else qmoe_kernel
    with pytest.raises(KernelError, match="not supported"):
        factory(node(op_type, arrays, **{"block_size": 32, **attributes}))


@pytest.mark.oracle
@pytest.mark.parametrize("normalized", [0, 1])
def test_moe_reference(onnxruntime_node: Any, floats: dict[str, np.ndarray], normalized: int) -> None:
    attributes: dict[str, Any] = {"k": 2, "normalize_routing_weights": normalized}
    inputs = [floats["x"], floats["scores"], floats["fc1"], None, floats["fc2"]]
    (theirs,) = onnxruntime_node("MoE", inputs, [0], constants=(2, 4), **attributes, **SWIGLU)
    close(theirs, moe(floats["x"], floats["scores"], floats["fc1"], None, floats["fc2"], None, **attributes), 5e-6)


@pytest.mark.oracle
@pytest.mark.parametrize("points", [False, True])
def test_qmoe_reference(onnxruntime_node: Any, floats: dict[str, np.ndarray], integers: Any, points: bool) -> None:
    """4 bits only: onnxruntime's 8-bit kernel rounds activations."""
    given = integers(4)
    if not points:
        given |= {"fc1_points": None, "fc2_points": None}
    inputs = [floats["x"], floats["scores"], given["fc1"], given["fc1_scales"], None, given["fc2"], given["fc2_scales"]]
    inputs += [None] * 4 + [given["fc1_points"], given["fc2_points"]]
    (theirs,) = onnxruntime_node(
        "QMoE",
        inputs,
        [0],
        constants=(2, 3, 5, 6, 11, 12),
        k=2,
        expert_weight_bits=4,
        block_size=32,
        normalize_routing_weights=1,
        **SWIGLU,
    )
    close(theirs, qmoe(floats["x"], floats["scores"], **given, k=2, bits=4, block_size=32), 2e-5)
