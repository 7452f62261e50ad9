"""The hub's usual mess: made-up repositories, each of which ends in a model that answers or in an error that names the
next command."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load, save

from genai.cli.app import run
from genai.hub.store import models
from genai.models.folders import bundled_model
from genai.text.detokenizer import ByteLevel
from tools.checkpoint_gguf import write_gguf
from tools.local_hub import LocalHub

from .conftest import CHECKPOINT

Files = dict[str, bytes]
QUESTION, ANSWER = ["-p", "What is 12 + 7?"], "19"
COMMAND = re.compile(r"`(?:genai|hf) [^`]+`")
JUNK = b"junk" * 999
INT4 = "cpu_and_mobile/cpu-int4-rtn-block-32-acc-level-4"


@dataclass(frozen=True)
class Mess:
    """A repository, and what it ends in.

    Attributes:
        files: made of those of a checkpoint that chats.
        ends: "" where the model answers, else a part of the error.
        reference: what is asked for, if not the repository. options: of the repository. token: in HF_TOKEN.
        never: parts of names of files that are not fetched; of a model that cannot run no weights are.
    """

    files: Callable[[Files], Files]
    ends: str = ""
    reference: str = "org/model"
    options: dict[str, Any] = field(default_factory=dict)
    token: str = ""
    never: tuple[str, ...] = ()


def without(files: Files, *names: str) -> Files:
    return {path: data for path, data in files.items() if path not in names}


def below(folder: str, files: Files) -> Files:
    return {f"{folder}/{path}": data for path, data in files.items()}


def changed(files: Files, **values: Any) -> Files:
    config = json.loads(files["config.json"]) | values
    return {**files, "config.json": json.dumps({key: value for key, value in config.items() if value != ""}).encode()}


def sharded(files: Files) -> Files:
    """A checkpoint in two files and an index."""
    tensors = load(files["model.safetensors"])
    names = sorted(tensors)
    parts = {f"model-0000{i + 1}-of-00002.safetensors": {name: tensors[name] for name in names[i::2]} for i in range(2)}
    index = {"metadata": {}, "weight_map": {name: part for part, held in parts.items() for name in held}}
    return {
        **without(files, "model.safetensors"),
        **{name: save(held) for name, held in parts.items()},
        "model.safetensors.index.json": json.dumps(index).encode(),
    }


def as_pairs(files: Files) -> Files:
    """The tokenizer as vocab.json and merges.txt, as Qwen's first repositories have it."""
    model = json.loads(files["tokenizer.json"])["model"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    config = json.loads(files["tokenizer_config.json"]) | {"tokenizer_class": "Qwen2Tokenizer"}
    return {
        **without(files, "tokenizer.json"),
        "vocab.json": json.dumps(model["vocab"]).encode(),
        "merges.txt": "\n".join(["#version: 0.2", *merges]).encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }


def as_tiktoken(files: Files) -> Files:
    """The tokenizer as a tiktoken file; special tokens are declared beside it."""
    value = json.loads(files["tokenizer.json"])
    added = {str(token["id"]): {"content": token["content"], "special": True} for token in value["added_tokens"]}
    ranks = {token: id_ for token, id_ in value["model"]["vocab"].items() if str(id_) not in added}
    lines = [
        b"%s %d" % (base64.b64encode(bytes(ByteLevel.BYTES[character] for character in token)), rank)
        for token, rank in sorted(ranks.items(), key=lambda item: item[1])
    ]
    config = json.loads(files["tokenizer_config.json"])
    config |= {"tokenizer_class": "QWenTokenizer", "added_tokens_decoder": added}
    return {
        **without(files, "tokenizer.json"),
        "qwen.tiktoken": b"\n".join(lines),
        "tokenizer_config.json": json.dumps(config).encode(),
    }


def onnx(folder: str) -> Files:
    return below(folder, {path.name: path.read_bytes() for path in bundled_model().iterdir() if path.is_file()})


@pytest.fixture(scope="session")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The same model as a GGUF file."""
    return write_gguf(CHECKPOINT, tmp_path_factory.mktemp("gguf") / "model.gguf").read_bytes()


@pytest.fixture
def given(chatting: Files, gguf: bytes) -> Files:
    """A checkpoint that chats, and a GGUF file."""
    return {**chatting, "model-Q8_0.gguf": gguf}


GGUF = "model-Q8_0.gguf"
ENORMOUS = {"rfilename": "original/everything.tar", "size": 1 << 45, "blobId": "0" * 40}
BESIDE = ("pytorch_model.bin", "tf_model.h5", "flax_model.msgpack", "onnx/model.onnx", "images/a.png", "training.pt")
MESSES = {
    "several formats side by side": Mess(
        lambda files: {**without(files, GGUF), **dict.fromkeys(BESIDE, JUNK)}, never=(*BESIDE, ".gguf")
    ),
    "sharded, with an index, beside the original": Mess(
        lambda files: {**sharded(without(files, GGUF)), "consolidated.safetensors": JUNK, "original/x.pth": JUNK},
        never=("consolidated", "original"),
    ),
    "an old name of a repository that moved": Mess(
        lambda files: without(files, GGUF), reference="old/name", options={"moved_from": "old/name"}
    ),
    "no tokenizer_config.json": Mess(lambda files: without(files, GGUF, "tokenizer_config.json")),
    "a tokenizer of vocab.json and merges.txt": Mess(lambda files: as_pairs(without(files, GGUF))),
    "a tokenizer in a tiktoken file": Mess(lambda files: as_tiktoken(without(files, GGUF))),
    "ONNX folders for several devices": Mess(
        lambda files: {**onnx(INT4), **onnx("cuda/cuda-int4-rtn-block-32"), **without(files, GGUF)},
        never=("cuda", "model.safetensors"),
    ),
    "GGUF files of several quantisations": Mess(
        lambda files: {GGUF: files[GGUF], "model-F16.gguf": JUNK, "mmproj-F16.gguf": JUNK, "imatrix.gguf": JUNK},
        never=("F16", "imatrix"),
    ),
    "a GGUF file beside a checkpoint": Mess(
        lambda files: {**files, "README.md": JUNK}, reference="org/model:Q8_0", never=("safetensors", "README")
    ),
    "huge files that no model needs": Mess(
        lambda files: without(files, GGUF), options={"facts": {"siblings": [ENORMOUS]}}, never=("original",)
    ),
    "gated, with a token": Mess(
        lambda files: without(files, GGUF), options={"gated": True, "token": "hf_good"}, token="hf_good"
    ),
    "gated, without": Mess(
        lambda files: files, "the model is gated", options={"gated": True, "token": "hf_good"}, never=("cdn",)
    ),
    "private, or a typo": Mess(lambda files: files, "not found", reference="org/modell"),
    "pickles alone": Mess(
        lambda files: {**without(files, GGUF, "model.safetensors"), "pytorch_model.bin": JUNK},
        "pickles",
        never=("bin",),
    ),
    "an adapter": Mess(
        lambda files: {"adapter_config.json": b"{}", "adapter_model.safetensors": JUNK}, "it contains an adapter"
    ),
    "code of its own": Mess(
        lambda files: {
            **changed(without(files, GGUF), model_type="own", auto_map={"AutoConfig": "own.Config"}),
            "modeling_own.py": b"raise SystemExit('executed')",
        },
        "model_type 'own' is not supported",
        never=("modeling_own.py", "model.safetensors"),
    ),
    "a shard is missing": Mess(
        lambda files: without(sharded(without(files, GGUF)), "model-00002-of-00002.safetensors"),
        "lists 1 files that are not in the repository",
        never=("-of-00002",),
    ),
    "an index that is none": Mess(
        lambda files: {**sharded(without(files, GGUF)), "model.safetensors.index.json": b"[]"},
        "model.safetensors.index.json",
        never=("-of-00002",),
    ),
    "no tokenizer": Mess(
        lambda files: without(files, GGUF, "tokenizer.json"), "tokenizer.json is missing", never=("model.safetensors",)
    ),
    "a tokenizer of another model": Mess(
        lambda files: changed(without(files, GGUF), vocab_size=300),
        "the model's largest token id is 299",
        never=("model.safetensors",),
    ),
    "an old configuration without sizes": Mess(
        lambda files: changed(without(files, GGUF), hidden_size=""),
        "config.json has no hidden_size",
        never=("model.safetensors",),
    ),
    "a base model without a template": Mess(
        lambda files: without({**files, "tokenizer_config.json": b"{}"}, GGUF, "chat_template.jinja"),
        "no chat template",
    ),
    "ONNX folders for other devices": Mess(lambda files: onnx("qnn/qnn-int4"), "are built for other devices"),
    "graphs that say nothing of text": Mess(
        lambda files: {"onnx/model.onnx": JUNK}, "needs config.json or genai_config.json"
    ),
    "parts of another kind of model": Mess(
        lambda files: {"model_index.json": b"{}", "unet/model.safetensors": JUNK}, "no config.json"
    ),
    "a GGUF file in parts, of which one is missing": Mess(
        lambda files: {"model-Q8_0-00001-of-00002.gguf": files[GGUF]}, "1 of its 2 parts are in the repository"
    ),
    "a damaged GGUF file": Mess(lambda files: {GGUF: files[GGUF][:9] + b"\xff" * 7 + files[GGUF][16:]}, "GGUF"),
}


@pytest.mark.parametrize("name", MESSES)
def test_it_ends_in_an_answer_or_in_the_next_command(
    name: str, hub: LocalHub, given: Files, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mess = MESSES[name]
    options = dict(mess.options)
    files = mess.files(given)
    if "facts" in options:
        hub.add("org/model", files)
        listed = hub.repositories["org/model"].listing()
        options["facts"] = {"siblings": [*listed, *options["facts"]["siblings"]]}
    hub.add("org/model", files, **options)
    if mess.token:
        monkeypatch.setenv("HF_TOKEN", mess.token)
    status = run(["chat", mess.reference, "--yes", *QUESTION])
    shown = capsys.readouterr()
    fetched = [path for path in hub.paths() if "/resolve/" in path]
    assert not [path for path in fetched if any(part in path for part in mess.never)]
    if mess.ends:
        assert (status, shown.out) == (1, "")
        assert mess.ends in shown.err
        assert COMMAND.search(shown.err.partition("fix: ")[2]), shown.err
        return
    assert (status, shown.out.strip()) == (0, ANSWER), shown.err
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asked = len(hub.requests)
    assert run(["chat", mess.reference, "--no-build", *QUESTION]) == 0
    again = capsys.readouterr()
    assert (again.out.strip(), again.err, len(hub.requests)) == (ANSWER, "", asked)
    (model,) = models()
    assert Path(model.path).exists()


def test_a_base_model_writes_on(hub: LocalHub, chatting: Files, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a template there is no chat, but text goes on, as the error says."""
    hub.add("org/base", without({**chatting, "tokenizer_config.json": b"{}"}, "chat_template.jinja"))
    assert run(["chat", "org/base", "--yes", *QUESTION]) == 1
    assert "genai generate" in capsys.readouterr().err
    assert run(["generate", "org/base", "-p", "Once", "-n", "3"]) == 0


def test_there_are_twenty() -> None:
    assert len(MESSES) >= 20
    assert sum(not mess.ends for mess in MESSES.values()) >= 10
