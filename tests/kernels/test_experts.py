"""Mixtures of experts as operators on arrays: both devices against onnxruntime and each other, a token by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from genai.devices import open_executor
from genai.kernels.reference.weights import routing_weights
from genai.ops.registry import KernelError, NodeSpec, find_kernel

EXPERTS, HIDDEN, WIDTH, TOKENS = 5, 64, 96, 7
SWIGLU = {"activation_type": "swiglu", "swiglu_fusion": 1, "activation_alpha": 1.0, "activation_beta": 0.0}


class Unshared:
    def packed(self, names: tuple[str, ...], layout: str, make: Callable[[], Any]) -> Any:
        return make()


def run(
    device: str, op_type: str, x: np.ndarray, scores: np.ndarray, constants: list[Any], **attributes: Any
) -> np.ndarray:
    """The operator with these constants behind its two values, by a device."""
    names = ("x", "r", *(f"c{i}" if array is not None else "" for i, array in enumerate(constants)))
    options = {"executor": lambda: open_executor(device, threads=2)}
    arrays = (None, None, *constants)
    spec = NodeSpec("com.microsoft", op_type, 1, attributes, names, ("y",), arrays, Unshared(), options)
    entry = find_kernel(spec.domain, op_type, 1)
    assert entry is not None
    (out,) = entry.factory(spec)(None, [x, scores])
    return out


@pytest.fixture
def floats(normal: Any) -> dict[str, np.ndarray]:
    return {
        "x": normal(1, TOKENS, HIDDEN),
        "scores": normal(TOKENS, EXPERTS),
        "fc1": normal(EXPERTS, 2 * WIDTH, HIDDEN) / 8,
        "fc2": normal(EXPERTS, HIDDEN, WIDTH) / 10,
    }


@pytest.fixture
def integers(rng: np.random.Generator) -> Callable[..., list[Any]]:
    """integers(bits, points): constants of QMoE from input 2 on."""

    def make(bits: int, points: bool, width: int = WIDTH) -> list[Any]:
        def layer(rows: int, columns: int) -> tuple[Any, Any, Any]:
            blocks = -(-columns // 32)
            data = rng.integers(0, 256, (EXPERTS, rows, columns * bits // 8), dtype=np.uint8)
            scales = (rng.random((EXPERTS, rows, blocks)) / (4 << bits)).astype(np.float32)
            zeros = rng.integers(0, 256, (EXPERTS, rows, -(-blocks * bits // 8)), dtype=np.uint8)
            return data, scales, zeros if points else None

        (fc1, s1, z1), (fc2, s2, z2) = layer(2 * width, HIDDEN), layer(HIDDEN, width)
        return [fc1, s1, None, fc2, s2, *[None] * 4, z1, z2]

    return make


def close(actual: np.ndarray, expected: np.ndarray, tolerance: float = 2e-5) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == np.float32
    assert np.abs(actual - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("normalized", [0, 1])
@pytest.mark.parametrize("k", [1, 2, EXPERTS])
@pytest.mark.parametrize("activation", ["swiglu", "geglu", "relu", "relu2", "silu", "gelu", "identity"])
def test_moe(floats: dict[str, np.ndarray], normal: Any, normalized: int, k: int, activation: str) -> None:
    gated = activation in ("swiglu", "geglu")
    fc1 = floats["fc1"] if gated else floats["fc1"][:, ::2]
    constants = [fc1, normal(*fc1.shape[:2]), floats["fc2"], normal(EXPERTS, HIDDEN)]
    attributes = {"k": k, "normalize_routing_weights": normalized, "activation_type": activation}
    if gated:
        numbers = {"activation_alpha": 1.7, "activation_beta": 1.0, "swiglu_limit": 2.0}
        attributes |= {**SWIGLU, **numbers, "activation_type": activation}
    ours, expected = (
        run(device, "MoE", floats["x"], floats["scores"], constants, **attributes) for device in ("cpu", "reference")
    )
    close(ours, expected)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("points", [False, True])
def test_qmoe(floats: dict[str, np.ndarray], integers: Any, bits: int, points: bool) -> None:
    given = (floats["x"], floats["scores"], integers(bits, points))
    attributes = {"k": 2, "expert_weight_bits": bits, "block_size": 32, **SWIGLU}
    expected = run("reference", "QMoE", *given, **attributes)
    close(run("cpu", "QMoE", *given, **attributes), expected)
    close(run("cpu", "QMoE", *given, accuracy_level=4, **attributes), expected, 0.05)


def test_a_token_does_not_depend_on_its_neighbours(floats: dict[str, np.ndarray], integers: Any) -> None:
    constants, options = integers(4, False), {"k": 2, "block_size": 32, "accuracy_level": 4, **SWIGLU}
    x, scores = floats["x"], floats["scores"]
    together = run("cpu", "QMoE", x, scores, constants, **options)
    for token in range(TOKENS):
        alone = run("cpu", "QMoE", x[:, token : token + 1], scores[token : token + 1], constants, **options)
        np.testing.assert_array_equal(alone[0, 0], together[0, token])


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_unread_experts_may_hold_anything(floats: dict[str, np.ndarray], device: str) -> None:
    """An expert that no token is sent to takes no part, not even with NaN."""
    scores = np.full((TOKENS, EXPERTS), -1e30, np.float32)
    scores[:, 1:3] = 0
    fc1 = floats["fc1"].copy()
    fc1[[0, 3, 4]] = np.nan
    assert np.isfinite(run(device, "MoE", floats["x"], scores, [fc1, None, floats["fc2"]], k=2, **SWIGLU)).all()


def test_ties_go_to_the_first() -> None:
    scores = np.array([[1, 2, 2, 2], [0, 0, 0, 0]], np.float32)
    chosen, weights = routing_weights(scores, 2, normalized=True)
    np.testing.assert_array_equal(chosen, [[1, 2], [0, 1]])
    np.testing.assert_allclose(weights, 0.5)


@pytest.mark.parametrize(
    ("op_type", "constants", "attributes"),
    [
        ("MoE", [0, None, 0, None, 0], {}),
        ("MoE", [0, None, 0], {"use_sparse_mixer": 1}),
        ("MoE", [0, None, 0], {"activation_type": "tanh"}),
        ("MoE", [0, None, 0], {"activation_type": "swiglu", "swiglu_fusion": 2}),
        ("QMoE", [0, 0, None, 0, 0, None, 0], {}),
        ("QMoE", [0, 0, None, 0, 0], {"quant_type": "fp4"}),
        ("QMoE", [0, 0, None, 0, 0], {"weights_prepacked": 1}),
        ("QMoE", [0, 0, None, 0, 0, *[None] * 7, 0], {}),
    ],
)
def test_refused(op_type: str, constants: list[Any], attributes: dict[str, Any]) -> None:
    arrays: list[Any] = [None if item is None else np.zeros((2, 64, 32), np.uint8) for item in constants]
    if op_type == "MoE":
        arrays = [None if array is None else array.astype(np.float32) for array in arrays]
    nothing = np.zeros((0, 32), np.float32)
    with pytest.raises(KernelError, match="not supported"):
        run("cpu", op_type, nothing, nothing, arrays, **{"block_size": 32, **attributes})


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("place", "change", "attributes", "text"),
    [
        (0, lambda a: a[:, :-2], {}, "scales has"),
        (0, lambda a: a[:-1], {}, "scales has"),
        (0, lambda a: a[:, :, :-4], {}, "weight has"),
        (1, lambda a: a[:, :, :1], {}, "scales has"),
        (2, lambda a: a[:, 1:], {}, "the bias 'c2' must have"),
        (3, lambda a: a[:, :-1], {}, "weight has|scales has"),
        (0, lambda a: a, {"k": 0}, "k is 0, but it must be from 1 to 5"),
        (0, lambda a: a, {"k": 6}, "k is 6"),
        (0, lambda a: a, {"block_size": 33}, "block_size is 33"),
        (0, lambda a: a, {"expert_weight_bits": 3}, "bits is 3"),
        (0, lambda a: a, {"swiglu_limit": float("nan")}, "swiglu_limit is nan"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_runs(
    integers: Any, device: str, place: int, change: Any, attributes: dict[str, Any], text: str
) -> None:
    constants = integers(4, False)
    constants[2] = np.zeros((EXPERTS, 2 * WIDTH), np.float32)
    constants[place] = change(constants[place])
    nothing = np.zeros((0, HIDDEN), np.float32)
    with pytest.raises(ValueError, match=text):
        run(device, "QMoE", nothing, nothing, constants, **{"k": 2, "block_size": 32, **SWIGLU, **attributes})


def test_layers_of_other_experts_are_refused(floats: dict[str, np.ndarray]) -> None:
    for first, second in ((floats["fc1"][:4], floats["fc2"]), (floats["fc1"], floats["fc2"][:, :, 1:])):
        with pytest.raises(KernelError, match="do not match each other"):
            run("reference", "MoE", floats["x"], floats["scores"], [first, None, second], **SWIGLU)


@pytest.mark.oracle
@pytest.mark.parametrize("normalized", [0, 1])
def test_moe_of_onnxruntime(onnxruntime_node: Any, floats: dict[str, np.ndarray], normalized: int) -> None:
    attributes: dict[str, Any] = {"k": 2, "normalize_routing_weights": normalized, **SWIGLU}
    constants = [floats["fc1"], None, floats["fc2"]]
    inputs = [floats["x"], floats["scores"], *constants]
    (theirs,) = onnxruntime_node("MoE", inputs, [0], constants=(2, 4), **attributes)
    close(run("reference", "MoE", floats["x"], floats["scores"], constants, **attributes), theirs, 5e-6)


@pytest.mark.oracle
@pytest.mark.parametrize("width", [WIDTH, 80])
@pytest.mark.parametrize("points", [False, True])
def test_qmoe_of_onnxruntime(
    onnxruntime_node: Any, floats: dict[str, np.ndarray], integers: Any, points: bool, width: int
) -> None:
    """4 bits only: onnxruntime's 8-bit kernel rounds activations. Of 80 columns no more is stored than they take."""
    constants = integers(4, points, width)
    attributes = {"k": 2, "expert_weight_bits": 4, "block_size": 32, **SWIGLU}
    inputs = [floats["x"], floats["scores"], *constants]
    (theirs,) = onnxruntime_node(
        "QMoE", inputs, [0], constants=(2, 3, 5, 6, 11, 12), normalize_routing_weights=1, **attributes
    )
    for device in ("reference", "cpu"):
        close(run(device, "QMoE", floats["x"], floats["scores"], constants, **attributes), theirs)
