"""Generators with beams: the outputs of onnxruntime-genai, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genai
from genai.convert import DecoderSpec, ExportOptions, write_model_folder
from genai.errors import ContextOverflowError, InputError, NotSupportedYetError, OptionError, StateError
from tools.make_beam_goldens import SPEC
from tools.random_weights import RandomWeights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, bundled_folder: Path) -> Path:
    spec, place = DecoderSpec(**SPEC), tmp_path_factory.mktemp("beams") / "model"
    write_model_folder(
        place, spec, ExportOptions(precision="fp32"), RandomWeights(spec, 3), tokenizer_dir=bundled_folder
    )
    return place


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[genai.Model]:
    with genai.Model(folder, threads=2) as loaded:
        yield loaded


def random_case(rng: np.random.Generator) -> tuple[np.ndarray, dict[str, Any]]:
    """Prompts [batch, L], and options."""
    beams, batch = int(rng.integers(2, 7)), int(rng.integers(1, 4))
    length = int(rng.integers(1, 20))
    prompts = rng.integers(3, SPEC["vocab_size"], (batch, length)).astype(np.int32)
    return prompts, {
        "batch_size": batch,
        "num_beams": beams,
        "num_return_sequences": int(rng.integers(1, beams + 1)),
        "length_penalty": float(rng.choice([-0.5, 0.0, 1.0, 1.0, 2.0])),
        # Of a batch it looks at the candidates of other prompts where this is off.
        "early_stopping": bool(batch > 1 or rng.integers(2)),
        "max_length": length + int(rng.integers(1, 24)),
        "min_length": int(rng.choice([0, 0, length + 1])),
        "repetition_penalty": float(rng.choice([1.0, 1.0, 1.3])),
        "no_repeat_ngram_size": int(rng.choice([0, 0, 2])),
    }


def run(og: Any, model: Any, prompts: Any, options: dict[str, Any]) -> list[Any]:
    params = og.GeneratorParams(model)
    params.set_search_options(**options)
    generator = og.Generator(model, params)
    generator.append_tokens(prompts)
    seen: list[Any] = []
    while not generator.is_done():
        generator.generate_next_token()
        seen.append((np.array(generator.get_next_tokens()).tolist(), generator.token_count()))
    count = options["batch_size"] * options["num_return_sequences"]
    return [seen, [np.array(generator.get_sequence(index)).tolist() for index in range(count)]]


@pytest.mark.oracle
def test_outputs_are_those_of_onnxruntime_genai(folder: Path, model: genai.Model, teacher_forcing: Any) -> None:
    theirs = teacher_forcing.other_library
    other, rng = theirs.Model(str(folder)), np.random.default_rng(5)
    for number in range(60):
        prompts, options = random_case(rng)
        ours, expected = run(genai, model, prompts, options), run(theirs, other, prompts, options)
        assert ours[1] == expected[1], (number, options)
        if options["batch_size"] == 1:  # prompts that are done are shown with what is left of their beams there
            assert ours[0][:-1] == expected[0][:-1], (number, options)


def test_what_beams_refuse(model: genai.Model) -> None:
    def generator(**options: Any) -> genai.Generator:
        params = genai.GeneratorParams(model)
        params.set_search_options(**{"num_beams": 3, "max_length": 20, **options})
        return genai.Generator(model, params)

    for options, kind, said in (
        ({"num_return_sequences": 4}, OptionError, "num_return_sequences = 4"),
        ({"do_sample": True}, OptionError, "do_sample"),
        ({"diversity_penalty": 0.5}, NotSupportedYetError, "diversity_penalty"),
        ({"num_beams": 1, "num_return_sequences": 2}, OptionError, "num_return_sequences = 2"),
    ):
        with pytest.raises(kind, match=said):
            generator(**options)
    for name, value in (("num_beams", 257), ("num_beams", 0), ("num_beams", 2.5), ("length_penalty", 99)):
        with pytest.raises(OptionError, match=name):
            genai.GeneratorParams(model).set_search_options(**{name: value})
    one = generator()
    assert not one.is_done() and one.token_count() == 0
    for call in (one.generate_next_token, one.get_next_tokens, lambda: one.get_sequence(0)):
        with pytest.raises(StateError, match="no tokens"):
            call()
    with pytest.raises(ContextOverflowError, match="exceed max_length 20"):
        one.append_tokens([5] * 21)
    one.append_tokens([5, 6])
    for refused in (
        lambda: one.append_tokens([5]),
        lambda: one.rewind_to(1),
        one.get_logits,
        lambda: one.set_logits(np.zeros(4)),
        one.fork,
        lambda: one.save_state("x"),
        lambda: one.get_output("logits"),
        lambda: one.get_input("input_ids"),
    ):
        with pytest.raises(StateError):
            refused()
    for index in (-1, 1, True, "0"):
        with pytest.raises(InputError, match="get_sequence"):
            one.get_sequence(index)  # type: ignore[arg-type]
    one.generate_next_token()
    assert one.get_next_tokens().shape == (3,)
    assert len(one.get_sequence(0)) == 3  # ends the search, as there
    assert one.is_done()
    pool = model.decoder.pool
    assert pool is not None
    one.close()
    assert pool.num_free == pool.num_blocks


def test_guidance_is_refused_beside_beams(bundled_folder: Path) -> None:
    with genai.Model(bundled_folder) as model:
        params = genai.GeneratorParams(model)
        params.set_search_options(num_beams=2)
        params.set_guidance("regex", "[a-z]+")
        with pytest.raises(OptionError, match="guidance cannot be used with num_beams = 2"):
            genai.Generator(model, params)
