"""Speculative decoding: a step computes draft tokens together with the last token, and keeps those that are accepted.

`lookup` and `draft` propose tokens, `policy` decides how many are worthwhile, and `speculator` is the interface to the
engine.
"""
