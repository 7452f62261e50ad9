"""Chat in twenty lines of code: read one message per line until the input ends, and keep the conversation."""

import sys

import genai

with genai.LLM(sys.argv[1] if len(sys.argv) > 1 else None) as llm:
    messages: list[dict[str, str]] = []
    print("Write a message. To quit, end the input (Ctrl-D).")
    for line in sys.stdin:
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line.strip()})
        try:
            with llm.stream(messages, max_tokens=300) as stream:
                for piece in stream:
                    print(piece, end="", flush=True)
            messages.append({"role": "assistant", "content": stream.completion.text})
        except genai.GenaiError as error:
            messages.pop()
            print(error.what, error.fix, sep="; ", end="")
        print()
