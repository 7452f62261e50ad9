"""The engine against itself: batched equals alone, chunked equals whole, rewound equals fresh, and nothing leaks."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genai as og
from genai.engine.decoder import compute
from genai.engine.scheduler import Pending
from genai.errors import (
    CacheCapacityError,
    ContextOverflowError,
    InputError,
    OptionError,
    StateError,
)
from tests.inside_steps import inside_steps

VOCAB = 320


def prompt(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, count).tolist()


def generator(model: og.Model, **options: Any) -> og.Generator:
    params = og.GeneratorParams(model)
    params.set_search_options(**{"max_length": 200, **options})
    return og.Generator(model, params)


def greedy(model: og.Model, tokens: list[int], steps: int, **options: Any) -> list[int]:
    with generator(model, min_length=len(tokens) + steps, **options) as one:
        one.append_tokens(tokens)
        for _ in range(steps):
            one.generate_next_token()
        return one.get_sequence(0).tolist()[len(tokens) :]


@pytest.fixture
def model(form: str, form_folder: Callable[..., Path]) -> Iterator[og.Model]:
    with og.Model(form_folder(form), threads=2) as loaded:
        assert loaded.info.flattened, loaded.info.reason
        yield loaded


@pytest.fixture(scope="module")
def small(form_folder: Callable[..., Path]) -> Iterator[og.Model]:
    with og.Model(form_folder("int4"), threads=2) as loaded:
        yield loaded


def test_a_mixed_batch_equals_each_alone(model: og.Model) -> None:
    """Prompts of different lengths in one step, then decode steps together: the same logits, bit for bit where the
    products are ours, and to rounding where BLAS chooses its kernel by the number of rows."""
    prompts = [prompt(seed, length) for seed, length in enumerate((1, 30, 7, 65))]
    alone = []
    for tokens in prompts:
        with generator(model) as one:
            one.append_tokens(tokens)
            alone.append(one.get_logits()[0, 0])
    with generator(model, batch_size=4) as batch:
        batch.append_tokens(prompts)
        together = batch.get_logits()[:, 0]
    for row, expected in zip(together, alone, strict=True):
        assert np.max(np.abs(row - expected)) <= 1e-4 * expected.std()
    steps = 10
    with generator(model, batch_size=4, min_length=100) as batch:
        batch.append_tokens(prompts)
        for _ in range(steps):
            batch.generate_next_token()
        for index, tokens in enumerate(prompts):
            assert batch.get_sequence(index).tolist()[65:] == greedy(model, tokens, steps)


@pytest.mark.parametrize("length", [90, 25])
def test_chunked_prefill_equals_whole(model: og.Model, length: int) -> None:
    """How a prompt is computed is settled when it is appended, not by the chunks that it is cut into."""
    tokens = prompt(3, length)
    with generator(model) as whole, generator(model, chunk_size=16) as chunked:
        whole.append_tokens(tokens)
        chunked.append_tokens(tokens)
        expected = whole.get_logits()
        assert np.max(np.abs(chunked.get_logits() - expected)) <= 1e-4 * expected.std()


@pytest.mark.parametrize("length", [31, 40])
def test_token_by_token_is_near_prefill(model: og.Model, form: str, length: int) -> None:
    """Single tokens and short prompts go one way; a long prompt may go another, which rounds differently."""
    tokens = prompt(4, length)
    with generator(model) as whole, generator(model) as stepwise:
        whole.append_tokens(tokens)
        for token in tokens:
            stepwise.append_tokens([token])
        expected = whole.get_logits()
        alike = length < 32 or "fp32" in form
        bound = 1e-4 if alike else 0.2
        assert np.max(np.abs(stepwise.get_logits() - expected)) <= bound * expected.std()


def test_fp32_activations_do_not_depend_on_how_tokens_come(form: str, form_folder: Callable[..., Path]) -> None:
    tokens = prompt(4, 40)
    with og.Model(form_folder(form), threads=2, accuracy="fp32") as exact:
        with generator(exact) as whole, generator(exact) as stepwise:
            whole.append_tokens(tokens)
            for token in tokens:
                stepwise.append_tokens([token])
            expected = whole.get_logits()
            assert np.max(np.abs(stepwise.get_logits() - expected)) <= 1e-4 * expected.std()


def test_threads_do_not_change_a_bit(form: str, form_folder: Callable[..., Path]) -> None:
    """Few rows, many rows and single tokens."""

    def logits(threads: int) -> np.ndarray:
        rows = []
        with og.Model(form_folder(form), threads=threads) as loaded:
            for length in (9, 70):
                with generator(loaded) as one:
                    for tokens in (prompt(5, length), *([token] for token in prompt(6, 4))):
                        one.append_tokens(tokens)
                        rows.append(one.get_logits().ravel())
        return np.stack(rows).view(np.uint32)

    alone = logits(1)
    for threads in (2, 3):
        np.testing.assert_array_equal(logits(threads), alone)


def test_append_generate_append_equals_one_prompt(small: og.Model) -> None:
    with generator(small) as one:
        one.append_tokens(prompt(1, 10))
        one.generate_next_token()
        one.generate_next_token()
        one.append_tokens(prompt(2, 5))
        sequence, logits = one.get_sequence(0).tolist(), one.get_logits()
    with generator(small) as fresh:
        fresh.append_tokens(sequence)
        np.testing.assert_allclose(fresh.get_logits(), logits, atol=1e-4)


@pytest.mark.parametrize(("length", "start"), [(0, 40), (1, 20), (9, 20), (31, 31), (32, 40), (33, 40), (40, 40)])
def test_rewind_equals_fresh(small: og.Model, length: int, start: int) -> None:
    tokens = prompt(6, start)
    with generator(small) as one, generator(small) as fresh:
        one.append_tokens(tokens)
        for _ in range(5):
            one.generate_next_token()
        one.rewind_to(length)
        assert one.token_count() == length
        assert one.get_sequence(0).tolist() == tokens[:length]
        if length:
            fresh.append_tokens(tokens[:length])
            np.testing.assert_array_equal(one.get_logits(), fresh.get_logits())
        one.append_tokens(prompt(7, 3))
        fresh.append_tokens(prompt(7, 3))
        np.testing.assert_array_equal(one.get_logits(), fresh.get_logits())


def test_no_ngram_comes_twice(small: og.Model) -> None:
    tokens = greedy(small, prompt(8, 12), 60, no_repeat_ngram_size=2)
    pairs = list(itertools.pairwise(tokens))
    assert len(set(pairs)) == len(pairs)


def test_generate_after_rewind_adds_one_token(small: og.Model) -> None:
    tokens = prompt(6, 12)
    expected = greedy(small, tokens[:5], 1)
    with generator(small, min_length=50) as one:
        one.append_tokens(tokens)
        one.rewind_to(5)
        one.generate_next_token()
        assert one.get_sequence(0).tolist() == tokens[:5] + expected


def test_set_logits_decides_the_next_token(small: og.Model) -> None:
    with generator(small) as one:
        one.append_tokens(prompt(0, 4))
        logits = one.get_logits()
        logits[:] = 0
        logits[0, 0, 77] = 1
        one.set_logits(logits)
        one.generate_next_token()
        assert one.get_next_tokens().tolist() == [77]
        # The cache holds the true state all the same.
        with generator(small) as fresh:
            fresh.append_tokens([*prompt(0, 4), 77])
            np.testing.assert_allclose(one.get_logits(), fresh.get_logits(), atol=1e-4)


def test_eos_ends_a_sequence_and_fill_follows(small: og.Model) -> None:
    (eos,) = small.config.model.eos_token_ids
    with generator(small, batch_size=2) as batch:
        batch.append_tokens([prompt(0, 4), prompt(1, 6)])
        pad = batch.get_sequence(0)[-1]
        logits = batch.get_logits()
        logits[0, 0, eos] = logits.max() + 1
        logits[1, 0, eos] = logits.min() - 1
        batch.set_logits(logits)
        batch.generate_next_token()
        assert batch.get_next_tokens()[0] == eos
        assert not batch.is_done()
        batch.generate_next_token()
        assert batch.get_sequence(0).tolist() == [*prompt(0, 4), pad, pad, eos, pad]
        assert len(batch.get_sequence(1)) == batch.token_count() == 8
        # Rewound to before the EOS, both go on: each as if it were alone.
        batch.rewind_to(6)
        batch.append_tokens([[5], [6, 7]])
        assert batch.get_sequence(0).tolist() == [*prompt(0, 4), pad, pad, 5, pad]
        for row, tokens in enumerate(([*prompt(0, 4), 5], [*prompt(1, 6), 6, 7])):
            with generator(small) as alone:
                alone.append_tokens(tokens)
                np.testing.assert_allclose(batch.get_logits()[row], alone.get_logits()[0], atol=1e-4)


def test_several_eos_ids(form_folder: Callable[..., Path]) -> None:
    config = og.Config(form_folder("int4"))
    config.overlay('{"model": {"eos_token_id": [2, 7]}}')
    with og.Model(config) as loaded:
        for eos in (2, 7):
            with generator(loaded) as one:
                one.append_tokens([5])
                logits = np.zeros((1, 1, VOCAB), np.float32)
                logits[0, 0, eos] = 1
                one.set_logits(logits)
                one.generate_next_token()
                assert one.is_done()


def test_max_length_ends_generation(small: og.Model) -> None:
    with generator(small, max_length=8, min_length=8) as one:
        one.append_tokens(prompt(0, 5))
        assert sum(1 for _ in one) == 3
        assert one.is_done()
        sequence = one.get_sequence(0).tolist()
        one.generate_next_token()
        assert one.get_sequence(0).tolist() == sequence
        with pytest.raises(ContextOverflowError, match="exceed max_length 8"):
            one.append_tokens([1])
        one.rewind_to(6)
        assert not one.is_done()


def test_same_seed_same_tokens_in_any_company(small: og.Model) -> None:
    options = {"do_sample": True, "temperature": 1.5, "top_k": 0, "random_seed": 11, "min_length": 100}
    tokens = prompt(9, 20)

    def run(batch_size: int, extra: list[list[int]]) -> list[int]:
        with generator(small, batch_size=batch_size, **options) as one:
            one.append_tokens([tokens, *extra])
            for _ in range(20):
                one.generate_next_token()
            return one.get_sequence(0).tolist()[-20:]

    assert run(1, []) == run(3, [prompt(1, 50), prompt(2, 3)])


def test_unseeded_runs_differ(small: og.Model) -> None:
    options = {"do_sample": True, "temperature": 5.0, "top_k": 0, "min_length": 60}

    def run() -> list[int]:
        with generator(small, **options) as one:
            one.append_tokens([5])
            for _ in range(20):
                one.generate_next_token()
            return one.get_sequence(0).tolist()

    assert run() != run()


def test_eight_threads_give_the_tokens_they_give_alone(small: og.Model) -> None:
    prompts = [prompt(seed, 5 + 9 * seed) for seed in range(8)]
    expected = [greedy(small, tokens, 20) for tokens in prompts]
    results: list[list[int] | None] = [None] * 8
    barrier = threading.Barrier(8)

    def work(index: int) -> None:
        barrier.wait()
        results[index] = greedy(small, prompts[index], 20)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == expected
    pool = small.decoder.pool  # type: ignore[attr-defined]
    assert not any(map(pool.references, range(pool.num_blocks)))


def test_dropped_generators_give_their_blocks_back(small: og.Model) -> None:
    pool = small.decoder.pool  # type: ignore[attr-defined]
    free = pool.num_free
    for _ in range(3):
        one = generator(small)
        one.append_tokens(prompt(0, 70))
        del one
    assert pool.num_free == free


def test_a_full_cache_raises_and_leaves_the_sequence_as_it_was(form_folder: Callable[..., Path]) -> None:
    bytes_per_token = 2 * 2 * 2 * 16 * 2
    with og.Model(form_folder("int4"), cache_bytes=3 * 32 * bytes_per_token) as loaded:
        with generator(loaded, max_length=96) as one, generator(loaded, max_length=96) as other:
            one.append_tokens(prompt(0, 60))
            logits = one.get_logits()
            with pytest.raises(CacheCapacityError, match="KV cache is too small"):
                other.append_tokens(prompt(1, 40))
            assert other.token_count() == 0
            other.append_tokens(prompt(1, 30))
            with pytest.raises(CacheCapacityError):
                one.append_tokens(prompt(2, 10))
            np.testing.assert_array_equal(one.get_logits(), logits)
            assert one.get_sequence(0).tolist() == prompt(0, 60)
            other.close()
            one.append_tokens(prompt(2, 10))


def test_cache_too_small_for_one_block(form_folder: Callable[..., Path]) -> None:
    with pytest.raises(CacheCapacityError, match="too small for one block"):
        og.Model(form_folder("int4"), cache_bytes=100)


@pytest.mark.parametrize(
    ("action", "error"),
    [
        (lambda g: g.get_sequence(1), InputError),
        (lambda g: g.get_sequence(-1), InputError),
        (lambda g: g.get_sequence(0.0), InputError),
        (lambda g: g.get_sequence(True), InputError),
        (lambda g: g.get_next_tokens(), StateError),
        (lambda g: g.get_logits(), StateError),
        (lambda g: g.generate_next_token(), StateError),
        (lambda g: g.rewind_to(1), InputError),
        (lambda g: g.rewind_to(-1), InputError),
        (lambda g: g.rewind_to(0.0), InputError),
        (lambda g: g.set_logits(np.zeros(3, np.float32)), InputError),
        (lambda g: g.set_logits(np.array(["x"] * VOCAB)), InputError),
        (lambda g: g.append_tokens([]), InputError),
        (lambda g: g.append_tokens([VOCAB]), InputError),
        (lambda g: g.append_tokens([1.5]), InputError),
        (lambda g: g.append_tokens([1] * 201), ContextOverflowError),
        (lambda g: g.set_active_adapter(None, "x"), InputError),
        (lambda g: g.get_output("logits"), StateError),
        (lambda g: g.nothing, AttributeError),
    ],
)
def test_misuse(small: og.Model, action: Callable[[og.Generator], Any], error: type[Exception]) -> None:
    with generator(small) as one, pytest.raises(error) as caught:
        action(one)
    if isinstance(caught.value, og.GenaiError):
        assert caught.value.why
        assert caught.value.fix


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"min_p": 0.1}, OptionError, "unknown search option 'min_p'"),
        ({"temprature": 0.1}, OptionError, "did you mean 'temperature'"),
        ({"temperature": -1}, OptionError, "0 or greater"),
        ({"temperature": float("nan")}, OptionError, "0 or greater"),
        ({"length_penalty": float("inf")}, OptionError, "a number"),
        ({"random_seed": float("inf")}, OptionError, "whole number"),
        ({"temperature": "1"}, OptionError, "is a string"),
        ({"temperature": True}, OptionError, "is a boolean"),
        ({"top_k": -1}, OptionError, "0 \\(all\\) or greater"),
        ({"top_k": VOCAB + 1}, OptionError, "vocabulary has 320"),
        ({"top_k": 2.5}, OptionError, "whole number"),
        ({"top_p": 1.1}, OptionError, "0 to 1"),
        ({"do_sample": 1}, OptionError, "True or False"),
        ({"repetition_penalty": 0}, OptionError, "greater than 0"),
        ({"max_length": 257}, OptionError, "context_length is 256"),
        ({"max_length": 0}, OptionError, "1 or greater"),
        ({"min_length": -1}, OptionError, "0 or greater"),
        ({"min_length": 257}, OptionError, "context_length is 256"),
        ({"batch_size": 10**400}, OptionError, "below 2"),
        ({"random_seed": -(10**400)}, OptionError, "in the range of a float"),
        ({"no_repeat_ngram_size": 10**5000}, OptionError, "too long to show"),
        ({"repetition_penalty": 1e-300}, OptionError, "1e-28"),
        ({"batch_size": 0}, OptionError, "1 or greater"),
        ({"num_beams": 257}, OptionError, "1 to 256"),
        ({"num_return_sequences": 0}, OptionError, "num_return_sequences"),
        ({"no_repeat_ngram_size": -1}, OptionError, "0 or greater"),
    ],
)
def test_search_options_are_checked(
    small: og.Model, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    params = og.GeneratorParams(small)
    before = params.get_search_options()
    with pytest.raises(error, match=message):
        params.set_search_options(**options)
    assert params.get_search_options() == before


def test_contradicting_lengths(small: og.Model) -> None:
    with pytest.raises(OptionError, match="min_length = 100 is greater than max_length = 50"):
        generator(small, min_length=100, max_length=50)


def test_params_of_another_model(small: og.Model, form_folder: Callable[..., Path]) -> None:
    with og.Model(form_folder("fp32")) as other, pytest.raises(InputError, match="another model"):
        og.Generator(other, og.GeneratorParams(small))


def test_a_closed_model_says_so(form_folder: Callable[..., Path]) -> None:
    loaded = og.Model(form_folder("int4"))
    loaded.close()
    loaded.close()
    with pytest.raises(StateError, match="closed"):
        generator(loaded)


@pytest.mark.parametrize("closed", ["generator", "model"])
def test_what_is_closed_computes_no_more(closed: str, form_folder: Callable[..., Path]) -> None:
    """Its tokens can still be read."""
    with og.Model(form_folder("int4")) as loaded:
        held = generator(loaded)
        held.append_tokens([5, 6, 7])
        (held if closed == "generator" else loaded).close()
        for action in (
            held.get_logits,
            held.generate_next_token,
            lambda: held.append_tokens([5]),
            lambda: held.rewind_to(1),
        ):
            with pytest.raises(StateError, match=f"the {closed} is closed"):
                action()
        assert held.get_sequence(0).tolist() == [5, 6, 7] and held.token_count() == 3


def test_the_reference_rounds_no_keys_and_values(form_folder: Callable[..., Path]) -> None:
    """Unless it is asked to: its cache is that of accuracy="fp32", whatever the products allow."""
    folder, logits = form_folder("int4"), []
    with og.Model(folder) as loaded:
        assert loaded.info.kv_dtype == "fp16"
    with og.Model(folder, device="reference", kv_dtype="fp16") as rounding:
        assert rounding.info.kv_dtype == "fp16"
    for options in ({"device": "reference"}, {"accuracy": "fp32"}):
        with og.Model(folder, **options) as loaded, generator(loaded) as one:
            assert loaded.info.kv_dtype == "fp32"
            one.append_tokens(list(range(5, 45)))
            logits.append(one.get_logits())
    np.testing.assert_allclose(*logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_a_closed_model_gives_its_weights_back(device: str, form_folder: Callable[..., Path]) -> None:
    """Also while somebody holds a generator, who is told."""
    loaded = og.Model(form_folder("int4"), device=device)
    held = generator(loaded)
    held.append_tokens([5, 6, 7])
    program = weakref.ref(loaded.decoder.run)
    loaded.close()
    gc.collect()
    assert program() is None
    with pytest.raises(StateError, match="closed"):
        held.append_tokens([5])


def test_a_model_closed_in_the_middle_of_a_step(form_folder: Callable[..., Path]) -> None:
    loaded = og.Model(form_folder("int4"))
    held = generator(loaded)
    with inside_steps(loaded.decoder, loaded.close), pytest.raises(StateError, match="closed"):
        held.append_tokens([5, 6, 7])


def test_blocks_are_copied_by_the_executor(small: og.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a fork shares and writes to."""
    copied: list[Any] = []
    copy = small.decoder.executor.copy_blocks

    def spy(blocks: Any, copies: Any) -> None:
        copied.extend(copies)
        copy(blocks, copies)

    monkeypatch.setattr(small.decoder.executor, "copy_blocks", spy)
    first = small.decoder.open()
    first.append([5, 6, 7])
    compute(small.decoder, [first])
    second = first.fork()
    (source,) = first.cache.tables[0].blocks
    for sequence in (first, second):
        sequence.append([8])
        compute(small.decoder, [sequence])
    assert copied[0] == (source, first.cache.tables[0].blocks[0])
    for sequence in (first, second):
        sequence.close()


@pytest.mark.parametrize(
    "options", [{"threads": 0}, {"threads": 1.5}, {"kv_dtype": "int3"}, {"accuracy": "best"}, {"cache_bytes": -1}]
)
def test_model_options_are_checked(form_folder: Callable[..., Path], options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        og.Model(form_folder("int4"), **options)


def test_a_prompt_takes_the_numerics_of_what_it_finds_and_keeps_them(form_folder):
    """A reply that comes back as part of a prompt is found as it was decoded, and computed so again if it must be."""
    tokens = list(range(3, 104))
    with og.Model(form_folder("int4")) as model:
        reply, later = model.decoder.open(), model.decoder.open()
        reply.append(tokens[:40])
        for token in tokens[40:]:
            reply.append([token])
        compute(model.decoder, [reply])
        reply.publish()
        later.append(tokens)
        assert later.pending() == Pending(101, True)
        assert later.reuse() == 96
        found = compute(model.decoder, [later])[0]
        later.truncate()
        assert later.pending() == Pending(40, True)
        assert np.array_equal(compute(model.decoder, [later])[0], found)
