"""Several outputs, and which to take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from genai.errors import ModelFolderError, OptionError
from genai.quantize.compare import Variant, choose_variant, compare, parse_variants

from .conftest import quick


def report(nbytes: int, kld: float) -> dict[str, Any]:
    return {"nbytes": nbytes, "quality": {"kld": kld}}


def test_the_smallest_that_is_good_enough_is_taken() -> None:
    reports = {
        "large": report(900, 0.001),
        "bad": report(100, 0.5),
        "good": report(400, 0.015),
        "beaten": report(500, 0.02),
    }
    result = choose_variant(reports, 0.02)
    assert result.taken == "good" and list(result.front) == ["bad", "good", "large"]
    assert list(result.reports) == ["bad", "good", "beaten", "large"]
    strict = choose_variant(reports, 1e-4)
    assert strict.taken == "large" and "no variant has" in strict.why


def test_variants() -> None:
    assert parse_variants("rtn/4/32, gptq/8/64") == [Variant("rtn", 4, 32), Variant("gptq", 8, 64)]
    assert parse_variants("rtn/4/32,gptq/nl3")[1] == Variant("gptq", format="nl3")
    assert parse_variants("rtn/4/32,gptq/nl3")[1].name == "gptq-nl3"
    assert len(parse_variants("default")) > 4
    for bad in ("", "rtn/4", "rtn/4/32", "rtn/4/32,rtn/4/32", "rtn/x/32,rtn/4/32", "rtn/nl9,rtn/4/32"):
        with pytest.raises(OptionError, match="variant"):
            parse_variants(bad)


def test_a_comparison(small: Path, tmp_path: Path) -> None:
    wanted = parse_variants("rtn/nl2,search/4/16,search/8/32")
    made = []

    def progress(phase: str, done: float, total: float) -> None:
        made.append(phase.partition(":")[0])

    result = compare(small, tmp_path / "out", wanted, quick(method=None), most_kld=1e-3, progress=progress)
    assert result.taken == "search-8-32" and list(result.reports) == ["rtn-nl2", "search-4-16", "search-8-32"]
    plain = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert plain["taken"] == "search-8-32" and set(plain["reports"]) == set(made)
    page = (tmp_path / "out" / "comparison.html").read_text()
    assert "Recommended: search-8-32" in page and 'href="rtn-nl2/quantization_report.html"' in page
    made.clear()
    again = compare(small, tmp_path / "out", wanted, quick(method=None), progress=progress)
    assert not made and list(again.reports) == list(result.reports)
    with pytest.raises(ModelFolderError, match=r"does not contain rtn-nl2 of"):
        compare(small, tmp_path / "out", wanted, quick(method=None, seed=5))
    with pytest.raises(OptionError, match="evaluate is off"):
        compare(small, tmp_path / "no", wanted, quick(method=None, evaluate=False))
    for options in ({"bits": 3}, {"method": "gptq"}, {"recipe": tmp_path / "recipe.yaml"}, {"format": "nl3"}):
        with pytest.raises(OptionError, match=f"{next(iter(options))} is .*several outputs are compared"):
            compare(small, tmp_path / "no", wanted, quick(**{"method": None, **options}))
    for most in (float("nan"), -1.0, 0.0):
        with pytest.raises(OptionError, match="max_kld is"):
            compare(small, tmp_path / "no", wanted, quick(method=None), most_kld=most)
    assert not (tmp_path / "no").exists()
    with pytest.raises(OptionError, match="method is 'x'"):
        compare(small, tmp_path / "no", parse_variants("x/4/32,rtn/4/32"), quick(method=None))
