"""The interface of an exported decoder, read from its graph: inputs, outputs, layers and heads.

The names of an exporter are recognised by their words, such as "mask" and "position". Keys and values of earlier tokens
are inputs whose names differ in a number only, which is the layer's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError, UnsupportedModelError, about
from ..onnx.ir import DataType, Graph, Value
from .cache_branch import BRANCH_INPUT

# Inputs that `decoder_file` sets to constants.
_SETTLED = re.compile(rf"num_logits_to_keep|onnx::Neg_.*|{BRANCH_INPUT}")
_OF_ENCODERS = {"input_ids", "attention_mask", "token_type_ids", "position_ids"}
_OF_FIXED_SIZE = re.compile(r"conv|recurrent|ssm")
_INTEGERS = (DataType.INT64, DataType.INT32)
_NAMES_SHOWN = 6
# The number of axes of a layer's keys: batch, heads, tokens and columns.
_STATE_AXES = 4
# The words in names of tensors with keys and values.
_OF_BOTH = {
    "",
    "past",
    "present",
    "both",
    "cache",
    "state",
    "states",
    "layer",
    "layers",
    "in",
    "out",
    "input",
    "output",
}


@dataclass(frozen=True)
class DecoderInterface:
    """The names of a decoder's inputs and outputs in the words of genai_config.json, and the sizes that they show.

    Attributes:
        inputs, outputs: names by the keys of genai_config.json.
        layers: number of layers with keys and values.
        kv_heads, head_size, vocab_size: sizes in the shapes; None if the graph leaves them open.
    """

    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    layers: int
    kv_heads: int | None
    head_size: int | None
    vocab_size: int | None


@dataclass(frozen=True)
class _States:
    """Inputs or outputs of all layers whose names differ in the layer's number: "%d" stands for it."""

    template: str
    values: Mapping[int, Value]

    @property
    def role(self) -> str:
        """The words "key", "value" or "both"; "" for another state."""
        words = re.split(r"[^a-z]+", re.sub(r"key_?values?|kv", "both", self.template.lower()).replace("%d", " "))
        found = [role for role in ("key", "value") if any(word in (role, f"{role}s", role[0]) for word in words)]
        if len(found) == 1:
            return found[0]
        return "both" if not found and set(words) <= _OF_BOTH else ""

    @property
    def is_of_encoder(self) -> bool:
        return re.search(r"encoder(?<!decoder)|cross", self.template) is not None


def read_interface(graph: Graph, path: Path, folder: Path, config: Mapping[str, Any]) -> DecoderInterface:
    """Return the interface of a decoder's graph.

    Args:
        graph: the graph.
        path: path of its file, for messages.
        folder: the model's folder, for messages.
        config: config.json.

    Raises:
        UnsupportedModelError: the graph is not a decoder of text with a cache of keys and values.
        ConfigError: the graph has no output for an input that the next step needs.
    """
    inputs = [value for value in graph.inputs if value.name not in graph.initializers]
    states, singles = _grouped(inputs)
    presents, results = _grouped(graph.outputs)
    known = _known_inputs(singles)
    logits = _logits(results) or (_only_result(results) if states else None)
    _check_kind(path, folder, config, known, singles, states, logits)
    explained = {*known.values(), *(value.name for value in singles if _SETTLED.fullmatch(value.name))}
    unknown = [value.name for value in singles if value.name not in explained]
    unknown += [one.template % min(one.values) for one in states if not one.role]
    if unknown:
        raise about(
            "graph",
            UnsupportedModelError(
                f"{path}: the graph needs the input {unknown[0]!r}",
                f"states of a fixed size, such as those of convolutions, are not supported: {_listed(unknown)}"
                if _OF_FIXED_SIZE.search(unknown[0])
                else "this toolkit knows token ids, a mask, positions, keys and values; unknown are "
                f"{_listed(unknown)}",
                _other_export(path),
            ),
        )
    by_role = {one.role: one for one in states}
    after = {one.role: one for one in presents if one.role}
    _check_states(path, states, by_role, after)
    first = next(iter(by_role.values()))
    shape = _shape(first.values[0])
    names_in, names_out = dict(known), {"logits": "" if logits is None else logits.name}
    for role, past, present in (
        ("key", "past_key_names", "present_key_names"),
        ("value", "past_value_names", "present_value_names"),
        ("both", "past_names", "present_names"),
    ):
        if role in by_role:
            names_in[past], names_out[present] = by_role[role].template, after[role].template
    vocabulary = _shape(logits)[-1:] if logits else ()
    return DecoderInterface(
        names_in, names_out, len(first.values), _whole(shape, -3), _whole(shape, -1), _whole(vocabulary, -1)
    )


def _other_export(path: Path) -> str:
    return f"use another export of the model, or run the graph on arrays: `genai run {path} --random`"


def is_decoder(graph: Graph) -> bool:
    """Return True if a graph computes logits from tokens and the states of earlier tokens."""
    states, singles = _grouped([value for value in graph.inputs if value.name not in graph.initializers])
    reads_text = {"input_ids", "inputs_embeds"} & set(_known_inputs(singles))
    return bool(reads_text and states) and _logits(graph.outputs) is not None


def _grouped(values: Sequence[Value]) -> tuple[list[_States], list[Value]]:
    """Divide values into the states of layers, and the others."""
    members: dict[str, dict[int, Value]] = {}
    templates: dict[str, list[tuple[str, int]]] = {}
    for value in values:
        for match in re.finditer(r"\d{1,6}", value.name):
            template = f"{value.name[: match.start()]}\0{value.name[match.end() :]}"
            members.setdefault(template, {})[int(match[0])] = value
            templates.setdefault(value.name, []).append((template, int(match[0])))
    states: dict[str, dict[int, Value]] = {}
    singles = []
    for value in values:
        found = [one for one in templates.get(value.name, []) if len(_shape(value)) > 2 and "%" not in value.name]
        if not found or _SETTLED.fullmatch(value.name):
            singles.append(value)
            continue
        template, number = max(found, key=lambda one: len(members[one[0]]))
        states.setdefault(template.replace("\0", "%d"), {})[number] = value
    return [_States(template, values) for template, values in states.items()], singles


def _known_inputs(values: Iterable[Value]) -> dict[str, str]:
    """Return the names of token ids or embeddings, the mask and the positions, by the keys of genai_config.json."""
    found: dict[str, str] = {}
    for value in values:
        words = value.name.lower()
        dtype = getattr(value.type, "dtype", None)
        if _SETTLED.fullmatch(value.name):
            continue
        if "embeds" in words and dtype not in _INTEGERS:
            key = "inputs_embeds"
        elif "mask" in words:
            key = "attention_mask"
        elif "position_ids" in words or words in ("positions", "position"):
            key = "position_ids"
        elif dtype in _INTEGERS and words in ("input_ids", "input", "inputs", "tokens", "ids", "token_ids"):
            key = "input_ids"
        else:
            continue
        found.setdefault(key, value.name)
    return found


def _logits(outputs: Sequence[Value]) -> Value | None:
    return next((value for value in outputs if value.name.endswith("logits")), None)


def _only_result(outputs: Sequence[Value]) -> Value | None:
    """Return the output of a decoder with one result, whatever its name is; hidden states are no logits."""
    return outputs[0] if len(outputs) == 1 and "hidden" not in outputs[0].name.lower() else None


def _check_kind(
    path: Path, folder: Path, config: Mapping[str, Any], known: Mapping[str, str], singles: Sequence[Value],
    states: Sequence[_States], logits: Value | None,
) -> None:  # fmt: skip
    """Raise UnsupportedModelError, naming the command that runs the graph, unless it is a decoder of text."""
    names = [value.name for value in singles]
    run = f"to run the graph on arrays, use `genai run {path} --random`"
    if "encoder_hidden_states" in names or any(one.is_of_encoder for one in states):
        raise about(
            "graph",
            UnsupportedModelError(
                f"{path}: the decoder reads the output of an encoder",
                "models of an encoder and a decoder, such as Whisper and T5, are not supported",
                run,
            ),
        )
    if not {"input_ids", "inputs_embeds"} & set(known):
        raise about(
            "graph",
            UnsupportedModelError(
                f"{path}: the graph does not read tokens",
                f"its inputs are {_listed(names) or 'none'}; 'input_ids' of whole numbers or 'inputs_embeds' of floats "
                "is expected"
                if states
                else f"its inputs are {_listed(names) or 'none'}, so it is a model of images or sound",
                run,
            ),
        )
    together = next((value.name for value in singles if len(_shape(value)) > _STATE_AXES), None)
    if together is not None and not states and logits is not None:
        raise UnsupportedModelError(
            f"{path}: the input {together!r} holds the keys and values of all layers",
            "each layer must have inputs and outputs of its own, such as 'past_key_values.0.key' and 'present.0.key'",
            "export the model again, for example with `optimum-cli export onnx --task text-generation-with-past`",
        )
    if states and logits is not None:
        return
    if states:
        raise UnsupportedModelError(
            f"{path}: the decoder has no output 'logits'",
            "it was exported without its output layer, so it cannot generate tokens",
            "export the model with its output layer, for example with `optimum-cli export onnx --task "
            "text-generation-with-past`",
        )
    reads_text_only = set(names) <= _OF_ENCODERS
    architectures = [str(name) for name in config.get("architectures") or []]
    generates = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures)
    if logits is not None and (generates or not reads_text_only):
        raise UnsupportedModelError(
            f"{path}: the decoder has no cache",
            "without inputs for the keys and values of earlier tokens, each step would compute the whole text again",
            "export the model with its cache, for example with `optimum-cli export onnx --task "
            "text-generation-with-past`",
        )
    if reads_text_only:
        scores = any(name.endswith("ForSequenceClassification") for name in architectures)
        raise about(
            "graph",
            UnsupportedModelError(
                f"{path}: the graph is an encoder, which generates no text",
                "it has no cache of keys and values" if logits is not None else "it has no output 'logits'",
                f"to compute scores, run `genai rerank {folder}`"
                if scores
                else f"to compute vectors, run `genai embed {folder}`",
            ),
        )
    raise about(
        "graph",
        UnsupportedModelError(
            f"{path}: the graph generates no text",
            f"its inputs are {_listed(names)}, and it has no output 'logits'; so it is a model of speech or images",
            run,
        ),
    )


def _check_states(
    path: Path, states: Sequence[_States], by_role: Mapping[str, _States], after: Mapping[str, _States]
) -> None:
    """Raise an error unless each layer has past and present keys and values."""
    if len(by_role) != len(states) or set(by_role) not in ({"key", "value"}, {"both"}):
        raise about(
            "graph",
            UnsupportedModelError(
                f"{path}: the states of the graph are {_listed([one.template % min(one.values) for one in states])}",
                "each layer must have one input for keys and one for values, or one for both",
                _other_export(path),
            ),
        )
    for role, past in by_role.items():
        rank = 5 if role == "both" else 4
        numbers = sorted(past.values)
        if numbers != list(range(len(numbers))) or len(_shape(past.values[0])) != rank:
            raise UnsupportedModelError(
                f"{path}: the states {past.template.replace('%d', 'N')} are those of layers "
                f"{_listed(list(map(str, numbers)))}, with {len(_shape(past.values[numbers[0]]))} axes",
                f"layers must be numbered from 0, and the states must have {rank} axes",
                "use another export of the model",
            )
        if role != "both" and _has_tokens_before_heads(past.values[0]):
            sizes = ", ".join(map(str, _shape(past.values[0])))
            raise UnsupportedModelError(
                f"{path}: the input {past.template % 0!r} has the shape [{sizes}]",
                "keys and values must have the axes [batch, heads, tokens, columns], but here, the second axis has a "
                "variable size and the third axis has a fixed size",
                "export the model with the heads before the tokens, as transformers stores its cache",
            )
        present = after.get(role)
        if present is None or not set(numbers) <= set(present.values):
            raise ConfigError(
                f"{path}: the graph has no output that replaces {past.template % 0!r} after a step",
                "the outputs are "
                + (_listed([one.template % min(one.values) for one in after.values()]) or "logits only"),
                "export the model with a cache, and name the outputs after the inputs, such as 'present.0.key'",
            )
    if len({len(one.values) for one in by_role.values()}) > 1:
        raise UnsupportedModelError(
            f"{path}: there are {' and '.join(str(len(one.values)) for one in by_role.values())} inputs for keys and "
            "for values",
            "each layer needs both",
            "export the model again",
        )


def _has_tokens_before_heads(value: Value) -> bool:
    """Return True if keys or values have the axes [batch, tokens, heads, columns]: only tokens have a variable size."""
    _, second, third, _ = _shape(value)
    return not isinstance(second, int) and isinstance(third, int)


def _shape(value: Value | None) -> Sequence[Any]:
    return () if value is None else getattr(value.type, "shape", None) or ()


def _whole(shape: Sequence[Any], axis: int) -> int | None:
    size = shape[axis] if len(shape) >= -axis else None
    return size if isinstance(size, int) else None


def _listed(names: Sequence[str]) -> str:
    rest = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + rest
