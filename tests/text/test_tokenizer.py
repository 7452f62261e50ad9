"""Tokenizer: the API, special ids, batches, options, and bad input."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend, decoders

from genai import Tokenizer
from genai.compat.onnxruntime_genai.tensor import Tensor
from genai.errors import ConfigError, GenaiError, InputError, ModelFolderError, OptionError, TokenizerError
from genai.models.config import Config
from genai.text import tokenizer as core
from genai.text.files import generation_defaults


@pytest.fixture
def tokenizer(model_folder) -> Tokenizer:
    return Tokenizer(model_folder)


def edit_json(path: Path, **changes: object) -> None:
    value = json.loads(path.read_text())
    value.update(changes)
    path.write_text(json.dumps(value))


def edit_model(folder: Path, **changes: object) -> None:
    model = json.loads((folder / "genai_config.json").read_text())["model"]
    kept = {name: value for name, value in {**model, **changes}.items() if value is not None}
    edit_json(folder / "genai_config.json", model=kept)


def assert_three_parts(error: GenaiError) -> None:
    assert error.what
    assert error.why
    assert error.fix


def test_texts_survive_encode_and_decode(tokenizer, torture):
    import unicodedata

    for text in torture:
        if "<|im_" not in text:
            ids = tokenizer.encode(text)
            assert (ids.dtype, ids.ndim) == (np.int32, 1)
            assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)


def test_decode_takes_what_people_pass(tokenizer):
    ids = tokenizer.encode("Hi there")
    for form in (ids, ids.tolist(), tuple(ids.tolist()), ids.astype(np.int64), ids.astype(np.uint16), list(ids)):
        assert tokenizer.decode(form) == "Hi there"
    assert tokenizer.decode(int(ids[0])) == tokenizer.decode(ids[:1])
    assert tokenizer.decode([]) == tokenizer.decode(np.zeros(0, np.int32)) == ""


@pytest.mark.parametrize(
    "ids",
    [[-1], [512], [2**40], [2**70], [1.5], [1.0], ["1"], "12", [True], [None], [[1, 2]], [[1], [1, 2]], None, {"a": 1}],
)
def test_decode_refuses_what_is_not_ids(tokenizer, ids):
    with pytest.raises(InputError, match="decode") as caught:
        tokenizer.decode(ids)
    assert_three_parts(caught.value)


@pytest.mark.parametrize("text", [None, b"bytes", 5, ["a"], "a\ud800b", "\udfff", "a\0b"])
def test_encode_refuses_what_is_not_text(tokenizer, text):
    for call in (tokenizer.encode, tokenizer.to_token_id, lambda text: tokenizer.encode_batch([text])):
        with pytest.raises(InputError) as caught:
            call(text)
        assert_three_parts(caught.value)


def test_special_tokens_in_text_become_their_ids(tokenizer):
    ids = tokenizer.encode("<|im_start|>Hi<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == "Hi"
    tokenizer.update_options(skip_special_tokens=False)
    assert tokenizer.decode(ids) == "<|im_start|>Hi<|im_end|>"


def test_add_special_tokens(model_folder):
    saved = json.loads((model_folder / "tokenizer.json").read_text())
    token = {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}
    saved["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": token},
    }
    (model_folder / "tokenizer.json").write_text(json.dumps(saved))
    tokenizer = Tokenizer(model_folder)
    plain = tokenizer.encode("Hi").tolist()
    assert plain[0] != 1
    tokenizer.update_options(add_special_tokens="true")
    assert tokenizer.encode("Hi").tolist() == [1, *plain]
    tokenizer.update_options(add_special_tokens="false", skip_special_tokens=True)
    assert tokenizer.encode("Hi").tolist() == plain


@pytest.mark.parametrize("options", [{}, {"foo": True}, {"add_special_tokens": 1}, {"skip_special_tokens": "maybe"}])
def test_update_options_refuses_the_rest_and_changes_nothing(tokenizer, options):
    with pytest.raises(OptionError) as caught:
        tokenizer.update_options(**{"skip_special_tokens": False, **options} if options else {})
    assert_three_parts(caught.value)
    assert tokenizer.decode([2]) == ""


def test_settings_of_the_file_cut_and_fill_nothing(model_folder):
    backend = Backend.from_file(str(model_folder / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=64)
    backend.save(str(model_folder / "tokenizer.json"))
    text = "the cat sat on the mat, 1 2 3 4 5"
    tokenizer = Tokenizer(model_folder)
    assert 3 < len(tokenizer.encode(text)) < 64
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_to_token_id(tokenizer):
    assert tokenizer.to_token_id("<|im_end|>") == 2
    assert tokenizer.to_token_id("no such token") == -1


def test_encode_batch_fills_on_the_right(model_folder):
    edit_model(model_folder, pad_token_id=5)
    tokenizer = Tokenizer(model_folder)
    batch = tokenizer.encode_batch(["the cat sat", "Hi", ""])
    assert isinstance(batch, Tensor)
    rows = batch.as_numpy()
    longest, short = tokenizer.encode("the cat sat"), tokenizer.encode("Hi")
    assert (rows.dtype, batch.shape()) == (np.int32, [3, len(longest)])
    np.testing.assert_array_equal(rows[0], longest)
    np.testing.assert_array_equal(rows[1, : len(short)], short)
    assert (rows[1, len(short) :] == 5).all()
    assert (rows[2] == 5).all()


def test_batches_of_the_core_are_arrays(model_folder, tokenizer):
    texts = ["the cat sat", "Hi"]
    batch = core.Tokenizer(model_folder).encode_batch(texts)
    assert isinstance(batch, np.ndarray)
    np.testing.assert_array_equal(batch, tokenizer.encode_batch(texts).as_numpy())
    assert core.Tokenizer(model_folder).decode_batch(tokenizer.encode_batch(texts)) == texts


def test_markers_come_from_genai_config(model_folder):
    edit_model(model_folder, bot_token_id=7, eot_token_id=-1)
    tokenizer = Tokenizer(model_folder)
    assert tokenizer.bot_token_id == 7
    with pytest.raises(TokenizerError, match="eot_token_id is not defined") as caught:
        _ = tokenizer.eot_token_id
    assert_three_parts(caught.value)


def test_batches_survive_encode_and_decode(tokenizer):
    texts = ["the cat sat", "Hi", ""]
    batch = tokenizer.encode_batch(texts)
    assert tokenizer.decode_batch(batch) == texts
    assert tokenizer.decode_batch(batch.as_numpy()) == texts
    assert tokenizer.decode_batch([tokenizer.encode(text).tolist() for text in texts]) == texts


@pytest.mark.parametrize("texts", [[], "text", b"text", None, 5, {"a"}])
def test_encode_batch_refuses_what_is_not_a_list_of_texts(tokenizer, texts):
    with pytest.raises(InputError, match="encode_batch") as caught:
        tokenizer.encode_batch(texts)
    assert_three_parts(caught.value)


@pytest.mark.parametrize(
    "batch", [np.zeros(3, np.int32), np.zeros((1, 2, 3), np.int32), "ab", None, 5, [[0.5]], [[-1]]]
)
def test_decode_batch_refuses_what_is_not_a_batch(tokenizer, batch):
    with pytest.raises(InputError, match="decode_batch") as caught:
        tokenizer.decode_batch(batch)
    assert_three_parts(caught.value)


def test_special_ids_come_from_genai_config(tokenizer):
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id) == (0, 0)
    assert tokenizer.eos_token_ids.tolist() == [2, 0]
    assert tokenizer.eos_token_ids.dtype == np.int32


def test_padding_falls_back_to_the_first_eos(model_folder):
    edit_model(model_folder, pad_token_id=None, bos_token_id=None)
    tokenizer = Tokenizer(model_folder)
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id) == (None, 2)


def test_without_any_padding_only_equal_lengths_make_a_batch(model_folder):
    edit_model(model_folder, pad_token_id=None, eos_token_id=[])
    tokenizer = Tokenizer(model_folder)
    assert tokenizer.eos_token_ids.tolist() == []
    assert tokenizer.encode_batch(["Hi", "Hi"]).shape()[0] == 2
    with pytest.raises(TokenizerError, match="no pad_token_id") as caught:
        tokenizer.encode_batch(["Hi", "the cat sat"])
    assert_three_parts(caught.value)


def test_without_genai_config_tokenizer_config_names_the_special_tokens(model_folder):
    (model_folder / "genai_config.json").unlink()
    tokenizer = Tokenizer(str(model_folder))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids.tolist(), tokenizer.pad_token_id) == (None, [2], 0)
    with pytest.raises(InputError):
        tokenizer.decode([tokenizer.vocab_size])
    (model_folder / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer(model_folder)
    assert (tokenizer.eos_token_ids.tolist(), tokenizer.pad_token_id) == ([], None)


def test_generation_config_lists_every_id_that_ends_a_reply(model_folder):
    (model_folder / "genai_config.json").unlink()
    path = model_folder / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [2, 0], "pad_token_id": 5, "temperature": 0.6, "top_p": None}))
    tokenizer = Tokenizer(model_folder)
    assert (tokenizer.eos_token_ids.tolist(), tokenizer.pad_token_id, tokenizer.bos_token_id) == ([2, 0], 5, None)
    assert generation_defaults(model_folder).sampling == {"temperature": 0.6}
    path.write_text(json.dumps({"eos_token_id": 1}))
    assert Tokenizer(model_folder).eos_token_ids.tolist() == [1, 2]  # and the tokenizer's eos_token
    path.write_text(json.dumps({"eos_token_id": None}))
    assert Tokenizer(model_folder).eos_token_ids.tolist() == [2]


@pytest.mark.parametrize(
    "values",
    [
        {"eos_token_id": "2"},
        {"eos_token_id": [-1]},
        {"bos_token_id": True},
        {"top_k": "5"},
        [1],
        {"pad_token_id": 2**40},
    ],
)
def test_a_malformed_generation_config_is_an_error(model_folder, values):
    (model_folder / "genai_config.json").unlink()
    (model_folder / "generation_config.json").write_text(json.dumps(values))
    with pytest.raises(TokenizerError, match=r"generation_config\.json") as caught:
        Tokenizer(model_folder)
    assert_three_parts(caught.value)


def test_words_that_the_config_calls_special_are_special(model_folder):
    word = "the"
    assert Tokenizer(model_folder).decode(Tokenizer(model_folder).encode("a the b")) == "a the b"
    for names in ({"mask_token": word}, {"image_token": {"content": word}}, {"additional_special_tokens": [word]}):
        (model_folder / "special_tokens_map.json").write_text(json.dumps(names))
        tokenizer = Tokenizer(model_folder)
        ids = tokenizer.encode("a the b").tolist()
        assert tokenizer.to_token_id(word) in ids
        assert tokenizer.decode(ids) == "a  b"
    size = tokenizer.vocab_size
    (model_folder / "special_tokens_map.json").write_text(json.dumps({"mask_token": "no such word"}))
    assert Tokenizer(model_folder).to_token_id("no such word") == size  # as in transformers


def test_config_and_model_are_sources(model_folder):
    config = Config(model_folder)

    class LikeModel:
        def __init__(self):
            self.config = config

    expected = Tokenizer(model_folder).encode("Hi").tolist()
    assert Tokenizer(config).encode("Hi").tolist() == expected
    assert Tokenizer(LikeModel()).encode("Hi").tolist() == expected


def test_tokenizer_dir(model_folder):
    edit_model(model_folder, tokenizer_dir="text")
    (model_folder / "text").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.move(model_folder / name, model_folder / "text" / name)
    assert Tokenizer(model_folder).to_token_id("<|im_end|>") == 2


@pytest.mark.parametrize("name", ["..", "text/../..", "/tmp"])
def test_tokenizer_dir_stays_in_the_folder(model_folder, name):
    edit_model(model_folder, tokenizer_dir=name)
    with pytest.raises(ConfigError, match="tokenizer_dir") as caught:
        Tokenizer(model_folder)
    assert_three_parts(caught.value)


@pytest.mark.parametrize("source", [None, 5, b"folder", ["folder"]])
def test_other_sources_are_refused(source):
    with pytest.raises(InputError, match=r"Tokenizer: the argument is (null|a )") as caught:
        Tokenizer(source)
    assert_three_parts(caught.value)


def test_a_missing_folder_and_a_file_are_no_folder(model_folder):
    for path in (model_folder / "nowhere", model_folder / "tokenizer.json"):
        with pytest.raises(ModelFolderError, match="not a folder") as caught:
            Tokenizer(path)
        assert_three_parts(caught.value)


def test_a_missing_tokenizer_names_what_would_do(model_folder):
    (model_folder / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is missing") as caught:
        Tokenizer(model_folder)
    assert_three_parts(caught.value)
    assert "tokenizer.model" in caught.value.why


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b"null", b"not json", b"\xff\xfe\x00", b'{"model": {"type": "X"}}']
)
def test_a_corrupt_tokenizer_is_an_error(model_folder, content):
    (model_folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError) as caught:
        Tokenizer(model_folder)
    assert_three_parts(caught.value)


def test_a_truncated_tokenizer_is_an_error(model_folder):
    content = (model_folder / "tokenizer.json").read_bytes()
    (model_folder / "tokenizer.json").write_bytes(content[: len(content) // 2])
    with pytest.raises(TokenizerError, match="not a usable tokenizer"):
        Tokenizer(model_folder)


def test_a_folder_in_the_place_of_the_file_is_an_error(model_folder):
    (model_folder / "tokenizer.json").unlink()
    (model_folder / "tokenizer.json").mkdir()
    with pytest.raises(TokenizerError, match="cannot be read") as caught:
        Tokenizer(model_folder)
    assert_three_parts(caught.value)


@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff", b"[" * 100000])
def test_a_corrupt_tokenizer_config_is_an_error(model_folder, content):
    (model_folder / "genai_config.json").unlink()
    (model_folder / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json") as caught:
        Tokenizer(model_folder)
    assert_three_parts(caught.value)


def test_text_without_ids_is_an_error(folder_of, tmp_path):
    saved = json.loads((folder_of("word_piece") / "tokenizer.json").read_text())
    saved["model"]["unk_token"] = "[MISSING]"
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    with pytest.raises(TokenizerError, match="cannot encode this text") as caught:
        Tokenizer(tmp_path).encode("☃")
    assert_three_parts(caught.value)


def test_a_panic_of_the_library_is_an_error(model_folder, capfd):
    backend = Backend.from_file(str(model_folder / "tokenizer.json"))
    backend.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip("x", 0, 5)])
    backend.save(str(model_folder / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="cannot decode these ids") as caught:
        Tokenizer(model_folder).decode([])
    assert_three_parts(caught.value)
    capfd.readouterr()


def test_an_interrupt_is_not_swallowed(tokenizer):
    from genai.text.backend import library_errors

    with pytest.raises(KeyboardInterrupt), library_errors("encode"):
        raise KeyboardInterrupt


def test_importing_the_tokenizer_loads_no_tokenizer_library():
    code = "import sys, genai.text.tokenizer; print({'tokenizers', 'jinja2', 'onnx', 'numba'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


@pytest.mark.oracle
class TestAgainstOnnxruntimeGenai:
    @pytest.fixture
    def theirs(self, model_folder):
        og = pytest.importorskip("onnxruntime_genai")
        return og.Tokenizer(str(model_folder))

    def test_the_same_ids_and_texts(self, tokenizer, theirs, torture):
        texts = [*torture, "What is 12 + 7? I'm sure it's 19.\n\n  - yes\n", "<|im_start|>user\nHi<|im_end|>\n"]
        different = [text for text in texts if tokenizer.encode(text).tolist() != theirs.encode(text).tolist()]
        # That library does not normalise to NFC, so text with combining marks may differ.
        assert all("\u0301" in text or "ͫ" in text for text in different), different
        for text in texts:
            ids = tokenizer.encode(text)
            assert tokenizer.decode(ids) == theirs.decode(ids), text

    def test_the_same_batches_and_special_ids(self, tokenizer, theirs):
        texts = ["the cat", "the cat sat on the mat", ""]
        np.testing.assert_array_equal(tokenizer.encode_batch(texts).as_numpy(), theirs.encode_batch(texts).as_numpy())
        assert tokenizer.bos_token_id == theirs.bos_token_id
        assert tokenizer.pad_token_id == theirs.pad_token_id
        assert tokenizer.eos_token_ids.tolist() == theirs.eos_token_ids.tolist()
        assert tokenizer.to_token_id("<|im_end|>") == theirs.to_token_id("<|im_end|>")
        assert tokenizer.to_token_id("nowhere") == theirs.to_token_id("nowhere")


def test_empty_template_and_tools_mean_none(model_folder):
    """onnxruntime-genai's examples pass empty strings for missing values."""
    (model_folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}{{ tools is none }}")
    tokenizer = Tokenizer(model_folder)
    messages = [{"role": "user", "content": "hi "}]
    assert tokenizer.apply_chat_template(messages, template_str="", tools="") == "hi True"
