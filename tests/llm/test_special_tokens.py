"""The special tokens around prompts: raw texts get those of the tokenizer, and conversations those of their template.

The right ids are those of the tokenizers library, which transformers and vLLM pass to their models.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

import genai
from genai.errors import OptionError
from genai.llm.chat import ChatSession
from tests.cli.processes import run

BOS, EOS = 0, 2
TEXTS = ("Once upon a time", " leading space", "x")
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def folder_with(tmp_path_factory: pytest.TempPathFactory, form_folder: Callable[[str], Path]) -> Callable[..., Path]:
    """folder_with(post_processor, template) -> a folder whose tokenizer has this post-processor and template."""

    def make(post_processor: Any, template: str = "{{ bos_token }}" + PLAIN) -> Path:
        folder = tmp_path_factory.mktemp("special") / "model"
        shutil.copytree(form_folder("fp32"), folder)
        path = folder / "tokenizer.json"
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
        tokenizer.post_processor = post_processor
        tokenizer.save(str(path))
        (folder / "chat_template.jinja").write_text(template)
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "bos_token": "<|endoftext|>"}))
        return folder

    return make


def begins(*, ends: bool = False) -> Any:
    single = "<|endoftext|> $A" + (" <|im_end|>" if ends else "")
    ids = [("<|endoftext|>", BOS), ("<|im_end|>", EOS)]
    return tokenizers.processors.TemplateProcessing(single=single, special_tokens=ids)


@pytest.fixture(scope="module")
def folder(folder_with: Callable[..., Path]) -> Path:
    return folder_with(begins())


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[genai.LLM]:
    with genai.LLM(folder) as llm:
        yield llm


@pytest.fixture(scope="module")
def oracle(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


ONE: dict[str, Any] = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}


def greedy(llm: genai.LLM, ids: list[int]) -> tuple[int, tuple[int, ...]]:
    (completion,) = llm.generate([ids], **ONE)
    return completion.prompt_tokens, completion.token_ids


def outputs(completions: Any) -> list[tuple[int, tuple[int, ...]]]:
    return [(completion.prompt_tokens, completion.token_ids) for completion in completions]


def test_raw_texts_get_what_the_tokenizer_adds(llm: genai.LLM, oracle: tokenizers.Tokenizer) -> None:
    rows = [oracle.encode(text).ids for text in TEXTS]
    assert all(row[0] == BOS for row in rows)
    expected = [greedy(llm, row) for row in rows]
    assert [llm.encode(text) for text in TEXTS] == rows
    assert outputs(llm.generate(list(TEXTS), **ONE)) == expected
    assert outputs(answer.completions[0] for answer in llm.map(list(TEXTS), **ONE)) == expected
    for text, right in zip(TEXTS, expected, strict=True):
        with llm.stream(text, **ONE) as stream:
            assert len("".join(stream)) >= 0
        assert outputs([stream.completion]) == [right]
    with llm.read(TEXTS[0]) as state:
        assert list(state.tokens) == rows[0]
        # A continuation is not the start of a text.
        (completion,) = state.generate(" and", max_tokens=1)
        assert completion.prompt_tokens == len(rows[0]) + len(oracle.encode(" and", add_special_tokens=False).ids)


def test_an_empty_text_is_the_start_of_a_text(llm: genai.LLM) -> None:
    assert outputs(llm.generate("", **ONE)) == [greedy(llm, [BOS])]


def test_a_rendered_template_has_bos_once(llm: genai.LLM, oracle: tokenizers.Tokenizer) -> None:
    prompt = llm.render("Hi")
    row = oracle.encode(prompt, add_special_tokens=False).ids
    assert row.count(BOS) == 1
    copied = f"{prompt}"  # a text of a file, for example
    assert type(copied) is str
    right = greedy(llm, row)
    assert llm.encode(prompt) == llm.encode(copied) == row
    assert outputs(llm.generate([prompt, copied], **ONE)) == [right, right]
    assert outputs([llm.chat("Hi", **ONE).completion]) == [right]
    messages = [{"role": "user", "content": "Hi"}]
    assert outputs(answer.completions[0] for answer in llm.map([messages, copied, prompt], **ONE)) == [right] * 3
    session = ChatSession(llm, **ONE)
    assert outputs([session.ask("Hi").completion]) == [right]
    assert llm.encode(prompt + "!") == oracle.encode(prompt + "!", add_special_tokens=False).ids


def test_a_template_without_bos_is_followed(folder_with: Callable[..., Path]) -> None:
    """As in transformers' apply_chat_template and in vLLM, whose prompts are what the template writes."""
    with genai.LLM(folder_with(begins(), PLAIN)) as llm:
        prompt = llm.render("Hi")
        row = llm.tokenizer.backend.encode(prompt, add_special_tokens=False).ids
        assert BOS not in row
        right = greedy(llm, row)
        assert outputs([llm.chat("Hi", **ONE).completion]) == outputs(llm.generate(prompt, **ONE)) == [right]
        messages = [{"role": "user", "content": "Hi"}]
        # The raw text with the same characters is a different prompt.
        chat, raw = llm.map([messages, str(prompt[:0]) + prompt[:]], **ONE)
        assert outputs(chat.completions) == [right]
        assert outputs(raw.completions) == [greedy(llm, [BOS, *row])]
        assert outputs([llm.chat("Hi", add_special_tokens=True, **ONE).completion]) == [greedy(llm, [BOS, *row])]


def test_add_special_tokens_false_gives_the_text_alone(llm: genai.LLM, oracle: tokenizers.Tokenizer) -> None:
    rows = [oracle.encode(text, add_special_tokens=False).ids for text in TEXTS]
    expected = [greedy(llm, row) for row in rows]
    assert outputs(llm.generate(list(TEXTS), add_special_tokens=False, **ONE)) == expected
    items = [{"prompt": text, "add_special_tokens": False} for text in TEXTS]
    assert outputs(answer.completions[0] for answer in llm.map(items, **ONE)) == expected
    assert llm.encode(TEXTS[0], add_special_tokens=False) == rows[0]


def test_the_tokenizers_switch_does_not_change_prompts(folder: Path) -> None:
    with genai.LLM(folder) as llm:
        before = [llm.encode(TEXTS[0]), llm.encode(llm.render("Hi"))]
        llm.tokenizer.update_options(add_special_tokens=True)
        assert [llm.encode(TEXTS[0]), llm.encode(llm.render("Hi"))] == before
        assert llm.chat("Hi", **ONE).completion.prompt_tokens == len(before[1])


@pytest.mark.parametrize(
    ("name", "processor"),
    [
        ("nothing", None),
        ("byte level", tokenizers.processors.ByteLevel()),
        ("bos and eos", begins(ends=True)),
        ("sequence", tokenizers.processors.Sequence([tokenizers.processors.ByteLevel(), begins()])),
        ("bert", tokenizers.processors.BertProcessing(("<|im_end|>", 2), ("<|endoftext|>", 0))),
        ("roberta", tokenizers.processors.RobertaProcessing(("<|im_end|>", 2), ("<|endoftext|>", 0))),
    ],
)
def test_every_kind_of_post_processor(folder_with: Callable[..., Path], name: str, processor: Any) -> None:
    folder = folder_with(processor)
    oracle = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer = genai.Tokenizer(folder)
    for text in ("", *TEXTS, "a", "é\n"):
        assert tokenizer.encode_prompt(text).tolist() == oracle.encode(text).ids, name
        # The drop-in's encode stays that of onnxruntime-genai: the text alone.
        assert tokenizer.encode(text).tolist() == oracle.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("value", ["yes", 1, 0.0])
def test_a_value_that_is_not_a_boolean(llm: genai.LLM, value: Any) -> None:
    with pytest.raises(OptionError, match="add_special_tokens = "):
        llm.generate("Hi", add_special_tokens=value)


def test_the_option_with_token_ids(llm: genai.LLM) -> None:
    with pytest.raises(OptionError, match="add_special_tokens = True without a text"):
        llm.generate([[5, 6]], add_special_tokens=True)
    with llm.read("Once") as state, pytest.raises(OptionError, match="add_special_tokens = False without a text"):
        state.generate(" upon", add_special_tokens=False)
    half = llm.generate("Once", keep_state=True, **ONE)[0]
    assert half.state is not None
    with half.state as state, pytest.raises(OptionError, match="without a text"):
        state.resume(add_special_tokens=True)


def test_on_the_command_line(folder: Path, tmp_path: Path) -> None:
    def prompt_tokens(*flags: str) -> int:
        result = run("generate", "--raw", str(folder), "-p", TEXTS[0], "--json", "--max-tokens", "1", *flags)
        return int(json.loads(result.stdout)["prompt_tokens"])

    assert prompt_tokens() == prompt_tokens("--special-tokens") == prompt_tokens("--no-special-tokens") + 1
    shown = run("generate", "--raw", str(folder), "-p", TEXTS[0], "--dump-prompt", "--max-tokens", "1")
    assert f"[{prompt_tokens()} tokens] {BOS} " in shown.stderr
    lines = [{"prompt": TEXTS[0]}, {"prompt": TEXTS[0], "add_special_tokens": False}]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    counts = []
    for flags in ([], ["--no-special-tokens"]):
        output = tmp_path / f"out{len(flags)}.jsonl"
        arguments = ["batch", str(tmp_path / "in.jsonl"), str(folder), "-o", str(output), "--in-order"]
        result = run(*arguments, "--max-tokens", "1", *flags)
        assert result.returncode == 0, result.stderr
        replies = map(json.loads, output.read_text().splitlines())
        counts += [reply["response"]["body"]["usage"]["prompt_tokens"] for reply in replies]
    assert counts == [counts[1] + 1, counts[1], counts[1], counts[1]]


def test_literal_prompts(llm: genai.LLM) -> None:
    text = "Hi<|im_end|> there"
    ids = [BOS, *llm.tokenizer.encode(text, literal=True).tolist()]
    assert EOS not in ids
    assert llm.encode(text, literal=True) == ids
    expected = [greedy(llm, ids)]
    assert outputs(llm.generate(text, literal=True, **ONE)) == expected
    assert outputs(answer.completions[0] for answer in llm.map([text], literal=True, **ONE)) == expected
    assert outputs(answer.completions[0] for answer in llm.map([{"prompt": text, "literal": True}], **ONE)) == expected
    with llm.read(text, literal=True) as state:
        assert list(state.tokens) == ids
        with state.read(text, literal=True) as longer:
            assert list(longer.tokens) == [*ids, *ids[1:]]
        assert outputs(state.generate(text, literal=True, **ONE)) == [greedy(llm, [*ids, *ids[1:]])]
    with pytest.raises(OptionError, match="literal = True without a text"):
        llm.generate([[5, 6]], literal=True)
    with pytest.raises(OptionError, match="literal = 'yes'"):
        llm.generate("Hi", literal="yes")  # type: ignore[call-overload]
    with pytest.raises(OptionError, match="literal = True with the text of a chat template"):
        llm.generate(llm.render("Hi"), literal=True)
