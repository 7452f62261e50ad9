"""Malicious tokenizers: rules that explode, expressions that take very long, texts that are far too long."""

from __future__ import annotations

import base64
import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import genai
from genai.common import reading
from genai.errors import ContextOverflowError, StateError, TokenizerError
from genai.llm.chat import ChatSession
from genai.text import backend

SLOW = {"type": "Split", "pattern": {"Regex": "(a{1,7}){1,7}c"}, "behavior": "Isolated", "invert": False}
EMPTY_TRIE = struct.pack("<I", 1024) + bytes(1024)
SLOW_TEXT = "a" * 3000
TEXTS = {"Sequence": {"id": "A", "type_id": 0}}
PAIR = [TEXTS, {"Sequence": {"id": "B", "type_id": 0}}]


def sequence(*rules: dict[str, Any], kind: str = "normalizers") -> dict[str, Any]:
    return {"type": "Sequence", kind: list(rules)}


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def charsmap(data: bytes) -> dict[str, Any]:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


@pytest.fixture
def edited(model_folder: Path) -> Callable[..., Path]:
    """edited(normalizer=…) -> the folder with parts of its tokenizer.json replaced."""

    def edit(**parts: Any) -> Path:
        path = model_folder / "tokenizer.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **parts}))
        return model_folder

    return edit


@pytest.mark.parametrize(
    ("part", "rule"),
    [
        ("normalizer", sequence(*[replace("a", "a" * 2000)] * 3)),
        ("normalizer", {"normalizers": [{"pattern": {"String": "a"}, "content": "a" * 2000}] * 3}),
        ("normalizer", {**replace("a", "a" * 2000), "normalizers": []}),
        ("normalizer", sequence(sequence(sequence(*[replace("a", "aa")] * 8)))),
        ("normalizer", sequence(*[{"type": "Prepend", "prepend": "x" * 10_000}] * 10)),
        ("normalizer", sequence({"type": "Prepend", "prepend": "a" * 5000}, replace("a", "a" * 60))),
        ("normalizer", sequence(*[{"type": "ByteLevel"}] * 40)),
        ("normalizer", sequence(*[{"type": "NFC"}] * 100)),
        ("normalizer", replace("", "x" * 500)),
        ("normalizer", replace("a|", "x" * 500, "Regex")),
        ("normalizer", charsmap(EMPTY_TRIE + b"x" * 500 + b"\0")),
        ("normalizer", sequence(*[{"type": "BertNormalizer", "handle_chinese_chars": True}] * 5)),
        ("pre_tokenizer", sequence(*[{"type": "Digits", "individual_digits": True}] * 100, kind="pretokenizers")),
        ("post_processor", {"type": "TemplateProcessing", "single": [TEXTS] * 999, "pair": PAIR, "special_tokens": {}}),
        ("decoder", sequence(*[replace("e", "e" * 3000)] * 3, kind="decoders")),
    ],
)
def test_rules_that_explode_are_refused_before_they_act(edited: Callable[..., Path], part: str, rule: Any) -> None:
    with pytest.raises(TokenizerError, match=f"the {part} can make text") as caught:
        genai.Tokenizer(edited(**{part: rule}))
    assert caught.value.why and caught.value.fix


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"", b"\x04\0\0\0", b"\x03\0\0\0abc", bytes(range(200)) * 2])
@pytest.mark.parametrize("hidden", [False, True])
def test_a_damaged_charsmap_does_not_end_the_process(edited: Callable[..., Path], data: bytes, hidden: bool) -> None:
    folder = edited(normalizer=sequence(charsmap(data)))
    if hidden:
        path = folder / "tokenizer.json"
        path.write_text(path.read_text().replace("Precompiled", "Prec\\u006fmpiled"))
    with pytest.raises(TokenizerError, match="precompiled_charsmap") as caught:
        genai.Tokenizer(folder)
    assert caught.value.why and caught.value.fix


def test_rules_as_models_have_them_pass(edited: Callable[..., Path]) -> None:
    table = EMPTY_TRIE + "\ufdfa".encode() * 18 + b"\0"
    rules = [charsmap(table), replace(" {2,}", " ", "Regex"), replace(" ", "▁"), {"type": "Prepend", "prepend": "▁"}]
    levels = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    single = [{"SpecialToken": {"id": "a", "type_id": 0}}, TEXTS]
    tokens = {"a": {"id": "a", "ids": [5], "tokens": ["a"]}}
    processor = {"type": "TemplateProcessing", "single": single, "pair": PAIR, "special_tokens": tokens}
    genai.Tokenizer(edited(normalizer=sequence(*rules), post_processor=processor)).encode("a  b")
    genai.Tokenizer(edited(normalizer={"type": "NFKC"}, pre_tokenizer=levels)).encode("a  b")


def test_dropout_is_off(edited: Callable[..., Path], model_folder: Path) -> None:
    text = "the cat sat on the mat and the dog ran over there"
    sound = genai.Tokenizer(model_folder).encode(text).tolist()
    model = json.loads((model_folder / "tokenizer.json").read_text())["model"]
    tokenizer = genai.Tokenizer(edited(model={**model, "dropout": 0.9}))
    assert all(tokenizer.encode(text).tolist() == sound for _ in range(20))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '{"version": ' + "9" * 5000 + "}"])
def test_json_that_is_too_deep_or_has_endless_numbers(model_folder: Path, text: str) -> None:
    for name in ("tokenizer.json", "generation_config.json", "tokenizer_config.json"):
        (model_folder / "genai_config.json").unlink(missing_ok=True)
        path = model_folder / name
        before = path.read_bytes() if path.exists() else None
        path.write_text(text)
        with pytest.raises(TokenizerError) as caught:
            genai.Tokenizer(model_folder)
        assert caught.value.why and caught.value.fix
        path.unlink() if before is None else path.write_bytes(before)


def test_expressions_that_take_ages(edited: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "SECONDS", 0.1)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", os.environ.get("TOKENIZERS_PARALLELISM", "true"))
    monkeypatch.setattr(backend, "ITEMS_PER_SECOND", 100_000)
    sound = genai.Tokenizer(edited())
    tokenizer = genai.Tokenizer(edited(pre_tokenizer=SLOW))
    with pytest.raises(TokenizerError, match="takes too long") as caught:
        tokenizer.encode(SLOW_TEXT)
    assert caught.value.why and caught.value.fix
    with pytest.raises(TokenizerError, match="takes too long"):
        tokenizer.encode("b")
    assert sound.encode(SLOW_TEXT).size


@pytest.mark.parametrize("call", ["encode(text)", "decode([65] * 3000)"])
def test_ctrl_c_ends_the_wait(edited: Callable[..., Path], call: str) -> None:
    rule = {"type": "Replace", "pattern": {"Regex": "(a{1,7}){1,7}c"}, "content": "b"}
    folder = edited(
        **(
            {"pre_tokenizer": SLOW}
            if "encode" in call
            else {"decoder": sequence({"type": "Fuse"}, rule, kind="decoders")}
        )
    )
    code = f"""
import os, signal, threading, time, genai
from genai.text import backend
backend.SECONDS = 1000.0
tokenizer = genai.Tokenizer({str(folder)!r})
text = "a" * 3000
ids = [tokenizer.to_token_id("a")] * 3000
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    tokenizer.{call.replace("[65] * 3000", "ids")}
except KeyboardInterrupt:
    print("interrupted")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (result.stdout.strip(), result.returncode) == ("interrupted", 0), result.stderr


def test_a_text_far_too_long_is_not_encoded_as_a_whole(bundled: genai.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    plain = backend.Encoder.encode

    def counted(self: backend.Encoder, text: str, **options: Any) -> list[int]:
        encoded.append(len(text))
        return plain(self, text, **options)

    monkeypatch.setattr(backend.Encoder, "encode", counted)
    text = "The quick brown fox. " * 150_000
    with genai.LLM(bundled) as llm:
        for call in (llm.generate, llm.chat, llm.stream, ChatSession(llm).ask):
            encoded.clear()
            with pytest.raises(ContextOverflowError) as caught:
                call(text)
            assert sum(encoded) < 100 * llm.context_size
            assert caught.value.why and caught.value.fix
        # Many characters in few tokens are read on.
        assert llm.tokenizer.too_many_tokens("a" * 1000, 10**6) == 0


def test_a_file_of_many_objects_is_read_with_interrupts_alive(tmp_path: Path) -> None:
    """The signal handler runs during parsing, not afterwards."""
    places = set()
    before = signal.signal(signal.SIGALRM, lambda number, frame: places.add(frame and frame.f_code.co_filename))
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    try:
        found = reading.json_object('{"rules": [' + "{}," * 500_000 + "{}]}", tmp_path, TokenizerError)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(found["rules"]) == 500_001
    assert reading.__file__ in places


def test_more_added_tokens_than_are_read_in_time(edited: Callable[..., Path], model_folder: Path) -> None:
    token = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    first = json.loads((model_folder / "tokenizer.json").read_text())["added_tokens"]
    many = [{**token, "id": 10_000 + i, "content": f"<{i}>"} for i in range(300_000)]
    with pytest.raises(TokenizerError, match="commas") as caught:
        genai.Tokenizer(edited(added_tokens=[*first, *many]))
    assert caught.value.why and caught.value.fix


def test_a_list_of_millions_in_a_small_file(model_folder: Path) -> None:
    path = model_folder / "tokenizer_config.json"
    path.write_text(json.dumps({"added_tokens_decoder": {"5": {"content": "x" * 10}}, "extra": [0] * 600_000}))
    with pytest.raises(TokenizerError, match="commas") as caught:
        genai.Tokenizer(model_folder)
    assert caught.value.why and caught.value.fix


def test_threads_that_the_system_refuses_are_no_fault_of_the_tokenizer() -> None:
    """The library panics then, with an exception that is not derived from Exception."""

    class PanicException(BaseException):
        pass

    said = 'ThreadPoolBuildError { kind: IOError(Os { code: 11, message: "Resource temporarily unavailable" }) }'
    with pytest.raises(StateError, match="a thread cannot be started") as caught, backend.library_errors("encode: no"):
        raise PanicException(said)
    assert "ulimit -u" in caught.value.fix and "code: 11" in caught.value.why
    with pytest.raises(TokenizerError, match="encode: no"), backend.library_errors("encode: no"):
        raise PanicException("index out of bounds")
