"""The measurements of `genai bench`: a model's speed on this machine, compared with the machine's ceilings.

This package runs models on random tokens, counts the bytes and operations that a step needs, and measures the machine's
ceilings (`genai.doctor`). It reports plain rows of names and numbers; the command line formats them as tables.
"""
