"""Earlier names of arguments and fields work, and warn."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from typing import Any

import pytest

from genai.common.renamed import renamed_arguments, renamed_fields


@renamed_fields(form="format")
@dataclass(frozen=True)
class Choice:
    format: str = "text"
    size: int = 1


@renamed_arguments(form="format")
def write(text: str, format: str = "text") -> str:
    return f"{text} as {format}"


def test_fields() -> None:
    make: Any = Choice
    with pytest.warns(DeprecationWarning, match=r"Choice\(form=…\) is now Choice\(format=…\)") as seen:
        choice = make(form="json")
    assert choice == Choice("json") and seen[0].filename == __file__
    with pytest.warns(DeprecationWarning, match=r"Choice\.form is now Choice\.format") as seen:
        assert choice.form == "json"
    assert seen[0].filename == __file__
    assert replace(choice, size=2) == Choice("json", 2)
    with pytest.raises(TypeError, match="form is the old name of format"):
        make(form="json", format="text")


def test_arguments() -> None:
    call: Any = write
    with pytest.warns(DeprecationWarning, match=r"write\(form=…\) is now write\(format=…\)") as seen:
        assert call("a", form="json") == "a as json"
    assert seen[0].filename == __file__
    assert write("a") == "a as text" and write("a", format="json") == "a as json"
    with pytest.raises(TypeError, match="pass only format"):
        call("a", form="json", format="text")


@renamed_fields(form="format")
@dataclass(frozen=True)
class Pickled:
    format: str = "plain"


def test_what_was_pickled_under_an_earlier_name() -> None:
    earlier = Pickled.__new__(Pickled)
    earlier.__setstate__({"form": "nl3"})  # type: ignore[attr-defined]
    assert earlier.format == "nl3"
    assert pickle.loads(pickle.dumps(Pickled("nl4"))) == Pickled("nl4")
