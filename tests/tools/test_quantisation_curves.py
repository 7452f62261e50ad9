"""The curves of quantisation: the points on them, the page, the importance matrix, and the measurement of other
quantisers' matrices, which is the same as ours."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf")

from genai.quantize import QuantizeOptions, quantize_model
from genai.quantize.source import FloatModel
from tools.quantisation_curves import subject as subject_module
from tools.quantisation_curves.gguf_peers import write_importance
from tools.quantisation_curves.ours import curve_ways, table_ways
from tools.quantisation_curves.points import Point, Points
from tools.quantisation_curves.report import best, figure, write_report
from tools.quantisation_curves.subject import Measuring, Subject

ROOT = Path(__file__).resolve().parent.parent.parent


def made(maker: str, name: str, bits: float, kld: float, model: str = "yardstick") -> Point:
    return Point(model, maker, name, bits, kld, kld / 10, kld / 2, 10 * kld, 0.9, 3.5, 3.25)


def test_the_best_of_every_size() -> None:
    points = [made("genai", str(n), *pair) for n, pair in enumerate([(4, 0.1), (3, 0.3), (3.5, 0.4), (4, 0.2)])]
    assert [point.name for point in best(points)] == ["1", "0"]


def test_the_page_and_its_figure(tmp_path: Path) -> None:
    points = [
        made("genai", "rtn/4/32", 4.5, 0.02), made("genai", "target 3", 3.0, 0.05),
        made("llama.cpp", "Q4_K_M", 4.9, 0.03), made("genai", "rtn/4/32", 4.5, 0.01, "bundled"),
    ]  # fmt: skip
    write_report(points, tmp_path)
    page = (tmp_path / "quantisation-curves.md").read_text()
    assert "| 4.5 | 0.02000 (rtn/4/32, 4.50) |  |" in page
    assert "| 5.5 | 0.02000 (rtn/4/32, 4.50) | 0.03000 (Q4_K_M, 4.90) |" in page
    assert "On the bundled model" in page and "| target 3 | 3.000 |" in page
    assert figure(points).startswith("<svg") and "Q4_K_M" in figure(points)
    assert len(json.loads((tmp_path / "quantisation-curves.json").read_text())) == 4


def test_points_are_kept(tmp_path: Path) -> None:
    points = Points(tmp_path / "points.json")
    points.add(made("genai", "a", 4, 0.1))
    again = Points(tmp_path / "points.json")
    assert again.has("yardstick", "genai", "a") and not again.has("bundled", "genai", "a")
    assert again.all == points.all


def test_every_way_can_be_asked_for() -> None:
    names = [name for name, options in (*table_ways(), *curve_ways()) if QuantizeOptions(**options)]
    assert len(names) == len(set(names)) > 40


def test_importance_as_the_program_reads_it(tmp_path: Path) -> None:
    write_importance(tmp_path / "file", {"model.layers.3.attn.qkv_proj.MatMul.weight": np.array([1, 2.5], np.float32)})
    data = (tmp_path / "file").read_bytes()
    for name in ("blk.3.attn_q.weight", "blk.3.attn_k.weight", "blk.3.attn_v.weight"):
        entry = struct.pack("<I", len(name)) + name.encode() + struct.pack("<I2f", 2, 1.0, 2.5)
        assert data.startswith(entry)
        data = data[len(entry) :]
    assert not data


def test_others_matrices_are_measured_as_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quality of a folder measured as another quantiser's output equals that in our own report."""
    for name, value in (("LENGTH", 32), ("EVAL_SAMPLES", 2), ("SAMPLES", 4)):
        monkeypatch.setattr(subject_module, name, value)
    checkpoint = ROOT / "tools" / "bundled_model" / "checkpoint"
    text = ROOT / "configs" / "tasks" / "pebble.jsonl"
    subject = Subject("bundled", checkpoint, text, text)
    report = quantize_model(checkpoint, tmp_path / "out", subject.options(method="rtn", calib=None))
    assert report.quality is not None
    with Measuring(subject) as measuring:
        with FloatModel(tmp_path / "out", requantize=True) as model:
            quality = measuring.quality(model)
        importance = measuring.importance()
    assert quality.kld == pytest.approx(report.quality.kld, rel=1e-4)
    assert quality.tokens == report.quality.tokens
    assert all(values.min() >= 0 and values.max() > 0 for values in importance.values())
    assert len(importance) == sum(bool(site.products) for site in measuring.source.sites)
