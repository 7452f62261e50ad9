"""Patterns of JSON schemas: every finished reply matches them, in JSON, in Python and in ECMA 262."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import warnings
from random import Random
from typing import Any

import pytest

from genai.engine.sampling.ecma_regex import PatternError, rewrite
from genai.engine.sampling.grammar import hold_values
from genai.engine.sampling.guidance import Guidance
from genai.errors import GrammarError
from tests.drawing import Draw

from .schema_replies import Takes, Walk, matcher_of


def in_ecma(pairs: list[tuple[str, str]]) -> list[bool | None]:
    """Return for pairs of a pattern and a text if node finds the pattern; all True without node.

    None if the pattern is malformed, with the flag u and without it.
    """
    if (node := shutil.which("node")) is None:
        return [True] * len(pairs)
    code = """
    const under = (p, t, flags) => { try { return new RegExp(p, flags).test(t) } catch { return null } };
    const find = (p, t) => under(p, t, "u") ?? under(p, t, "");
    let all = ""; process.stdin.on("data", d => all += d).on("end",
      () => console.log(JSON.stringify(JSON.parse(all).map(([p, t]) => find(p, t)))))"""
    done = subprocess.run([node, "-e", code], input=json.dumps(pairs), capture_output=True, text=True, check=True)
    found: list[bool | None] = json.loads(done.stdout)
    return found


# --- what patterns mean -------------------------------------------------------------------------------------------

# A pattern, texts that it matches as a whole, and texts that it does not; from ECMA 262, section 22.2.
MEANINGS: list[tuple[str, list[str], list[str]]] = [
    ("^[[:alpha:]]$", ["[]", ":]", "a]", "h]"], ["a", "b", "z", "m]"]),
    ("^[a&&b]$", ["a", "b", "&"], []),
    ("^[a||b~~c]$", ["a", "b", "c", "|", "~"], ["d"]),
    ("^[+--b]$", ["+", ",", "-", "b"], ["a"]),
    ("^[^a&&b]$", ["c"], ["a", "b", "&"]),
    (r"^[\w-.]$", ["a", "-", "."], ["+"]),
    (r"^[\[a]$", ["[", "a"], ["]"]),
    ("^[[a]$", ["[", "a"], ["]"]),
    ("^[a-]$", ["a", "-"], ["b"]),
    (r"^\cJ\t$", ["\n\t"], ["J\t"]),
    (r"^[\cA\b]$", ["\x01", "\b"] and ["\b"], ["A", "b", "c"]),
    (r"^\0$", ["\0"], ["0"]),
    (r"^\u{1F600}\ud83d\ude00\x41$", ["😀😀A"], []),
    (r"^\d$", ["7"], ["٣", "a"]),
    (r"^\D$", ["a", "é", "日", "–"], ["7", "٣"]),
    (r"^\w$", ["a", "Z", "_", "0"], ["é", "-"]),
    (r"^\W$", ["-", "\n", "–"], ["a", "é", "_"]),
    (r"^\s$", [" ", "\n", "\u2003"], ["\x85", "a"]),
    (r"^\S$", ["a", "é"], [" ", "\ufeff", "\x85"]),
    ("^.$", ["a", "日", "😀", "\t"], ["\n", "\r", "\u2028"]),
    (r"^[\s\S]$", ["a", "\n", " "], []),
    ('^[^"]$', ["a", "\\", "\n"], ['"']),
    (r"^[^\\]$", ["a", '"'], ["\\"]),
    (r"^\p{L}$", ["a", "ß", "日"], ["1", "-"]),
    (r"^\P{Uppercase_Letter}$", ["a", '"'], ["A", "É"]),
    (r"^\p{Script=Greek}$", ["α"], ["a"]),
    (r"^[^\p{sc=Greek}]$", ["a", '"', "\\"], ["α"]),
    (r"^[\p{Nd}a]$", ["٣", "a"], ["b"]),
    ("(?i)^[k-l]$", ["k", "K", "L"], ["m"]),
    ("^(?i:k)k$", ["Kk", "kk"], ["kK"]),
    ("^(?i:[^s])$", ["a"], ["s", "S", "ſ"]),
    ("^(?s:.)$", ["\n", "a"], []),
    ("^(?<stop>a)b$", ["ab"], ["a"]),
    ("^(?P<year>a)$", ["a"], ["b"]),
    ("^(?:a+?|b{2,3}?)$", ["a", "aa", "bb"], ["b"]),
    ("^{a}{}$", ["{a}{}"], ["a"]),
    (r"^\/\-\@\é$", ["/-@é"], []),
    ("^a$|^b$", ["a", "b"], ["c", "ab"]),
    ("b$", ["b", "ab"], ["bc"]),
    (r"^(?=.*\d)(?=.*[A-Z]).{3,}$", ["aB1", "1xA"], ["ab1", "B1"]),
    ("", ["", "a"], []),
]


@pytest.mark.parametrize(("pattern", "matching", "others"), MEANINGS, ids=[one[0] for one in MEANINGS])
def test_the_meaning_of_a_pattern(pattern: str, matching: list[str], others: list[str], takes: Takes) -> None:
    for text in (*matching, *others):
        expected = text in matching
        assert takes({"type": "string", "pattern": pattern}, json.dumps(text, ensure_ascii=False)) == expected, text
        keys = {"type": "object", "patternProperties": {pattern: {"const": 1}}, "additionalProperties": False}
        if "(?=" not in pattern:
            assert takes(keys, json.dumps({text: 1}, ensure_ascii=False)) == expected, text
    if "(?" not in pattern or "(?=" in pattern:  # node may not know groups with flags
        assert in_ecma([(pattern, text) for text in matching]) == [True] * len(matching)
        unlike = [text for text in others if text not in ("\x85", "é", "ſ", "٣", "\ufeff")]  # Python differs
        assert not any(in_ecma([(pattern, text) for text in unlike])) or not shutil.which("node")


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("[a--b]", "out of order"),
        ("[z-a]", "out of order"),
        ("[]a]", "begins with ]"),
        ("[^]", "begins with ]"),
        ("a[", "ends inside a class"),
        ("[a-", "ends inside a class"),
        (r"\bfoo\b", r"\b"),
        (r"(a)\1", r"\1"),
        (r"(?<n>a)\k<n>", r"\k"),
        ("a(?=b)", "lookahead"),
        ("^(?=a)|b", "lookahead"),
        ("^(?!a)b", "negative lookahead"),
        ("(?<=a)b", "lookbehind"),
        ("(?<!a)b", "negative lookbehind"),
        ("(?>a)", "atomic"),
        ("(?m)^a", "flag m"),
        ("a(?i)b", "start of the pattern"),
        (r"\A\Z", r"\A"),
        (r"\e", r"\e"),
        (r"\x4", r"\x4"),
        (r"\ud83d", "no character"),
        (r"\p{Script=Common}", "Script=Common"),
        (r"\pL", r"\p"),
        ("a++", "follows the quantifier"),
        ("*a", "follows nothing"),
        ("^*", "cannot repeat"),
        ("a{3,1}", "out of order"),
        ("a{,3}", "lower bound"),
        ("a{99999999}", "too often"),
        ("(a", "no closing"),
        ("a)", "no opening"),
        ("(" * 5000 + ")" * 5000, "levels deep"),
        ("a^b", ""),
    ],
)
def test_patterns_that_are_refused_by_name(pattern: str, named: str, guidance: Guidance) -> None:
    with pytest.raises(GrammarError) as raised:
        matcher_of(guidance, {"properties": {"a": {"pattern": pattern}}})
    assert named in raised.value.why and raised.value.fix
    if named:
        assert "the pattern at /properties/a of json_schema" in raised.value.what
    with pytest.raises(GrammarError):
        matcher_of(guidance, {"patternProperties": {pattern: {}}})


# --- random patterns ----------------------------------------------------------------------------------------------

_ITEMS = [
    "a", "b-f", "0-9", "A-Z", r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", r"\x00-\x1f", r"\x00-\x08", " -~", r"\n", r"\t",
    '"', r"\\", "/", r"\x7f", r"\x7f-\xff", "é", "日-本", "&&", "||", "~~", "[", r"\]", r"\-", r"\u2028", "!-~", "#-[",
    r"\x0b\x0c", r"\x01", ".", "^", "$", "{", "(",
]  # fmt: skip
_ATOMS = [
    "a", "b", "0", '"', r"\\", r"\n", r"\t", r"\x01", r"\x1f", r"\x7f", "/", " ", ".", r"\d", r"\w", r"\s", r"\D",
    r"\W", r"\S", r"\.", "é", "日", r"\u00e9", "&&", ",", r"\[",
]  # fmt: skip
# Atoms that are only valid with the flag u of ECMA 262, and atoms that are only valid without it.
_MODES = (["😀", "[😀-😂]", "[^😀]", "[a😀]"], [r"\-", r"\"", "{", "}", "]"])


def _random_pattern(random: Random, mode: int, depth: int = 0) -> str:
    def atom() -> str:
        kind = random.random()
        if kind < 0.45:
            chosen = random.sample(_ITEMS, random.randrange(1, 4))
            return f"[{random.choice(('', '', '^'))}{''.join(chosen)}]"
        if kind < 0.6 and depth < 2:
            return f"{random.choice(('(', '(?:'))}{_random_pattern(random, mode, depth + 1)})"
        return random.choice(_ATOMS if kind < 0.95 else _MODES[mode])

    def part() -> str:
        return atom() + random.choice(("", "", "", "?", "{2}", "{1,2}", "*?", "+"))

    text = "|".join("".join(part() for _ in range(random.randrange(1, 4))) for _ in range(random.choice((1, 1, 2))))
    return text if depth else random.choice(("", "^", "^")) + text + random.choice(("", "$", "$"))


def test_random_patterns(draw: Draw, walk: Walk) -> None:
    """Random replies under random patterns: JSON in Python, and a match in Python's `re` and in ECMA 262."""
    random, pairs, refused = Random(draw.seed), [], 0
    while len(pairs) < 600:
        pattern = _random_pattern(random, random.randrange(2))
        with warnings.catch_warnings(action="ignore"):
            try:
                known = re.compile(pattern)
            except re.error:
                with pytest.raises(GrammarError):  # what Python refuses is no ECMA 262 either, among these patterns
                    walk({"pattern": pattern, "type": "string"}, 0)
                continue
        schema = {"type": "string", "pattern": pattern}
        if random.random() < 0.3:
            schema |= {"minLength": random.randrange(3), "maxLength": 5}
        try:
            replies = [walk(schema, seed) for seed in range(6)]
        except GrammarError as error:
            # A pattern may need more characters than the schema allows, or a class may be empty.
            assert any(
                one in error.why for one in ("no characters", "begins with ]", "Unsatisfiable", "no reply", "Unable to")
            ), (
                pattern,
                error,
            )
            refused += 1
            continue
        for reply in replies:
            if reply is not None:
                value = json.loads(reply)
                assert known.search(value), (pattern, reply)
                assert schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
                # ECMA reads other characters as two, unless the flag u is set, which some of the patterns exclude.
                if max(value, default="") < "\U00010000":
                    pairs.append((pattern, value))
    assert [pair for pair, found in zip(pairs, in_ecma(pairs), strict=True) if not found] == []
    assert refused < 60


def test_a_rewritten_pattern_keeps_its_meaning(draw: Draw) -> None:
    random = Random(draw.seed)
    for pattern in (*(one[0] for one in MEANINGS), *(_random_pattern(random, 0) for _ in range(200))):
        try:
            once = rewrite(pattern)
        except PatternError:
            continue
        for text in once.patterns:
            assert rewrite(text).patterns == (text,)


@pytest.mark.parametrize(
    "schema",
    [
        {"items": [{"type": "string", "pattern": "[a--b]"}]},
        {"$ref": "#/x/a%20b", "x": {"a b": {"type": "string", "pattern": "[a--b]"}}},
        {"$defs": {"a": {"type": "string", "pattern": "[a--b]"}}},
    ],
    ids=str,
)
def test_patterns_anywhere(schema: Any) -> None:
    with pytest.raises(GrammarError, match="out of order"):
        hold_values(schema)
