"""Adapters of requests: many in one batch, each with the same output as alone."""

from __future__ import annotations

import gc
import json
import resource
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import genai
from genai import LLM, Model, OptionError, StateError
from genai.errors import StateMismatchError
from genai.llm.chat import ChatSession
from genai.lora.read import read_adapter
from tests.drawing import Draw

SIZES = {"q_proj": (256, 256), "k_proj": (256, 64), "v_proj": (256, 64), "o_proj": (256, 256),
         "gate_proj": (256, 640), "up_proj": (256, 640), "down_proj": (640, 256)}  # fmt: skip
LAYERS = 6


def write_adapter(folder: Path, seed: int, rank: int = 4, targets: Any = tuple(SIZES), size: float = 0.1) -> Path:
    """Write a random adapter for the bundled model."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, tensors = np.random.default_rng(seed), {}
    for layer in range(LAYERS):
        for name in targets:
            columns, rows = SIZES[name]
            block = "mlp" if columns == 640 or rows == 640 else "self_attn"
            module = f"base_model.model.model.layers.{layer}.{block}.{name}"
            tensors[f"{module}.lora_A.weight"] = rng.standard_normal((rank, columns), np.float32) * size
            tensors[f"{module}.lora_B.weight"] = rng.standard_normal((rows, rank), np.float32) * size
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank, "lora_alpha": rank}))
    return folder


@pytest.fixture(scope="module")
def adapter_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    root = tmp_path_factory.mktemp("adapters")

    def make(seed: int, **options: Any) -> Path:
        folder = root / f"{seed}-{sorted(options.items())}".replace("'", "").replace(" ", "")
        return folder if folder.exists() else write_adapter(folder, seed, **options)

    return make


NAMES = {"a": {"rank": 4}, "b": {"rank": 16}, "c": {"rank": 3, "targets": ("q_proj", "down_proj")}, "d": {"rank": 33}}


@pytest.fixture
def llm(bundled_folder: Path, adapter_folder: Callable[..., Path]) -> Iterator[LLM]:
    with LLM(bundled_folder, threads=2) as found:
        for seed, (name, options) in enumerate(NAMES.items()):
            found.load_adapter(adapter_folder(seed, **options), name)
        yield found


def requests(count: int, seed: int) -> list[tuple[list[int], Any]]:
    """Return random prompts, short and long, some with a common prefix, with no adapter, one, or two weighted ones."""
    rng = np.random.default_rng(seed)
    common = rng.integers(3, 1500, 70).tolist()
    made = []
    for _ in range(count):
        tokens = rng.integers(3, 1500, rng.integers(1, 60)).tolist()
        first, second = rng.choice(list(NAMES), 2, replace=False).tolist()
        choice: Any = [None, first, {first: float(rng.uniform(-1, 1.5)), second: 0.5}][rng.integers(3)]
        made.append((common + tokens if rng.random() < 0.3 else tokens, choice))
    return made


def tokens_of(completions: list[genai.Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


OPTIONS: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 12, "ignore_eos": True}


def test_sixty_four_requests_give_what_each_gives_alone(llm: LLM) -> None:
    asked = requests(64, 1)
    together = llm.generate([p for p, _ in asked], adapter=[a for _, a in asked], logprobs=2, **OPTIONS)
    for (prompt, adapter), completion in zip(asked, together, strict=True):
        (alone,) = llm.generate([prompt], adapter=adapter, logprobs=2, **OPTIONS)
        assert alone.token_ids == completion.token_ids
        assert alone.logprobs == completion.logprobs
    assert len({completion.token_ids for completion in together}) > 50


def test_adapters_make_a_difference_and_none_makes_none(llm: LLM, bundled: Model) -> None:
    prompt = llm.encode(llm.render("What is 12 + 7?"))
    with LLM(bundled) as plain:
        base = plain.generate([prompt], logprobs=3, max_tokens=3, ignore_eos=True)[0].logprobs
    by = {name: llm.generate([prompt], adapter=name, logprobs=3, max_tokens=3, ignore_eos=True)[0].logprobs
          for name in (None, *NAMES)}  # fmt: skip
    assert by[None] == base
    assert len({str(found) for found in by.values()}) == len(NAMES) + 1


@pytest.mark.parametrize("blocks", [9, 30])
def test_preempted_sequences_go_on_as_if_nothing_happened(
    blocks: int, bundled_folder: Path, adapter_folder: Callable[..., Path], llm: LLM
) -> None:
    """The cache holds only a part of the batch."""
    asked = requests(12, 2)
    per_block = llm.model.decoder.storage.layout.bytes_per_block  # type: ignore[attr-defined]
    with LLM(bundled_folder, threads=2, cache_bytes=blocks * per_block, context_size=192) as small:
        for seed, (name, options) in enumerate(NAMES.items()):
            small.load_adapter(adapter_folder(seed, **options), name)
        found = small.generate([p for p, _ in asked], adapter=[a for _, a in asked], **{**OPTIONS, "max_tokens": 40})
        pool = small.model.decoder.pool
        assert pool is not None
        assert pool.num_free == pool.num_blocks
    wanted = [llm.generate([p], adapter=a, **{**OPTIONS, "max_tokens": 40})[0] for p, a in asked]
    assert tokens_of(found) == tokens_of(wanted)


def test_the_prefix_cache_knows_adapters(llm: LLM) -> None:
    prompt = np.random.default_rng(4).integers(3, 1500, 200).tolist()

    def cached(adapter: Any) -> int:
        return llm.generate([prompt], adapter=adapter, max_tokens=1)[0].cached_tokens

    for adapter in (None, "a", {"a": 0.5}, {"a": 0.5, "b": 1.0}):
        assert cached(adapter) == 0
        assert cached(adapter) == 192
    assert cached({"a": 1.0}) == 192
    assert cached({"b": 1.0, "a": 0.5}) == 192
    assert cached({"a": 0.0}) == 192
    # By what an adapter holds, not by its name.
    llm.load_adapter(llm.adapters.info("a")["source"], "again")
    assert cached("again") == 192
    llm.load_adapter(llm.adapters.info("a")["source"], "half", 0.5)
    assert cached("half") == 0


def test_samples_and_chunks_and_streams(llm: LLM) -> None:
    prompt = np.random.default_rng(5).integers(3, 1500, 300).tolist()
    several = llm.generate([prompt], adapter="b", n=3, **OPTIONS)
    assert len({one.token_ids for one in several}) == 3
    again = llm.generate([prompt], adapter="b", n=3, **OPTIONS)
    assert tokens_of(several) == tokens_of(again)
    with llm.stream(prompt, adapter="b", **OPTIONS) as stream:
        for _ in stream:
            pass
    assert stream.completion.token_ids == several[0].token_ids


def test_unloading_in_use(llm: LLM) -> None:
    prompt = llm.encode(llm.render("Tell me a story about Luna and Tom."))
    (wanted,) = llm.generate([prompt], adapter="a", max_tokens=60, ignore_eos=True)
    stream = llm.stream(prompt, adapter="a", max_tokens=60, ignore_eos=True)
    next(stream)
    with pytest.raises(StateError, match="Adapter still in use: a"):
        llm.adapters.unload("a")
    llm.unload_adapter("a")
    with pytest.raises(OptionError, match="Adapter not found: a"):
        llm.generate([prompt], adapter="a")
    for _ in stream:
        pass
    assert stream.completion.token_ids == wanted.token_ids
    assert llm.adapters.names == ["b", "c", "d"]


def test_adapters_within_a_budget(
    bundled_folder: Path, adapter_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {name: adapter_folder(20 + index) for index, name in enumerate("stuvw")}
    with LLM(bundled_folder, threads=2) as free:
        free.load_adapter(folders["s"], "s")
        one = free.adapters.nbytes
        prompts = [free.encode(f"Spell {name}") for name in folders]
        for name, folder in list(folders.items())[1:]:
            free.load_adapter(folder, name)
        wanted = tokens_of(free.generate(prompts, adapter=list(folders), **OPTIONS))
    with LLM(bundled_folder, threads=2, max_adapter_bytes=2 * one) as llm:
        for name, folder in folders.items():
            llm.load_adapter(folder, name)
            assert llm.adapters.nbytes <= 2 * one
        assert [llm.adapters.info(name)["in_memory"] for name in folders] == [False, False, False, True, True]
        found = [llm.generate([p], adapter=name, **OPTIONS)[0] for p, name in zip(prompts, folders, strict=True)]
        assert tokens_of(found) == wanted
        assert llm.adapters.nbytes <= 2 * one
        with pytest.raises(genai.CacheCapacityError, match="max_bytes is"):
            llm.generate(prompts, adapter=list(folders), **OPTIONS)
        # Dropped from memory, and other files since.
        changed = write_adapter(tmp_path / "x", 30)
        monkeypatch.chdir(tmp_path)
        llm.load_adapter("x", "x")
        monkeypatch.chdir("/")
        for name in "stx":
            llm.generate(prompts[:1], adapter=name, max_tokens=1)
        for name in "st":
            llm.generate(prompts[:1], adapter=name, max_tokens=1)
        write_adapter(changed, 31)
        with pytest.raises(genai.InputError, match="has changed since it was loaded"):
            llm.generate(prompts[:1], adapter="x")
    with LLM(bundled_folder, threads=2, max_adapter_bytes=one // 2) as llm:
        with pytest.raises(genai.CacheCapacityError, match="max_bytes is"):
            llm.load_adapter(folders["s"], "s")
    with pytest.raises(OptionError, match="max_bytes = 0"):
        LLM(bundled_folder, max_adapter_bytes=0)


def test_the_budget_counts_what_requests_still_use(bundled_folder: Path, adapter_folder: Callable[..., Path]) -> None:
    """Two adapters of one request, unloaded adapters, and adapters that are loaded at the same time."""
    folders = [adapter_folder(seed) for seed in range(20, 25)]
    with LLM(bundled_folder, threads=2, lora=True) as free:
        free.load_adapter(folders[0], "a")
        room = free.adapters.nbytes * 3 // 2
    with LLM(bundled_folder, threads=2, lora=True, max_adapter_bytes=room) as llm:
        llm.load_adapter(folders[0], "a")
        llm.load_adapter(folders[1], "b")
        with pytest.raises(genai.CacheCapacityError, match="max_bytes is"):
            llm.generate(["x"], adapter={"a": 0.5, "b": 0.5})
        assert llm.generate(["x"], adapter="b", max_tokens=1)
        held = llm.adapters.mix("a")
        assert held is not None
        llm.unload_adapter("a")
        assert llm.adapters.nbytes == held.parts[0][0].nbytes
        llm.load_adapter(folders[2], "c")
        assert not llm.adapters.info("c")["in_memory"]
        assert llm.adapters.info("c")["bytes"] == llm.adapters.info("b")["bytes"]
        with pytest.raises(genai.CacheCapacityError, match="of which requests use"):
            llm.generate(["x"], adapter="c")
        del held
        assert llm.generate(["x"], adapter="c", max_tokens=1)
        start = threading.Barrier(len(folders))

        def load(index: int) -> None:
            start.wait()
            llm.load_adapter(folders[index], f"n{index}")

        threads = [threading.Thread(target=load, args=(index,)) for index in range(len(folders))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert llm.adapters.nbytes <= room
        assert sorted(llm.adapters.names) == ["b", "c", "n0", "n1", "n2", "n3", "n4"]


def test_an_adapter_that_overflows_harms_nobody_else(
    llm: LLM, adapter_folder: Callable[..., Path], bundled_folder: Path
) -> None:
    """The adapter's requests end with an error; other sequences reuse pages of the cache that contain its NaN."""
    asked = requests(8, 6)
    wanted = [tokens_of(llm.generate([p], adapter=a, **OPTIONS)) for p, a in asked]
    per_block = llm.model.decoder.storage.layout.bytes_per_block  # type: ignore[attr-defined]
    with LLM(bundled_folder, threads=2, cache_bytes=12 * per_block, context_size=192) as small:
        for seed, (name, options) in enumerate(NAMES.items()):
            small.load_adapter(adapter_folder(seed, **options), name)
        small.load_adapter(adapter_folder(9, size=1e18), "overflowing")
        for _ in range(2):
            lost = [small.stream(prompt, adapter="overflowing", **OPTIONS) for prompt, _ in asked]
            kept = [small.stream(prompt, adapter=adapter, **OPTIONS) for prompt, adapter in asked]
            for stream in lost:
                with pytest.raises(genai.SamplingError, match="no next token"):
                    list(stream)
            for stream in kept:
                list(stream)
            assert [[stream.completion.token_ids] for stream in kept] == wanted


# What may be asked for together with adapters: options of a request, and of the model.
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "samples": {"n": 3},
    "log-probabilities": {"logprobs": 2},
    "the prompt's": {"prompt_logprobs": 1},
    "stops": {"stop": ("a", " the")},
    "banned strings": {"banned_strings": ("e",)},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "dry": {"dry_multiplier": 0.8},
    "least tokens": {"min_tokens": 6, "ignore_eos": False},
    "bias": {"logit_bias": {7: 4.0}},
}
MODELS: dict[str, dict[str, Any]] = {
    "auto": {},
    "fp32": {"accuracy": "fp32"},
    "int8 keys and values": {"kv_dtype": "int8"},
    "int4 keys and values": {"kv_dtype": "int4", "kv_dtype_force": True},
}


@pytest.mark.parametrize("model", MODELS)
def test_every_feature_gives_in_company_what_it_gives_alone(
    model: str, bundled_folder: Path, adapter_folder: Callable[..., Path]
) -> None:
    """Short prompts, and long prompts that are computed in chunks, with a cache that holds a part of them."""
    rng = np.random.default_rng(8)
    prompts = [rng.integers(3, 1500, size).tolist() for size in (9, 330)]
    choices: list[Any] = [None, "b", {"a": -0.5, "d": 0.7}]
    asked = [(feature, prompt, choice) for feature in FEATURES for prompt in prompts for choice in choices]
    with LLM(bundled_folder, threads=1, **MODELS[model]) as wide:
        for seed, (name, options) in enumerate(NAMES.items()):
            wide.load_adapter(adapter_folder(seed, **options), name)
        alone = [wide.generate([p], adapter=c, **{**OPTIONS, **FEATURES[f]}) for f, p, c in asked]
        per_block = wide.model.decoder.storage.layout.bytes_per_block  # type: ignore[attr-defined]
    options = {"cache_bytes": 40 * per_block, "context_size": 400, **MODELS[model]}
    with LLM(bundled_folder, threads=2, **options) as narrow:
        for seed, (name, own) in enumerate(NAMES.items()):
            narrow.load_adapter(adapter_folder(seed, **own), name)
        params = [narrow.params(**{**OPTIONS, **FEATURES[feature]}) for feature, _, _ in asked]
        together = narrow.generate([p for _, p, _ in asked], params, adapter=[c for _, _, c in asked])
    found = iter(together)
    for case, wanted in zip(asked, alone, strict=True):
        for one in wanted:
            other = next(found)
            assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason), (
                case[0],
                case[2],
            )
            assert one.logprobs == other.logprobs
            assert one.prompt_logprobs == other.prompt_logprobs


def churn(llm: LLM, adapter_folder: Callable[..., Path], rounds: int, seed: int) -> None:
    """Run batches while adapters are loaded and unloaded and requests are cancelled. Results are the same as alone."""
    rng = np.random.default_rng(seed)
    alone: dict[str, tuple[int, ...]] = {}
    for round_ in range(rounds):
        asked = requests(6, int(rng.integers(8)))
        streams = [llm.stream(prompt, adapter=adapter, **OPTIONS) for prompt, adapter in asked]
        name = f"x{round_}"
        llm.load_adapter(adapter_folder(int(rng.integers(40, 44))), name)
        dropped = set(rng.choice(6, 2, replace=False).tolist())
        for index in dropped:
            streams[index].close()
        if rng.random() < 0.5:
            streams.append(llm.stream(asked[0][0], adapter=name, **OPTIONS))
        llm.unload_adapter(name)
        for index, stream in enumerate(streams):
            for _ in stream:
                pass
            if index < 6 and index not in dropped:
                key = str(asked[index])
                if key not in alone:
                    (one,) = llm.generate([asked[index][0]], adapter=asked[index][1], **OPTIONS)
                    alone[key] = one.token_ids
                assert stream.completion.token_ids == alone[key]
    pool = llm.model.decoder.pool
    assert pool is not None
    assert pool.num_free == pool.num_blocks
    assert llm.adapters.names == list(NAMES)


def test_adapters_come_and_go(llm: LLM, adapter_folder: Callable[..., Path]) -> None:
    churn(llm, adapter_folder, 8, 0)


@pytest.mark.slow
def test_half_a_minute_of_it(llm: LLM, adapter_folder: Callable[..., Path], draw: Draw) -> None:
    """Half a minute of churn, or a third of that, with numbers that are drawn by the commit."""
    churn_for(llm, adapter_folder, draw.fewer(30, 3), draw.seed)


@pytest.mark.fuzz
def test_ten_minutes_of_it(llm: LLM, adapter_folder: Callable[..., Path]) -> None:
    churn_for(llm, adapter_folder, 600)


def churn_for(llm: LLM, adapter_folder: Callable[..., Path], seconds: float, seed: int = 0) -> None:
    end, sizes = time.monotonic() + seconds, []
    while time.monotonic() < end:
        churn(llm, adapter_folder, 20, seed)
        seed += 1
        sizes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert sizes[-1] < 1.02 * sizes[len(sizes) // 3]


def test_choices_that_mean_nothing(llm: LLM) -> None:
    for choice, message in (
        ("q", "Adapter not found: q"),
        ({"q": 1.0}, "Adapter not found: q"),
        ({"a": float("nan")}, "weight of adapter 'a' = nan"),
        ({"a": float("inf")}, "weight of adapter 'a' = inf"),
        ({"a": "1"}, "weight of adapter 'a' = '1'"),
        ({"a": 10**400}, "weight of adapter 'a' = 1000"),
        (7, "adapter = 7"),
    ):
        with pytest.raises(OptionError, match=message):
            llm.generate(["x"], adapter=choice)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="2 adapters for 1 prompts"):
        llm.generate(["x"], adapter=["a", "b"])
    with pytest.raises(OptionError, match="Adapter already loaded: a"):
        llm.load_adapter(llm.adapters.info("a")["source"], "a")
    assert llm.generate(["x"], adapter={"a": np.float32(0.5), "b": np.int64(1)}, max_tokens=1)  # type: ignore[dict-item]
    with warnings.catch_warnings(action="error"):
        assert llm.generate(["x"], adapter={"a": np.float16(0.5)}, max_tokens=1)  # type: ignore[dict-item]
    for scale in (float("nan"), float("inf"), np.float16(np.inf), True, "2", 10**400):
        with pytest.raises(OptionError, match="scale of adapter 'z'"):
            llm.load_adapter(llm.adapters.info("a")["source"], "z", scale)  # type: ignore[arg-type]
    for name in ("", 3, "x" * 300):
        with pytest.raises(OptionError, match="the adapter's name is"):
            llm.load_adapter(llm.adapters.info("a")["source"], name)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="lora = 1"):
        Model(llm.model.folder, lora=1)  # type: ignore[arg-type]
    assert read_adapter(llm.adapters.info("a")["source"]).ranks == [4]


def test_an_error_names_a_few_of_many_adapters(llm: LLM) -> None:
    source = llm.adapters.info("a")["source"]
    for index in range(12):
        llm.load_adapter(source, f"n{index}")
    with pytest.raises(OptionError) as caught:
        llm.generate(["x"], adapter="n13")
    assert caught.value.why == "loaded adapters: a, b, c, d, n0, n1, n2, n3, n4, n5, …"
    assert "did you mean" in caught.value.fix


def test_a_chat_with_adapters(llm: LLM, adapter_folder: Callable[..., Path]) -> None:
    from genai.llm.chat import ChatSession

    llm.load_adapter(adapter_folder(9, rank=8, size=0.3), "loud")
    chat = ChatSession(llm, max_tokens=8)
    base = chat.ask("Hello!").text
    chat.clear()
    chat.use_adapter("loud")
    other = chat.ask("Hello!").text
    chat.clear()
    chat.use_adapter(None)
    assert chat.ask("Hello!").text == base != other
    with pytest.raises(OptionError, match="Adapter not found"):
        chat.use_adapter("nobody")
    assert llm.chat("Hello!", adapter="loud", max_tokens=8).text == other


# --- names that other adapters take -----------------------------------------------------------------------------------

TEXT = "Luna has a red ball. Tom has a blue kite. What is 47 + 38? " * 6
GREEDY: dict[str, Any] = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}


def _no_change(llm: LLM, folder: Path) -> None:
    pass


def _unload(llm: LLM, folder: Path) -> None:
    llm.unload_adapter("a")


def _take_name(llm: LLM, folder: Path) -> None:
    llm.unload_adapter("a")
    llm.load_adapter(folder, "a")


CHANGES: dict[str, Callable[[LLM, Path], None]] = {"nothing": _no_change, "unloaded": _unload, "renamed": _take_name}


def _uses_of_a_state(llm: LLM, change: Callable[[], None], path: Path) -> list[Any]:
    state = llm.read(TEXT, adapter="a")
    begun = llm.generate(TEXT, adapter="a", keep_state=True, **GREEDY)[0]
    change()
    found: list[Any] = [one.token_ids for one in state.generate(["What is 12 + 7?", "Tom"], **GREEDY)]
    with state.stream("Luna", **GREEDY) as stream:
        found.append("".join(stream))
    found.append(state.read(TEXT).generate("Tom", **GREEDY)[0].token_ids)
    found.append(state.fork().generate("Tom", num_beams=2, **{**GREEDY, "max_tokens": 4})[0].token_ids)
    again = begun.state.resume(max_tokens=10, keep_state=True)
    found.append((again.token_ids, again.state.generate("Tom", **GREEDY)[0].token_ids))
    state.save_state(path)
    return [*found, state.adapter, again.state.adapter]


def test_a_state_keeps_its_adapter(bundled_folder: Path, adapter_folder: Callable[..., Path], tmp_path: Path) -> None:
    """A name is looked up once. The expected tokens are those of the same calls without a change."""
    found = {}
    for name, change in CHANGES.items():
        with LLM(bundled_folder, threads=2) as llm:
            llm.load_adapter(adapter_folder(1), "a")
            found[name] = _uses_of_a_state(llm, lambda: change(llm, adapter_folder(2)), tmp_path / name)  # noqa: B023
            after = llm.generate(TEXT, adapter="a", **GREEDY)[0].token_ids if name == "renamed" else None
    assert found["unloaded"] == found["renamed"] == found["nothing"]
    with LLM(bundled_folder, threads=2) as llm:
        llm.load_adapter(adapter_folder(2), "a")
        assert llm.generate(TEXT, adapter="a", **GREEDY)[0].token_ids == after
        llm.load_adapter(adapter_folder(1), "first")
        for name in CHANGES:
            with pytest.raises(StateMismatchError, match="the loaded adapters are not the same"):
                llm.load_state(tmp_path / name)
            assert llm.load_state(tmp_path / name, adapter="first").generate("Tom", **GREEDY)


@pytest.mark.parametrize("name", ["unloaded", "renamed"])
def test_chats_and_maps_keep_their_adapter(
    bundled_folder: Path, adapter_folder: Callable[..., Path], name: str
) -> None:
    def use(change: Callable[[LLM, Path], None]) -> list[Any]:
        with LLM(bundled_folder, threads=2, max_adapter_bytes=2**24) as llm:
            llm.load_adapter(adapter_folder(1), "a")
            chat = ChatSession(llm, **GREEDY)
            chat.use_adapter("a")
            found: list[Any] = [chat.ask("What is 12 + 7?").text]

            def prompts() -> Iterator[str]:
                for number in range(40):
                    if number == 20:
                        change(llm, adapter_folder(2))
                    yield f"Luna has {number} red balls."

            found += [
                answer.text for answer in llm.map(prompts(), adapter="a", window=4, **{**GREEDY, "max_tokens": 4})
            ]
            found += [chat.ask("What is 20 - 5?").text, chat.adapter]
            assert llm.adapters.nbytes <= 2**24
            return found

    assert use(CHANGES[name]) == use(_no_change)


def test_an_adapter_of_a_chat_leaves_memory_when_it_is_unloaded(
    bundled_folder: Path, adapter_folder: Callable[..., Path]
) -> None:
    with LLM(bundled_folder, threads=2) as llm:
        llm.load_adapter(adapter_folder(1), "a")
        chat = ChatSession(llm, **GREEDY)
        chat.use_adapter("a")
        chat.ask("Hi")
        llm.unload_adapter("a")
        gc.collect()
        assert llm.adapters.nbytes == 0
        chat.ask("Hi")
        gc.collect()
        assert llm.adapters.nbytes == 0
        with pytest.raises(OptionError, match="Adapter not found: a"):
            chat.use_adapter("a")
        assert chat.adapter == "a"
        with pytest.raises(OptionError, match="Adapter not found: a"):
            llm.map(["Hi"], adapter="a")


@pytest.mark.parametrize("name", ["unloaded", "renamed"])
def test_a_generator_keeps_its_active_adapters(bundled: Model, adapter_folder: Callable[..., Path], name: str) -> None:
    """A second adapter is added to the adapter that is active, not to the adapter that took its name."""

    def use(change: str) -> list[int]:
        with genai.Adapters(bundled) as adapters:
            adapters.load(adapter_folder(1, targets=("q_proj",)), "a")
            adapters.load(adapter_folder(2, targets=("down_proj",)), "b")
            params = genai.GeneratorParams(bundled)
            params.set_search_options(max_length=60, min_length=60)
            with genai.Generator(bundled, params) as generator:
                generator.set_active_adapter(adapters, "a")
                if change != "nothing":
                    adapters.unload("a", when_idle=True)
                if change == "renamed":
                    adapters.load(adapter_folder(3, targets=("q_proj",)), "a")
                generator.set_active_adapter(adapters, "b")
                generator.append_tokens([7, 8, 9] * 10)
                while not generator.is_done():
                    generator.generate_next_token()
                return [int(token) for token in generator.get_sequence(0)]

    assert use(name) == use("nothing")
