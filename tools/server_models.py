"""The model that tests of the server use, its tools, and an adapter."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import genai
from genai.convert import DecoderSpec, ExportOptions, write_model_folder
from genai.models.folders import bundled_model
from tools.adapter_soak import write_adapter
from tools.random_weights import RandomWeights

CONTEXT, BLOCK = 32768, 32
# The form of Qwen's templates: the tools are part of the system prompt, and each call is a JSON object.
TEMPLATE = """{% if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
Return each call as <tool_call>
{"name": <name>, "arguments": <arguments>}
</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}{% for message in messages %}{% if message.role != 'system' %}<|im_start|>{{ message.role }}
{{ message.content or '' }}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_WORDS = "read write file test line name list value number string first last run change keep order short long".split()


def make_model(folder: Path, *, context: int = CONTEXT, seed: int = 0) -> Path:
    """Write the model's folder, which must not exist."""
    spec = DecoderSpec(
        model_type="llama", vocab_size=1536, hidden_size=64, intermediate_size=96, num_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_size=16, context_length=context, rms_norm_eps=1e-5,
        rope_theta=1e6, tie_word_embeddings=True, bos_token_id=0, eos_token_ids=(2, 0), pad_token_id=0,
    )  # fmt: skip
    write_model_folder(folder, spec, ExportOptions(), RandomWeights(spec, seed), tokenizer_dir=bundled_model())
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


def make_adapter(llm: genai.LLM, folder: Path, *, seed: int = 0) -> Path:
    """Write an adapter with random weights for a model that was loaded for adapters."""
    return write_adapter(folder, llm.model.lora_targets(), seed, rank=4)


def make_tools(count: int, dice: random.Random) -> list[dict[str, Any]]:
    """Return tools with short arguments, which a model with random weights can finish."""
    kinds = [
        {"type": "integer", "minimum": 1, "maximum": 4000},
        {"type": "boolean"},
        {"enum": ["src/main.py", "src/lists.py", "tests/test_lists.py"]},
        {"type": "array", "items": {"enum": ["fast", "quiet", "all"]}, "minItems": 1, "maxItems": 2},
    ]
    found = []
    for index in range(count):
        schema = {
            "type": "object",
            "properties": {f"{dice.choice(_WORDS)}_{place}": dice.choice(kinds) for place in range(dice.randint(1, 3))},
            "additionalProperties": False,
        }
        schema["required"] = [*schema["properties"]]  # type: ignore[misc]
        about = {"name": f"{dice.choice(_WORDS)}_{index}", "description": text(dice, 30), "parameters": schema}
        found.append({"type": "function", "function": about})
    return found


def text(dice: random.Random, words: int) -> str:
    """Return a text of random words."""
    return " ".join(dice.choice(_WORDS) for _ in range(words)).capitalize() + "."
