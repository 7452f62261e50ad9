from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import genai
from genai import Model
from genai.cli.terminal import read_stdin
from genai.common.reading import read_text_file
from genai.errors import (
    ConfigError,
    DeviceError,
    GenaiError,
    InputError,
    ModelFolderError,
    NotSupportedYetError,
    OptionError,
)
from genai.models.config import Config


def minimal() -> dict[str, Any]:
    return {
        "model": {
            "type": "llama",
            "vocab_size": 100,
            "context_length": 64,
            "eos_token_id": [2, 0],
            "pad_token_id": 0,
            "decoder": {
                "filename": "model.onnx",
                "head_size": 16,
                "hidden_size": 64,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "num_hidden_layers": 2,
                "session_options": {"log_id": "x", "provider_options": []},
            },
        },
        "search": {"top_k": 5, "do_sample": True},
    }


def write(folder: Path, value: Any) -> Path:
    text = value if isinstance(value, str) else json.dumps(value)
    (folder / "genai_config.json").write_text(text)
    return folder


def set_key(value: dict[str, Any], path: str, item: Any) -> dict[str, Any]:
    *parents, last = path.split(".")
    block = value
    for name in parents:
        block = block.setdefault(name, {})
    if item is ...:
        del block[last]
    else:
        block[last] = item
    return value


def test_reads_what_the_engine_needs(tmp_path: Path) -> None:
    config = Config(write(tmp_path, minimal()))
    assert config.model.eos_token_ids == (2, 0)
    assert config.model.decoder.names.past_key == "past_key_values.%d.key"
    assert config.search == {"top_k": 5, "do_sample": True}
    assert config.ignored_keys == ("model.decoder.session_options",)


@pytest.mark.parametrize(
    ("path", "item", "message"),
    [
        ("modl", {}, "unknown key 'modl'"),
        ("model.vocab_sise", 1, "did you mean 'vocab_size'"),
        ("model.vocab_size", "100", "int is expected, not str"),
        ("model.vocab_size", True, "int is expected, not bool"),
        ("model.vocab_size", 1.5, "int is expected, not float"),
        ("model.vocab_size", 0, "at least 1"),
        ("model.vocab_size", ..., "model.vocab_size is missing"),
        ("model.decoder", ..., "model.decoder is missing"),
        ("model.decoder.filename", ..., "filename is missing"),
        ("model.decoder.filename", "../model.onnx", "inside the model folder"),
        ("model.decoder.filename", "/etc/passwd", "inside the model folder"),
        ("model.decoder.num_hidden_layers", -1, "at least 0"),
        ("model.eos_token_id", 100, "below vocab_size 100"),
        ("model.eos_token_id", ["2"], "below vocab_size"),
        ("model.decoder.inputs", {"past_key_names": "past"}, "exactly one %d"),
        ("model.decoder.inputs", {"past_key_names": "past_%d_%s"}, "exactly one %d"),
        ("model.decoder.inputs", [], "dict is expected, not list"),
        ("search.top_k", 1.5, "int is expected"),
        ("search.min_p", 0.1, "unknown key 'search.min_p'"),
        ("model.vocab_size", 2**31, "32 bits"),
        ("model.vocab_size", 2**63, "32 bits"),
        ("model.context_length", 2**31, "32 bits"),
        ("model.decoder.head_size", 10**30, "32 bits"),
        ("model.bos_token_id", -(2**40), "32 bits"),
        ("search.batch_size", 2**62, "32 bits"),
        ("search.top_p", 5.0, "search.top_p = 5.0 in genai_config.json"),
        ("search.temperature", -1.0, "search.temperature = -1.0 in genai_config.json"),
        ("search.max_length", 0, "search.max_length = 0 in genai_config.json"),
        ("search.num_beams", 10**9, "search.num_beams = 1000000000 in genai_config.json"),
        ("speculative.max_draft_tokens", 17, "speculative.max_draft_tokens = 17 in genai_config.json"),
        ("speculative.ngram_size", 1.5, "int is expected"),
        ("speculative.cooldown", 1, "bool is expected"),
        ("model.draft", [], "dict is expected"),
        ("model.draft.file", "x", "unknown key 'model.draft.file'"),
    ],
)
def test_refuses(tmp_path: Path, path: str, item: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(write(tmp_path, set_key(minimal(), path, item)))
    assert message in str(caught.value)
    assert caught.value.why
    assert caught.value.fix


@pytest.mark.parametrize("path", ["model.encoder", "model.dspark", "model.draft.inputs.hidden_states"])
def test_keys_that_change_tokens_are_not_ignored(tmp_path: Path, path: str) -> None:
    with pytest.raises(NotSupportedYetError, match="not supported yet"):
        item = "x" if path.endswith("states") else {"filename": "x.onnx"}
        Config(write(tmp_path, set_key(minimal(), path, item)))


ENDLESS = [
    "[" * 100_000 + "]" * 100_000,
    '{"a":' * 100_000 + "1" + "}" * 100_000,
    '{"a": ' + "9" * 5000 + "}",
    '{"a": [' + "1," * 600_000 + "1]}",
]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "\x00", *ENDLESS], ids=lambda text: text[:9])
def test_not_a_json_object(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(write(tmp_path, text))
    assert caught.value.why and caught.value.fix
    assert "set_int_max" not in str(caught.value)
    if text in ENDLESS:
        assert "is not JSON" not in caught.value.what


@pytest.mark.parametrize("text", ENDLESS, ids=lambda text: text[:9])
def test_an_overlay_that_is_too_deep_or_has_endless_numbers(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        Config(write(tmp_path, minimal())).overlay(text)


def test_seeds_may_have_64_bits(tmp_path: Path) -> None:
    assert Config(write(tmp_path, set_key(minimal(), "search.random_seed", 2**63))).search["random_seed"] == 2**63


def test_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "genai_config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ConfigError, match="UTF-8"):
        Config(tmp_path)


def test_missing_folder_file_instead_and_missing_config(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="no such folder"):
        Config(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelFolderError, match="a file is not a model folder"):
        Config(tmp_path / "file")
    with pytest.raises(ModelFolderError, match=r"genai_config\.json is missing"):
        Config(tmp_path)


def test_errors_are_runtime_errors(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        Config(tmp_path)
    assert issubclass(GenaiError, RuntimeError)


def test_overlay_merges_and_a_bad_one_changes_nothing(tmp_path: Path) -> None:
    config = Config(write(tmp_path, minimal()))
    config.overlay('{"search": {"top_k": 9}, "model": {"context_length": 32}}')
    assert config.search == {"top_k": 9, "do_sample": True}
    assert config.model.context_length == 32
    for text in ("nonsense", "[]", '{"foo": 1}', '{"model": 1}', '{"search": {"top_k": "x"}}'):
        with pytest.raises(ConfigError):
            config.overlay(text)
    assert config.search["top_k"] == 9
    assert config.model.context_length == 32


def test_providers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = genai.Config(write(tmp_path, minimal()))
    config.clear_providers()
    config.append_provider("cpu")
    config.check_providers()
    config.append_provider("cuda")
    config.set_provider_option("cuda", "device_id", "1")
    config.set_decoder_provider_options_hardware_device_id("cuda", 1)
    assert config.device == "cuda:1"
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError, match="cuda:1"):
        Model(config)
    for bad in ("x", "abc", None, "-1", " 1", "", True, "²"):
        with pytest.raises(OptionError, match=r"device_id = .* of provider 'CUDA'") as raised:
            config.set_provider_option("CUDA", "device_id", bad)  # type: ignore[arg-type]
        assert repr(bad) in raised.value.what
    assert config.device == "cuda:1"
    config.set_provider_option("cuda", "device_id", "0")
    config.append_provider("slide rule")
    with pytest.raises(NotSupportedYetError, match="'slide rule' is not available"):
        Model(config)
    config.clear_providers()
    assert config.device == ""
    config.check_providers()
    config.set_provider_option("cpu", "x", "1")  # of no effect, as there
    config.check_providers()
    with pytest.raises(NotSupportedYetError, match="packages"):
        genai.Config.from_package_ep(str(tmp_path), "cpu")


def test_model_data_is_checked(tmp_path: Path) -> None:
    config = Config(write(tmp_path, minimal()))
    for given in ((1, b""), ("model.onnx", "text"), ("model.onnx", None)):
        with pytest.raises(InputError, match="add_model_data"):
            config.add_model_data(*given)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"no 'model\.onnx'"):
        config.remove_model_data("model.onnx")


@pytest.mark.parametrize("read", [Config, lambda folder: read_text_file(folder / "genai_config.json")])
def test_a_file_without_end(read: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genai.common.reading._MOST_BYTES", 1000)
    (tmp_path / "genai_config.json").symlink_to("/dev/zero")
    with pytest.raises(GenaiError, match="cannot be read") as caught:
        read(tmp_path)
    assert ("device" in caught.value.why) == (read is Config) and caught.value.fix


def test_a_stream_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genai.common.reading._MOST_BYTES", 1000)
    with Path("/dev/zero").open("rb") as endless, pytest.raises(InputError, match="stdin: the text cannot be read"):
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=endless, isatty=lambda: False))
        read_stdin()


def test_a_pipe_where_a_file_should_be(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "genai_config.json")
    with pytest.raises(ModelFolderError, match="pipe"):
        Config(tmp_path)


def test_a_text_may_come_through_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "text")
    with ThreadPoolExecutor(1) as pool:
        text = pool.submit(read_text_file, tmp_path / "text")
        (tmp_path / "text").write_text("Once")
        assert text.result(30) == "Once"
