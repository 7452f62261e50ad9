"""Texts that are difficult to tokenise, and conversations for chat templates."""

from __future__ import annotations

from typing import Any

TORTURE = (
    "",
    " ",
    "   ",
    "Hello",
    " Hello",
    "  two  spaces  ",
    "Hello, world! It's 12 + 7 = 19; don't do not ' quote '. I'm, we've, you're ?",
    "1234567890 3.14 1,000,000 ٣٤٥ ①②",
    "👩‍👩‍👧‍👦👍🏽🏳️‍🌈",
    "🇩🇪🇫🇷 1️⃣ 🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "e\u0301 n\u0303 \u00e9 \u212b \ufb01 \u1e9e",
    "Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍algo",
    "漢字とカタカナ、한국어。中文！",
    "\u1112\u1161\u11ab\u1100\u1173\u11af \ud55c\uae00",
    "שלום مرحبا \u202egnirts\u202c \u2066x\u2069",
    "def f(x):\n\tif x >= 1:\r\n\t\treturn {'a': [x ** 2]}\n\n\n",
    "        eight\n    four\n\n  two\t\ttabs",
    "\x01\x1b[31mred\x1b[0m\x7f\u0085\u200b\ufeff",
    "\u00a0no\u00a0break\u3000wide\u2009thin\u200dzwj",
    "𝕬𝖇𝖈 𐍈 ﷽",
    "ไทย हिन्दी தமிழ் Ελληνικά Кириллица",
    "<s>[INST] x </s><0x41>▁##ing<unk>",
    "<|im_start|>user\nHi<|im_end|> <|eot_id|> <|end|>  <|user|>\n next <end_of_turn>",
    "\u2581 \u0120 Ġ ▁▁ ##",
    "�\ufffd",
    "a" * 60 + "é" * 9,
    "Straße ǅ İstanbul ﬀ ½ ™",
    "https://example.org/a_b-c?d=%20e&f#g user@example.org",
    "CamelCaseWord snake_case_word SHOUTING",
    "\n",
    "\n\n hello\n",
)
CORPUS = (
    *TORTURE,
    "the cat sat on the mat and the dog ran over there; the end of the story is near",
    "I am walking, talking and singing while counting 1 2 3 4 5 6 7 8 9 10. Hello there!",
    "user assistant system instructions: the model answers the question of the user in a few words",
) * 3
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Today's weather <now> & later: 'ü'",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
DOCUMENTS = [{"title": "Cats", "text": "Cats sleep a lot."}, {"title": "Dogs", "text": "Dogs bark & run."}]
_USER = {"role": "user", "content": "  Grüße <you> 😀\n"}
_SYSTEM = {"role": "system", "content": "Be kind & brief."}
_CALL = {"type": "function", "id": "abcdef123", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [_USER], "add_generation_prompt": True},
    "system": {"messages": [_SYSTEM, _USER], "add_generation_prompt": True},
    "three turns": {
        "messages": [
            _SYSTEM,
            _USER,
            {"role": "assistant", "content": " <think>\nEasy.\n</think>\n\nHi! "},
            {"role": "user", "content": "And 3?\n\nSay 'three'."},
        ],
        "add_generation_prompt": True,
    },
    "finished": {"messages": [_USER, {"role": "assistant", "content": "Hi!"}], "add_generation_prompt": False},
    "continued": {"messages": [_USER, {"role": "assistant", "content": "Once upon "}], "continue_final_message": True},
    "no thinking": {"messages": [_USER], "add_generation_prompt": True, "enable_thinking": False},
    "reasoning": {
        "messages": [_USER, {"role": "assistant", "content": "Hi!", "thinking": "short"}],
        "add_generation_prompt": False,
    },
    "tools": {"messages": [_SYSTEM, _USER], "tools": TOOLS, "add_generation_prompt": True},
    "tool call": {
        "messages": [
            _USER,
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "name": "weather", "tool_call_id": "abcdef123", "content": '{"degrees": 7}'},
        ],
        "tools": TOOLS,
        "add_generation_prompt": True,
    },
    "documents": {"messages": [_USER], "documents": DOCUMENTS, "add_generation_prompt": True},
}
