"""LLM: prompts and conversations in, completions out.

`requests` checks what callers give, `generation` is one sample while it runs, `streaming` waits for it (blocking,
streamed, async), `completion` is the result, `chat` a conversation. Nothing here knows graphs or kernels.
"""
