"""The keys of genai_config.json, as onnxruntime-genai 0.18 defines them, and what each does here.

Three classes of keys: USED here; FOREIGN (they steer onnxruntime's own machinery and cannot change tokens: accepted
and named at -v); LATER (they change what is generated, and this version does not do it: refused when set).
A key in none of them is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Use(Enum):
    """What this toolkit does with a key."""

    USED = "used"
    FOREIGN = "accepted; steers onnxruntime only"
    LATER = "not supported yet"


@dataclass(frozen=True)
class Key:
    """One key: its JSON types, its use, and for objects the keys inside (None = any)."""

    types: tuple[type, ...]
    use: Use = Use.USED
    keys: Mapping[str, Any] | None = None


INT, FLOAT, BOOL, STR = (int,), (int, float), (bool,), (str,)
IDS = (int, list)


def _used(types: tuple[type, ...], names: str) -> dict[str, Key]:
    return {name: Key(types) for name in names.split()}


def _foreign(types: tuple[type, ...], names: str) -> dict[str, Key]:
    return {name: Key(types, Use.FOREIGN) for name in names.split()}


def _later(types: tuple[type, ...], names: str) -> dict[str, Key]:
    return {name: Key(types, Use.LATER) for name in names.split()}


_ANY = (object,)

DECODER_INPUTS = {
    **_used(STR, "input_ids attention_mask position_ids past_key_names past_value_names"),
    **_later(
        STR,
        "inputs_embeds past_names past_key_scale_names past_value_scale_names cross_past_key_names "
        "cross_past_value_names past_key_values_length past_sequence_length current_sequence_length "
        "total_sequence_length cache_indirection encoder_hidden_states encoder_attention_mask rnn_states_prev "
        "hidden_states block_table block_table_windowed cumulative_sequence_lengths past_sequence_lengths "
        "attention_metadata logits_indices past_conv_names past_recurrent_names state_update_capture_count "
        "state_update_active per_layer_inputs targets lstm_hidden_state lstm_cell_state",
    ),
}
DECODER_OUTPUTS = {
    **_used(STR, "logits present_key_names present_value_names"),
    **_later(
        STR,
        "present_names present_key_scale_names present_value_scale_names present_conv_names present_recurrent_names "
        "state_update_conv_value_names state_update_recurrent_capsule_names hidden_states output_cross_qk_names "
        "rnn_states lstm_hidden_state lstm_cell_state outputs",
    ),
}
SLIDING_WINDOW = {
    **_used(INT, "window_size"),
    **_foreign(INT, "pad_value cache_slack"),
    **_foreign(STR, "alignment"),
    **_foreign(BOOL, "slide_inputs slide_key_value_cache"),
    "layers": Key((list,)),
}
DECODER = {
    **_used(STR, "filename"),
    **_used(INT, "head_size hidden_size num_attention_heads num_key_value_heads num_hidden_layers"),
    "layer_types": Key((list,)),
    "inputs": Key((dict,), keys=DECODER_INPUTS),
    "outputs": Key((dict,), keys=DECODER_OUTPUTS),
    "session_options": Key((dict,), Use.FOREIGN),
    "run_options": Key((dict,), Use.FOREIGN),
    "sliding_window": Key((dict,), keys=SLIDING_WINDOW),
    "conv_cache_size": Key(INT, Use.LATER),
    "state_groups": Key((list,), Use.LATER),
    "state_update_capacity": Key(INT, Use.LATER),
    "shared_initializers": Key((list,), Use.LATER),
    "pipeline": Key((list,), Use.LATER),
}
MODEL = {
    **_used(STR, "type tokenizer_dir"),
    **_used(INT, "vocab_size context_length bos_token_id pad_token_id sep_token_id decoder_start_token_id"),
    **_used(INT, "bot_token_id eot_token_id bor_token_id eor_token_id"),
    "eos_token_id": Key(IDS),
    "decoder": Key((dict,), keys=DECODER),
    **_foreign(INT, "image_token_id audio_token_id boa_token_id video_token_id vision_start_token_id"),
    **_later(
        (dict,),
        "draft encoder embedding vision speech joiner vad mtp dflash2 dspark moonshine audio_output",
    ),
}
SEARCH = {
    **_used(BOOL, "do_sample early_stopping past_present_share_buffer"),
    **_used(FLOAT, "temperature top_p repetition_penalty length_penalty diversity_penalty"),
    **_used(
        INT,
        "top_k min_length max_length batch_size num_beams num_return_sequences no_repeat_ngram_size random_seed "
        "chunk_size",
    ),
    **_foreign(FLOAT, "blank_penalty audio_temperature"),
    **_foreign(BOOL, "audio_interleaved"),
    **_foreign(INT, "audio_top_k"),
}
ROOT = {
    "model": Key((dict,), keys=MODEL),
    "search": Key((dict,), keys=SEARCH),
    "speculative": Key((dict,), Use.LATER),
    "engine": Key((dict,), Use.FOREIGN),
    "runtime_profiles": Key((list,), Use.FOREIGN),
}
