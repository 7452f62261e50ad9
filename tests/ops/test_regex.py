"""Regular expressions: RE2's syntax, whole matches, in time linear in the text."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from onnx import helper

import genai as ort
from genai.kernels.ops.regex import Pattern
from genai.kernels.ops.regex_syntax import PatternError

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
        (r"[^\d\s]+", "ab", "a1"),
        (r"[[:xdigit:]]+", "beef", "xyz"),
        (r"\Qa.b*\E", "a.b*", "aab"),
        ("a{,2}", "a{,2}", "aa"),
    ],
)
def test_matches(pattern, yes, no):
    assert Pattern(pattern).matches(yes)
    assert not Pattern(pattern).matches(no)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)+", "(.*a){20}", "(x+x+)+y", "((a{0,30}){0,30}){0,3}b"])
def test_no_pattern_takes_long(pattern):
    began = time.monotonic()
    assert not Pattern(pattern).matches("a" * 500 + "c")
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", "missing )"),
        (")", "unexpected )"),
        ("*", "nothing to repeat"),
        ("a**", "repetition of a repetition"),
        ("a{1001}", "bad repetition"),
        ("a{2,1}", "bad repetition"),
        ("[b-a]", "empty"),
        ("[a", "unexpected end"),
        (r"\q", "escape"),
        (r"\x{110000}", "character code"),
        (r"\p{Greek}", "Unicode class"),
        ("[[:abc:]]", "class"),
        ("(?<name)", "group name"),
        ("(?=a)", "not known"),
        ("(" * 200, "groups in each other"),
        ("((a{1000}){1000}){1000}", "states"),
        ("(((){1000}){1000}){1000}", "states"),
    ],
)
def test_bad_patterns(pattern, message):
    with pytest.raises(PatternError, match="regular expression") as caught:
        Pattern(pattern)
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
                Pattern(pattern)
            continue
        expected = session.run(None, {"x": np.array(texts, object)})[0].tolist()
        assert [Pattern(pattern).matches(text) for text in texts] == expected, pattern
