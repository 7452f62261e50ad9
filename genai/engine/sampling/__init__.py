"""Choosing tokens: from what a request asks for to the next token of each row of a batch.

`order` names the samplers, `option_rules` and `contradictions` say which options are valid (`genai.sampling_params`
holds them); `plan` turns options into numbers for the kernels, once per request; `row` is what one sequence remembers;
`batch` samples many rows at once; `logprobs` reads log-probabilities. Beside them: Python `processors`, and policies
over tokens and text that callers drive: `stop_strings`, `banned_strings`, `breakers`. Only those three know text.
"""
