"""Regular expressions: RE2's syntax and limits, whole matches, the longest of several."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from onnx import helper

import genai as ort
from genai.ops.text import PatternError, Regex

ATOMS = r"""
a b . [ab] [^a] \d \w \W \s \b \B ^ $ (?:a|b) (a) (?i:a) x{2} a{1,2} a{0,} [a-c0-9] [[:alpha:]] [[:^digit:]] \pL \p{Lu}
\P{Ll} | * + ? *? \x41 \x{e9} é \. \Qa.b\E (?m)^ (?s). (?P<n>b) { } a{,2} \z \A ] - []a] [a\-z] \t \n \07 [\d_] {2} (
""".split()
CHARACTERS = "aAbB1 _é\n.x{}-]"


def model_of(pattern):
    node = helper.make_node("RegexFullMatch", ["x"], ["y"], pattern=pattern)
    values = [helper.make_tensor_value_info("x", 8, [None]), helper.make_tensor_value_info("y", 9, [None])]
    graph = helper.make_graph([node], "g", values[:1], values[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("", "", "a"),
        (r"www\.[\w.-]+\.\bcom\b", "www.google.com", "www.facebook.co"),
        ("a|ab", "ab", "abc"),
        ("(?i)straße", "STRAße", "strasse"),
        ("(?i:a)b", "Ab", "AB"),
        ("a.b", "axb", "a\nb"),
        ("(?s)a.b", "a\nb", "ab"),
        ("^a$", "a", "a\n"),
        ("(?m)a$\n^b", "a\nb", "ab"),
        (r"\d{2,3}", "123", "1234"),
        (r"\d", "1", "\u0661"),
        (r"\pL", "ж", "1"),
        (r"\p{Greek}", "α", "a"),
        (r"[^\d\s]+", "ab", "a1"),
        (r"[[:xdigit:]]+", "beef", "xyz"),
        (r"\Qa.b*\E", "a.b*", "aab"),
        ("a{,2}", "a{,2}", "aa"),
    ],
)
def test_matches(pattern, yes, no):
    assert Regex(pattern).matches(yes)
    assert not Regex(pattern).matches(no)


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(a|aa)+", "(.*a){20}", "(x+x+)+y", "((a{0,30}){0,30})b", "(" * 900 + ")" * 900]
)
def test_no_pattern_takes_long(pattern):
    began = time.thread_time()
    assert not Regex(pattern).matches("a" * 5000 + "c")
    assert len(list(Regex(pattern).spans("a" * 5000 + "c"))) <= 1
    assert time.thread_time() - began < 5


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", "missing )"),
        (")", "unexpected )"),
        ("*", "no argument for repetition"),
        ("a**", "bad repetition operator"),
        ("a{1001}", "repetition size"),
        ("a{2,1}", "repetition size"),
        ("[b-a]", "character class range"),
        ("[a", "missing ]"),
        (r"\q", "escape"),
        (r"\x{110000}", "escape"),
        (r"\p{Klingon}", "class"),
        ("[[:abc:]]", "class"),
        ("(?<name)", "capture group"),
        ("(?=a)", "perl operator"),
        ("(" * 200, "missing )"),
        ("((a{1000}){1000}){1000}", "repetition size"),
        (r"[\pL]{1000}", "too large"),
        (r"a\\\C", "single byte"),
    ],
)
def test_bad_patterns(pattern, message):
    with pytest.raises(PatternError, match="regular expression") as caught:
        Regex(pattern)
    assert message in str(caught.value)


def test_in_a_session():
    session = ort.InferenceSession(model_of("a+"))
    assert session.run(None, {"x": np.array(["aa", "b"], object)})[0].tolist() == [True, False]
    with pytest.raises(ort.GenaiError, match="RegexFullMatch") as caught:
        ort.InferenceSession(model_of("("))
    assert "missing )" in caught.value.why


@pytest.mark.oracle
def test_as_onnxruntime_does():
    onnxruntime = pytest.importorskip("onnxruntime")
    generator = random.Random(0)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    for _ in range(150):
        pattern = "".join(generator.choice(ATOMS) for _ in range(generator.randint(1, 5)))
        texts = ["".join(generator.choice(CHARACTERS) for _ in range(generator.randint(0, 5))) for _ in range(40)]
        try:
            session = onnxruntime.InferenceSession(model_of(pattern).SerializeToString(), options)
        except Exception:
            with pytest.raises(PatternError):
                Regex(pattern)
            continue
        expected = session.run(None, {"x": np.array(texts, object)})[0].tolist()
        assert [Regex(pattern).matches(text) for text in texts] == expected, pattern
