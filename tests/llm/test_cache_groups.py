"""Models whose layers have different cached state: window layers return blocks to the pool, and no token changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genai
from genai.convert import DecoderSpec, ExportOptions, write_model_folder
from genai.convert.rope_scaling import QueryScaling
from genai.engine.decoder import compute
from genai.engine.paged import PagedDecoder
from genai.engine.paged_sequence import PagedSequence
from genai.engine.state_file import Identity, SavedState, read_state, write_state
from genai.kernels.cuda.executor import CudaExecutor
from genai.kvcache.groups import GroupKind
from genai.kvcache.storage import grouped_layout
from genai.kvcache.table import GONE
from genai.models import decoder_graph, loading
from tests.integrity import check_pool, check_table
from tools.random_weights import RandomWeights

from ..kernels.cuda.devices import IS_THERE, open_device
from .conftest import SPEC

WINDOW = 40
# name -> changes of the spec, and how many groups of each kind are formed.
GEMMA = {"num_layers": 6, "sliding_layers": (0, 1, 2, 3, 4), "model_type": "gemma3_text", "local_rope_theta": 1000.0}
GPT_OSS = {"num_layers": 4, "sliding_layers": (0, 2), "model_type": "gpt_oss", "sinks": True, "sliding_window": 16}
LLAMA4: dict[str, Any] = {
    "num_layers": 4, "sliding_window": None, "chunk_size": WINDOW, "chunked_layers": (0, 2), "rope_layers": (0, 2),
    "query_scaling": QueryScaling(beta=0.2, length=30, first=1, rotated=False), "rope_interleaved": True,
    "qk_norm": True, "qk_norm_weights": False,
}  # fmt: skip
MIXES: dict[str, tuple[dict[str, Any], dict[GroupKind, int]]] = {
    "mistral": ({"model_type": "mistral"}, {GroupKind.WINDOW: 1}),
    "gemma3": (GEMMA | {"qk_norm": True}, {GroupKind.FULL: 1, GroupKind.WINDOW: 5}),
    "gpt-oss": (GPT_OSS, {GroupKind.FULL: 1, GroupKind.WINDOW: 1}),
    "llama4": (LLAMA4, {GroupKind.FULL: 1, GroupKind.CHUNKED: 1}),
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory, bundled_folder: Path) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("groups")

    def make(name: str) -> Path:
        place = root / name
        if not place.exists():
            changes = {"sliding_window": WINDOW, "context_length": 512, **MIXES[name][0]}
            spec = DecoderSpec(**{**SPEC, **changes})
            weights = RandomWeights(spec, seed=5)
            write_model_folder(place, spec, ExportOptions(precision="int4"), weights, tokenizer_dir=bundled_folder)
        return place

    return make


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.drawn(4) if name == "llama4" else ()) for name in MIXES],
)
def mix(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(mix: str, folder_of: Callable[[str], Path]) -> Path:
    return folder_of(mix)


@pytest.fixture(scope="module")
def grouped(folder: Path) -> Iterator[genai.LLM]:
    with genai.LLM(folder, threads=2) as llm:
        yield llm


def keep_all(patch: pytest.MonkeyPatch) -> None:
    """Let every layer cache every token, in one group."""
    kinds = [(GroupKind.FULL, 0)]
    patch.setattr(
        decoder_graph, "grouped_layout", lambda layers, _, size: grouped_layout(layers, kinds * len(layers), size)
    )


@pytest.fixture(scope="module")
def keeping(folder: Path) -> Iterator[genai.LLM]:
    """The same model, with all blocks kept."""
    with pytest.MonkeyPatch.context() as patch:
        keep_all(patch)
        model = genai.Model(folder, threads=2)
    with model, genai.LLM(model) as llm:
        yield llm


def opened(llm: genai.LLM | genai.Model) -> PagedDecoder:
    decoder = llm.model.decoder if isinstance(llm, genai.LLM) else llm.decoder
    assert isinstance(decoder, PagedDecoder)
    return decoder


LONG: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}
REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 1, "n": 2},
    {"temperature": 1.1, "seed": 2, "banned_strings": ["a", "the"]},
    {"temperature": 1, "seed": 3, "repetition_penalty": 1.5},
]


def test_layers_of_one_kind_share_groups(mix: str, grouped: genai.LLM) -> None:
    layout = opened(grouped).storage.layout
    found = [group.kind for group in layout.groups]
    assert {kind: found.count(kind) for kind in found} == MIXES[mix][1]
    assert sorted(layer for group in layout.groups for layer in group.layers) == list(range(len(layout.layers)))


@pytest.mark.parametrize("options", REQUESTS, ids=str)
def test_tokens_are_those_of_a_cache_that_keeps_all(
    options: dict[str, Any], grouped: genai.LLM, keeping: genai.LLM
) -> None:
    prompts = ["The cat and the dog " * 20, "Once"]
    found = grouped.generate(prompts, **options, **LONG)
    expected = keeping.generate(prompts, **options, **LONG)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    alone = [one.token_ids for prompt in prompts for one in grouped.generate(prompt, **options, **LONG)]
    assert alone == [one.token_ids for one in found]
    check_pool(opened(grouped).pool, [])


def test_beams_states_and_guesses(grouped: genai.LLM, keeping: genai.LLM, folder: Path, tmp_path: Path) -> None:
    prompt = "The cat and the dog " * 20
    beams = [llm.generate(prompt, num_beams=3, max_tokens=60, ignore_eos=True)[0] for llm in (grouped, keeping)]
    assert beams[0].token_ids == beams[1].token_ids
    whole = keeping.generate(prompt, temperature=0.8, seed=1, **LONG)[0]
    half = grouped.generate(prompt, temperature=0.8, seed=1, **{**LONG, "max_tokens": 120}, keep_state=True)[0]
    assert half.state is not None
    half.state.save_state(tmp_path / "state")
    with genai.LLM(folder, threads=2, speculation="lookup") as other:
        rest = other.load_state(tmp_path / "state").resume(max_tokens=80)
        assert half.token_ids + rest.token_ids == whole.token_ids
        again = other.generate(prompt, temperature=0.8, seed=1, **LONG)[0]
        assert again.token_ids == whole.token_ids
    half.state.close()


def test_states_of_earlier_versions(grouped: genai.LLM, keeping: genai.LLM, tmp_path: Path) -> None:
    """Older versions saved every token of every layer, block by block."""
    prompt = "The cat and the dog " * 20
    whole = grouped.generate(prompt, temperature=0.8, seed=1, **LONG)[0]
    half = keeping.generate(prompt, temperature=0.8, seed=1, **{**LONG, "max_tokens": 120}, keep_state=True)[0]
    assert half.state is not None
    half.state.save_state(tmp_path / "state")
    half.state.close()
    loaded = grouped.load_state(tmp_path / "state")
    free = opened(grouped).pool.num_free
    assert loaded.resume(max_tokens=80).token_ids == whole.token_ids[120:]
    loaded.close()
    assert opened(grouped).pool.num_free > free
    check_pool(opened(grouped).pool, [])


def test_a_state_whose_last_block_lost_its_window(mix: str, grouped: genai.LLM, tmp_path: Path) -> None:
    """After a rewind to just after a released window, nothing is stored, and everything is computed again."""
    decoder = opened(grouped)
    window = min(group.window for group in decoder.groups if group.is_bounded)
    sequence = decoder.open()
    sequence.append(list(range(3, 303)))
    compute(decoder, [sequence])
    shortest = max(group.first_visible(300) // 32 - 1 for group in decoder.groups) * 32 + window - 1
    assert sequence.truncate(shortest) == shortest
    sequence.rewind(shortest)
    identity = Identity("model", "numerics", 1536, 512)
    write_state(tmp_path / "state", decoder, sequence, identity, SavedState())
    assert sequence.num_stored() == 0 or mix == "llama4"
    loaded, _ = read_state(tmp_path / "state", decoder, identity, lambda _: None)
    sequence.truncate()
    np.testing.assert_array_equal(*(compute(decoder, [one])[0] for one in (sequence, loaded)))
    for one in (sequence, loaded):
        one.close()
    check_pool(decoder.pool, [])


def test_states_of_other_mixes_are_refused(
    mix: str, folder: Path, grouped: genai.LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model with the same weights whose layers are grouped differently."""
    if mix == "mistral":
        pytest.skip("it has one group, as states of earlier versions have")
    half = grouped.generate("The cat " * 20, max_tokens=20, ignore_eos=True, keep_state=True)[0]
    assert half.state is not None
    half.state.save_state(tmp_path / "state")
    half.state.close()
    keep_all(monkeypatch)
    with genai.LLM(folder, threads=2) as other, pytest.raises(genai.StateMismatchError, match="blocks of group 0"):
        other.load_state(tmp_path / "state")


def test_a_context_that_shifts(mix: str, grouped: genai.LLM, keeping: genai.LLM) -> None:
    options: dict[str, Any] = {"temperature": 0.8, "seed": 4, "ctx_shift": 8, "max_tokens": 600, "ignore_eos": True}
    if mix == "llama4":
        with pytest.raises(genai.UnsupportedModelError, match="attend to chunks, which start at fixed positions"):
            grouped.generate("The cat", **options)
        return
    found = [llm.generate("The cat and the dog " * 20, **options)[0].token_ids for llm in (grouped, keeping)]
    assert found[0] == found[1]
    check_pool(opened(grouped).pool, [])


def test_a_window_that_reaches_what_is_forgotten(mix: str, folder: Path) -> None:
    """The older part of the window is dropped when two thirds of a small context are; the rest is computed again."""
    if mix in ("gpt-oss", "llama4"):
        pytest.skip("its window is shorter than a block, or is a chunk, whose tokens cannot be dropped")
    with genai.LLM(folder, threads=2, context_size=128) as llm:
        decoder = opened(llm)
        decoder.groups = tuple(
            type(group)(group.layers, group.kind, 100) if group.is_bounded else group for group in decoder.groups
        )
        reply = llm.generate("Once", ctx_shift=4, max_tokens=400, ignore_eos=True, temperature=1, seed=1)[0]
        assert len(reply.token_ids) == 400
        check_pool(decoder.pool, [])


def test_a_sequence_holds_no_more_than_its_windows(mix: str, grouped: genai.LLM) -> None:
    decoder = opened(grouped)
    sequence, tokens = decoder.open(), np.random.default_rng(0).integers(3, 1500, 400).tolist()
    sequence.append(tokens)
    compute(decoder, [sequence])
    for group, table in zip(decoder.groups, sequence.cache.tables, strict=True):
        check_table(table)
        gone = group.first_visible(400) // 32 - 1 if group.is_bounded else 0
        assert table.num_gone == gone == len(table.blocks) - len(table.held_blocks)
    fork = sequence.fork()
    sequence.close()
    for token in tokens[:100]:
        fork.append([token])
        compute(decoder, [fork])
    for group, table in zip(decoder.groups, fork.cache.tables, strict=True):
        if group.is_bounded:
            assert len(table.held_blocks) <= group.window // 32 + 3 and table.blocks[0] == GONE
    before = fork.num_computed
    fork.rewind(490)
    assert fork.num_computed == 489 < before, "a little is taken back without being computed again"
    assert fork.truncate(300) == fork.num_computed == 0, "what left the window is computed again"
    fork.rewind(300)
    (rows,) = compute(decoder, [fork])
    other = decoder.open()
    other.append(tokens[:300], together=400)
    (expected,) = compute(decoder, [other])
    np.testing.assert_array_equal(rows[-1], expected[-1])
    fork.close()
    other.close()


def test_the_prefix_cache_finds_what_was_given_back(grouped: genai.LLM, keeping: genai.LLM) -> None:
    prompt = "A prompt of its own, " * 40
    first = grouped.generate(prompt, max_tokens=40, temperature=0, ignore_eos=True)[0]
    second = grouped.generate(prompt, max_tokens=40, temperature=0, ignore_eos=True)[0]
    assert first.token_ids == second.token_ids
    assert second.cached_tokens >= second.prompt_tokens - 32
    longer = prompt + "and more"
    found, expected = (llm.generate(longer, max_tokens=40, temperature=0)[0] for llm in (grouped, keeping))
    assert found.token_ids == expected.token_ids and found.cached_tokens >= first.prompt_tokens - 32


def test_a_prefix_is_as_long_as_every_group_has_it(mix: str, grouped: genai.LLM) -> None:
    """A window group needs only its last blocks; if one of them was evicted, the shared prefix is shorter."""
    decoder = opened(grouped)
    tokens = np.random.default_rng(7).integers(3, 1500, 400).tolist()

    def found() -> int:
        sequence = decoder.open()
        sequence.append(tokens)
        length = sequence.reuse()
        sequence.close()
        return length

    def forget(group: int, index: int) -> None:
        key = writer.cache._keys[index] + (b"%d" % group if group else b"")
        block = decoder.pool._block_of_key.pop(key)
        del decoder.pool._key_of_block[block], decoder.pool._note_of_block[block]
        if block in decoder.pool._idle:
            del decoder.pool._idle[block]
            decoder.pool._free.append(block)

    writer = decoder.open()
    writer.append(tokens)
    for length in (352, 200):
        writer.mark_boundary(length)
    compute(decoder, [writer])
    writer.publish()
    assert found() == 384
    window = next(number for number, group in enumerate(decoder.groups) if group.is_bounded)
    assert writer.cache._keys[3] + (b"%d" % window if window else b"") not in decoder.pool._block_of_key
    forget(window, 11)
    assert found() == 352
    if window:
        forget(0, 10)
        at_a_chunk = 320  # a token that begins a chunk needs no earlier block
        assert found() == (at_a_chunk if mix == "llama4" else 192), "nobody marked a longer one"
        forget(0, 0)
        assert found() == 0
    writer.close()
    check_pool(decoder.pool, [])


def test_prefixes_on_disk(folder: Path, keeping: genai.LLM, tmp_path: Path) -> None:
    options: dict[str, Any] = {"threads": 2, "prefix_cache_dir": tmp_path / "kv"}
    prompt = "A prompt that is kept, " * 16
    expected = keeping.generate(prompt, max_tokens=40, temperature=0, ignore_eos=True)[0].token_ids
    with genai.LLM(folder, **options) as llm:
        assert llm.generate(prompt, max_tokens=40, temperature=0, ignore_eos=True)[0].token_ids == expected
    for damaged in (False, True):
        if damaged:
            for path in sorted((tmp_path / "kv").glob("??/*"))[::3]:
                path.write_bytes(path.read_bytes()[:-40] + bytes(40))
        with genai.LLM(folder, **options) as llm:
            reply = llm.generate(prompt, max_tokens=40, temperature=0, ignore_eos=True)[0]
            assert reply.token_ids == expected
            assert damaged or reply.cached_tokens >= reply.prompt_tokens - 32
            check_pool(opened(llm).pool, [])


def test_many_long_sequences_share_a_small_cache(mix: str, folder: Path, keeping: genai.LLM) -> None:
    """Eight sequences of 400 tokens, in a cache of little more than their layers need, and of less."""
    prompts = [f"{number} " * 30 for number in range(8)]
    options: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True, "temperature": 0.9, "seed": 1}
    expected = [one.token_ids for one in keeping.generate(prompts, **options)]
    with genai.LLM(folder, threads=2) as llm:
        layout = opened(llm).storage.layout
        each = sum(layout.most_blocks(400, 64))
    for blocks, preempts in ((8 * each, False), (3 * each, True)):
        with genai.LLM(folder, threads=2, cache_bytes=blocks * layout.bytes_per_block, context_size=400) as llm:
            assert [one.token_ids for one in llm.generate(prompts, **options)] == expected
            assert (llm.stats().preempted > 0) <= preempts
            assert opened(llm).pool.num_blocks == blocks
            check_pool(opened(llm).pool, [])


def test_a_cache_of_mixed_layers_is_smaller(mix: str, grouped: genai.LLM, keeping: genai.LLM) -> None:
    """The cache size for one sequence of the maximum context."""
    ours, theirs = (
        sum(layout.most_blocks(4096, 64)) * layout.bytes_per_block
        for layout in (opened(grouped).storage.layout, opened(keeping).storage.layout)
    )
    layers = {"mistral": 0, "gemma3": 1 / 6, "gpt-oss": 1 / 2, "llama4": 1 / 2}[mix]
    assert ours / theirs == pytest.approx(layers, abs=0.06)


@pytest.mark.parametrize("device", ["reference", "cuda"])
def test_on_other_devices(mix: str, device: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens equal those of a cache that keeps all blocks: a prompt, single tokens, a fork, proposals, a rewind."""
    if device == "cuda":
        if not IS_THERE or mix == "llama4":
            pytest.skip("kernels run on Linux through g++, and none of them has chunks")
        monkeypatch.setattr(loading, "open_executor", lambda device, threads: CudaExecutor(open_device(), threads))
    found = []
    for keeps_all in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if keeps_all:
                keep_all(patch)
            with genai.Model(folder, device=device if device == "reference" else "cpu", cache_bytes=1 << 21) as model:
                found.append(walk(opened(model)))
    assert found[0] == found[1]


def walk(decoder: PagedDecoder) -> list[list[int]]:
    first, second = decoder.open(), decoder.open()
    first.append(list(range(3, 103)))
    second.append([9, 8, 7])
    sequences: list[PagedSequence] = [first, second]
    for step in range(60):
        rows = [decoder.executor.host(logits)[-1] for logits in compute(decoder, sequences)]
        for sequence, row in zip(sequences, rows, strict=True):
            sequence.append([int(row.argmax())])
        if step == 20:
            sequences.append(first.fork())
            sequences[-1].append([5])
        if step == 30:
            first.propose([1, 2, 3])
        if step == 40:
            second.rewind(30)
    result = [list(sequence.tokens) for sequence in sequences]
    for sequence in sequences:
        sequence.close()
    check_pool(decoder.pool, [])
    return result


@pytest.mark.slow
@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", ["gemma3", "gpt-oss"])
@pytest.mark.parametrize("device", ["reference", "cuda"])
def test_every_mode_on_other_devices(
    name: str, device: str, folder_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of a few hundred tokens in each mode, with and without cache groups."""
    if device == "cuda":
        if not IS_THERE:
            pytest.skip("kernels run on Linux through g++")
        monkeypatch.setattr(loading, "open_executor", lambda device, threads: CudaExecutor(open_device(), threads))
    options: dict[str, Any] = {"device": "reference"} if device == "reference" else {}
    found = []
    for keeps_all in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if keeps_all:
                keep_all(patch)
            found.append(dict(modes(folder_of(name), tmp_path / str(keeps_all), options)))
    assert found[0] == found[1]
    assert all(found[0].values())


def modes(folder: Path, place: Path, options: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return the result of a request in each mode, by the mode's name."""
    prompt, other = list(range(3, 263)), list(range(900, 980))
    sampled: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "temperature": 0.9, "seed": 2}
    with genai.LLM(folder, **options, context_size=320, prefix_cache_dir=place) as llm:
        layout = opened(llm).storage.layout
        for mode, prompts, own in (
            ("alone", [prompt], {}),
            ("prefix", [[*prompt, 5]], {}),
            ("batched", [prompt, other, [7, 8]], {}),
            ("forked", [prompt], {"n": 2}),
            ("shift", [prompt], {"ctx_shift": 8, "max_tokens": 70}),
        ):
            yield mode, [one.token_ids for one in llm.generate(prompts, **{**sampled, **own})]
        yield "beams", llm.generate([prompt], num_beams=2, max_tokens=10, ignore_eos=True)[0].token_ids
        half = llm.generate([prompt], **{**sampled, "max_tokens": 12}, keep_state=True)[0]
        assert half.state is not None
        half.state.save_state(place / "state")
        half.state.close()
        loaded = llm.load_state(place / "state")
        yield "state", half.token_ids + loaded.resume(max_tokens=12).token_ids
        loaded.close()
        check_pool(opened(llm).pool, [])
    exact = int(sum(layout.most_blocks(320, opened_budget(folder, options))) * 1.4) * layout.bytes_per_block
    with genai.LLM(
        folder, **options, context_size=320, cache_bytes=exact, prefix_cache_dir=place, speculation="lookup"
    ) as llm:
        replies = llm.generate([prompt, prompt[:200], other], **sampled)
        yield "little room, disk, guesses", [one.token_ids for one in replies]
        check_pool(opened(llm).pool, [])


def opened_budget(folder: Path, options: dict[str, Any]) -> int:
    with genai.Model(folder, **options, context_size=64) as model:
        return model.decoder.token_budget


def test_a_cache_that_is_too_small_says_what_each_kind_needs(mix: str, folder: Path) -> None:
    with pytest.raises(genai.CacheCapacityError) as caught:
        genai.Model(folder, cache_bytes=1000)
    assert ("full attention" in str(caught.value)) == (mix != "mistral")
    bounded = f"chunks of {WINDOW}" if mix == "llama4" else f"a window of {MIXES[mix][0].get('sliding_window', WINDOW)}"
    assert mix == "mistral" or f"with {bounded} tokens" in str(caught.value)
