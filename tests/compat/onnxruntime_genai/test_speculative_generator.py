"""Speculative decoding in a Generator changes no token and no other result of any call; and what it refuses."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai
import pytest

import genai
from genai.convert import DecoderSpec, ExportOptions, write_model_folder
from genai.errors import (
    CacheCapacityError,
    ConfigError,
    GenaiError,
    ModelFolderError,
    NotSupportedYetError,
    OptionError,
    SamplingError,
    StateError,
    UnsupportedModelError,
    VocabularyMismatchError,
)
from genai.kernels.cpu.executor import CpuExecutor
from genai.models import loading
from genai.models.folders import bundled_adapter
from tools.random_weights import RandomWeights

from ...engine.late_executor import LateExecutor, Log
from ...table_models import after, block, drafted_model, table_model, write_config, write_graph
from .test_ahead import act, drawn_calls

TEXT = "one, two, three, four, five, one, two, three, four, five, one, two,"
MODELS = ["self", "other"]
SOURCES: dict[str, dict[str, Any]] = {
    "ngram": {"ngram_size": 3, "max_draft_tokens": 4},
    "chained": {"ngram_size": 2, "max_draft_tokens": 8, "ngram_chained_lookup": True},
    "adaptive": {"ngram_size": 2, "min_adaptive_k": 2, "cooldown": True},
    "self": {"max_draft_tokens": 4},
    "other": {"max_draft_tokens": 3, "min_adaptive_k": 1, "cooldown": True},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, bundled_folder: Path) -> dict[str, Path]:
    """The bundled model with itself as its draft, and with random weights in a folder inside the model's folder."""
    made: dict[str, Path] = {}
    spec = DecoderSpec(
        model_type="llama", vocab_size=1536, hidden_size=64, intermediate_size=96, num_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_size=16, context_length=1024,
    )  # fmt: skip
    small = tmp_path_factory.mktemp("small") / "draft"
    write_model_folder(small, spec, ExportOptions(), RandomWeights(spec, seed=1), tokenizer_dir=bundled_folder)
    for name in MODELS:
        folder = made[name] = tmp_path_factory.mktemp(name) / "model"
        shutil.copytree(bundled_folder, folder, copy_function=os.link)
        source = folder
        if name == "other":
            source = folder / "draft"
            shutil.copytree(small, source)
        config = json.loads((folder / "genai_config.json").read_text())
        draft = json.loads((source / "genai_config.json").read_text())["model"]["decoder"]
        filename = (source / draft["filename"]).relative_to(folder).as_posix()
        config["model"]["draft"] = {**draft, "filename": filename}
        config["speculative"] = {"max_draft_tokens": 5}
        (folder / "genai_config.json").unlink()
        (folder / "genai_config.json").write_text(json.dumps(config))
    return made


@pytest.fixture(scope="module")
def models(folders: dict[str, Path], bundled: genai.Model) -> Iterator[Callable[[str], genai.Model]]:
    loaded = {name: genai.Model(folder, quiet=True) for name, folder in folders.items()}
    yield lambda name: loaded.get(name, bundled)
    for model in loaded.values():
        model.close()


def begin(model: Any, speculative: dict[str, Any], guidance: Any = None, room: int = 60, **search: Any) -> Any:
    params = genai.GeneratorParams(model)
    ids = genai.Tokenizer(model).encode(TEXT)
    params.set_search_options(**{"max_length": len(ids) + room, "do_sample": False, **search})
    params.set_speculative_options(**speculative)
    if guidance is not None:
        params.set_guidance(*guidance)
    generator = genai.Generator(model, params)
    generator.append_tokens(ids)
    return generator


def finished(generator: Any) -> list[int]:
    while not generator.is_done():
        generator.generate_next_token()
    return generator.get_sequence(0).tolist()  # type: ignore[no-any-return]


SEARCH: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 1.3, "top_k": 40, "top_p": 0.95, "random_seed": 5},
    "cold": {"do_sample": True, "temperature": 0.4, "top_k": 8, "random_seed": 6},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 4, "min_length": 90},
    "chunks": {"chunk_size": 1, "do_sample": True, "random_seed": 7},
}


@pytest.mark.parametrize("search", SEARCH)
@pytest.mark.parametrize("source", SOURCES)
def test_each_call_shows_the_same(
    source: str, search: str, models: Callable[[str], genai.Model], bundled: genai.Model
) -> None:
    """Tokens, logits, and the inputs and outputs of the last computation, bit by bit."""
    plain, other = begin(bundled, {}, **SEARCH[search]), begin(models(source), SOURCES[source], **SEARCH[search])
    index = 0
    while not plain.is_done():
        assert not other.is_done()
        if index % 4 == 1:
            assert plain.get_logits().tobytes() == other.get_logits().tobytes()
        if index % 7 == 3:
            assert plain.get_output("logits").tobytes() == other.get_output("logits").tobytes()
            assert plain.get_input("attention_mask").tolist() == other.get_input("attention_mask").tolist()
        for generator in (plain, other):
            generator.generate_next_token()
        assert plain.get_next_tokens().tolist() == other.get_next_tokens().tolist()
        assert plain.get_sequence(0).tolist() == other.get_sequence(0).tolist()
        index += 1
    stats = other.get_speculative_stats()
    assert other.is_done() and stats["draft_tokens_proposed"] > 0
    assert stats["rounds"] == stats["completed_rounds"] + stats["interrupted_rounds"]
    assert stats["tokens_queued"] == stats["tokens_emitted"] + stats["tokens_discarded"]
    assert plain.get_logits().tobytes() == other.get_logits().tobytes()
    assert not any(plain.get_speculative_stats()[name] for name in ("rounds", "effective_k", "tokens_queued"))


def test_a_draft_with_the_same_weights_is_right(models: Callable[[str], genai.Model]) -> None:
    """It chooses with the same random numbers, so even sampled tokens are the same."""
    for search in ("greedy", "sampled"):
        generator = begin(models("self"), SOURCES["self"], min_length=90, **SEARCH[search])
        finished(generator)
        stats = generator.get_speculative_stats()
        assert stats["draft_tokens_accepted"] == stats["draft_tokens_evaluated"] > 20
        assert stats["target_forward_passes"] <= stats["rounds"] < stats["tokens_emitted"] / 3


GUIDANCE = [
    ("regex", "([a-z]{3,5}, ){6}end"),
    ("regex", r"(one, two, three, four, five, ){3}six"),
    ("json_schema", json.dumps({"enum": ["one, two, three, four", "one, two, four, five"]})),
    ("lark_grammar", 'start: ("one, two, three, " | "two, ") "four, five, six"'),
]


@pytest.mark.parametrize("appends_forced", [False, True])
@pytest.mark.parametrize("source", SOURCES)
def test_with_a_grammar(
    source: str, appends_forced: bool, models: Callable[[str], genai.Model], bundled: genai.Model
) -> None:
    """Forced tokens appear one per call with speculation, as in onnxruntime-genai, and together without it."""
    for guidance in GUIDANCE:
        for search in ("greedy", "sampled"):
            given = (*guidance, appends_forced)
            expected = finished(begin(bundled, {}, given, **SEARCH[search]))
            generator = begin(models(source), SOURCES[source], given, **SEARCH[search])
            while not generator.is_done():
                before = generator.token_count()
                generator.generate_next_token()
                assert generator.token_count() <= before + 1
            assert generator.get_sequence(0).tolist() == expected
            stats = generator.get_speculative_stats()
            assert not stats["formula_supported"] and stats["expected_tokens_per_round"] == 0
            assert stats["draft_tokens_accepted"] <= stats["draft_tokens_evaluated"] <= stats["draft_tokens_proposed"]


def test_a_grammar_shortens_proposals(bundled: genai.Model) -> None:
    """The lookup finds "two, three". The grammar allows "two, t", but not "three"."""
    generator = begin(bundled, SOURCES["ngram"], ("regex", " three, f[a-h]+"), room=12)
    generator.generate_next_token()
    stats = generator.get_speculative_stats()
    assert stats["ngram_lookup_hits"] == 1 and stats["ngram_grammar_candidate_rejections"] == 1
    assert 0 < stats["ngram_lookup_tokens_proposed"] == stats["draft_tokens_proposed"] < 4


@pytest.mark.parametrize("seed", range(30))
def test_calls_return_the_same(
    seed: int, models: Callable[[str], genai.Model], bundled: genai.Model, tmp_path: Path
) -> None:
    """Appends, rewinds, logits, forks, adapters and saved states, also in the middle of a round."""
    rng = random.Random(seed)
    source, calls = rng.choice([*SOURCES]), drawn_calls(rng)
    search: dict[str, Any] = {"max_length": 100, "min_length": rng.choice([0, 60]), "chunk_size": rng.choice([0, 0, 2])}
    if rng.random() < 0.5:
        search |= {"do_sample": True, "top_k": 5, "temperature": 1.1, "random_seed": seed}
    found = []
    for model, speculative in ((bundled, {}), (models(source), SOURCES[source])):
        adapters = genai.Adapters(model)
        for name in ("words", "pirate"):
            adapters.load(str(bundled_adapter(name)), name)
        params = genai.GeneratorParams(model)
        params.set_search_options(**search)
        params.set_speculative_options(**speculative)
        with genai.Generator(model, params) as generator:
            generator.append_tokens([5, 9, 31, 77, 12, 8, 5, 9, 31])
            folder = tmp_path / f"{bool(speculative)}"
            folder.mkdir()
            found.append(act(generator, calls, folder, adapters))
        for name in ("words", "pirate"):
            adapters.unload(name, when_idle=True)
    assert found[0] == found[1]


# --- in the middle of a round ----------------------------------------------------------------------------------------


@pytest.fixture
def swapping(tmp_path: Path) -> Callable[..., Any]:
    """A Generator in the middle of a round: 1 2 1 2 is followed by 1, and four more tokens are buffered."""

    def make(**changes: Any) -> Any:
        folder = tmp_path / "swap"
        if not folder.exists():
            table_model(folder, after({1: 2, 2: 1, 7: 1}))
        model = genai.Model(folder)
        params = genai.GeneratorParams(model)
        params.set_search_options(max_length=30)
        options = {"ngram_size": 2, "max_draft_tokens": 4, "ngram_chained_lookup": True, **changes}
        params.set_speculative_options(**options)
        generator = genai.Generator(model, params)
        generator.append_tokens([1, 2, 1, 2])
        generator.generate_next_token()
        assert generator.get_speculative_stats()["tokens_buffered"] == 4 and generator.token_count() == 5
        return generator

    return make


def facts(generator: Any, *names: str) -> list[int]:
    stats = generator.get_speculative_stats()
    return [stats[name] for name in names]


DROPPED = ("interrupted_rounds", "tokens_discarded", "tokens_buffered", "active_rounds", "tokens_emitted")


def test_tokens_appended_in_the_middle_of_a_round(swapping: Callable[..., Any]) -> None:
    generator = swapping()
    generator.append_tokens([7, 1])
    assert facts(generator, *DROPPED) == [1, 4, 0, 0, 1]
    assert facts(generator, "target_reconciliation_forward_passes") == [1]
    assert generator.get_sequence(0).tolist() == [1, 2, 1, 2, 1, 7, 1]
    generator.generate_next_token()
    # Lookup in 1 2 1 2 1 7 1: the last 1 before the end is followed by 7, which is wrong.
    assert generator.get_sequence(0).tolist()[-1] == 2
    assert facts(generator, "rounds", "correction_tokens") == [2, 1]


@pytest.mark.parametrize("length", [0, 3, 5])
def test_a_rewind_in_the_middle_of_a_round(swapping: Callable[..., Any], length: int) -> None:
    generator = swapping()
    generator.rewind_to(length)
    assert facts(generator, *DROPPED) == [1, 4, 0, 0, 1]
    assert generator.get_sequence(0).tolist() == [1, 2, 1, 2, 1][:length]
    if not length:
        generator.append_tokens([1, 2, 1, 2])
    rest = finished(generator)
    assert rest == [1 + index % 2 for index in range(30)]


def test_outputs_after_a_rewind_of_appended_tokens(swapping: Callable[..., Any]) -> None:
    generator = swapping()
    generator.append_tokens([7, 1])
    generator.rewind_to(6)
    generator.generate_next_token()
    assert generator.get_input("attention_mask").shape == (1, 6)
    assert generator.get_output("logits").argmax() == 1


def test_a_rewind_resets_the_width(swapping: Callable[..., Any]) -> None:
    generator = swapping(min_adaptive_k=4)
    for _ in range(9):
        generator.generate_next_token()
    assert facts(generator, "effective_k", "adaptive_k_observations", "adaptive_k_increases") == [5, 2, 1]
    assert generator.get_speculative_stats()["adaptive_k_throughput"] > 0
    generator.rewind_to(4)
    assert facts(generator, "effective_k", "adaptive_k_increases", "adaptive_k_throughput") == [4, 1, 0]


def test_logits_in_the_middle_of_a_round(swapping: Callable[..., Any]) -> None:
    """Reading them changes no counter. Setting them discards the buffer, and the next tokens follow from them."""
    generator = swapping()
    before = generator.get_speculative_stats()
    assert generator.get_logits().argmax() == 2 and generator.get_logits().shape == (1, 1, 10)
    assert generator.get_speculative_stats() == before
    logits = np.full((1, 1, 10), -1e9, np.float32)
    logits[..., 7] = 1e9
    generator.set_logits(logits)
    assert facts(generator, *DROPPED) == [1, 4, 0, 0, 1]
    assert facts(generator, "target_reconciliation_forward_passes") == [1]
    for expected in (7, 1, 2, 1):
        generator.generate_next_token()
        assert generator.get_next_tokens().tolist() == [expected]


def test_a_fork_in_the_middle_of_a_round(swapping: Callable[..., Any]) -> None:
    generator = swapping()
    other = generator.fork()
    assert facts(other, "rounds", *DROPPED) == [0] * 6 and facts(generator, "tokens_buffered") == [4]
    assert finished(other) == finished(generator)
    assert facts(other, "draft_tokens_accepted")[0] > 0


def test_a_saved_state_contains_only_what_is_shown(swapping: Callable[..., Any], tmp_path: Path) -> None:
    generator = swapping()
    generator.save_state(tmp_path / "state")
    generator.rewind_to(1)
    generator.load_state(tmp_path / "state")
    assert generator.get_sequence(0).tolist() == [1, 2, 1, 2, 1]
    assert finished(generator) == [1 + index % 2 for index in range(30)]


def test_a_closed_generator_says_so(swapping: Callable[..., Any]) -> None:
    generator = swapping()
    generator.close()
    generator.close()
    for action in (generator.generate_next_token, generator.get_logits, lambda: generator.append_tokens([1])):
        with pytest.raises(StateError, match="closed"):
            action()
    assert generator.token_count() == 5 and facts(generator, "tokens_buffered") == [0]


def test_a_generator_without_tokens_says_so(bundled: genai.Model) -> None:
    params = genai.GeneratorParams(bundled)
    params.set_speculative_options(ngram_size=3)
    with genai.Generator(bundled, params) as generator, pytest.raises(StateError, match="no prior state"):
        generator.generate_next_token()


def test_a_terminated_session(models: Callable[[str], genai.Model], bundled: genai.Model) -> None:
    generator = begin(models("self"), SOURCES["self"])
    generator.generate_next_token()
    generator.set_runtime_option("terminate_session", "1")
    with pytest.raises(StateError, match="Terminated state"):
        generator.generate_next_token()
    generator.set_runtime_option("terminate_session", "0")
    assert finished(generator) == finished(begin(bundled, {}))


# --- what fails ------------------------------------------------------------------------------------------------------


def test_a_cache_without_room_for_proposals(bundled_folder: Path, bundled: genai.Model) -> None:
    """Two blocks are free, so proposals are dropped first, and then a step fails as it would without them."""
    with genai.Model(bundled_folder, context_size=128, quiet=True, cache_bytes=8 << 20) as model:
        pool, size = model.decoder.pool, 2 * model.decoder.block_size
        assert pool is not None
        held = pool.allocate(pool.num_blocks - 2)
        found = []
        for loaded, speculative in ((bundled, {}), (model, {"ngram_size": 2, "max_draft_tokens": 16})):
            params = genai.GeneratorParams(loaded)
            params.set_search_options(max_length=size + 16)
            params.set_speculative_options(**speculative)
            generator = genai.Generator(loaded, params)
            prompt = ([5, 9, 31] * 40)[: size - 2]
            generator.append_tokens([*prompt, prompt[-1]])
            for _ in range(2):
                generator.generate_next_token()
            found.append(generator.get_sequence(0).tolist())
        assert found[0] == found[1] and len(found[0]) == size + 1
        assert generator.get_speculative_stats()["draft_tokens_proposed"] > 0
        with pytest.raises(CacheCapacityError):
            generator.generate_next_token()
        assert generator.get_sequence(0).tolist() == found[0]
        pool.release(held)
        params = genai.GeneratorParams(bundled)
        params.set_search_options(max_length=size + 16)
        with genai.Generator(bundled, params) as plain:
            plain.append_tokens([*prompt, prompt[-1]])
            assert finished(generator) == finished(plain)


def test_a_step_that_fails_leaves_the_tokens(bundled_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a device whose steps may run ahead: rounds do not use that."""
    log = Log([])
    monkeypatch.setattr(loading, "open_executor", lambda device, threads: LateExecutor(CpuExecutor(1), log))
    with genai.Model(bundled_folder, context_size=256, cache_bytes=8 << 20, quiet=True) as model:
        expected = finished(begin(model, {}, min_length=90))
        log.asked.clear()
        generator = begin(model, SOURCES["chained"], min_length=90)
        for count in range(12):
            generator.generate_next_token()
            if count % 3 == 0:
                before = generator.get_sequence(0).tolist()
                with failing(log, count):
                    for _ in range(20):
                        generator.generate_next_token()
                assert generator.get_sequence(0).tolist()[: len(before)] == before
        assert finished(generator) == expected
        assert "ahead" not in log.asked


@contextmanager
def failing(log: Log, count: int) -> Iterator[None]:
    """Let the next steps or choices fail, whichever comes first."""

    def fail(what: str) -> None:
        if what == ("sample" if count % 2 else "step"):
            raise SamplingError("the device had enough", "a test", "wait")

    log.fails = fail
    with pytest.raises(SamplingError, match="had enough"):
        yield
    log.fails = str


def test_no_possible_token(swapping: Callable[..., Any]) -> None:
    generator = swapping()
    generator.set_logits(np.full((1, 1, 10), -np.inf, np.float32))
    for _ in range(2):
        with pytest.raises(SamplingError, match="no next token can be chosen"):
            generator.generate_next_token()
        generator.set_logits(np.full((1, 1, 10), -np.inf, np.float32))
    assert generator.get_sequence(0).tolist() == [1, 2, 1, 2, 1]


# --- options ---------------------------------------------------------------------------------------------------------


def test_options_are_read_from_the_folder_and_set(tmp_path: Path) -> None:
    speculative = {"max_draft_tokens": 3, "ngram_size": 2, "ngram_chained_lookup": True}
    with genai.Model(table_model(tmp_path / "model", after(), speculative=speculative)) as model:
        params = genai.GeneratorParams(model)
        defaults = {"max_draft_tokens": 3.0, "ngram_size": 2.0, "ngram_chained_lookup": True}
        assert params.get_speculative_options() == {**defaults, "min_adaptive_k": 0.0, "cooldown": False}
        params.set_speculative_options(min_adaptive_k=np.int64(16), cooldown=True, max_draft_tokens=16.0)
        changed = {**defaults, "max_draft_tokens": 16.0, "min_adaptive_k": 16.0, "cooldown": True}
        assert params.get_speculative_options() == changed
        with genai.Generator(model, params) as generator:
            assert generator.get_speculative_stats()["effective_k"] == 16


@pytest.mark.oracle
def test_the_same_options_as_in_onnxruntime_genai(tmp_path: Path) -> None:
    folder = table_model(tmp_path / "model", after())
    found = []
    for og in (genai, onnxruntime_genai):
        params = og.GeneratorParams(og.Model(str(folder)))
        options = params.get_speculative_options()
        found.append([(name, value, type(value)) for name, value in options.items()])
    assert found[0] == found[1]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_draft_tokens": 0}, "max_draft_tokens = 0"),
    ({"max_draft_tokens": 17}, "max_draft_tokens = 17"),
    ({"max_draft_tokens": 2.5}, "max_draft_tokens = 2.5"),
    ({"max_draft_tokens": True}, "max_draft_tokens = True"),
    ({"max_draft_tokens": None}, "max_draft_tokens = None"),
    ({"ngram_size": 1}, "ngram_size = 1"),
    ({"ngram_size": 17}, "ngram_size = 17"),
    ({"ngram_size": "3"}, "ngram_size = '3'"),
    ({"ngram_chained_lookup": 1}, "ngram_chained_lookup = 1"),
    ({"min_adaptive_k": -1}, "min_adaptive_k = -1"),
    ({"min_adaptive_k": 17}, "min_adaptive_k = 17"),
    ({"cooldown": 0.5}, "cooldown = 0.5"),
    ({"adaptive_k": True}, "unknown speculative option 'adaptive_k'"),
    ({"max_draft_token": 3}, "unknown speculative option 'max_draft_token'"),
    ({"cooldown": True, "ngram_size": 99}, "ngram_size = 99"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_wrong_options_are_named(options: dict[str, Any], message: str, bundled: genai.Model) -> None:
    params = genai.GeneratorParams(bundled)
    before = params.get_speculative_options()
    with pytest.raises(OptionError) as caught:
        params.set_speculative_options(**options)
    assert message in caught.value.what and caught.value.why and caught.value.fix
    assert params.get_speculative_options() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_draft_tokens": 99}, "speculative.max_draft_tokens = 99"),
        ({"min_adaptive_k": 1.5}, "speculative.min_adaptive_k = 1.5"),
        ({"ngram_size": 1}, "speculative.ngram_size = 1"),
        ({"cooldown": 1}, "speculative.cooldown = 1"),
        ({"adaptive_k": True}, "unknown key 'speculative.adaptive_k'"),
    ],
)
def test_wrong_options_of_the_folder_are_named(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = table_model(tmp_path / "model", after(), speculative=options)
    with pytest.raises(ConfigError) as caught:
        genai.Model(folder)
    assert message in caught.value.what and caught.value.fix


def refused(model: genai.Model, speculative: dict[str, Any], **search: Any) -> GenaiError:
    params = genai.GeneratorParams(model)
    params.set_search_options(**search)
    params.set_speculative_options(**speculative)
    with pytest.raises(GenaiError) as caught:
        genai.Generator(model, params)
    assert caught.value.why and caught.value.fix
    return caught.value


@pytest.mark.parametrize("source", ["ngram", "self"])
def test_only_one_sequence(source: str, models: Callable[[str], genai.Model]) -> None:
    model, options = models(source), SOURCES[source]
    error = refused(model, options, batch_size=2)
    assert isinstance(error, OptionError) and "does not support batch_size = 2" in error.what
    error = refused(model, options, num_beams=2)
    assert isinstance(error, OptionError) and "does not support num_beams = 2 (beam search)" in error.what
    error = refused(model, options, num_return_sequences=2)
    assert isinstance(error, OptionError) and "num_return_sequences = 2" in error.what
    # The way out that the message names.
    with genai.Model(model.folder, draft=False) as plain:
        assert plain.draft is None
        params = genai.GeneratorParams(plain)
        params.set_search_options(batch_size=2, num_beams=2, max_length=12)
        with genai.Generator(plain, params) as generator:
            generator.append_tokens([[5, 6, 7], [8, 9, 10]])
            generator.generate_next_token()


def test_one_proposer(models: Callable[[str], genai.Model], bundled: genai.Model) -> None:
    error = refused(models("self"), {"ngram_size": 3})
    assert isinstance(error, OptionError) and "cannot be combined with draft-model" in error.what
    error = refused(bundled, {"ngram_chained_lookup": True})
    assert isinstance(error, OptionError) and "ngram_chained_lookup = True requires ngram_size" in error.what
    with begin(bundled, {"max_draft_tokens": 2, "cooldown": True}) as generator:  # limits for what nobody proposes
        generator.generate_next_token()
        assert generator.get_speculative_stats()["effective_k"] == 0


def test_graphs_that_cannot_verify(tmp_path: Path) -> None:
    folder = table_model(tmp_path / "pruned", after())
    write_graph(folder / "model.onnx", after(), last_row_only=True)
    with genai.Model(folder, quiet=True) as model:
        error = refused(model, {"ngram_size": 3})
        assert isinstance(error, UnsupportedModelError) and "pruned last-token-only logits" in error.why
        with genai.Generator(model, genai.GeneratorParams(model)) as generator:
            generator.append_tokens([1])
            generator.generate_next_token()
    with genai.Model(table_model(tmp_path / "sliding", after(), decoder=block(sliding_window=SLIDING))) as model:
        error = refused(model, {"ngram_size": 3})
        assert isinstance(error, UnsupportedModelError) and "rewindable KV cache" in error.what


# --- draft models ----------------------------------------------------------------------------------------------------


def test_a_draft_with_another_vocabulary(tmp_path: Path) -> None:
    folder = drafted_model(tmp_path / "model", after(), np.eye(10, 11))
    with pytest.raises(VocabularyMismatchError, match="Target vocab: 10, Draft vocab: 11") as caught:
        genai.Model(folder)
    assert "draft.onnx" in caught.value.what and caught.value.fix


@pytest.mark.parametrize("filename", ["../draft.onnx", "draft/../../draft.onnx", "/tmp/draft.onnx"])
def test_a_draft_outside_the_folder(filename: str, tmp_path: Path) -> None:
    folder = drafted_model(tmp_path / "model", after(), after())
    shutil.copy(folder / "draft.onnx", tmp_path / "draft.onnx")
    write_config(folder, draft=block(filename))
    with pytest.raises(ConfigError, match=r"model\.draft\.filename") as caught:
        genai.Model(folder)
    assert "inside the model folder" in caught.value.why


def test_a_draft_that_is_missing(tmp_path: Path) -> None:
    folder = drafted_model(tmp_path / "model", after(), after())
    write_config(folder, draft=block("small/model.onnx"))
    with pytest.raises(ModelFolderError, match=r"small/model\.onnx"):
        genai.Model(folder)
    with genai.Model(folder, draft=False) as model, begin_table(model) as generator:
        assert finished(generator)[:4] == [1, 2, 3, 4]
        assert generator.get_speculative_stats()["rounds"] == 0


def begin_table(model: genai.Model) -> genai.Generator:
    params = genai.GeneratorParams(model)
    params.set_search_options(max_length=20)
    generator = genai.Generator(model, params)
    generator.append_tokens([1])
    return generator


CUDA = {"provider_options": [{"cuda": {}}]}
SLIDING = {"window_size": 8, "slide_key_value_cache": True}
BLOCKS: list[tuple[dict[str, Any], type[GenaiError], str]] = [
    ({"draft": {}}, ConfigError, r"model\.draft\.filename is not set"),
    ({"draft": block("")}, ConfigError, r"model\.draft\.filename is not set"),
    ({"draft": block(head_size=0)}, ConfigError, r"model\.draft\.head_size = 0"),
    ({"draft": block(headsize=1)}, ConfigError, r"unknown key 'model\.draft\.headsize'"),
    ({"draft": block(session_options=CUDA)}, ConfigError, "different devices.*'cpu' and 'cuda'"),
    ({"vision": {"filename": "vision.onnx"}}, ConfigError, r"model\.vision"),
    ({"speech": {"filename": "speech.onnx"}}, ConfigError, r"model\.speech"),
    ({"decoder": block(layer_types=["full_attention", "conv"])}, ConfigError, "'conv' in model.decoder.layer_types"),
    ({"draft": block(layer_types=["conv"])}, ConfigError, "'conv' in model.draft.layer_types"),
    ({"draft": block(sliding_window=SLIDING)}, ConfigError, r"model\.draft\.sliding_window\.slide_key_value_cache"),
    ({"draft": block(pipeline=[{"a": {}}])}, NotSupportedYetError, r"model\.draft\.pipeline"),
    ({"draft": block(num_hidden_layers=2)}, UnsupportedModelError, "no input for the keys and values"),
    ({"draft": block(outputs={"logits": "scores"})}, ConfigError, "Draft logits output 'scores' was not found"),
    ({"draft": block(inputs={"input_ids": "tokens"})}, ConfigError, "Draft token ids input 'tokens' was not found"),
]  # fmt: skip


@pytest.mark.parametrize(("blocks", "error", "message"), BLOCKS)
def test_blocks_that_rule_out_a_draft(
    blocks: dict[str, Any], error: type[GenaiError], message: str, tmp_path: Path
) -> None:
    folder = drafted_model(tmp_path / "model", after(), after())
    write_config(folder, **{"draft": block("draft.onnx"), **blocks})
    with pytest.raises(error, match=message) as caught:
        genai.Model(folder)
    assert caught.value.why and caught.value.fix


def test_a_draft_with_inputs_that_nobody_sets(tmp_path: Path) -> None:
    import onnx

    folder = drafted_model(tmp_path / "model", after(), after())
    graph = onnx.load(folder / "draft.onnx")
    graph.graph.input.append(onnx.helper.make_tensor_value_info("bias", onnx.TensorProto.FLOAT, [10]))
    graph.graph.node[-1].output[0] = "plain"
    graph.graph.node.append(onnx.helper.make_node("Add", ["plain", "bias"], ["logits"]))
    onnx.save(graph, folder / "draft.onnx")
    with pytest.raises(UnsupportedModelError, match="the draft model's graph has the input 'bias'"):
        genai.Model(folder, quiet=True)


def test_a_model_closes_its_draft(folders: dict[str, Path]) -> None:
    with genai.Model(folders["other"], context_size=256, quiet=True) as model:
        assert model.draft is not None and model.draft.context_size == 256
        generator = begin(model, {})
        assert generator.get_speculative_stats()["effective_k"] == 5  # the folder's
        generator.generate_next_token()
        draft = model.draft
    with pytest.raises(StateError, match="closed"):
        _ = draft.decoder
    with pytest.raises(StateError, match="closed"):
        generator.generate_next_token()


def test_a_draft_whose_context_is_full_proposes_nothing(folders: dict[str, Path], bundled: genai.Model) -> None:
    with genai.Model(folders["self"], quiet=True) as model:
        assert model.draft is not None
        model.draft.info = model.draft.info.__class__(**{**model.draft.info.__dict__, "context_size": 60})
        generator = begin(model, {}, min_length=90)
        assert finished(generator) == finished(begin(bundled, {}, min_length=90))
        stats = generator.get_speculative_stats()
        assert stats["rounds"] > 0 and stats["standard_fallback_steps"] > 10


def _held_blocks(model: genai.Model | None) -> set[int]:
    assert model is not None and model.decoder.pool is not None
    pool = model.decoder.pool
    return {block for block in range(pool.num_blocks) if pool.references(block)}


def test_drafts_of_several_generators(models: Callable[[str], genai.Model], bundled: genai.Model) -> None:
    """In turn, with one draft model; at the end, neither model holds a block."""
    searches = [SEARCH["greedy"], SEARCH["sampled"], SEARCH["cold"]]
    model = models("other")
    held = [_held_blocks(one) for one in (model, model.draft)]  # by generators of other tests, which they did not close
    generators = [begin(model, {}, **search) for search in searches]
    while not all(generator.is_done() for generator in generators):
        for generator in generators:
            if not generator.is_done():
                generator.generate_next_token()
    for generator, search in zip(generators, searches, strict=True):
        assert generator.get_sequence(0).tolist() == finished(begin(bundled, {}, **search))
        generator.close()
    assert model.draft is not None
    gc.collect()
    for one, before in zip((model, model.draft), held, strict=True):
        assert _held_blocks(one) <= before


def test_an_llm_uses_the_draft_of_the_folder(folders: dict[str, Path], bundled: genai.Model) -> None:
    with genai.LLM(bundled) as llm:
        (expected,) = llm.generate(TEXT, max_tokens=40)
    for choice, is_used in (("auto", True), ("lookup", False), ("off", False)):
        with genai.LLM(folders["self"], speculation=choice, quiet=True) as llm:
            assert (llm.model.draft is not None) == is_used
            (found,) = llm.generate(TEXT, max_tokens=40)
            assert found.token_ids == expected.token_ids


def test_an_adapter_that_replaces_inputs_is_refused(bundled: genai.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = genai.Adapters(bundled)
    monkeypatch.setattr(adapters, "values", lambda name: {"bias": np.zeros(3, np.float32)})
    generator = begin(bundled, SOURCES["ngram"])
    with pytest.raises(UnsupportedModelError, match="cannot be used with speculative decoding"):
        generator.set_active_adapter(adapters, "any")


def test_a_round_ends_where_the_rope_tables_change(tmp_path: Path) -> None:
    """As onnxruntime-genai does for these types: no round computes tokens on both sides of 4097."""
    folder = drafted_model(tmp_path / "phi3", after(), after(), type="phi3", context_length=4110)
    with genai.Model(folder) as model:
        generator = genai.Generator(model, genai.GeneratorParams(model))
        generator.append_tokens([token % 9 for token in range(4094)])
        names = ("rounds", "draft_tokens_proposed", "tokens_emitted", "tokens_discarded", "interrupted_rounds")
        found = []
        for _ in range(6):
            generator.generate_next_token()
            found.append(facts(generator, *names))
        # Two tokens are proposed up to 4096; then one, whose following token is discarded at 4097.
        assert found == [
            [1, 2, 1, 0, 0], [1, 2, 2, 0, 0], [1, 2, 3, 0, 0],
            [2, 6, 4, 0, 0], [2, 6, 5, 0, 0], [2, 6, 6, 0, 0],
        ]  # fmt: skip
