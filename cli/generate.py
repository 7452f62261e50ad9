"""`genai generate`: continue a text, without a chat template."""

from __future__ import annotations

from typing import Annotated

import typer

from . import options as opt
from .terminal import emit, footer, read_stdin, say


def generate(
    model: opt.ModelArgument = None,
    prompt: Annotated[str, typer.Option("-p", "--prompt", help="The text to continue; - reads stdin.")] = "-",
    chat_template: Annotated[
        bool, typer.Option("--chat/--raw", help="Render the prompt as a user message first.")
    ] = False,
    max_tokens: opt.MaxTokens = None,
    temperature: opt.Temperature = None,
    top_k: opt.TopK = None,
    top_p: opt.TopP = None,
    seed: opt.Seed = None,
    repeat_penalty: opt.RepeatPenalty = None,
    build: opt.Build = True,
    threads: opt.Threads = None,
    accuracy: opt.Accuracy = "auto",
    kv_type: opt.KvType = "auto",
    stats: opt.Stats = None,
) -> None:
    """Continue a text and print what the model writes."""
    search = opt.search_options(temperature, top_k, top_p, seed, repeat_penalty)
    text = read_stdin() if prompt == "-" else prompt
    from genai.generator import Generator, GeneratorParams
    from genai.reply import ReplyStats, stream_reply
    from genai.tokenizer import Tokenizer

    loaded = opt.load(model, threads, accuracy, kv_type, build)
    tokenizer = Tokenizer(loaded)
    params = GeneratorParams(loaded)
    params.set_search_options(**search)
    if chat_template:
        text = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
    figures = ReplyStats()
    with Generator(loaded, params) as generator:
        for piece in stream_reply(generator, tokenizer, tokenizer.encode(text).tolist(), figures, max_tokens):
            emit(piece)
    emit("\n")
    if stats:
        say(footer(figures, seed=seed))
