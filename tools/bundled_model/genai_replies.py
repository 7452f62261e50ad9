"""Greedy replies of an exported folder through onnxruntime-genai, an engine that is not ours."""

import json
from pathlib import Path

import onnxruntime_genai as og

from .held_out import Question


def genai_replies(folder: Path, questions: list[Question]) -> list[str]:
    """One reply per question, in order."""
    model = og.Model(str(folder))
    tokenizer = og.Tokenizer(model)
    return [_reply(model, tokenizer, question) for question in questions]


def _reply(model: og.Model, tokenizer: og.Tokenizer, question: Question) -> str:
    prompt = tokenizer.apply_chat_template(json.dumps(question["messages"]), add_generation_prompt=True)
    tokens = tokenizer.encode(prompt)
    limit = len(tokens) + question.get("max_tokens", 32)
    params = og.GeneratorParams(model)
    params.set_search_options(do_sample=False, max_length=limit)
    generator = og.Generator(model, params)
    generator.append_tokens(tokens)
    while not generator.is_done():
        generator.generate_next_token()
    reply = list(generator.get_sequence(0))[len(tokens) :]
    return str(tokenizer.decode(reply)).replace("<|im_end|>", "")
