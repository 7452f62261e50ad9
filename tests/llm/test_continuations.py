"""The text of outputs: what the output's tokens add to the text of the prompt.

Many tokenizers drop a space at the start of a text. The right text is decode(prompt + output) without decode(prompt),
by the tokenizers library.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

import genai
from tests.cli.processes import run

MARK = "\u2581"
LETTERS = "abcdefghijklmnopqrstuvwxyzH!."
WORDS = (MARK, MARK + "the", MARK + "a", MARK * 2)
BOS = 1


def _vocabulary(first: int) -> dict[str, int]:
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), *LETTERS, *WORDS]
    return {"<unk>": 0, "<s>": BOS, "</s>": 2} | {piece: first + index for index, piece in enumerate(pieces)}


def llama() -> Tokenizer:
    """Llama 2, Mistral, Phi-3, TinyLlama: a mark is prepended to a text, and its space is stripped."""
    vocabulary = _vocabulary(3)
    merges = [("\u2581t", "he"), (MARK, "t"), ("h", "e"), (MARK, "a"), (MARK, MARK)]
    vocabulary |= {"he": 400, MARK + "t": 401}
    tokenizer = Tokenizer(models.BPE(vocabulary, [merges[1], merges[2], merges[0], *merges[3:]], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = llama()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")])
    return tokenizer


@pytest.fixture(scope="module", params=[llama, metaspace])
def folder(request: Any, tmp_path_factory: pytest.TempPathFactory, form_folder: Callable[[str], Path]) -> Path:
    folder = tmp_path_factory.mktemp("continuations") / "model"
    shutil.copytree(form_folder("fp32"), folder)
    tokenizer = request.param()
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[genai.LLM]:
    with genai.LLM(folder) as llm:
        yield llm


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def added(oracle: Tokenizer, prompt: Any, output: Any) -> str:
    before, whole = oracle.decode([*prompt]), oracle.decode([*prompt, *output])
    assert whole.startswith(before)
    return whole[len(before) :]


def writing(oracle: Tokenizer, *tokens: str) -> dict[str, Any]:
    """Return options that force the output of one request."""
    ids = [oracle.token_to_id(token) for token in tokens]
    lengths: list[int] = []

    def force(sequence: Any, logits: np.ndarray) -> None:
        lengths.append(len(sequence))
        logits[:] = -1e6
        logits[ids[len(sequence) - lengths[0]]] = 0

    return {"temperature": 0, "max_tokens": len(ids), "logits_processors": [force], "ignore_eos": True}


OUTPUTS = [(MARK + "the",), (MARK, "h"), (MARK * 2, "h"), ("h", MARK + "the"), ("<0xC3>", "<0xA9>", MARK + "a")]


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("prompt", ["Hi", "Hi ", "the", "a\u00e9", ""])
def test_every_call_gives_what_the_output_adds(
    llm: genai.LLM, oracle: Tokenizer, prompt: str, output: tuple[str, ...]
) -> None:
    ids = llm.encode(prompt)
    assert ids == oracle.encode(prompt).ids
    right = added(oracle, ids, [oracle.token_to_id(token) for token in output])
    (completion,) = llm.generate(prompt, **writing(oracle, *output))
    assert completion.text == right
    with llm.stream(prompt, **writing(oracle, *output)) as stream:
        assert "".join(stream) == right
    (answer,) = llm.map([{"prompt": prompt}], **writing(oracle, *output))
    assert answer.text == right
    with llm.read(prompt) as state:
        # The prompt of a continuation is encoded like a text, so it begins with a mark.
        (completion,) = state.generate([[oracle.token_to_id("H")]], **writing(oracle, *output))
        assert completion.text == added(
            oracle, [*ids, oracle.token_to_id("H")], [oracle.token_to_id(token) for token in output]
        )
    half = llm.generate(prompt, keep_state=True, **{**writing(oracle, *output), "max_tokens": 1})[0]
    assert half.state is not None
    half.state.close()


def test_beams(llm: genai.LLM, oracle: Tokenizer) -> None:
    ids = llm.encode("Hi")
    for bias in (MARK + "the", MARK, "h"):
        options: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 3, "max_tokens": 4, "ignore_eos": True}
        for completion in llm.generate("Hi", logit_bias={oracle.token_to_id(bias): 50.0}, **options):
            assert completion.text == added(oracle, ids, completion.token_ids)


def test_stop_and_banned_strings_at_the_start(llm: genai.LLM, oracle: Tokenizer) -> None:
    words = [MARK + "the"] * 3
    (completion,) = llm.generate("Hi", **writing(oracle, *words), stop=" the")
    assert (completion.text, len(completion.token_ids)) == ("", 1)
    (completion,) = llm.generate("Hi", **writing(oracle, *words), stop="the")
    assert (completion.text, len(completion.token_ids)) == (" ", 1)
    (completion,) = llm.generate("Hi", max_tokens=8, seed=1, temperature=2.0, banned_strings=" ", ignore_eos=True)
    assert " " not in completion.text


@pytest.mark.parametrize("prompt", ["Hi", "Hi ", ""])
def test_replies_match_their_grammar(llm: genai.LLM, prompt: str) -> None:
    options: dict[str, Any] = {"temperature": 3.0, "seed": 1, "n": 6, "max_tokens": 60}
    for completion in llm.generate(prompt, regex=" the [a-z]{2}", **options):
        assert re.fullmatch(" the [a-z]{2}", completion.text)
    for completion in llm.generate(prompt, choice=[" the", " a", "the"], **options):
        assert completion.text in (" the", " a", "the")


def test_the_texts_of_logprobs_add_up(folder: Path, oracle: Tokenizer, tmp_path: Path) -> None:
    bias = {str(oracle.token_to_id(MARK + "the")): 100.0}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions",
            "body": {"prompt": "Hi", "max_tokens": 3, "logprobs": 1, "temperature": 0, "logit_bias": bias}}  # fmt: skip
    (tmp_path / "in.jsonl").write_text(json.dumps(line))
    result = run("batch", str(tmp_path / "in.jsonl"), str(folder), "-o", str(tmp_path / "out.jsonl"))
    assert result.returncode == 0, result.stderr
    (choice,) = json.loads((tmp_path / "out.jsonl").read_text())["response"]["body"]["choices"]
    assert choice["text"] == " the the the" == "".join(choice["logprobs"]["tokens"])
    assert choice["logprobs"]["text_offset"] == [0, 4, 8]


def test_a_conversation(folder: Path, oracle: Tokenizer) -> None:
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}")
    with genai.LLM(folder) as llm:
        prompt = llm.encode(llm.render("Hi"))
        reply = llm.chat("Hi", **writing(oracle, MARK + "the", "h"))
        assert reply.text == added(oracle, prompt, reply.completion.token_ids) == " theh"


def test_the_stream_of_the_drop_in(folder: Path, oracle: Tokenizer) -> None:
    """The pieces of onnxruntime-genai 0.18: a first token continues a text, unless a special token comes first."""
    tokenizer = genai.Tokenizer(folder)
    the = oracle.token_to_id(MARK + "the")
    for ids, pieces in (
        ([the, the], [" the", " the"]),
        ([BOS, the, the], ["", "the", " the"]),
        ([2, the], ["", "the"]),
    ):
        stream = tokenizer.create_stream()
        assert [stream.decode(id_) for id_ in ids] == pieces
        assert stream.flush() == ""
        assert stream.decode(the) == " the"
