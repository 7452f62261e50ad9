"""The reference as a device: programs, refusals, cancelling; and the bundled model against the CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genai.devices import open_executor
from genai.engine.decoder import Decoder, compute as logits_of
from genai.kernels import ir
from genai.kernels.device import Executor, StepCancelled, UnsupportedOp
from genai.kernels.ir import BlockWeight, DenseWeight, HostNode, Linear, Op, Projection, SliceColumns, Unary
from genai.kernels.reference.executor import KNOWN, ReferenceExecutor
from genai.kernels.weights import uniform_format
from genai.models.config import Config
from genai.models.loading import load_decoder

Run = Callable[..., Any]


@dataclass(frozen=True)
class Unheard(Op):
    """An op of no device."""

    x: ir.In
    out: ir.Out


def test_every_record_is_known() -> None:
    kinds = {kind for kind in vars(ir).values() if isinstance(kind, type) and issubclass(kind, Op)}
    assert set(KNOWN) == kinds - {Op}


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_a_device_has_all_that_an_executor_has(device: str) -> None:
    executor, public = open_executor(device), [name for name in vars(Executor) if not name.startswith("_")]
    assert {"compile", "allocate", "sampler", "copy_blocks", "rotate_keys", "close"} <= set(public)
    for name in public:
        assert callable(getattr(executor, name)) == callable(getattr(Executor, name)), name


def test_records_that_are_not_known(program: Run) -> None:
    with pytest.raises(UnsupportedOp, match="does not support these ops: Unheard"):
        ReferenceExecutor().compile(program([Unheard("x", "out")], {"x": 3, "out": 3}))
    executor, product = ReferenceExecutor(), Linear("x", Projection(DenseWeight("w", 2, 2)), "out", True)
    with pytest.raises(UnsupportedOp, match="no array function for Linear"):
        executor.array_function(product, program([product], {}, {"w": np.zeros((2, 2))}).constants)


def test_host_nodes_see_values_in_the_shapes_of_the_graph(program: Run, a_step: Run) -> None:
    seen: list[Any] = []

    def function(inputs: Any) -> tuple[Any, ...]:
        seen.extend(inputs)
        return inputs[0] + inputs[1][..., None] + inputs[2], "not wanted"

    node = HostNode("Mystery", "mystery", function, ("half", "ids", ""), ("host", ""), (None, None, 100))
    parts = [SliceColumns("x", 1, "half"), node, Unary("square", "host", "out")]
    made = program(parts, {"x": 3, "half": 2, "host": 2, "out": 2}, given=["x"], outputs=["out", "host"])
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    found = ReferenceExecutor().compile(made).run(a_step([10, 20]), {"x": x})
    np.testing.assert_array_equal(seen[1], [[10, 20]])
    np.testing.assert_array_equal(found["host"], [[[111, 112], [124, 125]]])
    np.testing.assert_array_equal(found["out"], found["host"] ** 2)
    assert found["out"].dtype == np.float32


def test_cancelling(program: Run, a_step: Run) -> None:
    """From another thread, between two parts; the next run is refused as well until it is forgotten."""
    calls: list[str] = []

    def function(inputs: Any) -> tuple[Any, ...]:
        calls.append("host")
        other = threading.Thread(target=step.cancel)
        other.start()
        other.join()
        return (inputs[0],)

    parts = [HostNode("Cancel", "cancel", function, ("x",), ("y",), (None,)), Unary("neg", "y", "out")]
    step = ReferenceExecutor().compile(program(parts, {"x": 1, "y": 1, "out": 1}, given=["x"]))
    for _ in range(2):
        with pytest.raises(StepCancelled):
            step.run(a_step([0]), {"x": np.ones((1, 1), np.float32)})
    assert calls == ["host"]
    step.resume()
    with pytest.raises(StepCancelled):
        step.run(a_step([0]), {"x": np.ones((1, 1), np.float32)})
    assert calls == ["host"] * 2


def test_constants_may_be_dropped_once_a_program_is_compiled(program: Run, a_step: Run) -> None:
    arrays = {"w": np.eye(2, dtype=np.float32)}
    made = program([Linear("x", Projection(DenseWeight("w", 2, 2)), "out", True)], {"x": 2, "out": 2}, arrays)
    step = ReferenceExecutor().compile(made)
    arrays.clear()
    x = np.ones((3, 2), np.float32)
    np.testing.assert_array_equal(step.run(a_step([0] * 3), {"x": x})["out"][0], x)


def test_what_a_device_says_of_itself(program: Run) -> None:
    executor = ReferenceExecutor(7)
    assert (executor.name, executor.threads) == ("reference", 1)
    memory = executor.allocate(12)
    assert (memory.bytes.shape, memory.bytes.dtype, memory.bytes.any()) == ((12,), np.uint8, False)
    memory.close()
    constants = program([], {}, {"d": np.zeros((4, 16), np.uint8), "s": np.zeros(4, np.float16)}).constants
    weight = BlockWeight("d", "s", "", 4, 32, uniform_format(4, 32))
    assert executor.packed_bytes(weight, constants) == 64 + 8
    op = Linear("x", Projection(weight), "out", False)
    assert executor.arithmetic(op, constants, prefill=False) == "fp32"
    assert executor.arithmetic(op, constants, prefill=True) is None
    assert executor.host(memory) is memory


@pytest.fixture(scope="module")
def decoders(bundled_folder: Path) -> list[Decoder]:
    """The bundled model on the reference and on the CPU, activations and cache in float32."""
    options: dict[str, Any] = {"kv_dtype": "fp32", "accuracy": "fp32", "cache_bytes": None, "context_size": 256}
    config = Config(bundled_folder)
    return [load_decoder(config, threads=1, quiet=True, device=device, **options)[0] for device in ("reference", "cpu")]


@pytest.mark.parametrize(("prompt", "budget"), [(5, None), (64, 16), (64, None)], ids=["short", "chunks", "at once"])
def test_the_bundled_model_is_that_of_the_cpu(decoders: list[Decoder], prompt: int, budget: int | None) -> None:
    """Logits of every token of a prompt, and of three decode steps."""
    rng = np.random.default_rng(prompt)
    tokens = rng.integers(3, decoders[0].vocab_size, prompt + 3).tolist()
    results = []
    for decoder in decoders:
        sequence = decoder.open()
        sequence.append(tokens[:prompt])
        rows = logits_of(decoder, [sequence], all_rows=True, token_budget=budget)
        for token in tokens[prompt:]:
            sequence.append([token])
            rows += logits_of(decoder, [sequence])
        sequence.close()
        results.append(np.concatenate(rows))
    ours, expected = results
    assert ours.shape == expected.shape == (prompt + 3, decoders[0].vocab_size)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)


def test_sequences_of_a_step_do_not_meet(decoders: list[Decoder]) -> None:
    """Two in one step, one of them behind a forked prefix: each as alone."""
    decoder = decoders[0]
    first, other = decoder.open(), decoder.open()
    first.append(list(range(10, 50)))
    logits_of(decoder, [first])
    second = first.fork()
    other.append([7, 8, 9])
    for sequence, token in ((first, 3), (second, 4)):
        sequence.append([token])
    together = logits_of(decoder, [first, second, other])
    for sequence, found in zip((first, second, other), together, strict=True):
        alone = decoder.open()
        alone.append(list(sequence.tokens))
        np.testing.assert_allclose(found, logits_of(decoder, [alone])[0], rtol=0, atol=1e-5)
