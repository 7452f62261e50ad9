"""Rows of tables by tokens and positions, and the logits rows of a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from genai.kernels.cpu.program.calls import Rows
from genai.kernels.cpu.program.step_table import ErrorCode, StepField
from genai.kernels.cpu.rowwise.gather import embedding, logits_rows, reordered
from genai.kernels.device import StepError

Execute = Callable[..., list[np.ndarray]]
Normal = Callable[..., np.ndarray]

TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [1, 15, 17, 31, 896])
def test_embedding(dtype: str, width: int, execute: Execute, normal: Normal, rng: np.random.Generator) -> None:
    table = normal(50, width).astype(TYPES[dtype])
    table[3, -1], table[7, 0], table[9, width // 2] = np.inf, np.nan, 1e-40
    tokens = np.concatenate([[3, 0, 49, 7, 9], rng.integers(0, 50, 8)])
    (out,) = execute(
        lambda out: embedding(table, Rows.of(out)), np.zeros((15, width), np.float32), tokens=13, TOKEN_IDS=tokens
    )
    np.testing.assert_array_equal(out[:13], table[tokens].astype(np.float32))
    assert not out[13:].any()


def test_positions_choose_rows_of_a_part_of_a_wider_table(execute: Execute, normal: Normal) -> None:
    table, positions = normal(20, 70), np.array([5, 6, 0], np.int64)
    (out,) = execute(
        lambda out: embedding(table[:, 30:50], Rows.of(out).columns(1, 20), StepField.POSITIONS),
        np.zeros((3, 22), np.float32),
        POSITIONS=positions,
    )
    np.testing.assert_array_equal(out[:, 1:21], table[positions, 30:50])
    assert not out[:, [0, 21]].any()


def test_table_in_a_read_only_file(execute: Execute, normal: Normal, tmp_path: Path) -> None:
    values = normal(30, 33).astype(np.float16)
    values.tofile(tmp_path / "table")
    table = np.memmap(tmp_path / "table", np.float16, "r", shape=(30, 33))
    tokens = np.array([29, 0], np.int64)
    (out,) = execute(lambda out: embedding(table, Rows.of(out)), np.zeros((2, 33), np.float32), TOKEN_IDS=tokens)
    np.testing.assert_array_equal(out, values[tokens].astype(np.float32))


@pytest.mark.parametrize("token", [-1, 50, 2**40, -(2**62)])
def test_token_outside_the_table(token: int, execute: Execute, normal: Normal) -> None:
    table, tokens = normal(50, 8), np.array([1, token, 3], np.int64)
    with pytest.raises(StepError, match=f"index outside its table .code {int(ErrorCode.INDEX_OUTSIDE_TABLE)}"):
        execute(lambda out: embedding(table, Rows.of(out)), np.zeros((3, 8), np.float32), TOKEN_IDS=tokens)


def test_logits_rows(execute: Execute, normal: Normal) -> None:
    x, wanted = normal(7, 40), np.array([6, 2], np.int64)

    def build(x: np.ndarray, out: np.ndarray) -> object:
        return logits_rows(Rows.of(x).columns(3, 33), Rows.of(out, StepField.LOGITS_ROWS))

    _, out = execute(build, x, np.zeros((4, 33), np.float32), LOGITS_ROWS=2, LOGITS_INDICES=wanted)
    np.testing.assert_array_equal(out[:2], x[wanted, 3:36])
    assert not out[2:].any()


@pytest.mark.parametrize("row", [-1, 5])
def test_logits_index_that_the_step_has_not(row: int, execute: Execute, normal: Normal) -> None:
    x, wanted = normal(7, 8), np.array([0, row], np.int64)

    def build(x: np.ndarray, out: np.ndarray) -> object:
        return logits_rows(Rows.of(x), Rows.of(out, StepField.LOGITS_ROWS))

    with pytest.raises(StepError, match=f"index outside its table .code {int(ErrorCode.INDEX_OUTSIDE_TABLE)}"):
        execute(build, x, np.zeros((2, 8), np.float32), tokens=5, LOGITS_ROWS=2, LOGITS_INDICES=wanted)


def test_bad_arguments() -> None:
    tokens, wanted = (
        Rows.of(np.zeros((2, 8), np.float32), count) for count in (StepField.TOKENS, StepField.LOGITS_ROWS)
    )
    table = np.zeros((5, 8), np.float32)
    for bad in (table.astype(np.float64), table[0], table.astype(">f4")):
        with pytest.raises(ValueError, match="expected float32, float16 or bfloat16"):
            embedding(bad, tokens)
    with pytest.raises(ValueError, match=r"out is \[TOKENS, 8\], expected \[TOKENS, 7\]"):
        embedding(table[:, :7], tokens)
    with pytest.raises(ValueError, match=r"out is \[LOGITS_ROWS, 8\], expected \[TOKENS, 8\]"):
        embedding(table, wanted)
    with pytest.raises(ValueError, match=r"x is \[LOGITS_ROWS, 8\], expected \[TOKENS, 8\]"):
        logits_rows(wanted, wanted)
    with pytest.raises(ValueError, match=r"out is \[TOKENS, 8\], expected \[LOGITS_ROWS, 8\]"):
        logits_rows(tokens, tokens)


@pytest.mark.parametrize("width", [1, 17, 64])
def test_columns_by_a_constant(width: int, execute: Execute, normal: Normal, rng: np.random.Generator) -> None:
    x, order = normal(5, 64), rng.integers(0, 64, width)
    (out,) = execute(lambda out: reordered(Rows.of(x), order, Rows.of(out)), np.zeros((5, width), np.float32), tokens=4)
    np.testing.assert_array_equal(out[:4], x[:4, order])
    assert not out[4:].any()


@pytest.mark.parametrize("order", [[0, 8], [-1, 0], [0]])
def test_columns_that_there_are_not(order: list[int], normal: Normal) -> None:
    x, out = normal(2, 8), normal(2, 2)
    with pytest.raises(ValueError, match="expected one of the 8 columns of x"):
        reordered(Rows.of(x), np.array(order), Rows.of(out))
