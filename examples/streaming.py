"""Print a story while it is generated, stop it after three sentences, and print the number of tokens."""

import sys

import genai

with genai.LLM(sys.argv[1] if len(sys.argv) > 1 else None) as llm:
    story = llm.render("Tell me a story about Luna and Tom.")
    with llm.stream(story, temperature=0.8, seed=1, max_tokens=200) as stream:
        sentences = 0
        for piece in stream:
            print(piece, end="", flush=True)
            sentences += piece.count(".")
            if sentences == 3:
                break  # leaving the with block cancels the rest
    completion = stream.completion
    print(f"\n{len(completion.token_ids)} tokens, {completion.finish_reason}", file=sys.stderr)
