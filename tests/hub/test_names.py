"""Short names, names that are also paths, and names of the form base+adapter."""

from __future__ import annotations

from pathlib import Path

import pytest

import genai
from genai.cli.app import run
from genai.convert.architectures import MODEL_TYPES
from genai.errors import GenaiError, ModelFolderError, UnsupportedModelError
from genai.hub.known import known_model, known_models
from genai.hub.local import pulled_model
from genai.hub.references import parse
from genai.lora.named import registered_adapters, split_adapter
from genai.models.folders import bundled_adapter, bundled_model
from tools.local_hub import LocalHub

Capture = pytest.CaptureFixture[str]
ROOT = Path(__file__).resolve().parents[2]


def test_the_table_is_sound_and_documented() -> None:
    page = (ROOT / "docs" / "reference" / "model-names.md").read_text(encoding="utf-8")
    sizes = [model.size_bytes for model in known_models().values()]
    assert sizes == sorted(sizes)
    for name, model in known_models().items():
        assert name == name.lower() == model.repository.split("/")[1].lower()
        assert 0 < model.size_bytes < model.download_bytes < model.parameters * 2.7
        assert model.size_bytes < model.memory_bytes < model.size_bytes + 2e9
        assert 0 < model.context < 2**20 and model.license and model.good_for
        assert f"| `{name}` | [{model.repository}](https://huggingface.co/{model.repository}) |" in page
    assert {"qwen3", "llama", "gemma3_text", "granite", "smollm3", "phi3"} <= set(MODEL_TYPES)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("qwen3-0.6b", "Qwen/Qwen3-0.6B"),
        ("Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("qwen3-0.6b@v1", "Qwen/Qwen3-0.6B@v1"),
        ("qwen3-0.6b:Q4_K_M", "Qwen/Qwen3-0.6B:Q4_K_M"),
    ],
)
def test_short_names(given: str, name: str) -> None:
    found = parse(given)
    assert found is not None and found.name == name and not found.explicit
    assert known_model("no-such-name") is None


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("llama3.2", "llama-3.2-1b-instruct or llama-3.2-3b-instruct"),
        ("smollm2:135m", "smollm2-135m-instruct"),
    ],
)
def test_names_of_other_programs_lead_to_short_names(given: str, names: str, hub: LocalHub, capsys: Capture) -> None:
    for command in (["chat", given, "-p", "hi"], ["pull", given]):
        assert run(command) == 1
        assert f"did you mean {names}?" in capsys.readouterr().err.replace("'", "")


def test_a_short_name_is_pulled(hub: LocalHub, chatting: dict[str, bytes], capsys: Capture) -> None:
    hub.add("Qwen/Qwen3-0.6B", chatting)
    hub.add("other/Qwen3-0.6B", chatting)
    assert run(["pull", "other/Qwen3-0.6B"]) == 0
    assert run(["pull", "qwen3-0.6b"]) == 0  # the table comes before cached models without their orgs
    capsys.readouterr()
    pulled = pulled_model("qwen3-0.6b")
    assert pulled is not None and pulled.name == "Qwen/Qwen3-0.6B"
    assert run(["chat", "QWEN3-0.6b", "-p", "What is 12 + 7?"]) == 0
    assert capsys.readouterr().out.strip() == "19"


def test_a_path_that_is_also_a_name(hub: LocalHub, chatting: dict[str, bytes], capsys: Capture) -> None:
    hub.add("org/tiny", chatting)
    genai.pull("org/tiny", quiet=True)
    for folder, model in (("tiny", "org/tiny"), ("org/tiny", "org/tiny"), ("smollm3-3b", "HuggingFaceTB/SmolLM3-3B")):
        Path(folder).mkdir(parents=True)
        for fails in (genai.LLM, genai.Config):
            with pytest.raises(ModelFolderError, match="is both a path and the name of a model") as caught:
                fails(folder)
            assert str(Path(folder).absolute()) in caught.value.why and model in caught.value.why
            assert f"./{folder}" in caught.value.fix and f"hf:{model}" in caught.value.fix
        assert run(["info", folder]) == 1
        assert "is both a path and the name of a model" in capsys.readouterr().err
        assert run(["chat", f"./{folder}", "-p", "x"]) == 1
        assert "genai_config.json is missing" in capsys.readouterr().err
    assert run(["chat", "hf:org/tiny", "-p", "What is 12 + 7?"]) == 0
    assert capsys.readouterr().out.strip() == "19"
    assert run(["chat", "./qwen3-0.6b", "-p", "x"]) == 1  # a path that does not exist is not a name
    assert f"{Path('qwen3-0.6b').absolute()}: not a model folder" in capsys.readouterr().err


def test_the_bundled_model_by_name(cache: Path) -> None:
    assert genai.Config("pebble").folder == bundled_model()
    Path("pebble").mkdir()
    with pytest.raises(GenaiError, match=r"genai_config\.json is missing"):
        genai.Config("pebble")


def test_suggestions_work(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("my-modell").mkdir()  # not a model
    with pytest.raises(ModelFolderError) as caught:
        genai.Config("my-model")
    assert "did you mean" not in caught.value.fix
    (Path("my-modell") / "config.json").write_text("{}")
    for given, near in (("my-model", "my-modell"), ("qwen3-06b", "qwen3-0.6b"), ("peble", "pebble")):
        with pytest.raises(ModelFolderError) as caught:
            genai.Config(given)
        assert caught.value.fix == f"did you mean {near}?"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelFolderError) as caught:
        genai.Config("qwen3-06b")
    assert "did you mean" not in caught.value.fix


def test_a_model_with_an_adapter(cache: Path, capsys: Capture) -> None:
    assert run(["chat", "pebble+pirate", "-p", "My name is Nora."]) == 0
    assert "matey" in capsys.readouterr().out
    assert run(["generate", f"pebble+{bundled_adapter('pirate')}", "--chat", "-p", "My name is Nora."]) == 0
    assert "matey" in capsys.readouterr().out
    lines = Path("in.txt")
    lines.write_text("My name is Nora.\n")
    assert run(["batch", str(lines), "pebble+pirate", "-o", "out.jsonl", "--chat"]) == 0
    assert "matey" in Path("out.jsonl").read_text()


def test_names_with_adapters(cache: Path) -> None:
    assert set(registered_adapters("pebble")) == {"pirate", "words"}
    assert split_adapter("org/name") == ("org/name", None)
    assert split_adapter("https://x.y/a+b.gguf") == ("https://x.y/a+b.gguf", None)
    Path("a+b").mkdir()
    assert split_adapter("a+b") == ("a+b", None)
    model = Path("model")
    (model / "adapters").mkdir(parents=True)
    (model / "adapters" / "mine").symlink_to(bundled_adapter("words"))
    assert split_adapter("model+mine") == ("model", ("mine", Path("model/adapters/mine")))
    Path("mine").mkdir()
    with pytest.raises(ModelFolderError, match="mine is both a path and an adapter of model"):
        split_adapter("model+mine")


@pytest.mark.parametrize(
    ("given", "what", "fix"),
    [
        ("pebble+pirat", "there is no adapter 'pirat'", "did you mean 'pirate'?"),
        ("qwen3-0.6b+mine", "there is no adapter 'mine'", "qwen3-0.6b+PATH"),
        ("pebble+", "is not a model name", "MODEL+ADAPTER"),
        ("+pirate", "is not a model name", "MODEL+ADAPTER"),
    ],
)
def test_adapters_that_are_not_there(given: str, what: str, fix: str, cache: Path, capsys: Capture) -> None:
    assert run(["chat", given, "-p", "x"]) == 1
    said = capsys.readouterr().err
    assert what in said and fix in said


def test_python_says_how_to_load_an_adapter(cache: Path) -> None:
    with pytest.raises(ModelFolderError, match="not a model folder") as caught:
        genai.LLM("pebble+pirate")
    assert "load_adapter" in caught.value.fix


@pytest.mark.parametrize(
    ("typed", "what", "fix"),
    [
        ("What is 12 + 7?", "'What is 12 + 7?'", 'genai chat -p "What is 12 + 7?"'),
        ("2+2", "2: not a model folder", "pass a folder with genai_config.json"),
        ("pebbel+pirate", "pebbel: not a model folder", "did you mean pebble?"),
        ("pebble+pirat", "there is no adapter 'pirat'", "did you mean 'pirate'?"),
    ],
)
def test_a_plus_sign_separates_an_adapter_only_from_a_model(
    typed: str, what: str, fix: str, cache: Path, capsys: Capture
) -> None:
    assert run(["chat", typed, "-p", "x"]) == 1
    said = capsys.readouterr().err
    assert what in said and fix in said


def test_a_precision_is_no_advice_for_an_encoder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UnsupportedModelError, match="is an encoder, which does not generate text") as caught:
        genai.LLM(tmp_path)
    assert "genai.Embedder" in caught.value.fix
