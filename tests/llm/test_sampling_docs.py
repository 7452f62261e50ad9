"""docs/reference/sampling.md agrees with the code."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from genai.engine.sampling.option_rules import DEFAULT_ORDER, SAMPLERS
from genai.engine.sampling.params import SamplingParams
from genai.errors import OptionError

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "sampling.md").read_text(encoding="utf-8")


def rows(section: str) -> list[list[str]]:
    """Return the cells of the first table of a section."""
    lines = re.findall(r"^\|(.*)\|$", PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0], re.M)
    return [[cell.strip() for cell in line.split(" | ")] for line in lines[2:]]


def test_every_sampler_with_its_options() -> None:
    """Also two that are not in `samplers`."""
    found = {cells[0].strip("`"): tuple(cells[1].replace("`", "").split(", ")) for cells in rows("Samplers")}
    apart = {name: found.pop(name) for name in ("mirostat", "no-repeat n-gram")}
    assert list(found.items()) == list(SAMPLERS.items())
    assert apart["mirostat"][0] == "mirostat" and apart["no-repeat n-gram"] == ("no_repeat_ngram_size",)


def test_every_option_with_its_default() -> None:
    found = {cells[0].strip("`"): cells[1].strip("`") for cells in rows("Options")}
    defaults = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    assert found == {
        name: "DEFAULT_ORDER" if value == DEFAULT_ORDER else repr(value) for name, value in defaults.items()
    }


@pytest.mark.parametrize("example", [cells[0].strip("`") for cells in rows("Contradictions")])
def test_contradictions(example: str) -> None:
    with pytest.raises(OptionError, match="contradicts"):
        eval(f"SamplingParams({example})", {"SamplingParams": SamplingParams})


def test_neutral_values_contradict_nothing() -> None:
    assert "`temperature=0, top_p=1` is valid, and so is `top_k=1`" in PAGE
    SamplingParams(temperature=0, top_p=1, top_k=1)
    SamplingParams(stop="bad", banned_strings="a bad word", min_tokens=3)
