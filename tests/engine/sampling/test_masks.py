"""Grammar masks: every device respects them with every sampler, and they are filled in the background of a step."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np
import pytest

from genai.devices import open_executor
from genai.engine.sampling.batch import BatchSampler
from genai.engine.sampling.grammar import Grammar
from genai.engine.sampling.guidance import FilledMask, Guidance, Matcher, TokenBytes
from genai.engine.sampling.masks import MaskFiller
from genai.engine.sampling.params import SamplingParams
from genai.engine.sampling.plan import RowSampler, plan_sampling
from genai.errors import GrammarError, SamplingError

from .test_every_sampler import EFFECTIVE

EXECUTORS = {name: open_executor(name, threads=1) for name in ("reference", "cpu")}
BYTES = TokenBytes([bytes([i]) for i in range(256)], [], lambda text: list(text.encode()))
END = 256
VOCAB = 260


@pytest.fixture(scope="module")
def guidance() -> Guidance:
    return Guidance(lambda: BYTES, VOCAB, [END])


class FixedMask:
    """A matcher with a given mask."""

    def __init__(self, mask: np.ndarray) -> None:
        self.mask = FilledMask(mask[None], 0)
        self.automaton = self

    def is_error(self) -> bool:
        return False


def words(allowed: np.ndarray) -> np.ndarray:
    bits = np.zeros(-(-len(allowed) // 32) * 32, np.uint8)
    bits[: len(allowed)] = allowed
    return np.packbits(bits, bitorder="little").view(np.uint32).copy()


def rows(masks: list[np.ndarray], vocab: int, **options: Any) -> list[RowSampler]:
    plan = plan_sampling(SamplingParams(**options), vocab_size=vocab)
    found = [RowSampler(plan, [1, 2, 3, 1, 2], seed=i, prompt_length=2) for i in range(len(masks))]
    for row, mask in zip(found, masks, strict=True):
        row.matcher = FixedMask(mask)  # type: ignore[assignment]
    return found


@pytest.mark.parametrize("vocab", [300, 5000])
@pytest.mark.parametrize("name", [*EFFECTIVE, "greedy"])
def test_devices_agree_under_masks(name: str, vocab: int, rng: np.random.Generator) -> None:
    """With few allowed tokens, with many, with one, and with more than fit a list."""
    options = {"temperature": 0, "repetition_penalty": 1.5} if name == "greedy" else EFFECTIVE[name]
    logits = rng.normal(0, 2, (6, vocab)).astype(np.float32)
    masks = [rng.random(vocab) < share for share in (0.02, 0.5, 0.9, 1.0)]
    masks += [np.arange(vocab) == 7, np.arange(vocab) >= vocab - 3]
    sampled, found = [], []
    for executor in EXECUTORS.values():
        sampler = BatchSampler(vocab, executor)
        chosen = [words(mask) for mask in masks]
        sampled.append(sampler.sample(logits, rows(chosen, vocab, **options)).tokens.tolist())
        found.append(sampler.distributions(logits, rows(chosen, vocab, **options)))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-6)
    assert sampled[0] == sampled[1]
    for distribution, mask in zip(found[1], masks, strict=True):
        assert not distribution[~mask].any() and distribution.sum() == pytest.approx(1)


@pytest.mark.parametrize("device", EXECUTORS)
@pytest.mark.parametrize(
    ("logits", "allowed", "why"),
    [
        (np.zeros(300), [], "are all -inf"),
        (np.full(300, -np.inf), [3, 4], "are all -inf"),
        (np.where(np.arange(300) == 4, np.nan, 0), [3, 4], "contain NaN"),
        (np.where(np.arange(300) == 4, np.inf, 0), [3, 4], "contain plus infinity"),
    ],
)
def test_what_cannot_be_sampled(device: str, logits: np.ndarray, allowed: list[int], why: str) -> None:
    mask = words(np.isin(np.arange(300), allowed))
    with pytest.raises(SamplingError) as raised:
        BatchSampler(300, EXECUTORS[device]).sample(logits.astype(np.float32)[None], rows([mask], 300))
    assert why in raised.value.why


@pytest.mark.parametrize("device", EXECUTORS)
def test_what_is_masked_may_be_anything(device: str) -> None:
    logits = np.where(np.arange(300) == 4, np.nan, np.arange(300)).astype(np.float32)
    mask = words(np.isin(np.arange(300), [3, 5]))
    sampler = BatchSampler(300, EXECUTORS[device])
    assert sampler.sample(logits[None], rows([mask], 300, temperature=0)).tokens.tolist() == [5]


def allowed_bytes(matcher: Matcher, filler: MaskFiller) -> set[int]:
    (mask,) = filler.filled([matcher])
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def test_masks_filled_beside_a_step_are_those_filled_at_once(guidance: Guidance) -> None:
    grammars = [Grammar("regex", f"[a-{letter}]+") for letter in "bcdefg"]
    ahead, at_once = ([guidance.matcher(one) for one in grammars] for _ in range(2))
    filler, other = MaskFiller(VOCAB), MaskFiller(VOCAB)
    filler.begin(ahead)
    filler.begin(ahead)  # again, as when a step was given up
    np.testing.assert_array_equal(filler.filled(ahead), other.filled(at_once))
    for matcher in ahead[1:4]:
        matcher.follow(ord("a"))
    filler.begin(ahead)
    # Some of the rows only, in another order.
    some = [ahead[3], ahead[0]]
    np.testing.assert_array_equal(filler.filled(some), [other.filled([one])[0] for one in some])
    assert allowed_bytes(ahead[3], filler) == {*b"abcde", END}
    assert allowed_bytes(ahead[0], filler) == {*b"ab"}


def test_a_matcher_goes_back(guidance: Guidance) -> None:
    matcher, filler = guidance.matcher(Grammar("regex", "ab(c|d)")), MaskFiller(VOCAB)
    other = matcher.fork()
    for token in b"abc":
        matcher.follow(token)
    assert matcher.is_over
    matcher.rewind(1)
    assert not matcher.is_over and allowed_bytes(matcher, filler) == {ord("b")}
    matcher.rewind(0)
    assert allowed_bytes(matcher, filler) == allowed_bytes(other, filler) == {ord("a")}
    assert matcher.forced() == [*b"ab"]
    with pytest.raises(GrammarError, match="after 0 tokens"):
        matcher.follow(ord("x"))


def test_a_vocabulary_without_an_end(guidance: Guidance) -> None:
    """Only the grammar ends the reply: where it may end, the tokens that continue it remain allowed."""
    matcher = Guidance(lambda: BYTES, VOCAB, []).matcher(Grammar("regex", "a*"))
    matcher.follow(ord("a"))
    assert allowed_bytes(matcher, MaskFiller(VOCAB)) & set(range(VOCAB)) == {ord("a")}


ENDLESS = """{
    "type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "required": ["a"],
    "$defs": {"b": {"anyOf": [{"$ref": "#"}]}}
}"""
REFUSED = {
    "no schema type": (Grammar("json_schema", '{"type": "strin"}'), "strin"),
    "a part": (Grammar("json_schema", '{"properties": {"a/b": {"items": {"minimum": "x"}}}}'), "minimum"),
    "what is not implemented": (Grammar("json_schema", '{"contains": {"const": 1}, "type": "array"}'), "contains"),
    "nothing matches": (Grammar("json_schema", '{"type": "string", "minLength": 2, "maxLength": 1}'), "Unsatisfiable"),
    "false": (Grammar("json_schema", "false"), "false"),
    "itself": (Grammar("json_schema", '{"$ref": "#"}'), "would be infinite"),
    "one in another": (Grammar("json_schema", ENDLESS), "would be infinite"),
    "elsewhere": (Grammar("json_schema", '{"$ref": "http://example.com/a"}'), "example.com"),
    "a pattern": (Grammar("regex", "a("), "unclosed group"),
    "look-ahead": (Grammar("regex", "(?=a)b"), "look"),
    "a name": (Grammar("grammar", "start: foo"), "foo"),
    "no way": (Grammar("grammar", "start: A\nA: /[a-z]+/ & /[0-9]+/"), "no reply can match"),
    "nested": (Grammar("grammar", "start: " + "(" * 20000 + '"a"' + ")" * 20000), "deeply"),
    "repeated": (Grammar("regex", "(((a{1000}){1000}){1000}){1000}"), "too many"),
    "GBNF": (Grammar("grammar", "root ::= (\n"), ""),
    "many": (Grammar("json_schema", '{"enum": ' + str(list(range(200_000))) + "}"), ""),
}


@pytest.mark.parametrize("name", REFUSED)
def test_grammars_that_cannot_be_used(name: str, guidance: Guidance) -> None:
    grammar, why = REFUSED[name]
    with pytest.raises(GrammarError) as raised:
        guidance.matcher(grammar)
    assert why in raised.value.why and raised.value.fix and len(str(raised.value)) < 600


def test_the_wrong_part_of_a_schema_is_named(guidance: Guidance) -> None:
    with pytest.raises(GrammarError, match="at /properties/a~1b/items\n"):
        guidance.matcher(REFUSED["a part"][0])


def test_a_grammar_that_takes_too_long(guidance: Guidance, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def compute(self: Guidance, grammar: Grammar) -> None:
        while not over.is_set():
            pass

    monkeypatch.setattr("genai.engine.sampling.guidance.SECONDS", 0.01)
    monkeypatch.setattr("genai.engine.sampling.guidance._BUSY", 10**6)
    monkeypatch.setattr(Guidance, "_compile", compute)
    with pytest.raises(GrammarError, match=r"the compilation takes more than \d+ seconds"):
        guidance.matcher(Grammar("regex", "never before"))
    over.set()


def test_a_busy_machine_refuses_no_grammar_too_soon(guidance: Guidance, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time in which the compiling thread does not run is not counted, but the total wait is limited."""
    compiled, over = guidance.matcher(Grammar("regex", "known"))._matcher, threading.Event()

    def wait(self: Guidance, grammar: Grammar) -> object:
        over.wait(0.5 if grammar.text == "slow" else None)
        return compiled

    monkeypatch.setattr("genai.engine.sampling.guidance.SECONDS", 0.1)
    monkeypatch.setattr("genai.engine.sampling.guidance._BUSY", 10**6)
    monkeypatch.setattr(Guidance, "_compile", wait)
    assert guidance.matcher(Grammar("regex", "slow")).num_followed == 0
    monkeypatch.setattr("genai.engine.sampling.guidance._BUSY", 2)
    with pytest.raises(GrammarError, match=r"the compilation takes more than \d+ seconds"):
        guidance.matcher(Grammar("regex", "for ever"))
    over.set()


def test_a_grammar_that_explodes_while_it_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    from llguidance import LLParserLimits

    small = LLParserLimits(max_lexer_states=100, verbose_errors=False)
    monkeypatch.setattr("genai.engine.sampling.guidance._limits", lambda: small)
    matcher = Guidance(lambda: BYTES, VOCAB, [END]).matcher(Grammar("regex", "(.*a.{500}){5}"))
    filler = MaskFiller(VOCAB)
    with pytest.raises(GrammarError, match="the grammar failed after") as raised:
        for _ in range(100):
            filler.filled([matcher])
            matcher.follow(ord("a"))
    assert "too many states" in raised.value.why and "fewer alternatives" in raised.value.fix


def test_compiled_grammars_are_kept_and_their_number_is_bounded(guidance: Guidance) -> None:
    for number in range(100):
        guidance.matcher(Grammar("regex", f"number {number}"))
    assert len(guidance._compiled) <= 64


def test_rows_with_and_without_a_mask_in_one_batch(rng: np.random.Generator) -> None:
    logits = rng.normal(0, 1, (3, 300)).astype(np.float32)
    made = rows([words(np.arange(300) == 9)] * 3, 300)
    made[1].matcher = None
    free = BatchSampler(300).distributions(logits[1:2], [without_matcher(made[1])])[0]
    found = BatchSampler(300).distributions(logits, made)
    np.testing.assert_array_equal(found[1], free)
    assert found[0].argmax() == found[2].argmax() == 9


def without_matcher(row: RowSampler) -> RowSampler:
    return RowSampler(dataclasses.replace(row.plan), row.tokens, seed=row.seed, prompt_length=2)
