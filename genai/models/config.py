"""genai_config.json: how it is read, the checks of every key, and the typed view that the engine uses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..common.reading import json_object
from ..engine.sampling.search_options import SEARCH_OPTIONS, checked
from ..engine.speculation import options as speculative_options
from ..errors import ConfigError, InputError, NotSupportedYetError, OptionError, did_you_mean
from ..hub.local import model_folder_of
from ..onnx.decoder_names import GraphNames
from . import config_schema
from .chosen_device import ChosenDevice, folder_device
from .config_schema import Key, Use
from .draft_block import DECODER, DRAFT, MTP, check_draft, check_mtp
from .exported_config import ExportedModel, find_exported, read_exported
from .folders import folder_json, no_config, readable

CONFIG_NAME = "genai_config.json"
_LIMIT = 2**31
_SEED = "search.random_seed"
_SLIDING = "sliding_attention"
_OPTIONS: Mapping[str, tuple[Collection[str], Callable[[str, Any], Any]]] = {
    "search": (SEARCH_OPTIONS, checked),
    "speculative": (speculative_options.SPECULATIVE_OPTIONS, speculative_options.checked),
}
_SESSION, _PROVIDERS = f"{DECODER}.session_options", "provider_options"


@dataclass(frozen=True)
class DecoderConfig:
    """The decoder block, with the file name, sizes, and the names of the graph's inputs and outputs.

    `sliding_window` is the number of tokens that a query of a layer in `windowed_layers` attends to, its own included.
    If `windowed_layers` is None, these are all layers. `block` is the dotted name of the block. For an MTP head,
    `hidden_output` is the output that takes the place of the decoder's hidden states when the head drafts more than one
    token, and `main_output` is the decoder's output that the head reads.
    """

    filename: str
    head_size: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    num_hidden_layers: int
    names: GraphNames
    sliding_window: int | None
    windowed_layers: tuple[int, ...] | None = None
    block: str = DECODER
    hidden_output: str = ""
    main_output: str = ""

    def has_window(self, layer: int) -> bool:
        """Return True if the layer attends to the last `sliding_window` tokens only."""
        if self.sliding_window is None:
            return False
        return self.windowed_layers is None or layer in self.windowed_layers


@dataclass(frozen=True)
class ModelConfig:
    """The model block. `embedding` names the graph that computes embeddings; "" = the decoder computes them."""

    type: str
    vocab_size: int
    context_length: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    decoder: DecoderConfig
    embedding: str = ""


class Config:
    """A model folder's genai_config.json, or the configuration that is derived for a folder without this file.

    Args:
        path: the model folder; the name of a pulled model; or, if the folder has several graphs and no
            genai_config.json, the path of one graph.

    Raises:
        ModelFolderError: the folder or the file is missing or unreadable, or the pulled model has not been built yet.
        ConfigError: the file is not JSON, or has an unknown key, a wrong type, or a value out of range.
        NotSupportedYetError: the file has a key that changes the generated tokens and that this version does not
            support.
    """

    def __init__(self, path: str | Path) -> None:
        self.folder = model_folder_of(path)
        self.model_data: dict[str, bytes] = {}
        self.exported: ExportedModel | None = None
        self.raw: dict[str, Any]
        with readable(self.folder):
            found = find_exported(self.folder)
        if found is None:
            self.raw = folder_json(self.folder, CONFIG_NAME, ConfigError, no_config)
        else:
            self.exported = read_exported(*found)
            self.folder, self.raw = self.exported.folder, dict(self.exported.raw)
        self._check()

    def _check(self) -> None:
        self.ignored_keys = tuple(_check_object("", self.raw, config_schema.ROOT))
        self.folder_device = folder_device(self.raw)
        if self.folder_device:  # in this case, only the providers among the session options have an effect
            others = [f"{_SESSION}.{name}" for name in self._session_options if name != _PROVIDERS]
            self.ignored_keys = (*(key for key in self.ignored_keys if key != _SESSION), *others)
        self.model = _model_config(self.raw)
        self.search: dict[str, Any] = dict(self.raw.get("search", {}))
        _check_options("search", self.search)
        self.speculative: dict[str, Any] = dict(self.raw.get("speculative", {}))
        _check_options("speculative", self.speculative)

    def for_mtp(self) -> Config | None:
        """Return the configuration of the MTP head (`model.mtp`), in which the head is the decoder; None = no head.

        Raises:
            ConfigError: the head has no file name or a wrong one, or more than one layer.
        """
        block = self.raw["model"].get("mtp")
        if not block or block.get("enabled") is False:
            return None
        check_mtp(block)
        head = copy(self)
        head.model = replace(self.model, decoder=_decoder_config(block, MTP), embedding="")
        return head

    def for_draft(self) -> Config | None:
        """Return the configuration of the draft model (`model.draft`), which has the same vocabulary; None = no draft.

        Raises:
            ConfigError: the draft has no file name or a wrong one, or uses another device than the decoder; or one of
                the two keeps a cache from which rejected tokens cannot be removed, or the model reads images or sound.
        """
        block = self.raw["model"].get("draft")
        if block is None:
            return None
        check_draft(self.raw)
        draft = copy(self)
        draft.model = replace(self.model, decoder=_decoder_config(block, DRAFT), embedding="")
        return draft

    @property
    def tokenizer_folder(self) -> Path:
        """The folder of the tokenizer's files. Raises ConfigError if it is outside the model folder."""
        name: str = self.raw["model"].get("tokenizer_dir", "")
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ConfigError(
                f"model.tokenizer_dir = {name!r} in {CONFIG_NAME}",
                "the tokenizer must be inside the model folder",
                "set model.tokenizer_dir to a relative path inside the model folder",
            )
        return self.folder / name

    def overlay(self, text: str) -> None:
        """Merge JSON text into the configuration: objects are merged, all other values are replaced.

        Raises:
            ConfigError: the text is not a JSON object, or the result is invalid. In both cases, the configuration stays
                unchanged.
        """
        patch = json_object(text, "overlay", ConfigError)
        before = self.raw
        self.raw = _merged(before, patch)
        try:
            self._check()
        except Exception:
            self.raw = before
            self._check()
            raise

    def add_model_data(self, model_filename: str, model_data: bytes | bytearray | memoryview) -> None:
        """Use a file from memory instead of the folder's file, in all models that are loaded afterwards.

        Args:
            model_filename: the file's name in genai_config.json, or in a graph's external data.
            model_data: the file's contents, which are copied.

        Raises:
            InputError: the name is not a str, or the contents are not bytes.
        """
        if not isinstance(model_filename, str) or not isinstance(model_data, bytes | bytearray | memoryview):
            raise InputError(
                f"add_model_data: got ({type(model_filename).__name__}, {type(model_data).__name__})",
                "a file name and its bytes are expected",
                'for example, call add_model_data("model.onnx", Path("model.onnx").read_bytes())',
            )
        self.model_data[model_filename] = bytes(model_data)

    def remove_model_data(self, model_filename: str) -> None:
        """Undo add_model_data for a file. Models that are already loaded keep the file's contents.

        Raises:
            InputError: no file with this name was added.
        """
        if model_filename not in self.model_data:
            names = ", ".join(self.model_data) or "none"
            raise InputError(
                f"remove_model_data: there is no {model_filename!r}", f"added files: {names}", "use one of these names"
            )
        del self.model_data[model_filename]

    @property
    def device(self) -> str:
        """The device that was set for models of this configuration, in the form of Model's argument; "" if none was."""
        return ""

    def choose_device(self, device: str | None) -> ChosenDevice:
        """Return the device of a model: the caller's, else the configured one, else the folder's, else the CPU."""
        if device is not None or self.device:
            return ChosenDevice(device or self.device)
        if self.folder_device:
            return ChosenDevice(self.folder_device, str(self.folder / CONFIG_NAME))
        return ChosenDevice("cpu", is_default=True)

    @property
    def _session_options(self) -> dict[str, Any]:
        options: dict[str, Any] = self.raw["model"]["decoder"]["session_options"]
        return options


def _check_object(where: str, value: Mapping[str, Any], keys: Mapping[str, Key]) -> list[str]:
    """Check one object against its schema. Return the dotted names of keys that are accepted and ignored."""
    ignored: list[str] = []
    for name, item in value.items():
        path = f"{where}.{name}" if where else name
        key = keys.get(name)
        if key is None:
            hint = did_you_mean(name, keys, f"known keys: {', '.join(sorted(keys))}")
            raise ConfigError(f"unknown key {path!r} in {CONFIG_NAME}", "the key is not part of the format", hint)
        if not (bool in key.types if isinstance(item, bool) else isinstance(item, key.types)):
            allowed = " or ".join(kind.__name__ for kind in key.types)
            raise ConfigError(
                f"{path} = {item!r:.80} in {CONFIG_NAME}",
                f"{allowed} is expected, not {type(item).__name__}",
                f"change {path} to {allowed}",
            )
        if key.types == config_schema.INT and path != _SEED and not -_LIMIT <= item < _LIMIT:
            raise ConfigError(
                f"{path} = {item} in {CONFIG_NAME}",
                "ids, sizes and lengths have 32 bits",
                f"use a value below {_LIMIT}",
            )
        if key.use is Use.LATER and item not in ({}, [], None):
            raise NotSupportedYetError(
                f"{path} in {CONFIG_NAME} is not supported yet", *config_schema.reason_and_fix(name)
            )
        if key.use is Use.FOREIGN:
            ignored.append(path)
        elif isinstance(item, dict) and key.keys is not None:
            ignored += _check_object(path, item, key.keys)
    return ignored


def _require(block: Mapping[str, Any], where: str, name: str) -> Any:
    if name not in block:
        raise ConfigError(
            f"{where}.{name} is missing in {CONFIG_NAME}", "the engine needs this key", f"add {name} to {where}"
        )
    return block[name]


def _at_least(least: int, block: Mapping[str, Any], where: str, name: str) -> int:
    value = int(_require(block, where, name))
    if value < least:
        raise ConfigError(
            f"{where}.{name} = {value} in {CONFIG_NAME}",
            f"the value must be at least {least}",
            f"set the key to a value of at least {least}",
        )
    return value


def _positive(block: Mapping[str, Any], where: str, name: str) -> int:
    return _at_least(1, block, where, name)


def _model_config(raw: Mapping[str, Any]) -> ModelConfig:
    model = _require(raw, "root", "model")
    vocab_size = _positive(model, "model", "vocab_size")
    eos = model.get("eos_token_id", [])
    eos_ids = tuple(eos) if isinstance(eos, list) else (eos,)
    optional = {name: model.get(name) for name in ("bos_token_id", "pad_token_id")}
    for name, value in [("eos_token_id", e) for e in eos_ids] + list(optional.items()):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value >= vocab_size):
            raise ConfigError(
                f"model.{name} = {value!r} in {CONFIG_NAME}",
                f"a token id below vocab_size {vocab_size} is expected",
                "correct the token id or vocab_size",
            )
    # Some builders write negative ids for missing tokens.
    bos, pad = (value if value is not None and value >= 0 else None for value in optional.values())
    return ModelConfig(
        type=str(_require(model, "model", "type")),
        vocab_size=vocab_size,
        context_length=_positive(model, "model", "context_length"),
        bos_token_id=bos,
        eos_token_ids=tuple(e for e in eos_ids if e >= 0),
        pad_token_id=pad,
        decoder=_decoder_config(_require(model, "model", "decoder"), DECODER),
        embedding=_embedding(model["embedding"]) if model.get("embedding") else "",
    )


def _embedding(block: Mapping[str, Any]) -> str:
    return _inside("model.embedding.filename", str(_require(block, "model.embedding", "filename")))


def _inside(where: str, filename: str) -> str:
    if Path(filename).is_absolute() or ".." in Path(filename).parts:
        raise ConfigError(
            f"{where} = {filename!r}",
            "the file must be inside the model folder",
            "use a file name relative to the model folder",
        )
    return filename


def _decoder_config(decoder: Mapping[str, Any], block: str) -> DecoderConfig:
    inputs, outputs = decoder.get("inputs", {}), decoder.get("outputs", {})
    filename = _inside(f"{block}.filename", str(_require(decoder, block, "filename")))
    windows = decoder.get("sliding_window", {})
    window = windows.get("window_size")
    # Only the sizes that a graph may leave open are required, because some folders omit the other sizes.
    either = "num_attention_heads" if "num_attention_heads" in decoder else "num_key_value_heads"
    heads = _positive(decoder, block, either if either in decoder else "num_attention_heads")
    kv_heads = int(decoder.get("num_key_value_heads", heads))
    head_size = _positive(decoder, block, "head_size")
    is_head = block == MTP
    sizes = {"hidden_size": heads * head_size, **decoder}
    return DecoderConfig(
        filename=filename,
        head_size=head_size,
        hidden_size=_positive(sizes, block, "hidden_size"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        num_hidden_layers=_at_least(0, decoder, block, "num_hidden_layers"),
        names=GraphNames(
            input_ids=inputs.get("input_ids", "input_ids"),
            attention_mask=inputs.get("attention_mask", "attention_mask"),
            position_ids=inputs.get("position_ids", "position_ids"),
            past_key=_template(inputs, "past_key_names", "past_key_values.%d.key"),
            past_value=_template(inputs, "past_value_names", "past_key_values.%d.value"),
            logits=outputs.get("logits", "logits"),
            present_key=_template(outputs, "present_key_names", "present.%d.key"),
            present_value=_template(outputs, "present_value_names", "present.%d.value"),
            past=_template(inputs, "past_names", "past_%d") if "past_names" in inputs else "",
            present=_template(outputs, "present_names", "present_%d") if "past_names" in inputs else "",
            inputs_embeds=inputs.get("inputs_embeds", "inputs_embeds"),
            past_conv=_template(inputs, "past_conv_names", "past.%d.conv"),
            past_recurrent=_template(inputs, "past_recurrent_names", "past.%d.recurrent"),
            present_conv=_template(outputs, "present_conv_names", "present.%d.conv"),
            present_recurrent=_template(outputs, "present_recurrent_names", "present.%d.recurrent"),
            hidden_states=inputs.get("hidden_states", "hidden_states") if is_head else "",
        ),
        sliding_window=window if window and window > 0 else None,
        windowed_layers=_windowed_layers(decoder, windows, block),
        block=block,
        hidden_output=outputs.get("hidden_states", "hidden_states_out") if is_head else "",
        main_output=decoder.get("main_hidden_states", "hidden_states") if is_head else "",
    )


def _windowed_layers(decoder: Mapping[str, Any], windows: Mapping[str, Any], block: str) -> tuple[int, ...] | None:
    """Return the layers that sliding_window.layers lists, or whose layer_types say so; None if there is no list."""
    types, layers = decoder.get("layer_types"), windows.get("layers")
    if layers is None:
        if not types or _SLIDING not in types:
            return None
        return tuple(index for index, kind in enumerate(types) if kind == _SLIDING)
    count = int(decoder["num_hidden_layers"])
    for layer in layers:
        if type(layer) is not int or not 0 <= layer < count:
            raise ConfigError(
                f"{block}.sliding_window.layers contains {layer!r:.40} in {CONFIG_NAME}",
                f"the model's layers are 0 to {count - 1}",
                "correct the list, or remove it",
            )
    return tuple(layers)


def _template(block: Mapping[str, Any], name: str, default: str) -> str:
    value = str(block.get(name, default))
    if value.count("%d") != 1 or value.count("%") != 1:
        raise ConfigError(
            f"{name} = {value!r} in {CONFIG_NAME}",
            "the name must contain exactly one %d, which stands for the layer number",
            f"for example, use {default!r}",
        )
    return value


def _check_options(block: str, options: Mapping[str, Any]) -> None:
    """Check the values of the block "search" or "speculative"."""
    for name, value in options.items():
        known, check = _OPTIONS[block]
        if name in known and value is not None:
            try:
                check(name, value)
            except OptionError as error:
                raise ConfigError(
                    f"{block}.{name} = {value!r} in {CONFIG_NAME}",
                    error.why,
                    "correct the value in that file, or remove the key",
                ) from error


def _merged(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for name, value in patch.items():
        old = result.get(name)
        result[name] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result
