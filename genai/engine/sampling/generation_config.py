"""The keys of transformers' generation_config.json: those that become sampling options, and those without effect.

Each key of transformers' GenerationConfig belongs to exactly one of OBEYED, IDS, WITHOUT_EFFECT and NOT_SUPPORTED. A
key with its neutral value, with which transformers does nothing, is never reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

_MOST_TOKENS = 2**31 - 1


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_TOKENS


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _are_texts(value: Any) -> bool:
    return _is_text(value) or (isinstance(value, list) and all(map(_is_text, value)))


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _are_sequences(value: Any) -> bool:
    return isinstance(value, list) and all(_are_ids(ids) and ids for ids in value)


def _are_biases(value: Any) -> bool:
    pairs = value if isinstance(value, list) else [None]
    return all(
        isinstance(pair, list) and len(pair) == 2 and _are_ids(pair[0]) and pair[0] and _is_number(pair[1])
        for pair in pairs
    )


_NUMBER = (_is_number, "a number or a boolean")
_COUNT = (_is_count, "a number of tokens")
OBEYED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "do_sample": _NUMBER,
    "temperature": _NUMBER,
    "top_k": _NUMBER,
    "top_p": _NUMBER,
    "min_p": _NUMBER,
    "typical_p": _NUMBER,
    "repetition_penalty": _NUMBER,
    "no_repeat_ngram_size": _NUMBER,
    "min_length": _COUNT,
    "max_length": _COUNT,
    "min_new_tokens": _COUNT,
    "max_new_tokens": _COUNT,
    "stop_strings": (_are_texts, "a text or a list of texts"),
    "suppress_tokens": (_are_ids, "a list of token ids"),
    "begin_suppress_tokens": (_are_ids, "a list of token ids"),
    "bad_words_ids": (_are_sequences, "a list of lists of token ids"),
    "sequence_bias": (_are_biases, "a list of pairs of token ids and a number"),
}
"""Keys that set defaults of requests, each with the test of its values and the expected form in words."""

FURTHER: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "xtc_probability": _NUMBER,
    "xtc_threshold": _NUMBER,
    "penalty_last_n": _COUNT,
    "mirostat": _COUNT,
    "mirostat_tau": _NUMBER,
    "mirostat_eta": _NUMBER,
    "samplers": (_is_text, "names of samplers, joined by semicolons"),
}
"""Options that only GGUF files set. The conversion writes them to generation_config.json, too."""

GGUF_PREFIX = "general.sampling."
"""The start of the keys of GGUF files that the conversion writes under their own names, because they are not obeyed."""

IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of token ids, see genai.text.files."""

# Keys of the other kind, each with the values, besides null, with which transformers does nothing.
NOT_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "max_time": (),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "num_beam_groups": (0, 1),
    "top_h": (),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "exponential_decay_length_penalty": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": ([],),
    "remove_invalid_values": (False,),
    "token_healing": (False,),
    "guidance_scale": (1,),
    "watermarking_config": ({},),
    "assistant_ensemble_weight": (0,),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "constraints": ([],),
    "force_words_ids": ([],),
}
"""Keys that change replies in transformers and have no effect here."""

WITHOUT_EFFECT = frozenset(
    # with a single beam, in a decoder without an encoder, or after a softmax
    "early_stopping length_penalty diversity_penalty decoder_start_token_id renormalize_logits"
    # memory, speed and the form of results
    " use_cache cache_implementation cache_config max_cache_len compile_config disable_compile low_memory"
    " continuous_batching_config prefill_chunk_size output_attentions output_hidden_states output_scores output_logits"
    " return_dict_in_generate"
    # speculation
    " is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold"
    " prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit assistant_lookbehind target_lookbehind"
    " speculation_type use_mtp"
    # the origin of the file
    " transformers_version _from_model_config _commit_hash".split()
)
"""Keys that do not change the tokens of a reply of a decoder, in transformers either."""


def unsupported(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys that change replies in transformers, and whose values are not obeyed."""
    found = [
        name
        for name, neutral in NOT_SUPPORTED.items()
        if (value := values.get(name)) is not None and value not in neutral
    ]
    return (*found, *(name for name in values if name.startswith(GGUF_PREFIX)))


def request_options(values: Mapping[str, Any], vocab_size: int, eos_token_ids: tuple[int, ...]) -> dict[str, Any]:
    """Return the sampling options that do not have the name and meaning of a search option.

    Args:
        values: values of OBEYED and FURTHER that have passed their tests.
        vocab_size: number of logits; greater ids have no effect, as in transformers.
        eos_token_ids: the tokens that end a reply; as in transformers, bad_words_ids cannot forbid them.
    """
    names = {"min_new_tokens": "min_tokens", "max_new_tokens": "max_tokens", "stop_strings": "stop"}
    options = {name: values[key] for key, name in names.items() if values.get(key)}
    biases = {tuple(ids): float(bias) for ids, bias in values.get("sequence_bias") or ()}
    bad = [tuple(ids) for ids in values.get("bad_words_ids") or ()]
    biases |= {ids: -math.inf for ids in bad if len(ids) > 1 or ids[0] not in eos_token_ids}
    biases |= {(token,): -math.inf for token in values.get("suppress_tokens") or ()}
    known = {ids: bias for ids, bias in biases.items() if max(ids) < vocab_size}
    if single := {ids[0]: bias for ids, bias in known.items() if len(ids) == 1}:
        options["logit_bias"] = single
    if several := {ids: bias for ids, bias in known.items() if len(ids) > 1}:
        options["sequence_bias"] = several
    if first := [token for token in values.get("begin_suppress_tokens") or () if token < vocab_size]:
        options["begin_suppress_tokens"] = first
    return options | {name: values[name] for name in FURTHER if values.get(name) is not None}
