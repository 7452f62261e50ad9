"""Complete a file of prompts in one batch: JSON lines in, JSON lines out.

Each input line is {"prompt": text} or {"messages": [...]}, with optional sampling options in the same object:

    {"messages": [{"role": "user", "content": "What is 12 + 7?"}], "max_tokens": 20}

Usage: batch_generation.py [INPUT [OUTPUT]] [--model FOLDER]. Without files, the script uses standard input and output.
If a line is invalid, the script prints the line's number and the error, and exits before it generates anything.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import genai


def read(llm: genai.LLM, lines: Iterable[str]) -> tuple[list[str], list[genai.SamplingParams]]:
    """Return the prompts and their sampling options."""
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
    """Read the prompts, generate, and write the completions."""
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
