"""An MTP head on a host that emulates a GPU: tokens are those without the head, and proposals are accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import genai
from tests.llm.test_speculation import SteadyCosts
from tests.mtp_models import write_with_head
from tools.speculation_agreement import facts, guessing

from .programs import Load

pytestmark = pytest.mark.gpu


def test_replies_are_the_same(load: Load, bundled_folder: Path, tmp_path: Path) -> None:
    folder = write_with_head(tmp_path / "mtp", bundled_folder)
    prompts = [np.random.default_rng(count).integers(3, 1500, count).tolist() for count in (2, 40)]
    options: dict[str, Any] = {"max_tokens": 10, "temperature": 0.8, "seed": 1, "ignore_eos": True, "logprobs": 1}
    with load(folder) as model, genai.LLM(model) as llm:
        expected = llm.generate(prompts, **options)
    with load(folder, mtp=True) as model, genai.LLM(model, speculation="mtp") as llm:
        made = llm._speculation.speculator()
        assert made is not None
        with guessing(llm, SteadyCosts(lookup=False, draft=made._draft, most_tokens=3)):
            found = llm.generate(prompts, **options)
    assert [facts(one) for one in found] == [facts(one) for one in expected]
    assert 0 < sum(one.accepted_tokens for one in found) < sum(one.proposed_tokens for one in found)
