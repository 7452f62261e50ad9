"""With speculative decoding, every output is bit-identical, for any proposals, preemption or cancellation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genai
import genai.errors
from genai.convert import DecoderSpec, ExportOptions, write_model_folder
from genai.engine.decoder import compute
from genai.engine.speculation.speculator import Speculator
from genai.llm.completion import Completion
from genai.models.folders import bundled_adapter
from tools.random_weights import RandomWeights
from tools.speculation_agreement import WAYS, ScriptedGuesses, facts, guessing, known_of

from .conftest import SPEC

TEXTS = ["Once upon a time", "Monday, Tuesday, Wednesday, Monday, Tuesday,", "A", "The cat and the dog " * 12]
MIXED: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 30, "logprobs": 2},
    {"temperature": 0.8, "top_p": 0.9, "seed": 1, "max_tokens": 25, "logprobs": 3, "stop": ["e t", "ing"]},
    {"temperature": 1.2, "repetition_penalty": 2, "frequency_penalty": 1, "seed": 2, "min_tokens": 9, "max_tokens": 40},
    {"mirostat": 2, "seed": 3, "max_tokens": 20, "n": 3, "prompt_logprobs": 1},
    {"temperature": 1, "dry_multiplier": 0.8, "top_k": 50, "seed": 4, "max_tokens": 35, "banned_strings": ["the", "a"]},
    {"temperature": 1.5, "no_repeat_ngram_size": 2, "seed": 5, "max_tokens": 30, "ignore_eos": True,
     "begin_suppress_tokens": range(3, 900),
     "sequence_bias": [[[i, i + j], bias] for i in range(3, 1400) for j, bias in ((1, 4.0), (2, -float("inf")))]},
]  # fmt: skip


class SteadyCosts(Speculator):
    """A step takes ten seconds plus a hundredth per row, so that proposals do not depend on the machine."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for sequences in range(1, 33):
            for rows in (sequences, sequences, sequences + 64, sequences + 64):
                self.note(sequences, rows, 0.0)

    def note(self, sequences: int, rows: int, seconds: float) -> None:
        super().note(sequences, rows, 10.0 + 0.01 * rows)


def all_facts(completions: list[Completion]) -> list[tuple[Any, ...]]:
    return [facts(one) for one in completions]


def requests(llm: genai.LLM) -> tuple[list[list[int]], list[genai.SamplingParams]]:
    prompts = [llm.encode(TEXTS[index % len(TEXTS)]) for index in range(len(MIXED))]
    return prompts, [genai.SamplingParams(**options) for options in MIXED]


@pytest.fixture(scope="module", params=["int4", "fp32", "window", "long-rope"])
def form_llm(request: pytest.FixtureRequest, form_folder: Callable[[str], Path]) -> Iterator[genai.LLM]:
    with genai.LLM(form_folder(request.param), threads=2) as llm:
        yield llm


# --- what it rests on ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"accuracy": "fp32"}, {"kv_dtype": "int8"}], ids=str)
def test_tokens_have_the_same_bits_one_by_one_and_several_in_a_step(
    options: dict[str, Any], bundled_folder: Path
) -> None:
    rng = np.random.default_rng(0)
    with genai.Model(bundled_folder, **options) as model:
        decoder = model.decoder
        prompt, tokens = rng.integers(3, 1500, 90).tolist(), rng.integers(3, 1500, 24).tolist()
        rows = {}
        for size in (1, 2, 3, 5, 8, 17):
            sequence = decoder.open()
            sequence.append(prompt)
            compute(decoder, [sequence])
            parts = []
            for begin in range(0, len(tokens), size):
                for token in tokens[begin : begin + size]:
                    sequence.append([token])
                parts.append(compute(decoder, [sequence], all_rows=True)[0].copy())
            rows[size] = np.concatenate(parts).view(np.int32)
            sequence.close()
        for found in rows.values():
            np.testing.assert_array_equal(found, rows[1])


def test_proposals_are_kept_where_the_same_is_appended(bundled: genai.Model) -> None:
    decoder = bundled.decoder
    sequence = decoder.open()
    sequence.append([5, 6, 7])
    compute(decoder, [sequence])
    sequence.append([8])
    sequence.propose([9, 10, 11])
    (rows,) = compute(decoder, [sequence])
    assert len(rows) == 4 and sequence.num_computed == 7
    sequence.append([9])
    assert sequence.proposed == [10, 11] and sequence.num_computed == 7
    sequence.append([12])
    assert sequence.proposed == [] and sequence.tokens == [5, 6, 7, 8, 9, 12] and sequence.num_computed == 5
    other = decoder.open()
    for token in sequence.tokens:
        other.append([token])
    (mine,), (theirs,) = compute(decoder, [sequence]), compute(decoder, [other])
    np.testing.assert_array_equal(mine[-1], theirs[-1])
    sequence.propose([1, 2])
    sequence.rewind(4)
    assert sequence.proposed == [] and sequence.num_computed == 3
    sequence.close()
    other.close()


# --- scripted guesses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_whatever_is_guessed_outputs_are_the_same(way: str, form_llm: genai.LLM) -> None:
    prompts, params = requests(form_llm)
    plain = form_llm.generate(prompts, params)
    guesses = ScriptedGuesses(known_of(prompts, plain), 1536, way)
    with guessing(form_llm, guesses):
        found = form_llm.generate(prompts, params)
    assert all_facts(found) == all_facts(plain)
    assert sum(one.proposed_tokens for one in found) == guesses.proposed > 50
    assert sum(one.accepted_tokens for one in found) <= guesses.kept
    if way == "right":
        assert guesses.kept > 0.25 * guesses.proposed  # what comes before going back is not known
    if way == "wrong":
        assert guesses.kept < 0.2 * guesses.proposed
    if way == "mixed":
        assert 0.1 * guesses.proposed < guesses.kept < 0.9 * guesses.proposed


def test_with_adapters(bundled_folder: Path) -> None:
    with genai.LLM(bundled_folder, lora=True) as llm:
        for name in ("words", "pirate"):
            llm.load_adapter(bundled_adapter(name), name)
        prompts = [llm.encode(llm.render("What is 47 + 38?"))] * 3
        options: dict[str, Any] = {"adapter": [None, "words", "pirate"], "temperature": 0.7, "seed": 1}
        plain = llm.generate(prompts, **options)
        with guessing(llm, ScriptedGuesses({}, 1536, "random")):
            assert all_facts(llm.generate(prompts, **options)) == all_facts(plain)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp32"])
def test_with_other_caches(kv_dtype: str, bundled_folder: Path) -> None:
    with genai.LLM(bundled_folder, kv_dtype=kv_dtype) as llm:
        prompts, params = requests(llm)
        plain = llm.generate(prompts, params)
        with guessing(llm, ScriptedGuesses(known_of(prompts, plain), 1536, "mixed")):
            assert all_facts(llm.generate(prompts, params)) == all_facts(plain)


def test_functions_over_logits_are_called_as_ever(llm: genai.LLM) -> None:
    """A stateful processor is called once per token, in order."""
    calls: list[tuple[int, ...]] = []

    def note(token_ids: tuple[int, ...], logits: np.ndarray) -> None:
        calls.append(token_ids)
        logits[len(calls) % 7] += 1

    options: dict[str, Any] = {"logits_processors": [note], "temperature": 0.9, "seed": 1, "max_tokens": 25}
    prompt = llm.encode(TEXTS[3])
    plain, before = llm.generate([prompt], **options), calls.copy()
    calls.clear()
    guesses = ScriptedGuesses(known_of([prompt], plain), 1536, "mixed")
    with guessing(llm, guesses):
        assert all_facts(llm.generate([prompt], **options)) == all_facts(plain)
    assert calls == before and guesses.kept


@pytest.mark.parametrize("way", ["right", "mixed"])
def test_preempted_sequences(
    way: str, form_folder: Callable[[str], Path], assert_all_given_back: Callable[[genai.Model], None]
) -> None:
    folder = form_folder("int4")
    prompts = [np.random.default_rng(seed).integers(3, 1500, 20 + 12 * seed).tolist() for seed in range(6)]
    options: dict[str, Any] = {"temperature": 0.9, "seed": 3, "max_tokens": 80, "ignore_eos": True, "logprobs": 1}
    with genai.LLM(folder) as roomy:
        plain = roomy.generate(prompts, **options)
        size = roomy.model.info.kv_bytes_per_token * 32 * 6
    with genai.LLM(folder, cache_bytes=size) as cramped:
        guesses = ScriptedGuesses(known_of(prompts, plain), 1536, way)
        with guessing(cramped, guesses):
            assert all_facts(cramped.generate(prompts, **options)) == all_facts(plain)
        assert guesses.kept
        assert_all_given_back(cramped.model)


def test_the_prefix_cache_holds_the_same_afterwards(form_folder: Callable[[str], Path]) -> None:
    def conversation(llm: genai.LLM) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = []
        ids = llm.encode(TEXTS[3])
        for turn in range(4):
            (one,) = llm.generate([ids], temperature=0.9, seed=turn, max_tokens=45, ignore_eos=True, logprobs=1)
            found.append((*facts(one), one.cached_tokens))
            ids = [*ids[:-3], *one.token_ids]
        return found

    with genai.LLM(form_folder("int4")) as llm:
        plain = conversation(llm)
    for way in ("wrong", "random"):
        with genai.LLM(form_folder("int4")) as llm, guessing(llm, ScriptedGuesses({}, 1536, way)):
            assert conversation(llm) == plain
    assert plain[-1][-1] > 32


def test_cancelled_ones_leave_the_others_as_they_are(
    form_folder: Callable[[str], Path], assert_all_given_back: Callable[[genai.Model], None]
) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "seed": 3, "max_tokens": 60, "ignore_eos": True}
    with genai.LLM(form_folder("int4")) as llm:
        prompts = [llm.encode(text) for text in TEXTS]
        plain = llm.generate(prompts, **options)
        with guessing(llm, ScriptedGuesses(known_of(prompts, plain), 1536, "mixed")):
            streams = [llm.stream(prompt, **options) for prompt in prompts for _ in range(2)]
            for stream in streams[1::2]:
                next(stream)
                stream.close()
            for stream, expected in zip(streams[::2], plain, strict=True):
                assert "".join(stream) == expected.text
                assert stream.completion.token_ids == expected.token_ids
            for stream, expected in zip(streams[1::2], plain, strict=True):
                ids = stream.completion.token_ids
                assert ids == expected.token_ids[: len(ids)]
        assert_all_given_back(llm.model)


# --- guesses of its own ----------------------------------------------------------------------------------------------


def test_lookup_finds_what_comes_again(llm: genai.LLM) -> None:
    prompts, params = requests(llm)
    prompts, params = [llm.encode(TEXTS[3])] * len(params), [one.replace(ignore_eos=True) for one in params]
    plain = llm.generate(prompts, params)
    with guessing(llm, SteadyCosts()):
        found = llm.generate(prompts, params)
        assert all_facts(found) == all_facts(plain)
        (again,) = llm.generate([llm.encode(TEXTS[3])], temperature=0, max_tokens=80, ignore_eos=True)
    assert sum(one.proposed_tokens for one in found) > 0
    assert 20 < again.accepted_tokens <= again.proposed_tokens
    assert again.usage.proposed_tokens == again.proposed_tokens


def test_a_lookup_file(bundled_folder: Path, tmp_path: Path) -> None:
    """The lookup file contains the reply."""
    with genai.LLM(bundled_folder) as llm:
        prompt = llm.encode(llm.render("Tell me a story about Luna and Tom."))
        options: dict[str, Any] = {"temperature": 0.7, "seed": 3, "max_tokens": 60}
        (plain,) = llm.generate([prompt], **options)
    path = tmp_path / "texts.txt"
    path.write_text("Something else.\n" + plain.text + "\nThe end.\n")
    with genai.LLM(bundled_folder, speculation=genai.Speculation(lookup=False, lookup_file=path)) as llm:
        speculator = llm._speculation.speculator()
        assert speculator is not None
        steady = SteadyCosts(lookup=False, text=speculator._text)
        with guessing(llm, steady):
            (found,) = llm.generate([prompt], **options)
    assert facts(found) == facts(plain)
    assert found.accepted_tokens > 20


def small_draft(folder: Path, tokenizer: Path, seed: int = 9, **changes: Any) -> Path:
    spec = DecoderSpec(
        **{**SPEC, "hidden_size": 32, "num_layers": 1, "intermediate_size": 64, "head_size": 8, **changes}
    )
    write_model_folder(
        folder, spec, ExportOptions(precision="int4"), RandomWeights(spec, seed=seed), tokenizer_dir=tokenizer
    )
    return folder


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("same", [False, True])
def test_draft_models(
    same: bool, sampled: bool, form_folder: Callable[[str], Path], bundled_folder: Path, tmp_path: Path
) -> None:
    """The model as its own draft proposes the right tokens, with the same random numbers; random weights do not."""
    folder = form_folder("int4")
    draft = folder if same else small_draft(tmp_path / "draft", bundled_folder)
    chosen = genai.Speculation(lookup=False, draft=draft, num_speculative_tokens=5)
    with genai.LLM(folder, speculation=chosen) as llm:
        prompts, params = requests(llm)
        if not sampled:
            params = [genai.SamplingParams(temperature=0, max_tokens=30, ignore_eos=True) for _ in params]
        with genai.LLM(folder) as other:
            plain = other.generate(prompts, params)
        made = llm._speculation.speculator()
        assert made is not None and made._draft is not None
        with guessing(llm, SteadyCosts(lookup=False, draft=made._draft, most_tokens=5)):
            found = llm.generate(prompts, params)
        assert all_facts(found) == all_facts(plain)
        proposed, accepted = (sum(getattr(one, f"{what}_tokens") for one in found) for what in ("proposed", "accepted"))
        assert proposed > 0
        # What is banned, and where Mirostat's limit stands, the draft does not know.
        assert accepted > (0.3 if sampled else 0.8) * proposed if same else accepted < 0.2 * proposed
        assert not made._draft._followers
        pool = llm._speculation._draft.decoder.pool  # type: ignore[union-attr]
        assert pool is not None and not any(map(pool.references, range(pool.num_blocks)))


def test_a_draft_with_a_short_context_and_a_small_cache(
    form_folder: Callable[[str], Path], bundled_folder: Path, tmp_path: Path
) -> None:
    """Sequences that the draft's cache cannot hold are not drafted, and nothing fails."""
    draft = small_draft(tmp_path / "draft", bundled_folder, context_length=64)
    with genai.Model(draft) as probe:
        size = probe.info.kv_bytes_per_token * 64
    with genai.Model(draft, cache_bytes=size) as small, genai.LLM(form_folder("int4")) as llm:
        prompts = [llm.encode(text) for text in TEXTS]
        options: dict[str, Any] = {"temperature": 0.8, "seed": 2, "max_tokens": 70, "ignore_eos": True}
        plain = llm.generate(prompts, **options)
        with genai.LLM(llm.model, speculation=genai.Speculation(lookup=False, draft=small)) as drafted:
            made = drafted._speculation.speculator()
            assert made is not None
            with guessing(drafted, SteadyCosts(lookup=False, draft=made._draft)):
                assert all_facts(drafted.generate(prompts, **options)) == all_facts(plain)
        assert small.decoder is not None  # it was given, and stays


def test_tokens_that_a_draft_does_not_have(bundled_folder: Path, tmp_path: Path) -> None:
    """The vocabularies have different padding: a prompt token beyond the draft's vocabulary is not drafted."""
    draft, folder = small_draft(tmp_path / "draft", bundled_folder), tmp_path / "padded"
    small_draft(folder, bundled_folder, seed=1, vocab_size=1600)
    options: dict[str, Any] = {"temperature": 1.5, "seed": 2, "max_tokens": 20, "ignore_eos": True}
    prompts = [[1599], [*range(3, 60), 1536], [5, 1590, 7] * 20, [5, 6, 7]]
    with genai.LLM(folder) as llm:
        plain = llm.generate(prompts, **options)
    with genai.LLM(folder, speculation=genai.Speculation(lookup=False, draft=draft)) as drafted:
        made = drafted._speculation.speculator()
        assert made is not None
        with guessing(drafted, SteadyCosts(lookup=False, draft=made._draft)):
            found = drafted.generate(prompts, **options)
    assert all_facts(found) == all_facts(plain)
    assert [one.proposed_tokens > 0 for one in found] == [False, False, False, True]


def test_a_context_that_is_larger_than_the_drafts(
    form_folder: Callable[[str], Path], bundled_folder: Path, tmp_path: Path
) -> None:
    """The requested context size is limited to the draft's maximum."""
    for own, expected in ((64, 64), (200, 96)):
        draft = small_draft(tmp_path / f"draft-{own}", bundled_folder, context_length=own)
        with genai.LLM(form_folder("int4"), context_size=96, speculation=genai.Speculation(draft=draft)) as llm:
            assert llm.context_size == 96 and llm._speculation._draft is not None
            assert llm._speculation._draft.context_size == expected


def test_on_by_itself(llm: genai.LLM, bundled: genai.Model) -> None:
    """With the step costs of this machine, for any proposals."""
    prompts, params = requests(llm)
    plain = llm.generate(prompts, params)
    for choice in ("lookup", "auto", genai.Speculation(num_speculative_tokens=3)):
        with genai.LLM(bundled, speculation=choice) as guesser:
            for _ in range(2):
                assert all_facts(guesser.generate(prompts, params)) == all_facts(plain)


# --- errors ----------------------------------------------------------------------------------------------------------


def test_a_model_that_cannot_be_speculated_with(form_folder: Callable[[str], Path]) -> None:
    with pytest.raises(genai.errors.UnsupportedModelError, match="cannot be verified"):
        genai.LLM(form_folder("dense"), speculation="lookup")
    with genai.LLM(form_folder("dense"), speculation="auto") as llm:
        (one,) = llm.generate("A", max_tokens=3)
        assert one.proposed_tokens == 0 and not llm._speculation.is_on


@pytest.mark.parametrize("wrong", ["ngram", 5, True, None, ["lookup"]])
def test_wrong_choices(wrong: Any, bundled: genai.Model) -> None:
    with pytest.raises(genai.errors.OptionError, match="speculation = "):
        genai.LLM(bundled, speculation=wrong)


@pytest.mark.parametrize(
    "options",
    [
        {"num_speculative_tokens": 0},
        {"num_speculative_tokens": 65},
        {"num_speculative_tokens": 2.0},
        {"num_speculative_tokens": True},
        {"lookup": "yes"},
        {"lookup": False},
        {"draft": 5},
        {"lookup_file": b"x"},
    ],
    ids=str,
)
def test_wrong_speculations(options: dict[str, Any]) -> None:
    with pytest.raises(genai.errors.OptionError):
        genai.Speculation(**options)


def test_wrong_lookup_files(bundled: genai.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(genai.errors.InputError, match="the file does not exist"):
        genai.LLM(bundled, speculation=genai.Speculation(lookup_file=tmp_path / "none.txt"))
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(genai.errors.InputError, match="UTF-8"):
        genai.LLM(bundled, speculation=genai.Speculation(lookup_file=path))
    path.write_text("x" * 100)
    monkeypatch.setattr("genai.llm.speculation._MOST_CHARACTERS", 99)
    with pytest.raises(genai.errors.InputError, match="100 characters"):
        genai.LLM(bundled, speculation=genai.Speculation(lookup_file=path))
    path.write_text("")
    with genai.LLM(bundled, speculation=genai.Speculation(lookup_file=path)) as llm:
        assert llm.generate("A", max_tokens=2)


def test_drafts_with_other_tokens(
    form_folder: Callable[[str], Path], bundled: genai.Model, bundled_folder: Path, tmp_path: Path
) -> None:
    def refused(folder: Path, message: str) -> None:
        with pytest.raises(genai.errors.VocabularyMismatchError, match=message) as caught:
            genai.LLM(form_folder("int4"), speculation=genai.Speculation(draft=folder))
        assert "a different vocabulary" in caught.value.what and caught.value.fix

    other = small_draft(tmp_path / "tokens", bundled_folder)
    for path in other.glob("*.json"):
        path.write_text(path.read_text(encoding="utf-8").replace("<|im_start|>", "<|im_begin|>"), encoding="utf-8")
    refused(other, "token [0-9]+ is '<.im_start.>' in .* and '<.im_begin.>' in")
    refused(
        small_draft(tmp_path / "ids", bundled_folder, eos_token_ids=(5,)), "eos_token_id is .0, 2. in .* and .5. in"
    )
    with pytest.raises(genai.errors.ModelFolderError):
        genai.LLM(bundled, speculation=genai.Speculation(draft=tmp_path / "none"))
