"""Atomic writing of a model folder: graphs and their tensors, genai_config.json and tokenizer files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ..common.atomic_files import unfinished_folder as unfinished_folder
from ..common.locks import locked as locked
from ..errors import InputError, ModelFolderError
from ..models.side_files import GENERATION_NAME, SENTENCEPIECE_NAMES
from ..text.backend import load_tokenizer
from ..text.files import older_generation_values
from ..text.sources.choosing import has_tokenizer
from .decoder import write_decoder
from .graph_writer import VECTORS, DataFile, Export, GraphWriter, caches_window, takes_positions, vectors_output
from .options import ExportOptions
from .rope import COS, SIN
from .spec import DecoderSpec, ShortConvSpec
from .tensors import mtp_name
from .weights import Weights

MODEL, DATA, CONFIG = "model.onnx", "model.onnx.data", "genai_config.json"
MTP, MTP_DATA = "mtp.onnx", "mtp.onnx.data"
# Starts of the names of the tensors that an MTP head shares with its decoder.
_SHARED = ("model.embed_tokens.", "lm_head.", COS, SIN)


def write_model_folder(
    path: str | Path,
    spec: DecoderSpec,
    options: ExportOptions,
    weights: Mapping[str, NDArray[Any]],
    *,
    tokenizer_dir: str | Path | None = None,
    search: Mapping[str, Any] | None = None,
    open_data: Callable[[Path], DataFile] = DataFile,
) -> Path:
    """Write a decoder in the form that onnxruntime-genai loads, and return the folder.

    Args:
        path: the folder to create. Its parent must exist, but the folder itself must not.
        weights: arrays by Hugging Face name, such as "model.layers.0.self_attn.q_proj.weight", of any float type. The
            mapping may load them lazily: each array is read and freed before the next one.
        tokenizer_dir: folder with the tokenizer to copy, in any supported format.
        search: search options for genai_config.json that override the defaults. The default is greedy search.
        open_data: creates the file for the tensors of the decoder, and then the file for those of its MTP head.

    Raises:
        ModelFolderError: the target exists or cannot be written, or there is no tokenizer.
        InputError: a tensor is missing, has the wrong shape or type, or contains NaN or infinity.
    """
    target = Path(path)
    if tokenizer_dir is not None:
        require_tokenizer(Path(tokenizer_dir))
    require_absent(target)
    if spec.rotated_norms:  # the operator of attention would rotate after the norms
        options = replace(options, fused_rope=False)
    try:
        with unfinished_folder(target) as unfinished:
            with open_data(unfinished / DATA) as data:
                graph = GraphWriter(data)
                decoder = Export(graph, spec, options, Weights(weights))
                write_decoder(decoder)
            (unfinished / MODEL).write_bytes(graph.model().SerializeToString(deterministic=True))
            if spec.mtp is not None:
                _write_mtp_head(unfinished, decoder, Weights(weights, mtp_name), open_data)
            config = json.dumps(genai_config(spec, options, search or {}), indent=4)
            (unfinished / CONFIG).write_text(config + "\n", encoding="utf-8")
            if tokenizer_dir is not None:
                copy_tokenizer(Path(tokenizer_dir), unfinished)
            require_absent(target)
            unfinished.rename(target)
    except OSError as error:
        raise ModelFolderError(
            f"cannot write the model folder {target}",
            str(error),
            "check that the parent folder exists, is writable and has enough free space",
        ) from error
    return target


def _write_mtp_head(folder: Path, decoder: Export, weights: Weights, open_data: Callable[[Path], DataFile]) -> None:
    """Write the graph of a decoder's MTP head. Embeddings, LM head and rotation tables stay in the decoder's file."""
    assert decoder.spec.mtp is not None
    with open_data(folder / MTP_DATA) as data:
        graph = GraphWriter(data, decoder.graph.tensors(*_SHARED))
        kept = {name: weight for name, weight in decoder.prequantized.items() if name.startswith(_SHARED)}
        write_decoder(Export(graph, decoder.spec.mtp, decoder.options, weights, kept))
    (folder / MTP).write_bytes(graph.model().SerializeToString(deterministic=True))


def require_absent(target: Path) -> None:
    """Raise ModelFolderError if the path of a new model folder already exists."""
    if target.exists() or target.is_symlink():
        raise ModelFolderError(
            f"{target} already exists",
            "a model folder is never overwritten",
            "delete the folder, or choose another path",
        )


def genai_config(spec: DecoderSpec, options: ExportOptions, search: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of genai_config.json; `search` overrides the defaults, which select greedy search."""
    eos = list(spec.eos_token_ids)
    bos = {} if spec.bos_token_id is None else {"bos_token_id": spec.bos_token_id}
    return {
        "model": {
            **bos,
            "context_length": spec.context_length,
            "decoder": _decoder_config(spec, options),
            "eos_token_id": eos[0] if len(eos) == 1 else eos,
            "pad_token_id": eos[0] if spec.pad_token_id is None else spec.pad_token_id,
            "type": spec.model_type,
            "vocab_size": spec.vocab_size,
            **({} if spec.mtp is None else {"mtp": _mtp_config(spec.mtp, options)}),
        },
        "search": {
            "diversity_penalty": 0.0,
            "do_sample": False,
            "early_stopping": True,
            "length_penalty": 1.0,
            "max_length": spec.context_length,
            "min_length": 0,
            "no_repeat_ngram_size": 0,
            "num_beams": 1,
            "num_return_sequences": 1,
            "past_present_share_buffer": True,
            "repetition_penalty": 1.0,
            "temperature": 1.0,
            "top_k": 50,
            "top_p": 1.0,
            **search,
        },
    }


def _decoder_config(spec: DecoderSpec, options: ExportOptions) -> dict[str, Any]:
    inputs = {"input_ids": "input_ids", "attention_mask": "attention_mask"}
    if takes_positions(spec, options):
        inputs["position_ids"] = "position_ids"
    inputs |= {"past_key_names": "past_key_values.%d.key", "past_value_names": "past_key_values.%d.value"}
    outputs = {
        "logits": "logits",
        "present_key_names": "present.%d.key",
        "present_value_names": "present.%d.value",
    }
    if (vectors := vectors_output(spec)) is not None:
        outputs["hidden_states"] = vectors
    for kind in ("conv", "recurrent") if spec.recurrent is not None else ():
        if kind == "conv" or not isinstance(spec.recurrent, ShortConvSpec):
            inputs[f"past_{kind}_names"], outputs[f"present_{kind}_names"] = f"past.%d.{kind}", f"present.%d.{kind}"
    decoder: dict[str, Any] = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "filename": "model.onnx",
        "head_size": spec.head_size,
        "hidden_size": spec.hidden_size,
        "inputs": inputs,
        "outputs": outputs,
        "num_attention_heads": spec.num_attention_heads,
        "num_hidden_layers": sum(map(spec.has_mixer, range(spec.num_cached_layers or spec.num_layers))),
        "num_key_value_heads": spec.num_key_value_heads,
    }
    if isinstance(spec.recurrent, ShortConvSpec):
        kinds = ["conv" if spec.is_recurrent(layer) else "full_attention" for layer in range(spec.num_layers)]
        decoder |= {"layer_types": kinds, "conv_cache_size": spec.recurrent.kernel - 1}
    if windowed := [layer for layer in spec.cached_layers if caches_window(spec, options, layer)]:
        decoder["sliding_window"] = {
            "window_size": spec.sliding_window,
            "slide_key_value_cache": False,
            "slide_inputs": False,
            "layers": windowed,
            "cache_slack": 0,
        }
    return decoder


def _mtp_config(spec: DecoderSpec, options: ExportOptions) -> dict[str, Any]:
    """Return the description of an MTP head, under the names that onnxruntime-genai's builder uses."""
    decoder = _decoder_config(spec, options)
    return {
        "enabled": True,
        "filename": MTP,
        "num_hidden_layers": spec.num_layers,
        "num_key_value_heads": spec.num_key_value_heads,
        "head_size": spec.head_size,
        "main_hidden_states": VECTORS,
        "inputs": {"hidden_states": VECTORS, **decoder["inputs"]},
        "outputs": decoder["outputs"],
    }


TOKENIZER, SPECIAL_TOKENS = "tokenizer.json", "special_tokens_map.json"
_COPIED = (
    TOKENIZER,
    "tokenizer_config.json",
    SPECIAL_TOKENS,
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
    *SENTENCEPIECE_NAMES,
)


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the tokenizer files that a model folder copies unchanged."""
    return [path for pattern in _COPIED for path in sorted(folder.glob(pattern)) if path.is_file()]


def require_tokenizer(folder: Path) -> None:
    """Raise ModelFolderError if a folder has no readable tokenizer."""
    if not has_tokenizer(folder):
        raise ModelFolderError(
            f"{folder}: {TOKENIZER} is missing, and there is no other tokenizer",
            "a model folder must contain a tokenizer",
            "download the tokenizer files to this folder",
        )


def check_tokenizer(folder: Path, vocab_size: int) -> list[str]:
    """Load the tokenizer, and check its ids against the vocabulary size, which may include padding.

    Returns:
        A remark for each special token without an embedding. Text models that share a tokenizer with a vision model
        have such tokens; they occur only if a text spells them out.

    Raises:
        ModelFolderError: there is no tokenizer.
        TokenizerError: the tokenizer cannot be used.
        InputError: the tokenizer has ids without an embedding.
    """
    require_tokenizer(folder)
    backend = load_tokenizer(folder).backend
    special = {id_ for id_, token in backend.get_added_tokens_decoder().items() if token.special}
    beyond = {id_: token for token, id_ in backend.get_vocab(with_added_tokens=True).items() if id_ >= vocab_size}
    if largest := max(beyond.keys() - special, default=0):
        raise InputError(
            f"the tokenizer has the token id {largest}, but the model's largest token id is {vocab_size - 1}",
            "vocab_size in config.json must be greater than every token id of the tokenizer",
            "check that the tokenizer and the weights belong to the same model",
        )
    return [f"the special token {beyond[id_]!r} ({id_}) is not in the model's vocabulary" for id_ in sorted(beyond)]


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy a tokenizer's files. Also convert a tokenizer in another format to tokenizer.json, for other runtimes, and
    write the sampling options in config.json to generation_config.json, if this file is missing.

    Raises:
        OSError: a file cannot be read or written.
        TokenizerError: the tokenizer cannot be used.
    """
    for file in tokenizer_files(source):
        destination = target / file.relative_to(source)
        destination.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, destination)
    generation = older_generation_values(source)
    if generation and not (target / GENERATION_NAME).exists():
        (target / GENERATION_NAME).write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    if not (target / TOKENIZER).exists():
        loaded = load_tokenizer(source)
        (target / TOKENIZER).write_text(loaded.backend.to_str(), encoding="utf-8")
        # The file in the other format may be the only file that names <s> and </s>.
        (target / SPECIAL_TOKENS).write_text(json.dumps(dict(loaded.special), indent=2) + "\n", encoding="utf-8")
