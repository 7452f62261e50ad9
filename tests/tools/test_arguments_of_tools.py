"""Invalid arguments on the command lines of developers' tools."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import cuda_host_time, outlier_model

FOLDER = Path(__file__).parent


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batches", "0"], "argument --batches: 0 is below 1"),
        (["--batches", "1", "-3"], "argument --batches: -3 is below 1"),
        (["--batches", "9" * 5000], "argument --batches: invalid positive value"),
        (["--tokens", "0"], "argument --tokens: 0 is below 1"),
        (["--repeat", "x"], "argument --repeat: invalid positive value: 'x'"),
        (["--graph-us", "nan"], "argument --graph-us: nan is not a number of microseconds"),
        (["--choice-us", "-1"], "argument --choice-us: -1 is not a number of microseconds"),
        (["--model", "/nonexistent"], "argument --model: there is no folder /nonexistent"),
        (["--model", str(FOLDER)], "error: "),
        (["--tokens", "5000", "--repeat", "1", "--only", "Generator"], "error: "),
    ],
)
def test_the_time_of_the_host(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cuda_host_time.main(arguments)
    shown = capsys.readouterr().err
    assert ended.value.code == 2 and shown.startswith("usage: ") and said in shown


def test_what_others_refuse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["outlier_model", "a", "b", "--every", "0"])
    with pytest.raises(SystemExit):
        outlier_model.main()
    assert "argument --every: 0 is below 1" in capsys.readouterr().err
