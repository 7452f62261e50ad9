"""States: continuations equal uninterrupted generations; files are whole or absent, and their content is verified."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import genai
from genai.errors import (
    CacheCapacityError,
    OptionError,
    StateError,
    StateFileError,
    StateMismatchError,
)
from genai.models.folders import bundled_adapter
from genai.models.kv_types import kv_types_on
from tests.drawing import Draw

TEXT = "The cat and the dog went to the park. " * 6
SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 5, "ignore_eos": True}
# Options with which what the sampler remembers matters.
REQUESTS: dict[str, dict[str, Any]] = {
    "sampled": SAMPLED,
    "greedy": {"temperature": 0, "ignore_eos": True},
    "mirostat": {"mirostat": 2, "seed": 3, "ignore_eos": True},
    "penalties": {**SAMPLED, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "dry_multiplier": 0.8},
    "minimum": {**SAMPLED, "ignore_eos": False, "min_tokens": 15, "logit_bias": {3: -2.5, 9: float("-inf")}},
    "sequences": {
        **SAMPLED,
        "sequence_bias": [[[i, j], 3.0] for i in range(3, 1500, 7) for j in (4, 9, i)],
        "begin_suppress_tokens": range(3, 1000),
    },
    "stop": {**SAMPLED, "stop": ["zzzz"], "logprobs": 2},
}


def outcome(*completions: Any) -> list[Any]:
    return [token for completion in completions for token in completion.token_ids]


@pytest.mark.parametrize("name", REQUESTS)
def test_a_pause_changes_nothing(llm: genai.LLM, tmp_path: Path, name: str) -> None:
    options = REQUESTS[name]
    whole = llm.generate(TEXT, max_tokens=40, **options)[0]
    first = llm.generate(TEXT, max_tokens=17, keep_state=True, **options)[0]
    assert first.state is not None
    again = first.state.resume(max_tokens=23)
    assert outcome(first, again) == outcome(whole)
    assert first.text + again.text == whole.text
    first.state.save_state(tmp_path / "a.state")
    loaded = llm.load_state(tmp_path / "a.state")
    assert loaded.tokens == first.state.tokens
    restored = loaded.resume(max_tokens=23)
    assert outcome(first, restored) == outcome(whole)
    if whole.logprobs is not None:
        assert (*first.logprobs, *restored.logprobs) == whole.logprobs


@pytest.mark.parametrize("form", ["int4", "fp32", "window", "long-rope", "dense"])
def test_a_pause_changes_nothing_in_any_form(form_folder: Callable[[str], Path], tmp_path: Path, form: str) -> None:
    with genai.LLM(form_folder(form), threads=2) as llm:
        whole = llm.generate(TEXT, max_tokens=50, **SAMPLED)[0]
        first = llm.generate(TEXT, max_tokens=20, keep_state=True, **SAMPLED)[0]
        assert first.state is not None
        first.state.save_state(tmp_path / "a.state")
    with genai.LLM(form_folder(form), threads=1) as llm:
        assert outcome(first, llm.load_state(tmp_path / "a.state").resume(max_tokens=30)) == outcome(whole)


@pytest.mark.parametrize("kv_dtype", ["fp32", "fp16", "bf16", "fp8", "int8", "int4"])
def test_a_pause_changes_nothing_with_any_cache(bundled_folder: Path, tmp_path: Path, kv_dtype: str) -> None:
    options: dict[str, Any] = {"kv_dtype": kv_dtype, "kv_dtype_force": kv_dtype == "int4", "threads": 2}
    device = {} if kv_dtype in kv_types_on("cpu") else {"device": "reference"}
    options = options if not device else {"kv_dtype": kv_dtype, **device}
    with genai.LLM(bundled_folder, **options) as llm:
        first = llm.generate(TEXT, max_tokens=9, keep_state=True, **SAMPLED)[0]
        assert first.state is not None
        first.state.save_state(tmp_path / "a.state")
        rest = first.state.resume(max_tokens=12)
    with genai.LLM(bundled_folder, **options) as llm:
        assert llm.load_state(tmp_path / "a.state").resume(max_tokens=12).token_ids == rest.token_ids
    other = "int8" if kv_dtype != "int8" else "fp16"
    with (
        genai.LLM(bundled_folder, kv_dtype=other, **device) as llm,
        pytest.raises(StateMismatchError, match="numerics"),
    ):
        llm.load_state(tmp_path / "a.state")


def test_samples_and_streams_go_on_apart(llm: genai.LLM) -> None:
    whole = llm.generate(TEXT, n=3, max_tokens=30, **SAMPLED)
    parts = llm.generate(TEXT, n=3, max_tokens=11, keep_state=True, **SAMPLED)
    assert [outcome(a, a.state.resume(max_tokens=19)) for a in parts if a.state] == [outcome(one) for one in whole]
    with llm.stream(TEXT, max_tokens=30, logits_processors=[lambda ids, logits: time.sleep(0.01)], **SAMPLED) as stream:
        for number, _ in enumerate(stream):
            if number == 5:
                state = stream.fork()
        ended = stream.completion
    done = len(state) - ended.prompt_tokens
    assert 0 < done < 30
    assert ended.token_ids[:done] + state.resume(max_tokens=30 - done).token_ids == ended.token_ids
    other = state.resume(max_tokens=30 - done, seed=99)
    assert other.token_ids != ended.token_ids[done:]
    with pytest.raises(StateError, match="is over"):
        stream.fork()


def test_a_text_is_read_once(llm: genai.LLM) -> None:
    document = llm.read(TEXT)
    assert len(document) == len(llm.encode(TEXT)) == len(document.tokens)
    asked = document.generate(["Tom", "Luna", "Tom"], max_tokens=6, temperature=0)
    assert [one.cached_tokens for one in asked] == [len(document)] * 3
    assert asked[0].token_ids == asked[2].token_ids
    assert "".join(document.stream("Tom", max_tokens=6, temperature=0)) == asked[0].text
    more = document.read("Tom")
    assert more.tokens == (*document.tokens, *llm.encode("Tom"))
    pool = llm.model.decoder.pool
    assert pool is not None
    free = pool.num_free
    forks = [document.fork() for _ in range(20)]
    assert pool.num_free == free
    for fork in forks:
        fork.close()
    with pytest.raises(StateError, match="was read, not generated"):
        document.resume()
    with pytest.raises(OptionError, match="prompt_logprobs"):
        document.generate("Tom", prompt_logprobs=0)
    document.close()
    document.close()
    with pytest.raises(StateError, match="closed"):
        document.generate("Tom")


def test_states_give_their_blocks_back(bundled_folder: Path) -> None:
    with genai.LLM(bundled_folder, threads=1) as llm:
        pool = llm.model.decoder.pool
        assert pool is not None
        states = [one.state for one in llm.generate([TEXT, "A"], max_tokens=40, keep_state=True, **SAMPLED)]
        assert pool.num_free < pool.num_blocks
        states.clear()
        assert pool.num_free == pool.num_blocks


def test_adapters_are_part_of_a_state(bundled_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.state"
    with genai.LLM(bundled_folder, threads=1) as llm:
        llm.load_adapter(bundled_adapter("pirate"), "pirate")
        whole = llm.generate(TEXT, max_tokens=20, adapter="pirate", **SAMPLED)[0]
        first = llm.generate(TEXT, max_tokens=8, adapter="pirate", keep_state=True, **SAMPLED)[0]
        assert first.state is not None
        first.state.save_state(path)
        assert outcome(first, first.state.resume(max_tokens=12)) == outcome(whole)
    with genai.LLM(bundled_folder, threads=1) as llm:
        with pytest.raises(OptionError, match="pirate"):
            llm.load_state(path)
        llm.load_adapter(bundled_adapter("words"), "pirate")
        with pytest.raises(StateMismatchError, match="was computed with the adapters pirate"):
            llm.load_state(path)
        llm.load_adapter(bundled_adapter("pirate"), "arr")
        assert outcome(first, llm.load_state(path, adapter="arr").resume(max_tokens=12)) == outcome(whole)


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(llm: genai.LLM, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("saved") / "a.state"
    state = llm.generate(TEXT, max_tokens=9, keep_state=True, **SAMPLED)[0].state
    assert state is not None
    assert state.save_state(path, {"of": "a test"}) == path.stat().st_size
    assert llm.load_state(path).notes == {"of": "a test"}
    return path.read_bytes()


def refused(llm: genai.LLM, path: Path, content: bytes) -> genai.GenaiError:
    path.write_bytes(content)
    pool = llm.model.decoder.pool
    assert pool is not None
    gc.disable()  # what earlier tests left in cycles gives its blocks back at another time
    try:
        free = pool.num_free
        with pytest.raises(StateFileError) as raised:
            llm.load_state(path)
        assert pool.num_free == free
    finally:
        gc.enable()
    assert raised.value.what and raised.value.why and raised.value.fix
    return raised.value


def test_what_is_no_state_is_refused(llm: genai.LLM, tmp_path: Path, saved: bytes) -> None:
    path = tmp_path / "a"
    assert "not a saved state" in str(refused(llm, path, b""))
    assert "not a saved state" in str(refused(llm, path, b"PK\3\4" + bytes(1000)))
    assert "header length is" in str(refused(llm, path, b"genai-st" + struct.pack("<Q", 2**62) + bytes(99)))
    assert "not JSON" in str(refused(llm, path, b"genai-st" + struct.pack("<Q", 2) + b"[[" + bytes(99)))
    assert "format" in str(refused(llm, path, b"genai-st" + struct.pack("<Q", 2) + b"[]" + bytes(99)))
    for place in (tmp_path, tmp_path / "absent"):
        with pytest.raises(StateFileError, match="cannot be read"):
            llm.load_state(place)


def changed(saved: bytes, **changes: Any) -> bytes:
    """Return the file with changed header entries and the matching digest."""
    import hashlib

    (length,) = struct.unpack_from("<Q", saved, 8)
    header = json.loads(saved[16 : 16 + length])
    text = json.dumps({**header, **changes}).encode()
    body = saved[:8] + struct.pack("<Q", len(text)) + text + saved[16 + length : -32]
    return body + hashlib.sha256(body).digest()


HEADERS: list[tuple[dict[str, Any], str]] = [
    ({"format": 2}, "format 2"),
    ({"model": "0" * 64}, "another model"),
    ({"numerics": "gpu"}, "another arithmetic"),
    ({"tokens": 10**9}, "tokens"),
    ({"tokens": -1}, "entries"),
    ({"tokens": True}, "entries"),
    ({"tokens": 70}, "bytes"),
    ({"stored": 33}, "not a multiple of the block size"),
    ({"stored": 0}, "a different layout"),
    ({"stored": 2**30}, "entries"),
    ({"arrays": [["blocks", "uint8", [2**40, 2**40]]]}, "a different layout"),
    ({"arrays": None}, "a different layout"),
    ({"extra": 1}, "entries"),
    ({"adapter": None}, "entries"),
    ({"adapter": {"key": "ff", "weights": {}}}, "was computed with"),
    ({"sampler": []}, "invalid entries"),
    ({"sampler": {"seed": -1}}, "invalid entries"),
    ({"notes": 5}, "entries"),
]


@pytest.mark.parametrize(("changes", "said"), HEADERS, ids=lambda value: str(value)[:30])
def test_headers_that_lie(llm: genai.LLM, tmp_path: Path, saved: bytes, changes: dict[str, Any], said: str) -> None:
    assert said in str(refused(llm, tmp_path / "a", changed(saved, **changes)))


def test_samplers_that_lie(llm: genai.LLM, tmp_path: Path, saved: bytes) -> None:
    (length,) = struct.unpack_from("<Q", saved, 8)
    sampler = json.loads(saved[16 : 16 + length])["sampler"]
    for change in (
        {"params": {**sampler["params"], "temperature": -1}},
        {"params": {**sampler["params"], "logits_processors": ["os.system"]}},
        {"params": {**sampler["params"], "nonsense": 1}},
        {"prompt_length": 10**6},
        {"row": "0"},
        {"forbidden": [2**40]},
        {"surprise_limit": "nan"},
    ):
        assert "invalid entries" in str(refused(llm, tmp_path / "a", changed(saved, sampler={**sampler, **change})))


def test_damage_anywhere_is_seen(llm: genai.LLM, tmp_path: Path, saved: bytes) -> None:
    rng = random.Random(1)
    for _ in range(60):
        place = rng.randrange(len(saved))
        refused(
            llm, tmp_path / "a", saved[:place] + bytes([saved[place] ^ (1 << rng.randrange(8))]) + saved[place + 1 :]
        )
    for length in [rng.randrange(len(saved)) for _ in range(30)]:
        refused(llm, tmp_path / "a", saved[:length])
    refused(llm, tmp_path / "a", saved + b"x")


def test_what_a_file_says_is_for_its_state_alone(bundled_folder: Path, tmp_path: Path, saved: bytes) -> None:
    """Keys and values that do not belong to the tokens, in an otherwise valid file."""
    import hashlib

    (length,) = struct.unpack_from("<Q", saved, 8)
    count = json.loads(saved[16 : 16 + length])["tokens"]
    arrays = 16 + length + 5 * count
    body = saved[:arrays] + bytes(len(saved) - 32 - arrays)
    (tmp_path / "a").write_bytes(body + hashlib.sha256(body).digest())
    with genai.LLM(bundled_folder, threads=2) as llm:
        expected = llm.generate(TEXT, max_tokens=20, **SAMPLED)[0].token_ids
    with genai.LLM(bundled_folder, threads=2) as llm:
        state = llm.load_state(tmp_path / "a")
        state.resume(max_tokens=5)
        state.generate("Tom", max_tokens=5)
        state.read("Luna and Tom. " * 10).close()
        state.close()
        assert llm.generate(TEXT, max_tokens=20, **SAMPLED)[0].token_ids == expected


def test_tokens_outside_the_vocabulary(llm: genai.LLM, tmp_path: Path, saved: bytes) -> None:
    import hashlib

    (length,) = struct.unpack_from("<Q", saved, 8)
    body = saved[: 16 + length] + struct.pack("<i", 10**6) + saved[20 + length : -32]
    assert "token ids range from" in str(refused(llm, tmp_path / "a", body + hashlib.sha256(body).digest()))


def test_another_model_and_a_smaller_one(
    llm: genai.LLM, form_folder: Callable[[str], Path], bundled_folder: Path, tmp_path: Path, saved: bytes
) -> None:
    path = tmp_path / "a"
    path.write_bytes(saved)
    with (
        genai.LLM(form_folder("int4"), threads=1) as other,
        pytest.raises(StateMismatchError, match="another model") as caught,
    ):
        other.load_state(path)
    assert caught.value.why == f"the state belongs to pebble, but {other.model.folder.name} is loaded"
    assert caught.value.fix == "load pebble, or process the text again"
    with genai.LLM(bundled_folder, context_size=32, threads=1) as other:
        with pytest.raises(StateMismatchError, match="loaded model has 32"):
            other.load_state(path)
    with genai.LLM(bundled_folder, context_size=128, cache_bytes=128 * 1024 * 3, threads=1) as other:
        pool = other.model.decoder.pool
        assert pool is not None
        held = pool.allocate(pool.num_free)
        with pytest.raises(CacheCapacityError):
            other.load_state(path)
        pool.release(held)


def test_functions_are_not_saved(llm: genai.LLM, tmp_path: Path) -> None:
    options = {**SAMPLED, "logits_processors": [lambda ids, logits: None]}
    state = llm.generate("A", max_tokens=3, keep_state=True, **options)[0].state
    assert state is not None
    with pytest.raises(StateError, match="logits_processors"):
        state.save_state(tmp_path / "a")
    assert not list(tmp_path.iterdir())
    assert len(state.resume(max_tokens=2).token_ids) == 2


def test_places_that_cannot_be_written(llm: genai.LLM, tmp_path: Path) -> None:
    state = llm.read("A B C")
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "absent" / "a", tmp_path / "pipe"):
        with pytest.raises(StateFileError, match="cannot be saved"):
            state.save_state(place)
        with pytest.raises(StateFileError, match="cannot be read"):
            llm.load_state(place)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    state.save_state(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and len(llm.load_state(tmp_path / "target")) == len(state)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["link", "pipe", "target"]


def test_places_that_are_none(llm: genai.LLM, tmp_path: Path) -> None:
    state = llm.read("A B C")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for place in (5, None, "a\0b", tmp_path / "loop", "~nobody-of-this-name/a"):
        for call in (state.save_state, llm.load_state):
            with pytest.raises(StateFileError, match=r"not a path|cannot be") as raised:
                call(place)  # type: ignore[operator]
            assert raised.value.why and raised.value.fix


KILLED = """
import sys, genai
with genai.LLM(threads=1) as llm:
    states = [llm.read("Luna " * count) for count in (40, 200)]
    print("ready", flush=True)
    while True:
        for state in states:
            state.save_state(sys.argv[1])
"""


def test_killed_while_saving_it_is_whole_or_absent(llm: genai.LLM, tmp_path: Path) -> None:
    """Five times here, and up to fifty times in the slow test."""
    _kill_while_saving(llm, tmp_path, 5, seed=2)


@pytest.mark.slow
def test_killed_many_times_while_saving(llm: genai.LLM, tmp_path: Path, draw: Draw) -> None:
    _kill_while_saving(llm, tmp_path, draw.fewer(50, 4), draw.seed)


def _kill_while_saving(llm: genai.LLM, folder: Path, times: int, seed: int) -> None:
    rng, path, lengths = random.Random(seed), folder / "a.state", {len(llm.encode("Luna " * n)) for n in (40, 200)}
    for _ in range(times):
        with subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            time.sleep(rng.uniform(0, 0.05))
            process.send_signal(signal.SIGKILL)
        if path.exists():
            assert len(llm.load_state(path)) in lengths
    llm.read("A").save_state(path)  # and removes what the killed ones left
    assert [one.name for one in folder.iterdir()] == ["a.state"]


# --- Generator -------------------------------------------------------------------------------------------------------


@pytest.fixture
def generator(bundled: genai.Model) -> Iterator[Callable[..., genai.Generator]]:
    def make(**options: Any) -> genai.Generator:
        params = genai.GeneratorParams(bundled)
        params.set_search_options(
            **{"do_sample": True, "temperature": 0.9, "random_seed": 4, "max_length": 120, **options}
        )
        return genai.Generator(bundled, params)

    yield make


def steps(generator: genai.Generator, count: int) -> list[int]:
    tokens = []
    for _ in range(count):
        generator.generate_next_token()
        tokens.append(int(generator.get_next_tokens()[0]))
    return tokens


def test_a_generator_forks_and_is_saved(generator: Any, tmp_path: Path) -> None:
    prompt = [7, 8, 9] * 15
    one = generator(min_length=110)
    one.append_tokens(prompt)
    steps(one, 6)
    fork = one.fork()
    one.save_state(tmp_path / "g.state")
    expected = steps(one, 20)
    assert steps(fork, 20) == expected
    assert fork.get_sequence(0).tolist() == one.get_sequence(0).tolist()
    restored = generator(min_length=110, random_seed=77)
    restored.load_state(tmp_path / "g.state")
    assert restored.token_count() == len(prompt) + 6
    assert steps(restored, 20) == expected
    fork.rewind_to(50)
    fork.append_tokens([5, 6])
    assert one.token_count() == len(prompt) + 26 and fork.token_count() == 52


def test_what_a_generator_refuses(generator: Any, tmp_path: Path, bundled: genai.Model) -> None:
    with pytest.raises(StateError, match="no tokens"):
        generator().save_state(tmp_path / "g")
    pair = generator(batch_size=2)
    pair.append_tokens([[5, 6], [7, 8]])
    for call in (pair.save_state, pair.load_state):
        with pytest.raises(StateError, match="2 sequences"):
            call(tmp_path / "g")
    assert pair.fork().token_count() == 2
    long = generator()
    long.append_tokens([5] * 40)
    long.save_state(tmp_path / "g")
    with pytest.raises(StateMismatchError, match="max_length is 20"):
        generator(max_length=20).load_state(tmp_path / "g")
    adapters = genai.Adapters(bundled)
    adapters.load(bundled_adapter("pirate"), "pirate")
    other = generator()
    other.set_active_adapter(adapters, "pirate")
    with pytest.raises(StateMismatchError, match="no adapter"):
        other.load_state(tmp_path / "g")
    long.set_active_adapter(adapters, "pirate")
    with pytest.raises(StateError, match="adapters of this sequence were changed"):
        long.save_state(tmp_path / "g")
    other.append_tokens([5] * 40)
    other.save_state(tmp_path / "g")
    expected = steps(other, 5)
    again = generator()
    again.set_active_adapter(adapters, "pirate")
    again.load_state(tmp_path / "g")
    assert steps(again, 5) == expected
