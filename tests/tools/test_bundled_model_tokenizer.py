"""The shipped tokenizer: single digits, any text round-trips, and other runtimes give the same ids."""

import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from tokenizers import Tokenizer  # noqa: E402

from tools.bundled_model.split import is_held_out  # noqa: E402
from tools.bundled_model.tasks.stories import SLOTS  # noqa: E402
from tools.bundled_model.tasks.word_list import RARE  # noqa: E402
from tools.bundled_model.tokenizer import (  # noqa: E402
    CHAT_TEMPLATE,
    IM_END_ID,
    IM_START_ID,
    PAD_ID,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    chat_prompt,
)

FOLDER = ROOT / "configs" / "models" / "pebble"
TEXTS = (
    "",
    " ",
    "Hello, world!",
    "What is 12 + 7?",
    "1234567890",
    "  two  spaces   three    and a tail  ",
    "line\nline\n\n\r\nend\n",
    "\t\ttabs\tand mixed \t \n spaces",
    "don't we'll I'M they'Ve it's",
    "def f(x):\n    return x**2  # code\n",
    '{"key": [1, 2.5, null], "b": "\\n"}',
    "café naïve Ångström e\u0301",
    "Привет, мир! Ёлка",
    "你好，世界。今天天气很好",
    "こんにちは カタカナ ｶﾅ",
    "한국어 텍스트",
    "مرحبا بالعالم",
    "שלום עולם",
    "😀 👍🏽 👩‍👩‍👧‍👦 🇩🇪",
    "Ⅷ ½ ² ٣ ௧",
    "x\u200by\u00a0z\u3000w",
    "snake_case CamelCase kebab-case c-a-t",
    "!!!???... --- ***",
    "https://example.org/a?b=c&d=%20",
    "<|im_start|>user\nhi<|im_end|>\n",
    "ünïcödé 𝒳𝒴𝒵 𐍈",
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello!"},
    {"role": "assistant", "content": "Hello! How can I help you?"},
    {"role": "user", "content": "12+7"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def test_sizes_and_special_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [PAD_ID, IM_START_ID, IM_END_ID] == [0, 1, 2]


def test_digits_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert not [token for token in tokenizer.get_vocab() if len(token) > 1 and any(c.isdigit() for c in token)]
    assert tokenizer.encode("12+7").tokens == ["1", "2", "+", "7"]


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_held_out_words_are_in_pieces(tokenizer: Tokenizer) -> None:
    """A word that is one token could only be spelled if its spelling was trained."""
    story_words = {word for texts in SLOTS.values() for text in texts for word in text.split()}
    for word in set(RARE) - story_words:
        if is_held_out(f"word:{word}"):
            assert len(tokenizer.encode(f" {word}").ids) > 1, word


def test_template_in_both_files_gives_the_training_form() -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    assert (FOLDER / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    assert json.loads((FOLDER / "tokenizer_config.json").read_text())["chat_template"] == CHAT_TEMPLATE
    template = ImmutableSandboxedEnvironment().from_string(CHAT_TEMPLATE)
    assert template.render(messages=CHAT, add_generation_prompt=True) == chat_prompt(CHAT)


@pytest.mark.oracle
def test_onnxruntime_genai_gives_the_same_ids(tokenizer: Tokenizer) -> None:
    og = pytest.importorskip("onnxruntime_genai")
    other = og.Tokenizer(og.Model(str(FOLDER)))
    for text in TEXTS:
        assert list(other.encode(text)) == tokenizer.encode(text).ids, text
    assert other.apply_chat_template(json.dumps(CHAT), add_generation_prompt=True) == chat_prompt(CHAT)


@pytest.mark.oracle
def test_transformers_gives_the_same_ids(tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    other = transformers.AutoTokenizer.from_pretrained(str(FOLDER))
    for text in TEXTS:
        assert other.encode(text) == tokenizer.encode(text).ids, text
    assert other.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == chat_prompt(CHAT)
