"""Malicious model folders: templates, tokenizers, configurations and graphs that explode, hang or crash."""

from __future__ import annotations

import base64
import contextlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from .odd import ODD_NUMBERS, break_anywhere, dumped

# --- templates -------------------------------------------------------------------------------------------------------

BIG_TEMPLATES = (
    "{% set v = [1] %}" + "{% set v = [v, v] %}" * 40,
    "{% set v = (1, 1) %}" + "{% set v = (v, v) %}" * 45,
    "{% set v = {'a': 1} %}" + "{% set v = {'a': v, 'b': v} %}" * 40,
    "{% set v = 'a ' * 2000000 %}",
    "{% set v = '\\t\\n' * 2000000 %}",
    "{% set v = ['x' * 4000000] * 5000 %}",
    "{% set v = [[0] * 100000] * 40000 %}",
    "{% set v = range(99999) | list %}{% set v = v * 40 %}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{% set v = n.x %}",
    "{% set v = 10 ** 10000000000 %}",
    "{% set v = messages * 4000000 %}",
)
TEMPLATE_USES = (
    "{{ v }}",
    "{{ v | tojson }}",
    "{{ v | pprint }}",
    "{{ v | string | length }}",
    "{{ v == [v, v] }}",
    "{% set d = {v: 1} %}",
    "{{ v | sum(start=[]) | length }}",
    "{{ v | wordwrap(1) | length }}",
    "{{ v.expandtabs(1000) | length }}",
    "{{ v | indent(1000) | length }}",
    "{{ v | tojson(separators=('x' * 20000, ':')) | length }}",
    "{{ (('%s' * 1000) % ((v,) * 1000)) | length }}",
    "{{ v | join | length }}",
    "{{ v | join(v) | length }}",
    "{{ v | sort | unique | list | length }}",
    "{{ v | map('string') | join | length }}",
    "{{ v | groupby(0) | list }}",
    "{{ v.replace('a', 'a' * 100000) | length }}",
    "{{ v | batch(3, v) | list | length }}",
    "{{ '{0}{0}{0}'.format(v) * 3000000 }}",
    "{% for a in v %}{% for b in v %}{{ a }}{{ b }}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{{ f(n) }}{{ v }}{% endmacro %}{{ f(1) }}",
    "{{ v | urlize | length }}{{ v | striptags | length }}{{ v | title | length }}",
    "{% if v in [v, [v]] %}{{ v > v }}{% endif %}{{ v | max }}",
)
_LONG = ("{{ a }}" * 140_000, "{% if a %}" * 5_000, "{{ " + "(" * 50_000, "{#" * 100_000, "{{ 9" + "9" * 5_000 + " }}")


def template_bomb(folder: Path, rng: random.Random) -> str:
    """Write a chat template that builds a large value, or seems to, and applies an operation to the value."""
    if rng.random() < 0.1:
        text = rng.choice(_LONG)
    else:
        text = rng.choice(BIG_TEMPLATES) + "".join(rng.sample(TEMPLATE_USES, rng.choice((1, 1, 2))))
    (folder / "chat_template.jinja").write_text(text)
    return text[:200]


# --- tokenizers ------------------------------------------------------------------------------------------------------


def _replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _charsmap(data: bytes) -> dict[str, Any]:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


_SLOW = ("(a+)+$", "(a|a)+$", "(a|aa)+!x", "(.*)*x", "([a-z]+)*y", "(a{1,9}){1,9}c", "(?=(a+)+c)a", "(a|a){20}c")
_NORMALIZERS: tuple[Callable[[random.Random], dict[str, Any]], ...] = (
    lambda rng: _replace("a", "a" * rng.choice((2, 50, 2000))),
    lambda rng: _replace("", "x" * 500),
    lambda rng: _replace("a|", "aa", "Regex"),
    lambda rng: _replace(rng.choice(_SLOW), rng.choice(("", "aaaa")), "Regex"),
    lambda rng: {"type": "Prepend", "prepend": "x" * rng.choice((1, 1000, 10**6))},
    lambda rng: {"type": "ByteLevel"},
    lambda rng: {"type": "NFKD"},
    lambda rng: {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": False},
    lambda rng: _charsmap(rng.choice((b"\xff\xff\xff\xff", b"", b"\x04\0\0\0", bytes(range(200)), rng.randbytes(80)))),
)


def _nest(rule: dict[str, Any], kind: str, items: str, times: int) -> dict[str, Any]:
    for _ in range(times):
        rule = {"type": kind, items: [rule]}
    return rule


def _break_normalizer(tokenizer: dict[str, Any], rng: random.Random) -> None:
    rules = [make(rng) for make in rng.choices(_NORMALIZERS, k=rng.choice((1, 2)))] * rng.choice((1, 3, 40, 300))
    sequence = {"type": "Sequence", "normalizers": rules}
    tokenizer["normalizer"] = _nest(sequence, "Sequence", "normalizers", rng.choice((0, 0, 5, 5000)))


def _break_pre_tokenizer(tokenizer: dict[str, Any], rng: random.Random) -> None:
    marks = [{"type": "Metaspace", "replacement": c, "prepend_scheme": "always", "split": True} for c in "abcdef" * 20]
    levels = [{"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}] * 40
    rules = rng.choice(([_split(rng.choice(_SLOW))], marks, levels, [_split("(a{1,7}){1,7}c")] * 9))
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": rules}


def _break_ends(tokenizer: dict[str, Any], rng: random.Random) -> None:
    text = {"Sequence": {"id": "A", "type_id": 0}}
    pair = [text, {"Sequence": {"id": "B", "type_id": 0}}]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing", "single": [text] * 10**6, "pair": pair, "special_tokens": {}
    }  # fmt: skip
    rules = [_replace("e", "e" * 3000)] * 4, [_replace(rng.choice(_SLOW), "x", "Regex")], [{"type": "Fuse"}] * 10**5
    if rng.random() < 0.6:
        del tokenizer["post_processor"]
        tokenizer["decoder"] = {"type": "Sequence", "decoders": rng.choice(rules)}


def _break_settings(tokenizer: dict[str, Any], rng: random.Random) -> None:
    tokenizer["padding"] = {
        "strategy": {"Fixed": rng.choice((2**40, 2**63))},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "x" * 1000,
    }
    tokenizer["model"]["dropout"] = rng.choice((0.5, 1.0, -1, 2**80))
    tokenizer["model"]["continuing_subword_prefix"] = rng.choice((None, "x" * 10**6))


def _break_model(tokenizer: dict[str, Any], rng: random.Random) -> None:
    long = [[piece * length, -1.0] for piece, length in (("a", 10**5), ("ab", 10**4), ("a", 1))]
    words = {"type": "WordPiece", "unk_token": "x", "continuing_subword_prefix": "", "max_input_chars_per_word": 2**40}
    tokenizer["model"] = rng.choice((
        {"type": "Unigram", "unk_id": rng.choice((0, 2**40)), "vocab": [["x", 0.0], *long], "byte_fallback": True},
        {**words, "vocab": {"x": rng.choice(ODD_NUMBERS), "a": 1}},
        {**tokenizer["model"], "vocab": {**tokenizer["model"]["vocab"], "a": rng.choice(ODD_NUMBERS)}},
        {**tokenizer["model"], "merges": [["a", "a"]] * 1000},
    ))  # fmt: skip


def _break_counts(tokenizer: dict[str, Any], rng: random.Random) -> None:
    if rng.random() < 0.5:
        token = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        tokenizer["added_tokens"] += [{**token, "id": 9000 + i, "content": f"<{i}>"} for i in range(300_000)]
    else:
        tokenizer["model"]["merges"] *= 2000


def tokenizer_bomb(folder: Path, rng: random.Random) -> str:
    """Write a tokenizer.json with rules that explode, take very long or contradict each other."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    break_it = rng.choice((
        _break_normalizer, _break_normalizer, _break_pre_tokenizer, _break_ends, _break_settings, _break_model,
        break_anywhere, _break_counts,
    ))  # fmt: skip
    break_it(tokenizer, rng)
    path.write_text(dumped(tokenizer))
    return break_it.__name__


# --- configurations --------------------------------------------------------------------------------------------------


def config_bomb(folder: Path, rng: random.Random) -> str:
    """Write a JSON file with unexpected numbers, texts and nesting."""
    name = rng.choice(("genai_config.json",) * 3 + ("tokenizer_config.json", "generation_config.json"))
    path = folder / name
    text = path.read_text() if path.exists() else '{"eos_token_id": 2, "temperature": 0.5, "top_k": 3}'
    match rng.randrange(6):
        case 0:
            text = text.replace(rng.choice([c for c in text if c.isdigit()] or ["}"]), "9" * 5000, 1)
        case 1:
            brackets = rng.choice(("[]", '{"a":}'))
            text = brackets[:-1] * 100_000 + brackets[-1:] * 100_000
        case 2:
            text = text.replace("{", '{"search": {"batch_size": %d},' % rng.choice(ODD_NUMBERS), 1)  # noqa: UP031
        case 3:
            text = text.replace("{", '{"eos_token_id": [' + "2," * 5_000_000 + "2],", 1)
        case _:
            value = json.loads(text)
            for _ in range(rng.choice((1, 2, 3))):
                break_anywhere(value, rng)
            text = json.dumps(value)
    path.write_text(text)
    return f"{name}: {text[:100]}"


# --- graphs ----------------------------------------------------------------------------------------------------------


def decoder_bomb(folder: Path, rng: random.Random) -> str:
    """Change sizes, types, names or operators of a graph."""
    model = onnx.load(folder / "model.onnx", load_external_data=rng.random() < 0.7)
    for _ in range(rng.choice((1, 1, 2, 3))):
        rng.choice(
            (_other_attribute, _other_input, _other_tensor, _other_tensor, _other_operator, _other_type, _other_layer)
        )(model.graph, rng)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return "model.onnx"


def _other_attribute(graph: onnx.GraphProto, rng: random.Random) -> None:
    attribute = rng.choice([a for node in graph.node for a in node.attribute])
    number = rng.choice([n for n in ODD_NUMBERS if -(2**63) <= n < 2**63])
    if attribute.type == attribute.INT:
        attribute.i = number
    elif attribute.type == attribute.FLOAT:
        attribute.f = rng.choice((0.0, -1.0, 1e38, float("nan"), float("inf")))
    else:
        attribute.Clear()


def _other_input(graph: onnx.GraphProto, rng: random.Random) -> None:
    node = rng.choice([node for node in graph.node if node.input])
    place = rng.randrange(len(node.input))
    values = (
        [tensor.name for tensor in graph.initializer] + [name for each in graph.node for name in each.output] + [""]
    )
    if rng.random() < 0.3:
        del node.input[place]
    else:
        node.input[place] = rng.choice(values)


def _other_tensor(graph: onnx.GraphProto, rng: random.Random) -> None:
    tensor = rng.choice(list(graph.initializer))
    if tensor.data_location == onnx.TensorProto.EXTERNAL or rng.random() < 0.2:
        if tensor.dims:
            tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice([n for n in ODD_NUMBERS if abs(n) < 2**63])
        return
    with contextlib.suppress(ValueError):  # the same tensor may be changed twice
        array = numpy_helper.to_array(tensor)
        changed = rng.choice((array.reshape(-1)[: array.size // 2], array[None], array[:0], array.astype(np.float64)))
        tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(changed), tensor.name))


def _other_operator(graph: onnx.GraphProto, rng: random.Random) -> None:
    names = "Add Mul MatMul Softmax Cast Reshape Gather Concat Shape Sigmoid Expand Tile Range ConstantOfShape".split()
    rng.choice(list(graph.node)).op_type = rng.choice(names)


def _other_type(graph: onnx.GraphProto, rng: random.Random) -> None:
    kind = rng.choice([*graph.input, *graph.output]).type.tensor_type
    if kind.shape.dim and rng.random() < 0.5:
        rng.choice(list(kind.shape.dim)).dim_value = rng.choice([n for n in ODD_NUMBERS if abs(n) < 2**63])
    else:
        kind.elem_type = rng.choice((1, 7, 8, 10, 16))


def _other_layer(graph: onnx.GraphProto, rng: random.Random) -> None:
    number = rng.choice(("7", "100000000", "4000000000", "9" * 5000, "-1", "x"))

    def renamed(name: str) -> str:
        return name.replace("past_key_values.0.", f"past_key_values.{number}.").replace(
            "present.0.", f"present.{number}."
        )

    for value in (*graph.input, *graph.output):
        value.name = renamed(value.name)
    for node in graph.node:
        node.input[:] = [renamed(name) for name in node.input]
        node.output[:] = [renamed(name) for name in node.output]
