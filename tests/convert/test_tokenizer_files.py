"""What a model folder takes over from a checkpoint's tokenizer: the built folder reads and writes the same text."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from safetensors.numpy import save_file

import genai
from genai.convert import ExportOptions, build_model
from genai.convert.architectures import find
from genai.convert.hf_config import HFConfig
from genai.convert.tensors import tensor_shapes
from genai.errors import ConfigError, InputError
from genai.llm.requests import RequestBuilder
from tools.random_weights import random_tensor
from tools.text_goldens.forms import write_form

SENTENCEPIECE = Path(__file__).parents[1] / "text" / "goldens" / "sentencepiece"
TEXTS = json.loads((SENTENCEPIECE.parent / "texts.json").read_text(encoding="utf-8"))["torture"]
INT4 = ExportOptions(precision="int4")
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
CHECKPOINT_CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 64, "eos_token_id": 2,
}  # fmt: skip
MESSAGES = [{"role": "user", "content": "Hi, naïve café 漢字"}]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[[int], Path]:
    """checkpoint(vocab_size) -> a folder without a tokenizer."""

    def write(vocab_size: int) -> Path:
        folder = tmp_path / "hf"
        folder.mkdir()
        config = CHECKPOINT_CONFIG | {"vocab_size": vocab_size}
        shapes = tensor_shapes(find("llama").describe(HFConfig(config)))
        (folder / "config.json").write_text(json.dumps(config))
        save_file({name: random_tensor(name, shape, 1) for name, shape in shapes.items()}, folder / "model.safetensors")
        return folder

    return write


@pytest.mark.parametrize("name", ["tokenizer.model", "spiece.model"])
@pytest.mark.parametrize("config", [{}, {"legacy": True, "add_bos_token": True, "chat_template": TEMPLATE}])
@pytest.mark.parametrize("model", sorted(path.stem for path in SENTENCEPIECE.glob("*.model")))
def test_sentencepiece_becomes_tokenizer_json(
    checkpoint: Any, tmp_path: Path, model: str, config: dict[str, Any], name: str
) -> None:
    folder = checkpoint(1000)
    (folder / name).write_bytes((SENTENCEPIECE / f"{model}.model").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    built = build_model(folder, tmp_path / "built", INT4)
    assert (built / name).is_file()
    (built / name).unlink()
    ours, theirs = genai.Tokenizer(built), genai.Tokenizer(folder)
    for tokenizer in (ours, theirs):
        tokenizer.update_options(add_special_tokens=True)
    for text in TEXTS:
        assert ours.encode(text).tolist() == theirs.encode(text).tolist()
        assert ours.decode(ours.encode(text)) == theirs.decode(ours.encode(text))
    if "chat_template" in config:
        assert ours.apply_chat_template(MESSAGES) == theirs.apply_chat_template(MESSAGES)
        assert ours.apply_chat_template(MESSAGES).endswith("</s>")


@pytest.mark.parametrize("name", ["llama3", "qwen", "tekken", "qwen2", "gpt2", "bert", "sentencepiece_unigram"])
def test_every_form_becomes_tokenizer_json(checkpoint: Any, tmp_path: Path, name: str) -> None:
    folder = write_form(name, checkpoint(1200))
    config = json.loads((folder / "config.json").read_text())
    if "hidden_size" not in config:  # the form brings its own, with the model_type alone
        (folder / "config.json").write_text(json.dumps(CHECKPOINT_CONFIG | {"vocab_size": 1200}))
    built = build_model(folder, tmp_path / "built", INT4)
    kept = {path.name for path in built.iterdir()}
    assert "tokenizer.json" in kept and not kept & {"tekken.json", "qwen.tiktoken", "vocab.txt"}
    for other in ("tokenizer.model", "vocab.json", "merges.txt", "spiece.model"):
        (built / other).unlink(missing_ok=True)
    ours, theirs = genai.Tokenizer(built), genai.Tokenizer(folder)
    for tokenizer in (ours, theirs):
        tokenizer.update_options(add_special_tokens=True)
    for text in TEXTS:
        assert ours.encode(text).tolist() == theirs.encode(text).tolist()


@pytest.mark.parametrize("name", ["llama3", "qwen", "tekken", "qwen2", "bert", "sentencepiece_bpe"])
def test_forms_larger_than_the_vocabulary(checkpoint: Any, tmp_path: Path, name: str) -> None:
    folder = write_form(name, checkpoint(64))
    (folder / "config.json").write_text(json.dumps(CHECKPOINT_CONFIG | {"vocab_size": 64}))
    with pytest.raises(InputError, match="the model's largest token id is 63"):
        build_model(folder, tmp_path / "built", INT4)


@pytest.mark.oracle
def test_onnxruntime_genai_reads_what_was_sentencepiece(checkpoint: Any, tmp_path: Path) -> None:
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    og = pytest.importorskip("onnxruntime_genai")
    folder = checkpoint(1000)
    (folder / "tokenizer.model").write_bytes((SENTENCEPIECE / "llama.model").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    built = build_model(folder, tmp_path / "built", INT4)
    theirs, ours = og.Tokenizer(og.Model(str(built))), genai.Tokenizer(built)
    for text in ("Hello, world! 12 + 7", "the cat sat on the mat"):
        assert theirs.encode(text).tolist() == ours.encode(text).tolist()


def test_everything_about_chats_is_taken_over(checkpoint: Any, tmp_path: Path, byte_tokenizer_dir: Path) -> None:
    folder = checkpoint(300)
    for file in byte_tokenizer_dir.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "chat_template.jinja").write_text("default {{ messages[0].content }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools {{ messages[0].content }}")
    generation = {"eos_token_id": [2, 7], "do_sample": True, "temperature": 0.6, "min_p": 0.1, "top_p": 0.9}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    built = build_model(folder, tmp_path / "built", INT4)
    tokenizer = genai.Tokenizer(built)
    assert tokenizer.apply_chat_template(MESSAGES).startswith("default Hi")
    assert tokenizer.apply_chat_template(MESSAGES, tools=[{"name": "clock"}]).startswith("tools Hi")
    assert tokenizer.eos_token_ids.tolist() == [2, 7]
    with genai.Model(built) as model:
        params = RequestBuilder(model, tokenizer, genai.Adapters(model)).params(None, {})
    assert (params.temperature, params.min_p, params.top_p) == (0.6, 0.1, 0.9)


END, OTHER = 2, 7  # </s>, which tokenizer_config.json names, and a plain token


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        ({"eos_token_id": OTHER}, None, [OTHER, END]),  # a ChatML fine-tune with the base model's config.json
        ({"eos_token_id": [OTHER, 8]}, None, [OTHER, 8, END]),
        ({"eos_token_id": OTHER}, {"eos_token_id": 9}, [9, END]),  # as in transformers, the second file alone counts
        ({"eos_token_id": 9}, {"eos_token_id": [END, OTHER]}, [END, OTHER]),
        ({"eos_token_id": OTHER}, {"temperature": 0.5, "do_sample": True}, [OTHER, END]),
        ({"eos_token_id": None}, None, [END]),
        ({}, {"eos_token_id": None}, [END]),
        ({"eos_token_id": END}, None, [END]),
    ],
)
def test_the_ends_of_replies_are_a_union(
    checkpoint: Any,
    tmp_path: Path,
    byte_tokenizer_dir: Path,
    config: dict[str, Any],
    generation: dict[str, Any] | None,
    ends: list[int],
) -> None:
    """As in vLLM, which ends on the tokenizer's eos_token and on each id of the configuration."""
    folder = checkpoint(300)
    for file in byte_tokenizer_dir.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    base = {name: value for name, value in CHECKPOINT_CONFIG.items() if name != "eos_token_id"}
    (folder / "config.json").write_text(json.dumps({**base, "vocab_size": 300, **config}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    built = build_model(folder, tmp_path / "built", INT4)
    assert genai.Tokenizer(folder).eos_token_ids.tolist() == ends
    assert genai.Tokenizer(built).eos_token_ids.tolist() == ends
    with genai.LLM(built) as llm:
        prompt = llm.encode("Hi")

        def end_as_named(ids: Any, logits: Any) -> None:
            logits[:] = -1e9
            logits[END if len(ids) == len(prompt) + 2 else OTHER + 60] = 0

        (completion,) = llm.generate([prompt], temperature=0, max_tokens=8, logits_processors=[end_as_named])
        assert (completion.finish_reason, completion.stopped_by, len(completion.token_ids)) == ("stop", END, 2)


def test_an_end_that_no_file_names(checkpoint: Any, tmp_path: Path, byte_tokenizer_dir: Path) -> None:
    folder = checkpoint(300)
    (folder / "tokenizer.json").write_bytes((byte_tokenizer_dir / "tokenizer.json").read_bytes())
    (folder / "config.json").write_text(json.dumps({**CHECKPOINT_CONFIG, "vocab_size": 300, "eos_token_id": None}))
    with pytest.raises(ConfigError, match="no eos_token_id, and the tokenizer has no eos_token") as caught:
        build_model(folder, tmp_path / "built", INT4)
    assert caught.value.fix == "add eos_token_id to config.json"


@pytest.mark.parametrize("content", ["<|im_end|>", "not in the vocabulary"])
def test_an_end_of_the_tokenizer_that_the_model_lacks(
    checkpoint: Any, tmp_path: Path, byte_tokenizer_dir: Path, content: str
) -> None:
    """Text models that share a tokenizer with a vision model have special tokens without an embedding."""
    folder = checkpoint(259)
    tokenizer = tokenizers.Tokenizer.from_file(str(byte_tokenizer_dir / "tokenizer.json"))
    assert tokenizer.add_special_tokens(["<|im_end|>"]) and tokenizer.token_to_id("<|im_end|>") == 259
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": content}))
    built = build_model(folder, tmp_path / "built", INT4)
    assert genai.Tokenizer(built).eos_token_ids.tolist() == [2]
