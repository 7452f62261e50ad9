"""Fixtures of the reference device: ops computed alone, and steps without pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from genai.kernels.cache_layout import PagedLayer
from genai.kernels.device import PageTables, StepContext
from genai.kernels.ir import Ids, Op, OpProgram, RowsType, Weight
from genai.kernels.reference.executor import ReferenceExecutor


@dataclass(eq=False)
class Constants:
    """Constants by name."""

    arrays: Mapping[str, np.ndarray]

    def array(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def packed(self, weight: Weight) -> None:
        raise AssertionError("the reference has no form of its own")


def step_of(tokens: Sequence[int], wanted: Sequence[int] = ()) -> StepContext:
    """One sequence of tokens at positions 0, 1, 2, ..., without pages."""
    count = len(tokens)
    return StepContext(
        tokens=np.array(tokens, np.int64),
        positions=np.arange(count),
        cu_seqlens_q=np.array([0, count], np.int32),
        context_lens=np.array([count], np.int32),
        groups=(PageTables(np.zeros((1, 0), np.int32), np.zeros(count, np.int64)),),
        num_decode_sequences=0,
        logits_indices=np.array(wanted, np.int64),
        rope_table=np.zeros(1, np.int32),
    )


@pytest.fixture(scope="session")
def a_step() -> Callable[..., StepContext]:
    """a_step(tokens, wanted=()), see `step_of`."""
    return step_of


@pytest.fixture(scope="session")
def program() -> Callable[..., OpProgram]:
    """program(parts, widths, constants, given, outputs): values are named in `widths`, numbers per row."""

    def make(
        parts: Sequence[Any],
        widths: Mapping[str, int],
        constants: Mapping[str, np.ndarray] | None = None,
        given: Sequence[str] = (),
        outputs: Sequence[str] = ("out",),
    ) -> OpProgram:
        types = {name: RowsType((1, -1, width), width) for name, width in widths.items()}
        ids = {"ids": (Ids.TOKENS, np.dtype(np.int64))}
        return OpProgram(tuple(parts), types, Constants(constants or {}), tuple(outputs), ids, tuple(given))

    return make


@pytest.fixture(scope="session")
def compute(program: Callable[..., OpProgram]) -> Callable[..., Any]:
    """compute(op, constants, step=..., layers=..., **values): float32 rows [T, width] of the op's outputs.

    Values are rows, or the widths of outputs.
    """

    def run(
        op: Op,
        constants: Mapping[str, np.ndarray] | None = None,
        *,
        step: StepContext | None = None,
        layers: Sequence[PagedLayer] = (),
        **values: Any,
    ) -> Any:
        rows = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
        widths = {name: value.shape[1] if name in rows else value for name, value in values.items()}
        made = program([op], widths, constants, list(rows), op.outputs)
        step = step or step_of([0] * len(next(iter(rows.values()))))
        found = ReferenceExecutor().compile(made, layers).run(step, rows)
        assert all(value.dtype == np.float32 for value in found.values())
        results = [found[name].reshape(-1, widths[name]) for name in op.outputs]
        return results[0] if len(results) == 1 else results

    return run
