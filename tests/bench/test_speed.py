"""Results of `genai bench`: calculation of shares, sweeps, and refused arguments. Speeds themselves are not judged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import genai
from genai.bench import speed
from genai.bench.attention import bench_attention
from genai.bench.ceilings import Ceiling, traffic_of
from genai.bench.kernels import bench_kernels
from genai.bench.speed import bench_decode, bench_prefill, bench_startup, sweep_batch, sweep_context, sweep_threads
from genai.convert import DecoderSpec, ExportOptions, write_model_folder
from genai.convert.spec import ExpertsSpec
from genai.errors import ContextOverflowError, GenaiError, UnsupportedModelError
from genai.evaluate.model_diff import diff_models
from genai.kernels.ir import Linear, MoE as ExpertsRecord
from genai.models.model import Model
from tools.random_weights import RandomWeights


def mixture(folder: Path, per_token: int, *, normalized: bool = True) -> Path:
    """One layer with eight experts of 3 * 128 * 128 weights each."""
    spec = DecoderSpec(
        model_type="qwen2_moe",
        vocab_size=320,
        hidden_size=128,
        intermediate_size=128,
        num_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_size=32,
        context_length=64,
        experts=ExpertsSpec(count=8, per_token=per_token, intermediate_size=128, normalized=normalized),
    )
    return write_model_folder(folder, spec, ExportOptions(precision="int4", accuracy_level=4), RandomWeights(spec, 1))


def test_traffic_of_the_bundled_model(bundled: Any) -> None:
    """4.33 million weights: the embedding is not counted, because it is the head's matrix; the head has one row."""
    traffic = traffic_of(bundled)
    assert traffic is not None
    head = 1536 * 256
    assert traffic.products_per_token + head == pytest.approx(bundled.info.parameters, rel=0.01)
    # 4 bits and a float16 scale per 32 weights; 8 bits in the head.
    expected = traffic.products_per_token * (0.5 + 2 / 32) + head * (1 + 2 / 32)
    assert traffic.weight_bytes == pytest.approx(expected, rel=0.02)
    assert traffic.decode_bytes(100, 3) == traffic.weight_bytes + 300 * bundled.info.kv_bytes_per_token
    assert replace(traffic, state_bytes=7).decode_bytes(100, 3) == traffic.decode_bytes(100, 3) + 3 * 2 * 7
    assert traffic.prefill_operations(10) == 20 * traffic.products_per_token


def test_fp32_products_are_compared_with_fp32(bundled_folder: Path) -> None:
    with genai.Model(bundled_folder, accuracy="fp32") as model:
        traffic = traffic_of(model)
    assert traffic is not None and traffic.arithmetic == "fp32"


def test_of_experts_those_count_that_a_token_chooses(tmp_path: Path) -> None:
    found = []
    for per_token in (2, 4):
        with genai.Model(mixture(tmp_path / f"{per_token}", per_token), threads=2) as model:
            traffic = traffic_of(model)
            assert traffic is not None
            found.append(traffic)
            program, executor = model.decoder.program, model.decoder.executor  # type: ignore[union-attr]
            arithmetic = {
                type(op): executor.arithmetic(op, program.constants, prefill=False)
                for op in program.ops
                if not getattr(op, "exact", True)
            }
    two, four = found
    experts = 2 * 3 * 128 * 128
    assert two.products_per_token == (128 + 2 * 64) * 128 + 128 * 128 + 8 * 128 + experts
    assert four.products_per_token - two.products_per_token == experts
    assert four.weight_bytes - two.weight_bytes == experts * (32 * 4 // 8 + 2) // 32
    # In a prompt, the experts do most of the work, with the same activations as other products, as in decoding.
    assert two.arithmetic == arithmetic[ExpertsRecord] == arithmetic[Linear]


def test_traffic_is_unknown_where_the_host_computes(tmp_path: Path) -> None:
    with genai.Model(mixture(tmp_path / "model", 2, normalized=False), threads=2) as model:
        assert model.info.flattened and traffic_of(model) is None


def test_a_share_is_what_was_used_of_what_there_is() -> None:
    ceilings = iter([1e9, 2e9, 4e9])
    speeds = iter([9.0, 500.0, 500.0, 1000.0])  # the first is not counted
    found = speed._timed(lambda: next(speeds), 3, Ceiling("bandwidth", 1e6, lambda: next(ceilings)), speed.silent)
    assert (found["bandwidth"], found["share"]) == (2e9, 0.25)


def test_decode_and_prefill(bundled: Any) -> None:
    decode = bench_decode(bundled, context=40, tokens=4, batch=2, repeat=2)
    assert (decode["context"], decode["tokens"], decode["batch"]) == (40, 4, 2)
    prefill = bench_prefill(bundled, tokens=64, repeat=2)
    for found in (decode, prefill):
        assert 0 < found["slowest"] <= found["tokens_per_second"] <= found["fastest"]
        assert found["share"] > 0
    assert decode["bandwidth"] > 1e8
    with pytest.raises(ContextOverflowError, match="the run needs"):
        bench_decode(bundled, context=100_000, tokens=1, repeat=1)
    with pytest.raises(ContextOverflowError, match="the run needs"):
        bench_prefill(bundled, tokens=100_000, repeat=1)


def test_sweeps(bundled: Any, bundled_folder: Path) -> None:
    assert [row["context"] for row in sweep_context([bundled], [8, 40], tokens=2, repeat=1)] == [8, 40]
    rows = list(sweep_batch(bundled, [1, 3], context=8, tokens=2, repeat=1))
    assert [row["batch"] for row in rows] == [1, 3]
    assert rows[1]["per sequence"] == pytest.approx(rows[1]["tok/s"] / 3)

    def load(count: int) -> genai.Model:
        return genai.Model(bundled_folder, threads=count)

    assert [row["threads"] for row in sweep_threads(load, [1, 2], context=8, tokens=2, repeat=1)] == [1, 2]


def test_kernels(bundled: Any) -> None:
    rows = list(bench_kernels(bundled, rows=[1, 33], repeat=1))
    kinds = {row["product"] for row in rows}
    assert len(kinds) == 5 and "640 x 256 int4 by 32, silu of two" in kinds
    for row in rows:
        assert row["ms"] > 0 and row["numerics"] in ("decode", "prefill")
        assert row["of products"] > 0 and row["of bandwidth"] > 0
    assert {row["rows"] for row in rows} == {1, 33}


def test_kernels_of_a_model_with_places_for_adapters(bundled_folder: Path) -> None:
    with Model(bundled_folder, lora=True) as model:
        rows = list(bench_kernels(model, rows=[1], repeat=1))
        assert len({row["product"] for row in rows}) == 5
        diff = diff_models(model, model, np.array([3, 4, 5]))
        assert diff.first is None and len(diff.values) > 60


def test_kernels_need_programs() -> None:
    with pytest.raises(UnsupportedModelError, match="cannot be measured individually"):
        next(bench_kernels(SimpleNamespace(decoder=None), rows=[1]))  # type: ignore[arg-type]


def test_startup(bundled_folder: Path) -> None:
    found = bench_startup(bundled_folder, tokens=8, repeat=1)
    assert 0 < found["packages s"] < found["model s"] < found["first token s"] == found["fastest s"]


def test_startup_says_what_went_wrong(tmp_path: Path) -> None:
    with pytest.raises(GenaiError, match="cannot be loaded in a separate process") as caught:
        bench_startup(tmp_path, repeat=1)
    assert str(tmp_path) in str(caught.value)


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    from genai.cli import app

    def run(*arguments: str) -> str:
        assert not app.run(["bench", *arguments])
        return capsys.readouterr().out

    batch = json.loads(run("batch", "-b", "2", "-n", "2", "-c", "8", "-r", "1", "--json"))
    assert [row["batch"] for row in batch] == [2]
    table = run("context", "-c", "8", "-c", "9", "-n", "2", "-r", "1").splitlines()
    assert [line.split()[0] for line in table[-3:]] == ["context", "8", "9"]
    assert {len(line) for line in table} == {len(table[0])}
    assert "bandwidth" in run("decode", "-n", "2", "-c", "8", "-r", "1")
    table = run("kernels", "-m", "1", "-r", "1").splitlines()
    assert table[0].split()[-1] == "of" and table[1].split()[-1] == "products"


def test_attention_reads_the_bytes_of_its_cache(bundled: Any) -> None:
    rows = list(bench_attention(bundled, context=100, repeat=1))
    layers, sizes = bundled.info.num_layers, {"fp16": 1536, "fp32": 3072, "int8": 816, "int4": 432}
    assert [row["product"] for row in rows] == [f"attention to 100 tokens, {kind} cache" for kind in sizes]
    for row, size in zip(rows, sizes.values(), strict=True):
        assert row["GB/s"] * row["ms"] * 1e6 == pytest.approx(100 * size / layers)
    capped = next(iter(bench_attention(bundled, context=10**6, repeat=1)))
    assert capped["product"].startswith(f"attention to {bundled.config.model.context_length} tokens")
