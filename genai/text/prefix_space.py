"""The space before the first word of a text: add_prefix_space in tokenizer_config.json, compared with tokenizer.json.

The rules are those of AutoTokenizer in transformers 5.24. A tokenizer class whose constructor takes add_prefix_space
replaces the rule in tokenizer.json. Other classes, and all classes of some model types, read the rule in
tokenizer.json and ignore the key.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import TokenizerError
from ..models.side_files import CONFIG_NAME, MODEL_CONFIG_NAME
from .files import FolderFacts, read_object

if TYPE_CHECKING:
    import tokenizers

Part = dict[str, Any]

# Classes of byte-level tokenizers that add no space by default.
_WITHOUT_SPACE = frozenset(
    "GPT2Tokenizer RobertaTokenizer BartTokenizer LEDTokenizer LongformerTokenizer MvpTokenizer GPTNeoXTokenizer "
    "Qwen2Tokenizer Qwen3_5Tokenizer CohereTokenizer CodeGenTokenizer DebertaTokenizer LukeTokenizer "
    "WhisperTokenizer".split()
)
_BYTE_LEVEL = _WITHOUT_SPACE | {"BlenderbotTokenizer", "LayoutLMv3Tokenizer"}
_LLAMA = frozenset({"LlamaTokenizer", "CodeLlamaTokenizer"})
# Classes of Unigram tokenizers.
_UNIGRAM = frozenset(
    "AlbertTokenizer BarthezTokenizer BigBirdTokenizer CamembertTokenizer RemBertTokenizer XLMRobertaTokenizer "
    "XGLMTokenizer LayoutXLMTokenizer DebertaV2Tokenizer".split()
)
SENTENCEPIECE_CLASSES = _LLAMA | _UNIGRAM
"""The classes of SentencePiece tokenizers whose constructor takes add_prefix_space."""
# Model types whose tokenizer.json is authoritative, whatever class tokenizer_config.json names.
_AS_IN_FILE = frozenset(
    "arctic aria beam bigbird_pegasus camembertv2-base canary chatlm cohere_asr ernie4_5 ernie4_5_moe flex_olmo fuyu "
    "glm glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe glm_image glmasr got_ocr2 gpt_bigcode gradium_phonon_tts granite "
    "granitemoe granitemoehybrid granitemoeshared h2ovl_chat hyperclovax hyperclovax_vlm internlm2 internlm3 "
    "iquestcoder jamba kimi_k25 kimi_linear kosmos-2 llava llava_next mimo_v2_flash minicpm3 minicpm_ocr minicpmv "
    "minicpmv4_6 minicpmv4_7 minimax_m2 ministral ministral3 mistral mistral3 mistral_large4 mixtral modernbert "
    "modernbert-decoder molmo molmo2 nemo_speechlm nemotron nvfp4 nystromformer olmo2 olmo3 olmo_hybrid omniasr "
    "opencua openvla paddleocr_vl pegasus_x persimmon phi3 phi3_v phimoe pix2struct pixtral pocket_tts smolvlm "
    "stablelm step3_vl umt5 vipllava voxtral voxtral_realtime xlm-roberta-xl".split()
)
# The class of a model type if no file names one; for `_FORCED`, also if a file names another class.
_QWEN3_5 = "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen4_exp"
_FORCED = {
    **dict.fromkeys(_QWEN3_5.split(), "Qwen3_5Tokenizer"),
    "qwen2": "Qwen2Tokenizer",
    "hyperclovax_vision_v2": "GPT2Tokenizer",
}
_CLASSES = {
    name: tokenizer_class
    for tokenizer_class, names in {
        "GPT2Tokenizer": "blip-2 codegen dbrx emu3 gpt2 gpt_neo gptj instructblip instructblipvideo jais2 opt phi "
        "starcoder2",
        "RobertaTokenizer": "bart bridgetower clap data2vec-text florence2 ibert led lilt longformer mega mra mvp "
        "roberta roberta-prelayernorm",
        "GPTNeoXTokenizer": "falcon_mamba gpt_neox mamba mamba2 mpt olmo olmoe rwkv xlstm",
        "Qwen2Tokenizer": "audioflamingo3 colqwen2 cosmos3_omni dots3_note fun_asr_nano hunyuan_vl internvl "
        "lighton_ocr moss_transcribe_diarize ovis2 qianfan_ocr qwen2_5_omni qwen2_5_vl qwen2_audio qwen2_moe qwen2_vl "
        "qwen3 qwen3_asr qwen3_moe qwen3_next qwen3_omni_moe qwen3_vl qwen3_vl_moe vibevoice",
        "Qwen3_5Tokenizer": "qwen3_5_text",
        "CohereTokenizer": "aya_vision cohere cohere2",
        "BlenderbotTokenizer": "blenderbot",
        "DebertaTokenizer": "deberta",
        "LayoutLMv3Tokenizer": "layoutlmv3",
        "LukeTokenizer": "luke",
        "WhisperTokenizer": "whisper",
        "LlamaTokenizer": "idefics idefics2",
        "CodeLlamaTokenizer": "code_llama",
        "AlbertTokenizer": "albert yoso",
        "BarthezTokenizer": "barthez",
        "BigBirdTokenizer": "big_bird",
        "CamembertTokenizer": "camembert",
        "DebertaV2Tokenizer": "deberta-v2",
        "LayoutXLMTokenizer": "layoutxlm",
        "RemBertTokenizer": "rembert",
        "XGLMTokenizer": "xglm",
        "XLMRobertaTokenizer": "gte jina_embeddings_v3 metaclip_2 trocr xlm-roberta xmod",
    }.items()
    for name in names.split()
} | _FORCED
_MARK = "\u2581"


def prefix_space(facts: FolderFacts) -> bool | None:
    """Return add_prefix_space of tokenizer_config.json; None if it is absent or null.

    Raises:
        TokenizerError: the value is not a boolean.
    """
    value = facts.config.get("add_prefix_space")
    if value is not None and not isinstance(value, bool):
        raise TokenizerError(
            f"{facts.files.path(CONFIG_NAME)}: add_prefix_space = {value!r:.40}",
            "true or false is expected",
            "correct the file, or copy it again from the original model",
        )
    return value


def reading_class(facts: FolderFacts) -> str:
    """Return the class with which transformers reads a folder's tokenizer; "" if tokenizer.json is authoritative."""
    named = facts.tokenizer_class
    if not named:
        other = read_object(facts.files, MODEL_CONFIG_NAME).get("tokenizer_class")
        named = other.removesuffix("Fast") if isinstance(other, str) else ""
    if "auto_map" in facts.config:
        return named
    if facts.model_type in _AS_IN_FILE:
        return ""
    return _FORCED.get(facts.model_type, "") or named or _CLASSES.get(facts.model_type, "")


def apply_prefix_space(backend: tokenizers.Tokenizer, facts: FolderFacts) -> None:
    """Set the rule of tokenizer_config.json for the space before a text in a tokenizer from a tokenizer.json.

    Without a rule, the rule of tokenizer.json applies, except that byte-level classes such as GPT2Tokenizer add none.

    Raises:
        TokenizerError: add_prefix_space is not a boolean.
    """
    adds, name = prefix_space(facts), reading_class(facts)
    if adds is None and name in _WITHOUT_SPACE:
        adds = False
    if adds is None or name not in _BYTE_LEVEL | SENTENCEPIECE_CLASSES:
        return
    state = {part: _state(getattr(backend, part)) for part in _PARTS}
    is_byte_level = any(
        part["type"] == "ByteLevel" for kind in ("pre_tokenizer", "decoder") for part in _parts(state[kind])
    )
    if name == "LlamaTokenizer" and is_byte_level:
        return  # as in transformers: tokenizer.json is authoritative
    if name in _BYTE_LEVEL:
        changed = {"pre_tokenizer": _changed(state["pre_tokenizer"], lambda part: _byte_level(part, adds))}
    elif name in _UNIGRAM:
        without = "first" if name == "DebertaV2Tokenizer" else "never"
        changed = {
            kind: _changed(state[kind], lambda part: _metaspace(part, "always" if adds else without))
            for kind in ("pre_tokenizer", "decoder")
        }
    else:
        everywhere = name == "LlamaTokenizer" and facts.config.get("legacy") is True
        changed = _llama(state, ("always" if everywhere else "first") if adds else "never")
    for kind, value in changed.items():
        if value != state[kind]:
            setattr(backend, kind, _built(kind, value))


_PARTS = ("normalizer", "pre_tokenizer", "decoder")
_LISTS = ("normalizers", "pretokenizers", "decoders")


def _state(part: Any) -> Part | None:
    return None if part is None else json.loads(part.__getstate__())


def _built(kind: str, state: Part | None) -> Any:
    """Return a part of a tokenizer with a state, or None."""
    from tokenizers import decoders, normalizers, pre_tokenizers

    if state is None:
        return None
    part: Any = {"normalizer": normalizers.NFC, "pre_tokenizer": pre_tokenizers.ByteLevel, "decoder": decoders.Fuse}[
        kind
    ]()
    part.__setstate__(json.dumps(state).encode())  # the state determines the kind of the part
    return part


def _parts(part: Part | None) -> Iterator[Part]:
    """Yield the rules of a part in order."""
    if part is None:
        return
    if part["type"] == "Sequence":
        for inner in next(part[name] for name in _LISTS if name in part):
            yield from _parts(inner)
    else:
        yield part


def _changed(part: Part | None, change: Callable[[Part], Part | None]) -> Part | None:
    """Return a part whose rules are replaced by `change`; None removes a rule."""
    if part is None or part["type"] != "Sequence":
        return None if part is None else change(part)
    name = next(name for name in _LISTS if name in part)
    inner = [found for rule in part[name] if (found := _changed(rule, change)) is not None]
    return {**part, name: inner}


def _byte_level(rule: Part, adds: bool) -> Part:
    return {**rule, "add_prefix_space": adds} if rule["type"] == "ByteLevel" else rule


def _metaspace(rule: Part, scheme: str) -> Part:
    return {**rule, "prepend_scheme": scheme} if rule["type"] == "Metaspace" else rule


def _llama(state: Mapping[str, Part | None], scheme: str) -> dict[str, Part | None]:
    """Return the parts of a tokenizer of the Llama kind with a mark before texts ("always" also adds a mark after
    special tokens) or without a mark ("never").
    """
    if scheme == "always" and any(map(_prepends, _parts(state["normalizer"]))):
        return {}
    normalizer = _changed(state["normalizer"], lambda rule: None if _prepends(rule) else rule)
    pre_tokenizer = _changed(state["pre_tokenizer"], lambda rule: _metaspace(rule, scheme))
    decoder = _changed(state["decoder"], lambda rule: _metaspace(rule, scheme))
    if scheme == "never":
        decoder = _changed(decoder, lambda rule: None if _strips_start(rule) else rule)
        return {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "decoder": decoder}
    if not any(rule["type"] == "Metaspace" for rule in _parts(pre_tokenizer)):
        mark = {"type": "Metaspace", "replacement": _MARK, "prepend_scheme": scheme, "split": False}
        pre_tokenizer = {"type": "Sequence", "pretokenizers": [mark, *_parts(pre_tokenizer)]}
    after = list(_parts(decoder))
    if after and not any(_strips_start(rule) or rule["type"] == "Metaspace" for rule in after):
        decoder = {"type": "Sequence", "decoders": [*after, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}
    return {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "decoder": decoder}


def _prepends(rule: Part) -> bool:
    return bool(rule["type"] == "Prepend" and rule["prepend"] == _MARK)


def _strips_start(rule: Part) -> bool:
    return bool(rule["type"] == "Strip" and rule["content"] == " " and rule["start"] > 0)
