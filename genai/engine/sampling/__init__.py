"""Choosing tokens: from what a request asks for to the next token of each row of a batch.

`option_rules` names the samplers and says which options are valid, `params` holds them, `search_options` has those of
onnxruntime-genai; `plan` turns options into numbers for the kernels, once per request, and is what one sequence
remembers; `batch` samples many rows at once and reads log-probabilities. `strings` are policies over tokens and text.
"""
