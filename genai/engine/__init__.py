"""The engine: sequences go in, logits and tokens come out.

`scheduler` decides which tokens are computed in a step (pure policy, no arrays); a decoder (`paged`, or `unbatched` for
graphs that cannot be flattened) computes them; `sampling` picks the next tokens. The engine knows token ids only:
nothing here knows text.
"""
