"""Model folders made to do harm: templates, tokenizers, configurations and graphs that explode, hang or crash.

    python -m tools.bombs                    # 240 of them, from seed 0 on
    python -m tools.bombs --first 500 --count 20

Each is used twice in a process of its own: to its end, which must come in time, within memory, and as an answer or a
typed error; and with Ctrl-C a moment after the start, which must end it soon.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

import genai
from genai.builder import DecoderSpec, ExportOptions, write_model_folder
from genai.measure.model_info import describe
from genai.model.folders import bundled_model
from tools.random_weights import RandomWeights

SECONDS = 5.0
SECONDS_AFTER_INTERRUPT = 1.5
MEMORY_BYTES = 2**30
# The worst that a bomb may do to the machine of whoever runs this.
_SAFETY_BYTES = 3 * 2**30
_UNTIL_INTERRUPT = 0.6
SPEC = DecoderSpec(
    model_type="llama",
    vocab_size=1536,
    hidden_size=32,
    intermediate_size=64,
    num_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_size=16,
    context_length=512,
)
TEXT = "Tell me about bananas, " + "a" * 60 + "!"
ODD_NUMBERS = (0, 1, -1, 2, 7, 2**31 - 1, 2**31, -(2**31), 2**40, 2**62, 2**63 - 1, 2**63, 10**30)


@dataclass(frozen=True)
class Outcome:
    """What using a bomb led to; `fault` is "" where that is allowed."""

    fault: str
    seconds: float
    memory_bytes: int


def base_folder(root: Path) -> Path:
    """A sound folder, from which bombs are made."""
    folder = root / "sound"
    write_model_folder(
        folder, SPEC, ExportOptions(precision="int4"), RandomWeights(SPEC), tokenizer_dir=bundled_model()
    )
    return folder


# --- templates -------------------------------------------------------------------------------------------------------

_BIG = (
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
_USES = (
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
    """A value that is large or looks so, and something that is done with it."""
    if rng.random() < 0.1:
        text = rng.choice(_LONG)
    else:
        text = rng.choice(_BIG) + "".join(rng.sample(_USES, rng.choice((1, 1, 2))))
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


def _break_anywhere(value: Any, rng: random.Random) -> None:
    """Put something odd somewhere into nested lists and objects."""
    while isinstance(value, (dict, list)) and value:
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        if not isinstance(value[key], (dict, list)) or not value[key] or rng.random() < 0.2:
            value[key] = rng.choice(
                (*ODD_NUMBERS, None, True, "", "x" * 10**5, [], {}, [[]] * 1000, -1.5, "\0", "\ud800")
            )
            return
        value = value[key]


def tokenizer_bomb(folder: Path, rng: random.Random) -> str:
    """A tokenizer.json with rules that explode, take ages or contradict each other."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    break_it = rng.choice((
        _break_normalizer, _break_normalizer, _break_pre_tokenizer, _break_ends, _break_settings, _break_model,
        _break_anywhere, _break_counts,
    ))  # fmt: skip
    break_it(tokenizer, rng)
    path.write_text(_dumped(tokenizer))
    return break_it.__name__


def _dumped(value: Any) -> str:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(50_000)
    try:
        return json.dumps(value)
    finally:
        sys.setrecursionlimit(limit)


# --- configurations --------------------------------------------------------------------------------------------------


def config_bomb(folder: Path, rng: random.Random) -> str:
    """A JSON file with numbers, texts and nesting that nobody expects."""
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
                _break_anywhere(value, rng)
            text = json.dumps(value)
    path.write_text(text)
    return f"{name}: {text[:100]}"


# --- graphs ----------------------------------------------------------------------------------------------------------


def decoder_bomb(folder: Path, rng: random.Random) -> str:
    """A graph with sizes, types, names or operators changed."""
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
    with contextlib.suppress(ValueError):  # a second change of one tensor
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


# --- using them ------------------------------------------------------------------------------------------------------

BOMBS = (template_bomb, tokenizer_bomb, config_bomb, decoder_bomb)


def make_bomb(base: Path, folder: Path, seed: int) -> str:
    """Write the bomb of a seed, and say what it is."""
    rng = random.Random(seed)
    make = BOMBS[seed % len(BOMBS)]
    shutil.copytree(base, folder)
    return f"{seed} {make.__name__}: {make(folder, rng)}"


def use(folder: Path) -> None:
    """Everything that reads a folder, as a user would; typed errors are answers."""
    with contextlib.suppress(genai.GenaiError):
        describe(folder)
    with genai.LLM(folder, threads=1, quiet=True) as llm:
        calls: tuple[Callable[[], object], ...] = (
            lambda: llm.chat(TEXT, max_tokens=2),
            lambda: llm.tokenizer.decode(llm.tokenizer.encode(TEXT)),
            lambda: llm.generate([5, 6, 7], max_tokens=2),
            lambda: genai.Generator(llm.model, genai.GeneratorParams(llm.model)).append_tokens([5, 6]),
        )
        for call in calls:
            with contextlib.suppress(genai.GenaiError):
                call()


def try_bomb(folder: Path, *, interrupted: bool, patience: float = 1.0, memory_bytes: int = MEMORY_BYTES) -> Outcome:
    """Use a folder in a process of its own; where `interrupted`, with Ctrl-C a moment after the start.

    `memory_bytes` bounds what the process comes to hold beyond what it inherits.
    """
    start = time.monotonic()
    inherited = _statm(1)
    pid = os.fork()
    if not pid:
        _use_apart(folder)
    allowed = _UNTIL_INTERRUPT + SECONDS_AFTER_INTERRUPT * patience if interrupted else SECONDS * patience
    sent = False
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        now = time.monotonic()
        if done:
            break
        if interrupted and not sent and now > start + _UNTIL_INTERRUPT:
            os.kill(pid, signal.SIGINT)
            sent = True
        if now > start + 3 * allowed:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    took, code = time.monotonic() - start, os.waitstatus_to_exitcode(status)
    fault = "" if code in (0, *((_INTERRUPTED,) if sent else ())) else f"ended with {code}"
    fault = fault or (f"took {took:.1f} s" if took > allowed else "")
    memory = usage.ru_maxrss * 1024 - inherited
    return Outcome(fault or (f"took {memory >> 20} MiB" if memory > memory_bytes else ""), took, memory)


_INTERRUPTED = 130


def _statm(field: int) -> int:
    """A field of /proc/self/statm in bytes: 1 is what the process holds in memory, 5 what RLIMIT_DATA counts."""
    return int(Path("/proc/self/statm").read_text().split()[field]) * resource.getpagesize()


def _use_apart(folder: Path) -> None:
    """In the child: 0 for an answer or a typed error, 130 for Ctrl-C, 1 and a traceback for anything else."""
    code = 1
    try:
        most = _statm(5) + _SAFETY_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with open(os.devnull, "w") as silence:  # noqa: PTH123
            os.dup2(silence.fileno(), 2)
        use(folder)
        code = 0
    except genai.GenaiError as error:
        code = 0 if error.what and error.why and error.fix else 3
    except KeyboardInterrupt:
        code = _INTERRUPTED
    except BaseException:
        traceback.print_exc(file=sys.stdout)
    finally:
        sys.stdout.flush()
        os._exit(code)


@contextlib.contextmanager
def workshop(*, patience: float = 1.0) -> Iterator[Callable[[int], list[str]]]:
    """Gives a function that makes the bomb of a seed, uses it twice, and tells what was wrong.

    Args:
        patience: times what a bomb may take, for machines that are busy with other things.
    """
    with tempfile.TemporaryDirectory(prefix="genai-bombs-") as name:
        root = Path(name)
        base = base_folder(root)
        # This one compiles what the others use, which takes time and memory that are not a folder's fault.
        sound = try_bomb(base, interrupted=False, patience=100, memory_bytes=_SAFETY_BYTES)
        if sound.fault:
            raise RuntimeError(f"the sound folder {sound.fault}")

        def run(seed: int) -> list[str]:
            folder = root / str(seed)
            what = make_bomb(base, folder, seed)
            outcomes = [try_bomb(folder, interrupted=interrupted, patience=patience) for interrupted in (False, True)]
            shutil.rmtree(folder)
            return [f"{what}: {outcome.fault}" for outcome in outcomes if outcome.fault]

        yield run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=240)
    options = parser.parse_args()
    faults: list[str] = []
    with workshop() as run:
        for seed in range(options.first, options.first + options.count):
            for fault in run(seed):
                print(fault, flush=True)
                faults.append(fault)
    print(f"{options.count} bombs, {len(faults)} faults")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
