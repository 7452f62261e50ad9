"""Charts as text, SVG and PNG."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from genai.common.plots import Chart
from genai.errors import InputError, OptionError

CHART = Chart("Speed", "threads", ["1", "16"], {"decode": [100.0, 1234.5], "prefill": [0.0, 50.0]}, "tok/s")


def test_text_fits_the_window() -> None:
    lines = CHART.text(40).splitlines()
    assert lines[0] == "Speed, by threads"
    assert lines[1] == "decode" and lines[4] == "prefill"
    assert lines[2].startswith("   1 ##") and lines[2].endswith("100 tok/s")
    assert lines[3].startswith("  16 ####") and lines[3].endswith(" 1,234 tok/s")
    assert lines[2].count("#") / lines[3].count("#") == pytest.approx(100 / 1234.5, abs=0.05)
    assert "#" not in lines[5]
    for width in (10, 30, 200):
        assert all(len(line) <= max(width, 17) for line in CHART.text(width).splitlines())
    one = Chart("Right", "task", ["sum"], {"right": [50.0]}, "%", {"right": [7.9]})
    assert one.text(60).splitlines()[1].endswith("50 ± 7.9 %")
    assert Chart("Nothing", "task", [], {"right": []}).text(20) == "Nothing, by task"


def test_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, begin in (("a.svg", b"<?xml"), ("a.png", b"\x89PNG")):
        CHART.save(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(begin)
    drawn = (tmp_path / "a.svg").read_text()
    assert all(f">{word}<" in drawn for word in ("Speed", "threads", "tok/s", "decode", "prefill", "16"))
    CHART.save(tmp_path / "b.svg")
    assert (tmp_path / "b.svg").read_text() == drawn, "the same chart is the same file"
    with pytest.raises(InputError, match="cannot be written"):
        CHART.save(tmp_path / "no" / "such.svg")


def test_files_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="SVG or PNG"):
        CHART.save(tmp_path / "a.jpg")
    import_before = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return import_before(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(OptionError, match="pip install matplotlib"):
        CHART.save(tmp_path / "a.svg")
