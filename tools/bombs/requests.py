"""Malicious inputs from users and servers: grammars, schemas, batches, and false responses of a hub."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.local_hub import Fault

from .odd import ODD_NUMBERS, break_anywhere, break_json, dumped

# --- grammars --------------------------------------------------------------------------------------------------------


def _nested(depth: int, make: Callable[[Any], Any], inner: Any) -> Any:
    for _ in range(depth):
        inner = make(inner)
    return inner


_MANY_KEYS = {f"k{n}": {"type": "string"} for n in range(3000)}
_EXPRESSIONS = (
    "(a{1,1000}){1,1000}", "((((a{1,99}){1,99}){1,99}){1,99}){1,99}", "(" * 20_000 + ")" * 20_000, "a{2000000000}",
    "(a|b)*a" + "(a|b)" * 40, "(.*a.*b.*c.*d.*){50}", "|".join("a" * n for n in range(1, 1200)), "\\p{L}{1,5000}",
    "(a*)*(b*)*(c*)*!", "[^\\x00-\\x7f]{1,3000}", "(?i)" + "(abc|def|ghi)" * 3000, "a" * 900_000, "\ud800", "(?=a)b",
)  # fmt: skip
_SCHEMAS: tuple[Callable[[], Any], ...] = (
    lambda: _nested(3000, lambda inner: {"type": "object", "properties": {"a": inner}, "required": ["a"]}, {}),
    lambda: _nested(14, lambda inner: {"anyOf": [inner, {"type": "array", "items": inner}]}, {"type": "null"}),
    lambda: _nested(60, lambda inner: {"allOf": [inner, {"type": "object"}]}, {"properties": _MANY_KEYS}),
    lambda: {"$ref": "#"},
    lambda: {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    lambda: {"$ref": "file:///etc/passwd"},
    lambda: {"$ref": "http://127.0.0.1:1/x"},
    lambda: {"type": "string", "minLength": 10**9, "maxLength": 10**18},
    lambda: {"type": "string", "pattern": "(a{1,999}){1,999}"},
    lambda: {"type": "array", "minItems": 10**6, "maxItems": 10**7, "uniqueItems": True},
    lambda: {"enum": ["x" * n for n in range(1000)]},
    lambda: {"enum": list(range(100_000))},
    lambda: {"type": "object", "properties": _MANY_KEYS},
    lambda: {"type": "object", "properties": _MANY_KEYS, "required": list(_MANY_KEYS), "minProperties": 10**9},
    lambda: {"type": "object", "patternProperties": {f"^{'a|' * n}b$": {} for n in range(200)}},
    lambda: {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
    lambda: {"type": "number", "multipleOf": 1e-300, "exclusiveMinimum": 0, "maximum": 1e300},
    lambda: {"oneOf": [{"type": "integer", "minimum": n, "maximum": n + 5} for n in range(500)]},
    lambda: {"not": {"not": {"not": {}}}},
    lambda: {"const": _nested(2000, lambda inner: [inner], 1)},
    lambda: {"properties": {"a": {"format": "x" * 10**5}, "b": {"x-unknown": _MANY_KEYS}}},
)
_GRAMMARS: tuple[Callable[[], str], ...] = (
    lambda: "start: start start | A\nA: /a/",
    lambda: "start: a\na: a",
    lambda: "start: " + " ".join("(" * 5000) + '"x"' + ")" * 5000,
    lambda: "start: a0\n" + "\n".join(f"a{n}: a{n + 1} a{n + 1}" for n in range(40)) + "\na40: /a?/",
    lambda: "start: a0\n" + "\n".join(f"a{n}: a{n + 1} | a{n + 1} a{n + 1}" for n in range(3000)) + '\na3000: "x"',
    lambda: "start: A\nA: /(a{1,999}){1,999}/",
    lambda: "start: A{1,1000000}\nA: /a/",
    lambda: "start: A~1..1000000\nA: /a/",
    lambda: "start: (A|B|A B|B A)* A\nA: /a*/\nB: /[ab]*/",
    lambda: "\n".join(f'r{n}: "{n}"' for n in range(30_000)) + "\nstart: r0",
    lambda: "start: %json {}\n" * 2000,
    lambda: "%import common.WORD\n%import /etc/passwd\nstart: WORD",
    lambda: "root ::= root root | \"a\"\n",
    lambda: "root ::= (((((\"a\"){1,999}){1,999}){1,999}){1,999}){1,999}",
    lambda: "root ::= " + "(" * 30_000,
    lambda: "root ::= [" + "\\x00-\\xff" * 50_000 + "]",
    lambda: "start: /(?=x)y/ | /\\1/",
    lambda: "start: " + " | ".join(f'"{"a" * n}"' for n in range(1, 1000)),
)  # fmt: skip


def grammar_bomb(folder: Path, rng: random.Random) -> str:
    """Write a schema, regular expression, grammar or list of choices that explodes, is endless or is invalid."""
    option = rng.choice(("json_schema", "json_schema", "regex", "grammar", "choice"))
    value: Any
    match option:
        case "json_schema":
            value = rng.choice(_SCHEMAS)()
            if rng.random() < 0.3 and isinstance(value, dict):
                value = {"type": "object", "properties": {"a": value, "b": rng.choice(_SCHEMAS)()}}
            if rng.random() < 0.2:
                break_anywhere(value, rng)
        case "regex":
            value = rng.choice(_EXPRESSIONS)
            if rng.random() < 0.3:
                value = f"({value})|({rng.choice(_EXPRESSIONS)})*"
        case "grammar":
            value = rng.choice(_GRAMMARS)()
        case _:
            value = rng.choice(
                (["a" * n for n in range(1, 1400)], [f"{n}" for n in range(10_000)], ["a"] * 10**6, [""])
            )
    text = dumped({option: value})
    (folder / "request.json").write_text(text)
    return text[:200]


# --- batches ---------------------------------------------------------------------------------------------------------

_OPTIONS = (
    "n max_tokens temperature top_k top_p min_p seed logprobs stop logit_bias stop_token_ids dry_multiplier "
    "repetition_penalty banned_strings priority best_of bad_words regex json_schema adapter xtc_probability"
).split()
_VALUES: tuple[Any, ...] = (
    *ODD_NUMBERS, None, True, "", "x" * 10**5, [], {}, [[]] * 1000, -1.5, "\0", [""], ["x" * 10**5] * 50, 1e308, "NaN",
    {"1": 10**30}, {str(n): -100 for n in range(10_000)}, list(range(100_000)), float("nan"), float("inf"),
)  # fmt: skip


def batch_bomb(folder: Path, rng: random.Random) -> str:
    """Write a file of requests with endless lines, deep nesting, or options that demand too much."""
    form = rng.choice(("jsonl", "jsonl", "jsonl", "csv", "txt", "parquet"))
    lines: list[bytes] = []
    for _ in range(rng.choice((1, 3, 8))):
        line: dict[str, Any] = {"prompt": "Once", "max_tokens": 2} | {
            rng.choice(_OPTIONS): rng.choice(_VALUES) for _ in range(rng.choice((1, 1, 2)))
        }
        if rng.random() < 0.3:
            line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": line}
        lines.append(dumped(line).encode())
    lines[0] = rng.choice(
        (
            lines[0], lines[0], b"[" * 10**6, b'{"a":' * 10**5, b'{"prompt": "' + b"x" * 17 * 2**20, b"\xff\xfe\0\0",
            b'{"prompt": ' + b"9" * 10**5 + b"}", b"\r" * 10**6, b'{"messages": [' + b"{}," * 10**5 + b"{}]}",
            b'{"prompt": "' + b"word " * 10**6 + b'"}', b'{"prompt": [' + b"5," * 10**6 + b"5]}",
        )
    )  # fmt: skip
    content = b"\n".join(lines)
    match form:
        case "csv":
            content = rng.choice((b'prompt,n\n"never closed' + b"x\n" * 10**6, b"a," * 10**6, b"prompt\n" + content))
        case "txt":
            content = rng.choice((b"\n" * 10**6, b"x" * 2**25, content))
        case "parquet":
            content = b"PAR1" + rng.randbytes(1000) + b"PAR1"
    (folder / f"input.{form}").write_bytes(content)
    return f"{form}: {content[:150]!r}"


# --- a hub -----------------------------------------------------------------------------------------------------------


def hub_bomb(folder: Path, rng: random.Random) -> str:
    """Break a server's responses: listings, redirections, sizes and files."""
    path = folder / "hub.pickle"
    files, facts, faults = pickle.loads(path.read_bytes())
    what = rng.choice(("listing", "listing", "names", "body", "redirection", "status", "file"))
    odd_names = ("../../x", "/etc/x", "a/../../b", "x" * 5000, "\0", "", ".", "a\\..\\b", "con", "\ud800", 7, None)
    entries = [{"rfilename": name, "size": len(data), "blobId": "0" * 40} for name, data in files.items()]
    match what:
        case "listing":
            for entry in entries:
                if rng.random() < 0.5:
                    entry[rng.choice(("size", "blobId", "lfs", "rfilename"))] = rng.choice((*ODD_NUMBERS, None, [], {}))
            facts["siblings"] = entries
        case "names":
            facts["siblings"] = [*entries, *({"rfilename": rng.choice(odd_names), "size": 5} for _ in range(5))]
        case "body":
            text = json.dumps({"id": "org/name", "sha": "0" * 40, "siblings": entries})
            body = rng.choice(
                (break_json(text, rng).encode(), b"[" * 10**6, b" " * 10**8, b'"' + b"x" * 10**8, b"\xff")
            )
            faults["/api/models/"] = [Fault(body=body)] * 20
        case "redirection":
            to = rng.choice(
                ("/api/models/org/name?x", "file:///etc/passwd", "http://[", "//", "gopher://x", "\r\nX: y")
            )
            faults[rng.choice(("/api/", "/resolve/", "/cdn/"))] = [Fault(302, {"location": to})] * 200
        case "status":
            status = rng.choice((204, 206, 304, 418, 429, 500, 503, 599, 999))
            headers = rng.choice(({}, {"retry-after": "9" * 400}, {"retry-after": "-1"}, {"content-length": "9" * 30}))
            faults[rng.choice(("/api/", "/resolve/"))] = [Fault(status, headers)] * 200
        case _:
            name = rng.choice(list(files))
            files[name] = rng.choice(
                (b"", b"{" * 10**6, b"9" * 10**5, break_json(files["config.json"].decode(), rng).encode())
            )
    path.write_bytes(pickle.dumps((files, facts, faults)))
    return f"{what}: {str(faults or facts)[:150]}"
