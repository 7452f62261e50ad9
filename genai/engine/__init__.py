"""The inference engine, which computes sequences of token ids and generates new tokens.

`scheduler` plans which tokens each step computes (pure policy, no arrays). A decoder (`paged`, or `unbatched` for
graphs that cannot be flattened) computes them. `sampling` chooses the next tokens. The engine handles only token ids,
never text.
"""
