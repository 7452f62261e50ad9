"""What `genai bench` measures: a model's speed on this machine, beside what the machine can do at most.

Knows how to run a model with random tokens, how much memory and how many products a step needs, and the machine's
ceilings (`genai.doctor`). It reports plain rows of names and numbers; the command line makes tables of them.
"""
