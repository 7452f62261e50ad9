"""`genai list`, `rm` and `info` for everything that MODEL may be, with the last use of models in the cache."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from onnx import TensorProto, helper, save

from genai.cli.app import run
from genai.cli.model_names import request_name
from genai.cli.options import EngineFlags
from genai.cli.serve_router import _listed
from genai.common.locks import locked
from genai.errors import ModelFolderError, StateError
from genai.hub import built, store
from genai.hub.local import named_or
from genai.models.folders import bundled_adapter
from tools.checkpoint_gguf import write_gguf
from tools.local_hub import LocalHub

from .conftest import CHECKPOINT

Capture = pytest.CaptureFixture[str]
QUESTION = ["-p", "What is 12 + 7?"]


def listed(capsys: Capture) -> dict[str, list[dict[str, object]]]:
    capsys.readouterr()
    assert run(["list", "--json"]) == 0
    facts: dict[str, list[dict[str, object]]] = json.loads(capsys.readouterr().out)
    return facts


def test_built_models_are_listed_and_removed(cache: Path, capsys: Capture) -> None:
    assert run(["list"]) == 0
    assert "the cache is empty" in capsys.readouterr().err
    shutil.copytree(CHECKPOINT, "mine")
    write_gguf(CHECKPOINT, Path("import.gguf"), "Q8_0")
    for source in ("mine", "import.gguf"):
        assert run(["chat", source, *QUESTION]) == 0
    facts = listed(capsys)
    names = [str(row["name"]) for row in facts["built"]]
    assert [name.rpartition("-")[0] for name in names] == ["import", "mine"]
    assert all(row["kind"] == "built" and row["used"] for row in facts["built"])
    assert [row["precision"] for row in facts["built"]] == ["kept", "int4"]
    assert [Path(str(row["source"])).name for row in facts["built"]] == ["import.gguf", "mine"]
    assert facts["total_bytes"] == sum(int(str(row["bytes"])) for row in facts["built"]) > 5_000_000
    assert run(["list"]) == 0
    shown = capsys.readouterr().out
    assert "kept, built 20" in shown and "import.gguf" in shown
    assert "built, " in shown and "used 20" in shown and shown.splitlines()[-1].startswith("total")

    for command in ("info", "show"):  # the names of the list name models
        assert run([command, names[1]]) == 0
        assert "fits with the full" in capsys.readouterr().out
    assert run(["show", names[1]]) == 0
    assert "built, int4, " in (shown := capsys.readouterr().out) and str(Path("mine").absolute()) in shown
    assert run(["show", names[1], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["info"]["layers"] == 6
    assert run(["info", "mine"]) == 0
    assert "fits with the full" in capsys.readouterr().out

    assert run(["rm", names[0]]) == 1
    assert f"`genai rm {names[0]} --yes`" in capsys.readouterr().err
    assert run(["rm", names[0], "--yes"]) == 0
    assert f"removed {names[0]}" in capsys.readouterr().err
    assert [row["name"] for row in listed(capsys)["built"]] == [names[1]]
    (model,) = built.built_models()
    with locked(model.folder.parent), pytest.raises(StateError, match="another process is building"):
        built.remove_built(model)
    assert run(["rm", names[1], "--yes"]) == 0
    assert built.built_models() == [] and Path("mine").is_dir()
    assert list((cache.parent / "last_use").iterdir()) == list((cache.parent / "built_from").iterdir()) == []


def test_paths_outside_the_cache_are_not_removed(cache: Path, capsys: Capture) -> None:
    Path("mine").mkdir()
    for name in ("mine", "./mine", str(Path("mine").absolute()), "../here/mine"):
        assert run(["rm", name, "--yes"]) == 1
        assert "it is a path outside the cache" in capsys.readouterr().err
    outside = built.BuiltModel("mine", "built", "", Path("mine").absolute())
    with pytest.raises(ModelFolderError, match="the folder was not removed"):
        built.remove_built(outside)
    built.models_folder().mkdir(parents=True)
    (built.models_folder() / "link").symlink_to(Path("mine").absolute())
    assert run(["rm", "link", "--yes"]) == 1
    assert Path("mine").is_dir()


def test_names_without_hashes(cache: Path, capsys: Capture) -> None:
    first, second = (built.models_folder() / f"smol.Q4_1-{digit * 12}" for digit in "1a")
    for folder, precision in ((first, "kept"), (second, "fp32")):
        folder.mkdir(parents=True)
        (folder / "genai_config.json").write_text("{}")
        built.note_build(folder, Path("smol.Q4_1.gguf"), precision)
    assert run(["list"]) == 0
    assert "kept, built 20" in (shown := capsys.readouterr().out) and "fp32, built 20" in shown
    for command in (["rm", "smol.Q4_1", "--yes"], ["show", "smol.Q4_1"]):
        assert run(command) == 1
        message = " ".join(capsys.readouterr().err.split())
        assert "several built models have this name" in message and "fix: add the hash" in message
        assert f"{first.name} (kept, 20" in message and f"{second.name} (fp32, 20" in message
    with pytest.raises(ModelFolderError, match="several built models"):
        named_or(Path("smol.Q4_1"))
    assert named_or(Path(first.name)) == first
    assert request_name(Path(first.name)) == "smol.Q4_1" and request_name(first) == "smol.Q4_1"
    assert request_name(Path(first.name), with_hash=True) == first.name
    names = [one.name for one in _listed([Path(first.name), Path(second.name), Path("pebble")], EngineFlags())]
    assert names == [first.name, second.name, "pebble"]
    assert run(["rm", first.name, "--yes"]) == 0
    assert run(["rm", "smol.Q4_1.gguf", "--yes"]) == 0 and not second.exists()
    assert run(["rm", "smol.Q4_1", "--yes"]) == 1 and "is not in the cache" in capsys.readouterr().err


def test_interrupted_builds_are_listed(cache: Path, capsys: Capture) -> None:
    (built.models_folder() / "half-123").mkdir(parents=True)
    assert [row["kind"] for row in listed(capsys)["built"]] == ["unfinished build"]
    assert run(["rm", "half-123", "--yes"]) == 0
    assert built.built_models() == []


def test_the_last_use(hub: LocalHub, chatting: dict[str, bytes], capsys: Capture) -> None:
    hub.add("org/tiny", chatting)
    assert run(["pull", "org/tiny"]) == 0
    assert [row["used"] for row in listed(capsys)["models"]] == [""]
    assert run(["chat", "tiny", *QUESTION]) == 0
    (row,) = listed(capsys)["models"]
    assert str(row["used"]).startswith("20")
    (model,) = store.models()
    os.utime(built._mark(model.folder), (0, 86400))
    assert built.last_use(model.folder).startswith("1970")
    built.note_use(Path("elsewhere"))  # not in the cache: ignored
    assert run(["rm", "tiny", "--yes"]) == 0
    assert built.last_use(model.folder) == ""


def test_info_about_a_name_downloads_nothing(hub: LocalHub, chatting: dict[str, bytes], capsys: Capture) -> None:
    hub.add("Qwen/Qwen3-0.6B", chatting, facts={"cardData": {"license": "mit"}})
    assert run(["info", "qwen3-0.6b"]) == 0
    shown = capsys.readouterr().out
    for text in ("checkpoint to download", "Qwen/Qwen3-0.6B", "mit", "596,049,920", "model.safetensors 8.7 MB"):
        assert text in shown
    assert not any("/resolve/" in path for path in hub.paths())
    assert run(["info", "qwen3-0.6b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["download_bytes"] > 8_000_000
    assert run(["info", "qwen3-0.6b", "-c", "9"]) == 2
    assert "--ctx-size cannot be used with qwen3-0.6b" in capsys.readouterr().err
    assert run(["pull", "qwen3-0.6b"]) == 0
    assert run(["info", "qwen3-0.6b"]) == 0
    assert "kind checkpoint" in " ".join(capsys.readouterr().out.split())
    assert run(["info", "org/none"]) == 1
    assert "the repository was not found" in capsys.readouterr().err


def test_info_about_sources(cache: Path, capsys: Capture) -> None:
    assert run(["info", str(CHECKPOINT)]) == 0
    shown = capsys.readouterr().out
    assert "checkpoint" in shown and "llama" in shown and "int4" in shown and "4.0 MB" in shown
    write_gguf(CHECKPOINT, Path("import.gguf"), "Q8_0")
    assert run(["info", "import.gguf", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["kind"], facts["default_precision"], facts["layers"]) == ("GGUF file", "kept", 6)
    assert built.built_models() == []


def test_info_about_adapters(cache: Path, capsys: Capture) -> None:
    assert run(["info", str(bundled_adapter("pirate"))]) == 0
    assert "adapter ranks" in capsys.readouterr().out
    assert run(["info", "pebble+pirate", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["layers"] == 6 and facts["adapter"]["ranks"] == [4]
    assert run(["info", "pebble+none"]) == 1
    assert "there is no adapter 'none'" in capsys.readouterr().err
    assert run(["info", "no-such-folder"]) == 1
    assert "not a model folder" in capsys.readouterr().err


def test_info_about_an_encoder(cache: Path, capsys: Capture) -> None:
    folder = Path("encoder")
    folder.mkdir()
    config = {"model_type": "bert", "architectures": ["BertModel"], "num_hidden_layers": 2, "hidden_size": 8}
    (folder / "config.json").write_text(json.dumps(config))
    ids, states = (
        helper.make_tensor_value_info(name, kind, ["batch", "tokens"])
        for name, kind in (("input_ids", TensorProto.INT64), ("last_hidden_state", TensorProto.FLOAT))
    )
    cast = helper.make_node("Cast", ["input_ids"], ["last_hidden_state"], to=TensorProto.FLOAT)
    save(helper.make_model(helper.make_graph([cast], "encoder", [ids], [states])), str(folder / "model.onnx"))
    assert run(["info", "encoder"]) == 0
    shown = capsys.readouterr().out
    for text in ("encoder", "bert", "model.onnx", "genai embed encoder"):
        assert text in shown
