"""The engine: sequences go in, logits and tokens come out.

`sequence` holds what a request has written so far; `scheduler` decides which tokens are computed in a step (pure
policy, no arrays); a decoder (`paged`, or `dense` for graphs that cannot be flattened) computes them; `sampler` picks
the next tokens. The engine knows token ids only: nothing here knows text.
"""
