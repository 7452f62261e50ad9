"""The table of operator speeds."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from tools import operator_speed


def test_cases_are_valid_models():
    found = list(operator_speed.cases())
    assert len({(case.name, case.kinds) for case in found}) == len(found) > 60
    case = next(case for case in found if case.name == "QuickGelu (x * Sigmoid(1.702 x))")
    assert list(case.feed()) == ["x"] and case.kinds == "float32 [1, 128, 768]"


@pytest.mark.oracle
def test_a_table_of_chosen_operators(monkeypatch, capsys, tmp_path):
    pytest.importorskip("onnxruntime")
    x = np.ones((2, 3), np.float32)
    made = [operator_speed.Case(name, ((name, "x", "out", {}),), (x,)) for name in ("Abs", "Neg")]
    monkeypatch.setattr(operator_speed, "cases", lambda: iter(made))
    monkeypatch.setattr(operator_speed, "SECONDS", 1e-4)
    monkeypatch.setattr(operator_speed, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(sys, "argv", ["operator_speed", "Ne"])
    operator_speed.main()
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == ["Neg"] and rows[0].count("|") == 6
    monkeypatch.setattr(sys, "argv", ["operator_speed", "--write", "one core"])
    operator_speed.main()
    assert (
        "on one core" in operator_speed.PAGE.read_text()
        and "| Abs | float32 [2, 3] |" in operator_speed.PAGE.read_text()
    )


@pytest.mark.parametrize(
    ("flags", "message"), [(["X", "--write", "m"], "--write needs all"), (["Nothing"], "no operator")]
)
def test_arguments_that_do_not_fit(monkeypatch, capsys, flags, message):
    monkeypatch.setattr(sys, "argv", ["operator_speed", *flags])
    with pytest.raises(SystemExit) as caught:
        operator_speed.main()
    assert message in capsys.readouterr().err + str(caught.value)
