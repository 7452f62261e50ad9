"""The tables of `genai bench`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from genai.bench import attention, kernels, speed
from genai.cli.app import run

Capture = pytest.CaptureFixture[str]


def products(kind: str) -> list[dict[str, Any]]:
    figures = {"ms": 0.01234, "GB/s": 123.456, "of bandwidth": 1.0, "TOP/s": 0.00018042, "of products": 0.0123}
    return [{"product": kind, "rows": rows, "numerics": "prefill", **figures} for rows in (1, 512)]


def test_a_table_fits_into_60_columns_and_cuts_nothing(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    wide = "128256 x 4096 floats in 1050673152 bytes, Sigmoid of two"
    monkeypatch.setattr(kernels, "bench_kernels", lambda *_, **__: [*products("8 x 8 int4 by 32"), *products(wide)])
    monkeypatch.setattr(attention, "bench_attention", lambda *_, **__: [])
    assert run(["bench", "kernels"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) < 60
    assert [line.split() for line in lines[:2]] == [["of", "of"], "rows as ms GB/s bandwidth TOP/s products".split()]
    assert lines[2] == "8 x 8 int4 by 32" and lines[5] == wide
    assert lines[3].replace(" %", "%").split() == ["1", "many", "0.01234", "123.5", "100.0%", "0.00018", "1.2%"]
    assert len({len(line) for line in (*lines[:2], *lines[3:5], *lines[6:])}) == 1, "columns end together"


@pytest.mark.parametrize(
    ("command", "head"),
    [
        ("context", [["prefill", "prefill", "decode", "decode"], ["context", "tok/s", "share", "tok/s", "share"]]),
        ("batch", [["per"], ["batch", "tok/s", "sequence", "share"]]),
        ("threads", [["decode", "decode", "prefill", "prefill"], ["threads", "tok/s", "share", "tok/s", "share"]]),
    ],
)
def test_sweeps(command: str, head: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    figures = {"tokens_per_second": 12345.678, "share": 0.98765}
    monkeypatch.setattr(speed, "bench_prefill", lambda *_, **__: figures)
    monkeypatch.setattr(speed, "bench_decode", lambda *_, **__: {**figures, "share": None})
    flag = {"context": "-c", "batch": "-b", "threads": "-t"}[command]
    assert run(["bench", command, flag, "1", flag, "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:2]] == head
    assert max(map(len, lines)) < 60
    assert all("12,346" in line for line in lines[2:]) and len(lines) == 4


def test_kernels_end_with_attention_by_type_of_cache(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(kernels, "bench_kernels", lambda *_, **__: products("8 x 8 int4 by 32"))
    assert run(["bench", "kernels", "-c", "100", "-r", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line for line in lines if line.startswith("attention")]
    assert names == [f"attention to 100 tokens, {kind} cache" for kind in ("fp16", "fp32", "int8", "int4")]
    assert max(map(len, lines)) < 60


def test_throughput(capsys: Capture) -> None:
    asked = ["--requests", "3", "-p", "40", "-n", "4", "--long-prompt", "80"]
    assert run(["bench", "throughput", *asked]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line and " " not in line.removeprefix("at ")] == [
        "at once",
        "arriving",
        "watched",
    ]
    assert max(map(len, lines)) < 60
    assert run(["bench", "throughput", *asked, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert all(value > 0 for row in rows for name, value in row.items() if name != "run")


def test_throughput_refuses(capsys: Capture) -> None:
    assert run(["bench", "throughput", "--rate", "0"]) == 2
    assert "--rate 0" in capsys.readouterr().err
    assert run(["bench", "throughput", "--long-prompt", "5000"]) == 1
    assert "a request has 5001 tokens" in capsys.readouterr().err


def test_contexts_with_two_types_of_cache(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    figures = {"tokens_per_second": 12345.678, "share": 0.98765}
    monkeypatch.setattr(speed, "bench_prefill", lambda *_, **__: figures)
    monkeypatch.setattr(speed, "bench_decode", lambda *_, **__: figures)
    assert run(["bench", "context", "-c", "9", "-c", "20", "--beside", "int8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[2:]] == [["9", "fp16"], ["9", "int8"], ["20", "fp16"], ["20", "int8"]]
    assert max(map(len, lines)) < 60
    assert run(["bench", "context", "--beside", "int9"]) == 2
    assert "--kv-type 'int9'" in capsys.readouterr().err
