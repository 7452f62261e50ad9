"""Every sampler in `kernels/sampling.py` is implemented everywhere; a failure names the file that lacks it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genai.cli.options import FLAGS
from genai.devices import open_executor
from genai.engine.sampling.batch import BatchSampler
from genai.engine.sampling.option_rules import SAMPLERS
from genai.engine.sampling.params import DRAWING, SamplingOptions, SamplingParams, with_defaults
from genai.engine.sampling.plan import RowSampler, plan_sampling
from genai.errors import OptionError
from genai.kernels.sampling import Setting, Step

Distribution = Callable[..., np.ndarray]
PAGE = (Path(__file__).resolve().parents[3] / "docs" / "reference" / "sampling.md").read_text(encoding="utf-8")
EXECUTORS = {name: open_executor(name, threads=1) for name in ("reference", "cpu")}
# Of each sampler options with which it changes the distribution of the rows below.
EFFECTIVE: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "dry": {"dry_multiplier": 2.0},
    "top_n_sigma": {"top_n_sigma": 1.5},
    "top_k": {"top_k": 5},
    "typical_p": {"typical_p": 0.5003},
    "top_p": {"top_p": 0.5003},
    "min_p": {"min_p": 0.1},
    "xtc": {"xtc_probability": 1.0, "xtc_threshold": 0.02},
    "temperature": {"temperature": 0.5},
    "mirostat": {"mirostat": 2, "mirostat_tau": 1.0},
}
# These can change which token is the most likely one, so they have an effect at a temperature of 0.
CHANGE_THE_ORDER = {"penalties", "dry"}
NAMES = [step.name.lower() for step in Step if step is not Step.END]
ROWS = np.random.default_rng(5).normal(0, 2, (20, 300)).astype(np.float32)
HISTORY = [1, 2, 3, 4, 1, 2, 3]


def undeclared(name: str) -> Iterator[str]:
    """Yield the files that do not declare a sampler, or an option that enables it."""
    if name not in SAMPLERS and name != "mirostat":
        yield f"genai/engine/sampling/option_rules.py: SAMPLERS has no {name!r}"
    if name not in EFFECTIVE:
        yield f"tests/engine/sampling/test_every_sampler.py: EFFECTIVE has no {name!r}"
    if f"\n| `{name}` |" not in PAGE.split("\n## Options\n")[0]:
        yield f"docs/reference/sampling.md: no row {name!r} under Samplers"
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    for option in SAMPLERS.get(name, (name,)):
        if option not in fields:
            yield f"genai/engine/sampling/params.py: SamplingParams has no {option!r}"
        if option not in SamplingOptions.__annotations__:
            yield f"genai/engine/sampling/params.py: SamplingOptions has no {option!r}"
        if name != "mirostat" and option.upper() not in Setting.__members__:
            yield f"kernels/sampling.py: Setting has no {option.upper()}"
        if option not in {flag.option for flag in FLAGS}:
            yield f"cli/options.py: FLAGS has no {option!r}"
        if f"\n| `{option}` |" not in PAGE.split("\n## Options\n")[1]:
            yield f"docs/reference/sampling.md: no row {option!r} under Options"


@pytest.mark.parametrize("name", NAMES)
def test_it_is_declared_everywhere(name: str) -> None:
    missing = [*undeclared(name)]
    assert not missing, "\n".join(missing)


def test_every_number_is_an_option() -> None:
    """A plan reads an option for each setting; only `mirostat_limit` is state."""
    fields = {field.name for field in dataclasses.fields(SamplingParams)} | {"mirostat_limit"}
    missing = {setting.name.lower() for setting in Setting} - fields
    assert not missing, f"genai/engine/sampling/params.py: SamplingParams has no {sorted(missing)}"


def asked(**options: Any) -> list[RowSampler]:
    plan = plan_sampling(SamplingParams(**options), vocab_size=ROWS.shape[1])
    return [RowSampler(plan, HISTORY, seed=i, prompt_length=2) for i in range(len(ROWS))]


@pytest.mark.parametrize("device", EXECUTORS)
@pytest.mark.parametrize("name", NAMES)
def test_every_device_applies_it(name: str, device: str, published: Distribution) -> None:
    where = {"reference": "kernels/reference/sampling.py: _step", "cpu": "kernels/cpu/sampling/sampler.py"}[device]
    sampler = BatchSampler(ROWS.shape[1], EXECUTORS[device])
    found, without = (sampler.distributions(ROWS, asked(**options)) for options in (EFFECTIVE[name], {}))
    assert not np.allclose(found, without), f"{where} does nothing for {name!r}"
    for row, distribution in zip(ROWS, found, strict=True):
        expected = published(row, HISTORY, 2, **EFFECTIVE[name])
        np.testing.assert_allclose(distribution, expected, rtol=1e-4, atol=1e-7, err_msg=f"{where}: {name!r}")


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_drawn_with_it(name: str) -> None:
    """A CPU has a smaller kernel for common steps, which must not be used for others."""
    ours, theirs = (
        BatchSampler(ROWS.shape[1], one).sample(ROWS, asked(**EFFECTIVE[name])) for one in EXECUTORS.values()
    )
    what = f"kernels/sampling.py: _RARE has no {name.upper()}, or kernels/cpu/sampling/sampler.py does not apply it"
    assert ours.tokens.tolist() == theirs.tokens.tolist(), what


@pytest.mark.parametrize("name", [name for name in NAMES if name not in CHANGE_THE_ORDER | {"temperature"}])
def test_it_is_refused_where_nothing_is_drawn(name: str) -> None:
    """It is also dropped from a model's defaults if a temperature of 0, or Mirostat, is requested."""
    switch = SAMPLERS.get(name, (name,))[0]
    assert switch in DRAWING, f"genai/engine/sampling/params.py: DRAWING has no {switch!r}"
    for other in ({"temperature": 0}, {"mirostat": 2}):
        if name in other:
            continue
        try:
            SamplingParams(**EFFECTIVE[name], **other)
        except OptionError as error:
            assert "contradicts" in error.what
        else:
            pytest.fail(f"genai/engine/sampling/option_rules.py: _TRUNCATION has no {switch!r} ({other} accepts it)")
        with_defaults(EFFECTIVE[name], other)
