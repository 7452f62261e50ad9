"""The keys that genai_config.json has in onnxruntime-genai 0.18, and the way in which this toolkit treats them.

There are three classes of keys. USED: the key has an effect. FOREIGN: the key controls onnxruntime's own machinery and
cannot change tokens; it is accepted, and listed with -v. LATER: the key changes the generated tokens and is not
supported by this version, so setting the key is an error. A key in none of these classes is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Use(Enum):
    """The way in which a key is treated."""

    USED = "used"
    FOREIGN = "ignored; affects only onnxruntime"
    LATER = "not supported yet"


@dataclass(frozen=True)
class Key:
    """A key, with its JSON types, its use, and, for objects, the keys inside (None = any keys)."""

    types: tuple[type, ...]
    use: Use = Use.USED
    keys: Mapping[str, Any] | None = None


INT, FLOAT, BOOL, STR = (int,), (int, float), (bool,), (str,)
IDS = (int, list)


def _keys(types: tuple[type, ...], names: str, use: Use = Use.USED) -> dict[str, Key]:
    return {name: Key(types, use) for name in names.split()}


DECODER_INPUTS = {
    **_keys(STR, "input_ids inputs_embeds attention_mask position_ids past_key_names past_value_names past_names"),
    **_keys(STR, "past_conv_names past_recurrent_names"),
    **_keys(
        STR,
        "past_key_scale_names past_value_scale_names cross_past_key_names "
        "cross_past_value_names past_key_values_length past_sequence_length current_sequence_length "
        "total_sequence_length cache_indirection encoder_hidden_states encoder_attention_mask rnn_states_prev "
        "hidden_states block_table block_table_windowed cumulative_sequence_lengths past_sequence_lengths "
        "attention_metadata logits_indices state_update_capture_count "
        "state_update_active per_layer_inputs targets lstm_hidden_state lstm_cell_state",
        Use.LATER,
    ),
}
_STATES = (
    "the model has states of a fixed size, such as those of convolutions or linear attention",
    "use a model whose layers all have keys and values",
)
_ENCODER = ("the model has an encoder, such as a model of speech", "run the graphs with genai run")
_PAGED = (
    "the graph has paged attention, which only onnxruntime-genai's engine for CUDA computes",
    "build the folder again without use_paged_attention=true; the cache is paged in any case",
)
_OTHER = ("this key changes the generated tokens, so it cannot be ignored", "use a model folder without this key")
_REASONS = (
    (_STATES, "conv recurrent state_ rnn lstm"),
    (_ENCODER, "cross encoder joiner vad moonshine"),
    (_PAGED, "block_table cumulative_sequence past_sequence_lengths attention_metadata logits_indices"),
)


def reason_and_fix(name: str) -> tuple[str, str]:
    """Return the reason why a key of the class LATER is refused, and what to do."""
    return next((texts for texts, parts in _REASONS if any(part in name for part in parts.split())), _OTHER)


DECODER_OUTPUTS = {
    **_keys(STR, "logits present_key_names present_value_names present_names hidden_states"),
    **_keys(STR, "present_conv_names present_recurrent_names"),
    **_keys(
        STR,
        "present_key_scale_names present_value_scale_names "
        "state_update_conv_value_names state_update_recurrent_capsule_names output_cross_qk_names "
        "rnn_states lstm_hidden_state lstm_cell_state outputs",
        Use.LATER,
    ),
}
SLIDING_WINDOW = {
    **_keys(INT, "window_size"),
    **_keys(INT, "pad_value cache_slack", Use.FOREIGN),
    **_keys(STR, "alignment", Use.FOREIGN),
    **_keys(BOOL, "slide_inputs slide_key_value_cache", Use.FOREIGN),
    "layers": Key((list,)),
}
DECODER = {
    **_keys(STR, "filename"),
    **_keys(INT, "head_size hidden_size num_attention_heads num_key_value_heads num_hidden_layers"),
    "layer_types": Key((list,)),
    "inputs": Key((dict,), keys=DECODER_INPUTS),
    "outputs": Key((dict,), keys=DECODER_OUTPUTS),
    "session_options": Key((dict,), Use.FOREIGN),
    "run_options": Key((dict,), Use.FOREIGN),
    "sliding_window": Key((dict,), keys=SLIDING_WINDOW),
    "conv_cache_size": Key(INT, Use.FOREIGN),
    "state_groups": Key((list,), Use.LATER),
    "state_update_capacity": Key(INT, Use.LATER),
    "shared_initializers": Key((list,), Use.FOREIGN),
    "pipeline": Key((list,), Use.LATER),
}
# Images and audio are not supported, so their inputs are empty. The text of such a model still works.
EMBEDDING = {
    **_keys(STR, "filename"),
    "inputs": Key((dict,), keys=_keys(STR, "input_ids image_features audio_features")),
    "outputs": Key((dict,), keys=_keys(STR, "inputs_embeds")),
    "session_options": Key((dict,), Use.FOREIGN),
    "run_options": Key((dict,), Use.FOREIGN),
}
# A head that predicts further tokens from the hidden states of the decoder.
MTP = {
    "enabled": Key(BOOL),
    **_keys(STR, "filename main_hidden_states"),
    **_keys(INT, "num_hidden_layers num_attention_heads num_key_value_heads head_size hidden_size"),
    "inputs": Key(
        (dict,),
        keys=_keys(STR, "input_ids hidden_states attention_mask position_ids past_key_names past_value_names"),
    ),
    "outputs": Key((dict,), keys=_keys(STR, "logits hidden_states present_key_names present_value_names")),
    "session_options": Key((dict,), Use.FOREIGN),
    "run_options": Key((dict,), Use.FOREIGN),
    "shared_initializers": Key((list,), Use.FOREIGN),
}
SPECULATIVE = {
    **_keys(INT, "max_draft_tokens ngram_size min_adaptive_k"),
    **_keys(BOOL, "ngram_chained_lookup cooldown"),
}
MODEL = {
    **_keys(STR, "type tokenizer_dir"),
    **_keys(INT, "vocab_size context_length bos_token_id pad_token_id sep_token_id decoder_start_token_id"),
    **_keys(INT, "bot_token_id eot_token_id bor_token_id eor_token_id"),
    "eos_token_id": Key(IDS),
    "decoder": Key((dict,), keys=DECODER),
    "draft": Key((dict,), keys=DECODER),
    "mtp": Key((dict,), keys=MTP),
    **_keys(INT, "image_token_id audio_token_id boa_token_id video_token_id vision_start_token_id", Use.FOREIGN),
    "embedding": Key((dict,), keys=EMBEDDING),
    **_keys((dict,), "vision speech", Use.FOREIGN),
    **_keys((dict,), "encoder joiner vad dflash2 dspark moonshine audio_output", Use.LATER),
}
SEARCH = {
    **_keys(BOOL, "do_sample early_stopping past_present_share_buffer"),
    **_keys(FLOAT, "temperature top_p repetition_penalty length_penalty diversity_penalty"),
    **_keys(
        INT,
        "top_k min_length max_length batch_size num_beams num_return_sequences no_repeat_ngram_size random_seed "
        "chunk_size",
    ),
    **_keys(FLOAT, "blank_penalty audio_temperature", Use.FOREIGN),
    **_keys(BOOL, "audio_interleaved", Use.FOREIGN),
    **_keys(INT, "audio_top_k", Use.FOREIGN),
}
ROOT = {
    "model": Key((dict,), keys=MODEL),
    "search": Key((dict,), keys=SEARCH),
    "speculative": Key((dict,), keys=SPECULATIVE),
    "engine": Key((dict,), Use.FOREIGN),
    "runtime_profiles": Key((list,), Use.FOREIGN),
}
