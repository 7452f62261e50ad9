"""Sampling: the path from a request's options to the next token of each row in a batch.

`option_rules` lists the samplers and validates options, `params` holds the options, and `search_options` holds those of
onnxruntime-genai. `plan` converts options to kernel parameters once per request, and holds the state of one sequence.
`batch` samples many rows at a time and computes log-probabilities. `strings` detects stop strings and banned strings.
"""
