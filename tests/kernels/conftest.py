"""Fixtures of the kernel tests: seeded numbers, and one-node graphs run by onnxruntime."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Seeded by the test's name: each test has numbers of its own, always the same."""
    return np.random.default_rng(list(request.node.name.encode()))


@pytest.fixture
def normal(rng: np.random.Generator) -> Callable[..., np.ndarray]:
    """Standard normal float32 numbers of a shape."""
    return lambda *shape: rng.standard_normal(shape).astype(np.float32)


@pytest.fixture(scope="session")
def onnxruntime_node() -> Callable[..., list[np.ndarray]]:
    """run(op_type, inputs, outputs, domain=..., constants=..., **attributes): the outputs of a graph of one node.

    Inputs that are None are absent; those whose index is in `constants` become initialisers.
    """
    ort = pytest.importorskip("onnxruntime")
    from onnx import helper, numpy_helper

    def run(
        op_type: str,
        inputs: Sequence[Any],
        outputs: Sequence[int],
        domain: str = "com.microsoft",
        constants: Sequence[int] = (),
        **attributes: Any,
    ) -> list[np.ndarray]:
        names = [f"input_{i}" if value is not None else "" for i, value in enumerate(inputs)]
        fixed = {names[i]: inputs[i] for i in constants if names[i]}
        feeds = {name: value for name, value in zip(names, inputs, strict=True) if name and name not in fixed}
        results = [f"output_{i}" if i in outputs else "" for i in range(max(outputs) + 1)]
        node = helper.make_node(op_type, names, results, domain=domain, **attributes)
        graph = helper.make_graph(
            [node],
            "one_node",
            [
                helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
                for name, value in feeds.items()
            ],
            [helper.make_empty_tensor_value_info(name) for name in results if name],
            [numpy_helper.from_array(value, name) for name, value in fixed.items()],
        )
        opsets = [helper.make_opsetid("", 22), helper.make_opsetid("com.microsoft", 1)]
        options = ort.SessionOptions()
        options.log_severity_level = 3
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        return session.run(None, feeds)

    return run


@pytest.fixture
def with_instructions() -> Callable[..., None]:
    """with_instructions(name, *files): their tests pass with another instruction set, in a process of their own.

    In one (-n 0): several would compile the same kernels.
    """

    def run(name: str, *files: str) -> None:
        environment = {**os.environ, "GENAI_CPU_ISA": name}
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *files]
        result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800, check=False)
        assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]

    return run


@pytest.fixture(scope="session", autouse=True)
def short_waits() -> None:
    """Threads that wait for each other sleep almost at once: there are more of them than cores."""
    from genai.kernels.cpu.program import thread_pool

    thread_pool._POOL = thread_pool._Pool(spins=10)


@pytest.fixture(params=[1, 2, 3], ids=lambda count: f"{count} threads")
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Threads that share even the smallest piece of work."""
    from genai.kernels.cpu.program import thread_pool

    monkeypatch.setattr(thread_pool, "_MIN_SHARED_WORK", 0.0)
    return thread_pool.Threads(request.param)
