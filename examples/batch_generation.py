"""Complete a file of prompts: JSON lines in, JSON lines out, all of them in one batch.

Each input line is {"prompt": text} or {"messages": [...]}, with any sampling options beside it:

    {"messages": [{"role": "user", "content": "What is 12 + 7?"}], "max_tokens": 20}

Usage: batch_generation.py [INPUT [OUTPUT]] [--model FOLDER]; without files, standard input and output. A line that
cannot be used ends the run with its number, before anything is generated.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import genai


def read(llm: genai.LLM, lines: Iterable[str]) -> tuple[list[str], list[genai.SamplingParams]]:
    """Prompts and their options."""
    prompts, params = [], []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                options: dict[str, Any] = json.loads(line)
                messages = options.pop("messages", None)
                prompts.append(options.pop("prompt") if messages is None else llm.render(messages))
                params.append(llm.params(**options))
            except (json.JSONDecodeError, KeyError, TypeError, AttributeError, genai.GenaiError) as error:
                sys.exit(f"line {number}: {type(error).__name__}: {error}")
    return prompts, params


def main() -> None:
    """Read, generate, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", nargs="?", type=Path)
    parser.add_argument("output", nargs="?", type=Path)
    parser.add_argument("--model")
    arguments = parser.parse_args()
    with genai.LLM(arguments.model) as llm:
        text = arguments.input.read_text(encoding="utf-8") if arguments.input else sys.stdin.read()
        prompts, params = read(llm, text.splitlines())
        completions = llm.generate(prompts, params) if prompts else []
    lines = [
        json.dumps(
            {
                "index": one.prompt_index,
                "sample": one.sample_index,
                "text": one.text,
                "finish_reason": one.finish_reason,
                "tokens": len(one.token_ids),
                "seed": one.seed,
            },
            ensure_ascii=False,
        )
        for one in completions
    ]
    output = "".join(f"{line}\n" for line in lines)
    if arguments.output:
        arguments.output.write_text(output, encoding="utf-8")
        print(f"{len(completions)} completions written to {arguments.output}")
    else:
        print(output, end="")


main()
