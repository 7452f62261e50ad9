"""With an MTP head, every output is bit-identical to that without the head, and many proposals are accepted."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import genai
from genai.convert.spec import DeltaNetSpec
from genai.engine.decoder import compute
from genai.engine.hidden_rows import HiddenRows
from genai.engine.mtp import HeadDecoder
from genai.engine.paged import PagedDecoder
from genai.engine.speculation.mtp import MtpProposer
from genai.errors import (
    CacheCapacityError,
    ConfigError,
    GenaiError,
    ModelFolderError,
    OptionError,
    UnsupportedModelError,
)
from genai.kernels.ir import weights_of
from genai.llm.completion import Completion
from tests.integrity import check_pool
from tests.mtp_models import HIDDEN, edit_block, write_with_head
from tools.speculation_agreement import facts, guessing

from .test_speculation import MIXED, SteadyCosts

HYBRID = {
    "model_type": "qwen3_5_text",
    "num_layers": 2,
    "qk_norm": True,
    "recurrent": DeltaNetSpec(layers=(0,), kernel=4, key_heads=2, value_heads=4, key_size=16, value_size=16),
}
CHOICE = genai.Speculation(lookup=False, mtp=True)
OPTIONS: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "logprobs": 1}
Ids = Callable[[int], list[int]]


@pytest.fixture
def ids(request: pytest.FixtureRequest) -> Ids:
    """ids(count) -> random tokens, which are the same in every run of the test, in whatever order tests run."""
    rng = np.random.default_rng(crc32(request.node.name.encode()))
    return lambda count: rng.integers(3, 1500, count).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, bundled_folder: Path) -> Path:
    return write_with_head(tmp_path_factory.mktemp("mtp") / "one", bundled_folder)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[genai.LLM]:
    with genai.LLM(folder, threads=2) as llm:
        assert llm.model.head is None
        yield llm


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[genai.LLM]:
    with genai.LLM(folder, threads=2, speculation=CHOICE) as llm:
        yield llm


@contextmanager
def drafting(llm: genai.LLM, most: int = 4) -> Iterator[None]:
    """Let the head propose tokens at every step, whatever the steps of this machine cost."""
    made = llm._speculation.speculator()
    assert made is not None and isinstance(made._draft, MtpProposer)
    with guessing(llm, SteadyCosts(lookup=False, draft=made._draft, most_tokens=most)):
        yield
    assert not made._draft._followers
    assert llm.model.head is not None
    check_pool(llm.model.head.pool, [])


def check_same(found: list[Completion], expected: list[Completion], least: float) -> None:
    """Check that the completions are the same, and that at least a share of the proposals was accepted."""
    assert [facts(one) for one in found] == [facts(one) for one in expected]
    proposed, accepted = (sum(getattr(one, f"{what}_tokens") for one in found) for what in ("proposed", "accepted"))
    assert proposed > 0 and accepted >= least * proposed


def test_rows_of_hidden_states() -> None:
    rows = HiddenRows(most=6)
    numbers = np.arange(20, dtype=np.float32)[:, None]
    rows.put(3, numbers[3:7])
    rows.put(7, numbers[7:8])
    assert (rows.first, rows.end) == (3, 8) and rows.take(4, 8).ravel().tolist() == [4, 5, 6, 7]
    rows.put(5, numbers[15:17])  # in place of rejected tokens
    assert (rows.first, rows.end) == (3, 7) and rows.take(3, 7).ravel().tolist() == [3, 4, 15, 16]
    copy = rows.copy()
    rows.drop(4)
    rows.put(7, numbers[7:11])
    assert (rows.first, rows.end) == (5, 11) and rows.take(5, 8).ravel().tolist() == [15, 16, 7]
    rows.put(13, numbers[13:14])  # after a gap
    assert (rows.first, rows.end) == (13, 14) and (copy.first, copy.end) == (3, 7)
    rows.put(2, numbers[2:3])  # computed again from an earlier token
    rows.drop(9)
    assert (rows.first, rows.end) == (3, 3)


def test_the_head_computes_what_its_graph_says(ids: Ids, llm: genai.LLM, folder: Path) -> None:
    """At once, in pieces and after a cut, the logits are those of the graph in a session."""
    head, tokens = llm.model.head, ids(40)
    rows = np.random.default_rng(0).normal(size=(40, HIDDEN)).astype(np.float32)
    empty = np.zeros((1, 2, 0, 16), np.float32)
    feeds: dict[str, Any] = {"input_ids": [tokens], "hidden_states": rows[None], "attention_mask": [[1] * 40]}
    feeds = {name: np.asarray(value, np.int64 if name != "hidden_states" else None) for name, value in feeds.items()}
    session = genai.InferenceSession(folder / "mtp.onnx")
    feeds |= {value.name: empty for value in session.get_inputs() if value.name.startswith("past")}
    expected, hidden = session.run(["logits", "hidden_states_out"], feeds)
    assert isinstance(head, HeadDecoder)
    sequence = head.open()
    sequence.feed(tokens[:35], rows[:35])
    found = [compute(head, [sequence], all_rows=True)[0]]
    sequence.feed([5, 6], rows[:2])
    compute(head, [sequence])
    sequence.cut(35)
    for index in range(35, 40):
        sequence.feed([tokens[index]], rows[index : index + 1])
        found.append(compute(head, [sequence], all_rows=True)[0])
    np.testing.assert_allclose(np.concatenate(found), expected[0], atol=2e-4)
    assert sequence.hidden is not None
    np.testing.assert_allclose(sequence.hidden.take(39, 40), hidden[0, -1:], atol=2e-4)
    sequence.close()


def test_greedy_replies_of_unlike_lengths(ids: Ids, llm: genai.LLM, plain: genai.LLM) -> None:
    prompts = [ids(count) for count in (1, 5, 57, 130)]
    expected = plain.generate(prompts, **OPTIONS)
    with drafting(llm):
        found = llm.generate(prompts, **OPTIONS)
        check_same(found, expected, least=0.3)
        again = llm.generate(prompts, **OPTIONS)  # most of each prompt is in the prefix caches
        check_same(again, expected, least=0.3)
        assert again[-1].cached_tokens > 60
        accepted = [sum(one.accepted_tokens for one in replies[2:]) for replies in (found, again)]
        assert abs(accepted[0] - accepted[1]) <= 3
    steps = sum(len(one.token_ids) - one.accepted_tokens for one in found)
    assert steps < 0.8 * sum(len(one.token_ids) for one in found)


def test_sampled_replies(ids: Ids, llm: genai.LLM, plain: genai.LLM) -> None:
    prompts = [ids(20 + 30 * index) for index in range(len(MIXED))]
    params = [genai.SamplingParams(**options) for options in MIXED]
    expected = plain.generate(prompts, params)
    with drafting(llm):
        check_same(llm.generate(prompts, params), expected, least=0.1)


def test_replies_in_a_grammar(ids: Ids, llm: genai.LLM, plain: genai.LLM) -> None:
    options: dict[str, Any] = {"regex": "[a-z ]{40,50}", "max_tokens": 60, "temperature": 0}
    prompts = [ids(30), ids(3)]
    expected = plain.generate(prompts, **options)
    with drafting(llm):
        check_same(llm.generate(prompts, **options), expected, least=0.0)


def test_forks_states_and_turns(ids: Ids, llm: genai.LLM, plain: genai.LLM, tmp_path: Path) -> None:
    """Samples share a prompt, a saved state has no hidden states, and a later turn has some."""
    prompt, more = ids(70), ids(12)
    options = {**OPTIONS, "temperature": 0.9, "seed": 3}

    def replies(one: genai.LLM) -> list[Completion]:
        found = one.generate([prompt], n=3, **options)
        state = one.generate([prompt], keep_state=True, **options)[0].state
        assert state is not None
        path = tmp_path / f"state{len(list(tmp_path.iterdir()))}"
        state.save_state(path)
        with state, one.load_state(path) as loaded:
            return [*found, *state.generate([more], **options), *loaded.generate([more], **options)]

    expected = replies(plain)
    with drafting(llm):
        check_same(replies(llm), expected, least=0.05)


@pytest.mark.parametrize("way", ["preempted", "small"])
def test_small_caches(ids: Ids, way: str, folder: Path, plain: genai.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of the model is full at times, or that of the head has room for few sequences."""
    prompts = [ids(9 + seed) for seed in range(6)]
    options = {**OPTIONS, "max_tokens": 70}
    expected = plain.generate(prompts, **options)
    with genai.LLM(folder, threads=2, speculation=CHOICE) as cramped:
        decoder, head, calls = cramped.model.decoder, cramped.model.head, itertools.count()
        assert head is not None
        compute_step = decoder.step

        def step(sequences: Any, *args: Any, **named: Any) -> Any:
            if way == "preempted" and len(sequences) > 1 and next(calls) % 5 > 2:
                raise CacheCapacityError("full", "in this test", "none")
            return compute_step(sequences, *args, **named)

        monkeypatch.setattr(decoder, "step", step)
        if way == "small":
            head.pool.allocate(head.pool.num_blocks - 8)
        made = cramped._speculation.speculator()
        assert made is not None
        with guessing(cramped, SteadyCosts(lookup=False, draft=made._draft, most_tokens=4)):
            found = cramped.generate(prompts, **options)
            assert cramped.stats().preempted or way == "small"
        check_same(found, expected, least=0.0)
        check_pool(cramped.model.decoder.pool, [])


@pytest.mark.parametrize("form", ["hybrid", "int4"])
def test_other_models(ids: Ids, form: str, tmp_path: Path, bundled_folder: Path) -> None:
    """A model with states, whose head has other random weights; and block-quantised weights."""
    changes = HYBRID if form == "hybrid" else {}
    folder = write_with_head(
        tmp_path / form, bundled_folder, changes, precision="fp32" if form == "hybrid" else "int4", seed=4
    )
    prompts = [ids(count) for count in (3, 140, 40)]
    options = {**OPTIONS, "temperature": 0.8, "seed": 1}
    with genai.LLM(folder, threads=2) as plain:
        expected = plain.generate(prompts, **options)
    with genai.LLM(folder, threads=2, speculation=CHOICE) as llm, drafting(llm):
        check_same(llm.generate(prompts, **options), expected, least=0.0 if form == "hybrid" else 0.05)


def test_on_the_reference(ids: Ids, folder: Path) -> None:
    options = {**OPTIONS, "max_tokens": 8}
    prompts = [ids(4), ids(2)]
    with genai.LLM(folder, device="reference") as plain:
        expected = plain.generate(prompts, **options)
    with genai.LLM(folder, device="reference", speculation=CHOICE) as llm, drafting(llm):
        check_same(llm.generate(prompts, **options), expected, least=0.2)


def test_the_head_shares_the_weights_that_it_stores_once(tmp_path: Path, bundled_folder: Path) -> None:
    """All weights of this head are in the data file of the model, and are packed once."""
    folder = write_with_head(tmp_path / "int4", bundled_folder, precision="int4")
    with genai.Model(folder, mtp=True, threads=2) as model:
        assert isinstance(model.decoder, PagedDecoder) and model.head is not None
        programs = model.decoder.program, model.head.program
        weights = model.decoder.executor._weights  # type: ignore[attr-defined]
        main, head = ({id(weights.matrix(w, p.constants)) for op in p.ops for w in weights_of(op)} for p in programs)
        assert len(main) > 5 and len(head - main) == 1  # `fc` is in the head's own file


def test_the_first_step_after_a_long_prompt_has_proposals(ids: Ids, llm: genai.LLM) -> None:
    """The head reads the prompt after the first tokens, and drafts in the same step."""
    with drafting(llm):
        (found,) = llm.generate([ids(90)], **{**OPTIONS, "max_tokens": 4})
    assert found.proposed_tokens > 0


# --- when a head is used, and what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "used"),
    [
        ("auto", True),
        ("lookup", False),
        ("off", False),
        ("mtp", True),
        (genai.Speculation(), True),
        (genai.Speculation(mtp=False), False),
    ],
    ids=str,
)
def test_choices(choice: Any, used: bool, folder: Path, plain: genai.LLM) -> None:
    with genai.LLM(folder, speculation=choice) as llm:
        assert (llm.model.head is not None) == used
        made = llm._speculation.speculator()
        assert used == (made is not None and isinstance(made._draft, MtpProposer))


def test_choices_that_contradict(bundled_folder: Path, folder: Path) -> None:
    with pytest.raises(OptionError, match="mtp = 1"):
        genai.Speculation(mtp=1)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="cannot be used with a draft"):
        genai.Speculation(mtp=True, draft=folder)
    with pytest.raises(UnsupportedModelError, match="no MTP head"):
        genai.LLM(bundled_folder, speculation="mtp")


BAD: dict[str, tuple[dict[str, Any], type[GenaiError], str]] = {
    "layers": ({"num_hidden_layers": 2}, ConfigError, "num_hidden_layers is 2"),
    "no layers": ({"num_hidden_layers": None}, ConfigError, "num_hidden_layers is None"),
    "no file name": ({"filename": None}, ConfigError, "model.mtp.filename is not set"),
    "outside": ({"filename": "../mtp.onnx"}, ConfigError, "must be inside the model folder"),
    "missing": ({"filename": "absent.onnx"}, ModelFolderError, "absent.onnx"),
    "main output": ({"main_hidden_states": "rows"}, ConfigError, "main_hidden_states is 'rows'"),
    "its output": ({"outputs": {"hidden_states": "rows"}}, ConfigError, "model.mtp.outputs.hidden_states is 'rows'"),
    "its input": ({"inputs": {"hidden_states": "rows"}}, UnsupportedModelError, "'hidden_states' is unknown"),
    "not a head": ({"filename": "model.onnx", "outputs": {}}, ConfigError, "outputs.hidden_states is"),
    "unknown key": ({"layer": 1}, ConfigError, "unknown key 'model.mtp.layer'"),
    "wrong type": ({"enabled": 1}, ConfigError, "bool is expected"),
}


@pytest.mark.parametrize("case", BAD)
def test_heads_that_cannot_be_used(case: str, folder: Path, tmp_path: Path) -> None:
    changes, kind, message = BAD[case]
    copy = linked(folder, tmp_path)
    edit_block(copy, **changes)
    with pytest.raises(kind, match=message) as caught:
        genai.LLM(copy, speculation="auto")
    assert caught.value.why and caught.value.fix


def linked(folder: Path, target: Path) -> Path:
    """Return a folder with links to the files of another folder, and a copy of its configuration."""
    for path in folder.iterdir():
        if path.name == "genai_config.json":
            (target / path.name).write_text(path.read_text())
        else:
            (target / path.name).hardlink_to(path)
    return target


def test_a_head_of_another_width(folder: Path, tmp_path: Path) -> None:
    copy = linked(folder, tmp_path)
    (copy / "mtp.onnx").unlink()
    head = onnx.load(folder / "mtp.onnx", load_external_data=False)
    (weight,) = (tensor for tensor in head.graph.initializer if tensor.name == "fc")
    weight.CopyFrom(numpy_helper.from_array(np.zeros((48, HIDDEN), np.float32), "fc"))
    (rows,) = (value for value in head.graph.input if value.name == "hidden_states")
    rows.type.tensor_type.shape.dim[2].dim_value = 48
    onnx.save(head, copy / "mtp.onnx")
    with pytest.raises(ConfigError, match=r"reads hidden states of 48 numbers, but model\.decoder returns 64"):
        genai.LLM(copy, speculation="auto")


def test_a_head_with_a_window(bundled_folder: Path, tmp_path: Path) -> None:
    changes = {"sliding_window": 40, "model_type": "mistral"}
    folder = write_with_head(tmp_path / "window", bundled_folder, changes)
    with pytest.raises(UnsupportedModelError, match="this MTP head is not supported") as caught:
        genai.LLM(folder, speculation="auto")
    assert "full attention" in caught.value.why


def test_a_head_that_is_disabled(folder: Path, tmp_path: Path) -> None:
    copy = linked(folder, tmp_path)
    edit_block(copy, enabled=False)
    with genai.LLM(copy, speculation="auto") as llm:
        assert llm.model.head is None
