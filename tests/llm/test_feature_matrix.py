"""Every pair of features works together, or is refused with an error that names one of them.

Some features change the output (an adapter, a grammar, beams …): a pair of them must generate the same tokens in
a batch as alone. Other features do not change the output (proposals, preemption, a saved state …): with one of them,
the tokens must be the same as without it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

import genai
from genai.engine.scheduler import Scheduler
from genai.errors import GenaiError
from genai.llm.completion import Completion
from genai.models.folders import bundled_adapter

from .test_speculation import SteadyCosts


@dataclass(frozen=True)
class Feature:
    """The options of an LLM and of a request for a feature; an error names one of `words`."""

    llm: Mapping[str, Any] = field(default_factory=dict)
    request: Mapping[str, Any] = field(default_factory=dict)
    words: tuple[str, ...] = ()


CHANGING = {
    "adapter": Feature({"lora": True}, {"adapter": "pirate"}),
    "int8 cache": Feature({"kv_dtype": "int8"}),
    "samples": Feature({}, {"n": 3}, ("n = 3",)),
    "grammar": Feature({}, {"regex": "[A-Z][a-z ,]{600,620}[.]"}, ("regex", "grammar")),
    "beams": Feature(
        {},
        {"num_beams": 3, "temperature": None, "seed": None},
        ("beams", "temperature = 0", "other sequences of this model"),
    ),
    "ctx_shift": Feature({}, {"ctx_shift": True, "max_tokens": 150, "ignore_eos": True}, ("ctx_shift",)),
    "mirostat": Feature({}, {"mirostat": 2}, ("mirostat",)),
    "banned strings": Feature({}, {"banned_strings": ["the", "Luna"]}, ("banned_strings",)),
}
KEEPING = {
    "company": Feature(),
    "preemption": Feature({"cache_bytes": 450_000}, words=("KV cache",)),
    "speculation": Feature({"speculation": "lookup"}),
    "saved state": Feature(words=("keep_state",)),
    "prefix cache": Feature(),
    "chunks": Feature(),
}
FEATURES = {**CHANGING, **KEEPING}
REFUSED = {
    ("samples", "beams"),
    ("grammar", "beams"),
    ("beams", "ctx_shift"),
    ("beams", "mirostat"),
    ("beams", "banned strings"),
    ("beams", "saved state"),
    ("ctx_shift", "saved state"),
}
# A search gives nothing back: it ends where others hold the whole cache, which is a matter of time.
SOMETIMES = {("beams", "preemption")}
PROMPT = "Luna and Tom went to the garden, and Luna and Tom found a ball. " * 3
DEFAULTS: dict[str, Any] = {"temperature": 0.8, "seed": 7, "max_tokens": 40}


@pytest.fixture(scope="module")
def loaded(bundled_folder: Path) -> Iterator[Callable[[Mapping[str, Any]], genai.LLM]]:
    """Return an LLM with these options, created once."""
    made: dict[str, genai.LLM] = {}

    def load(options: Mapping[str, Any]) -> genai.LLM:
        key = repr(sorted(options.items()))
        if key not in made:
            made[key] = genai.LLM(bundled_folder, threads=2, context_size=160, **options)
            if "lora" in options:
                made[key].load_adapter(bundled_adapter("pirate"), "pirate")
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("genai.llm.speculation.Speculator", SteadyCosts)
        yield load
    for llm in made.values():
        llm.close()


def request_of(names: tuple[str, str]) -> dict[str, Any]:
    options: dict[str, Any] = dict(DEFAULTS)
    for name in names:
        options |= FEATURES[name].request
    if "regex" in options:
        options["ignore_eos"] = None  # the end of a grammar is the end of the reply
    return {name: value for name, value in options.items() if value is not None}


def run(llm: genai.LLM, names: tuple[str, ...], options: dict[str, Any], folder: Path) -> list[Completion]:
    """Return the completions of a request, generated as the features require."""
    if "prefix cache" in names:
        llm.generate(PROMPT, **options)
        found = llm.generate(PROMPT, **options)
        assert found[0].cached_tokens >= 32 or "num_beams" in options
        return found
    if "saved state" not in names:
        return llm.generate(PROMPT, **options)
    most = options["max_tokens"]
    halves = llm.generate(PROMPT, **{**options, "max_tokens": most // 2}, keep_state=True)
    whole = []
    for index, half in enumerate(halves):
        assert half.state is not None
        half.state.save_state(folder / f"{index}.state")
        half.state.close()
        rest = llm.load_state(folder / f"{index}.state").resume(max_tokens=most - most // 2)
        whole.append(half if half.finish_reason == "stop" else joined(half, rest))
    return whole


def joined(half: Completion, rest: Completion) -> Completion:
    from dataclasses import replace

    return replace(rest, token_ids=half.token_ids + rest.token_ids, text=half.text + rest.text)


class Company:
    """Requests of all kinds that keep the engine busy in the meantime."""

    def __init__(self, llm: genai.LLM, is_wanted: bool) -> None:
        self._llm, self._over, self._is_wanted = llm, threading.Event(), is_wanted
        self._thread = threading.Thread(target=self._talk)

    def _talk(self) -> None:
        while not self._over.is_set():
            params = [
                genai.SamplingParams(seed=seed, temperature=1, max_tokens=100, ignore_eos=True) for seed in range(6)
            ]
            self._llm.generate([PROMPT, "Once", "Tom", PROMPT + "And", "Luna", "A cat"], params)

    def __enter__(self) -> None:
        if self._is_wanted:
            self._thread.start()
            while not self._llm.stats().running:
                pass

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._is_wanted:
            self._thread.join()


@pytest.mark.parametrize("names", [*combinations(FEATURES, 2)], ids=" and ".join)
def test_a_pair_works_or_is_refused_by_name(
    names: tuple[str, str],
    loaded: Callable[[Mapping[str, Any]], genai.LLM],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    features = [FEATURES[name] for name in names]
    options = request_of(names)
    changing = {name: value for name in names if name in CHANGING for name, value in FEATURES[name].llm.items()}
    wanted = {name: value for one in features for name, value in one.llm.items()}
    if "int8 cache" in names and "cache_bytes" in wanted:
        wanted["cache_bytes"] //= 2
    llm = loaded(wanted)
    if "chunks" in names:
        monkeypatch.setattr(llm.model.decoder, "token_budget", 16)
    if "preemption" in names:
        monkeypatch.setattr(Scheduler, "_fits", lambda self, generation: True)
    try:
        alone_as_well = {"saved state", "prefix cache", "chunks"} & {*names} and "preemption" not in names
        with Company(llm, is_wanted=not alone_as_well):
            before = llm.stats()
            found = run(llm, names, options, tmp_path)
            after = llm.stats()
    except GenaiError as error:
        assert names in REFUSED | SOMETIMES, error
        said = f"{error.what} {error.why} {error.fix}"
        for feature in features:
            assert any(word in said for word in feature.words), said
        return
    assert names not in REFUSED
    alone = loaded(changing).generate(PROMPT, **options)
    assert [(one.token_ids, one.text) for one in found] == [(one.token_ids, one.text) for one in alone]
    if "ctx_shift" in names:
        assert all(one.forgotten_tokens for one in found)
    if "preemption" in names:
        assert after.preempted > before.preempted
