"""LLM: completion of prompts, and conversations.

`requests` checks the arguments of calls, `generation` represents a sample during generation, and `streaming` waits for
samples (blocking, streamed, async). `completion` defines the results, and `chat` a conversation. Nothing here depends
on graphs or kernels.
"""
