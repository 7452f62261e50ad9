"""`genai lora`, and --lora."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from genai.cli.app import run
from genai.cli.options import read_lora
from genai.errors import OptionError
from genai.lora.read import read_adapter
from genai.models.folders import bundled_adapter

CHECKPOINT = Path(__file__).parents[2] / "tools" / "bundled_model" / "checkpoint"
Capture = pytest.CaptureFixture[str]
WORDS = str(bundled_adapter("words"))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a=b", ("a", Path("b"), 1.0)),
        ("a=b:0.5", ("a", Path("b"), 0.5)),
        ("a=b:-2", ("a", Path("b"), -2.0)),
        ("a=b:1e-3", ("a", Path("b"), 0.001)),
        ("a=/x:y/b", ("a", Path("/x:y/b"), 1.0)),
        ("a=/x:y/b:3", ("a", Path("/x:y/b"), 3.0)),
        ("a=b:3:1", ("a", Path("b:3"), 1.0)),
        ("a=C:\\b", ("a", Path("C:\\b"), 1.0)),
        ("a=b=c:2", ("a", Path("b=c"), 2.0)),
        ("a=b:", ("a", Path("b:"), 1.0)),
        ("a=b:1_0", ("a", Path("b:1_0"), 1.0)),
        ("a=b: 2", ("a", Path("b: 2"), 1.0)),
        ("a=~/b", ("a", Path("~/b").expanduser(), 1.0)),
        ("a b=c", ("a b", Path("c"), 1.0)),
    ],
)
def test_names_paths_and_scales(text: str, wanted: tuple[str, Path, float]) -> None:
    assert read_lora(text) == wanted


@pytest.mark.parametrize("text", ["", "a", "a=", "=b", "a=:2", "=", "off=b"])
def test_what_is_none(text: str) -> None:
    with pytest.raises(OptionError):
        read_lora(text)


def test_a_bundled_adapter_is_named_with_its_folder() -> None:
    with pytest.raises(OptionError) as caught:
        read_lora("pirate")
    assert caught.value.fix == f"name the adapter: --lora pirate={bundled_adapter('pirate')}"


def test_mistakes_are_said_before_the_model_is_loaded(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genai.llm.llm.LLM.__init__", lambda *_, **__: pytest.fail("loaded"))
    for given, said in (("words", "NAME=PATH"), ("off=x", "/lora off"), (f"a={tmp_path / 'none'}", "not an adapter")):
        assert run(["generate", "-p", "x", "--lora", given])
        assert said in capsys.readouterr().err


def test_scales_that_are_none(capsys: Capture) -> None:
    for scale in ("nan", "inf", "1e7"):
        assert run(["generate", "-q", "-p", "x", "--lora", f"a={WORDS}:{scale}"]) == 2
        assert "a number from -1e6 to 1e6" in capsys.readouterr().err


def test_listing_and_describing(capsys: Capture, tmp_path: Path) -> None:
    assert run(["lora", "ls", "--json"]) == 0
    assert [Path(row["path"]).name for row in json.loads(capsys.readouterr().out)] == ["pirate", "words"]
    assert run(["lora", "ls", str(tmp_path)]) == 0
    assert "no adapters in" in capsys.readouterr().err
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "adapter_config.json").write_text("{")
    assert run(["lora", "ls", str(tmp_path)]) == 0
    assert "cannot be read" in capsys.readouterr().out
    for missing in (tmp_path / "none", tmp_path / "broken" / "adapter_config.json"):
        assert run(["lora", "ls", str(missing)]) == 1
        assert ": not a folder" in capsys.readouterr().err
    assert run(["lora", "info", WORDS, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["kind"], facts["ranks"], facts["modules"]) == ("peft", [4], 42)
    assert run(["lora", "info", str(tmp_path / "none")]) == 1
    assert "not an adapter" in capsys.readouterr().err


def test_checking(capsys: Capture) -> None:
    assert run(["lora", "check", WORDS]) == 0
    assert capsys.readouterr().out.startswith("fits pebble: changes 42 of 54 projections")


def test_converting_there_and_back(capsys: Capture, tmp_path: Path, bundled_folder: Path) -> None:
    file, folder = tmp_path / "w.onnx_adapter", tmp_path / "w"
    assert run(["lora", "convert", WORDS, "-o", str(file)]) == 0
    assert run(["lora", "convert", str(file), "-o", str(folder), "--model", str(bundled_folder)]) == 0
    assert read_adapter(folder).pairs.keys() == read_adapter(WORDS).pairs.keys()
    assert run(["lora", "check", str(folder), str(bundled_folder)]) == 0
    capsys.readouterr()
    for wrong, said in (
        ([WORDS, "-o", WORDS], "already exists"),
        ([str(file), "-o", str(file)], "already exists"),
        ([WORDS, "-o", str(tmp_path / "x.gguf")], "x.gguf: .gguf files are not written"),
        ([WORDS, "-o", str(tmp_path / "x"), "--dtype", "int8"], "allowed: float32, float16"),
        ([WORDS, "-o", str(tmp_path / "x"), "--model", str(tmp_path / "none")], "none"),
    ):
        assert run(["lora", "convert", *wrong])
        assert said in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_merging(capsys: Capture, tmp_path: Path) -> None:
    """The merged model replies as the base model with the adapter does, for either format of the adapter."""
    file = tmp_path / "w.onnx_adapter"
    assert run(["lora", "convert", WORDS, "-o", str(file)]) == 0
    for index, adapter in enumerate((WORDS, str(file))):
        merged = str(tmp_path / f"merged {index}")
        assert run(["lora", "merge", str(CHECKPOINT), adapter, "-o", merged]) == 0
        capsys.readouterr()
        assert run(["chat", merged, "-q", "-p", "What is 47 + 38?"]) == 0
        assert capsys.readouterr().out == "85, eighty-five\n"
        assert run(["lora", "merge", str(CHECKPOINT), adapter, "-o", merged]) == 1
        assert "already exists" in capsys.readouterr().err
    assert run(["lora", "merge", str(CHECKPOINT), WORDS, "-o", str(tmp_path / "x"), "--weight", "nan"]) == 2
    assert "a finite number" in capsys.readouterr().err
