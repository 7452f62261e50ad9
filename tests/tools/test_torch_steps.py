"""Steps in PyTorch, for comparison with ours: on the CPU, to check that they compute."""

from __future__ import annotations

import json
import sys

import pytest

from tools import torch_steps


@pytest.mark.parametrize("kind", torch_steps.KINDS)
def test_a_step_of_a_tiny_shape(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    asked = ["tiny", "--device", "cpu", "--context", "40", "--batch", "3", "--weights", kind]
    assert torch_steps.main(asked) == 0
    row = json.loads(capsys.readouterr().out)
    assert kind in row["what"] and (row["sequences"], row["context"]) == (3, 40)


def test_keys_of_a_step_are_seen() -> None:
    """The tokens change with the cache, and with the input token."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    spec = torch_steps.SHAPES["tiny"].spec
    with torch.inference_mode():
        decoder = torch_steps.Decoder(torch, spec, torch_steps.Linears(torch, "cpu", "bfloat16"), 4, 40)
        found = []
        for _ in range(3):
            decoder.tokens[:] = 7
            decoder.step()
            found.append(decoder.tokens.tolist())
            decoder._cache.mul_(-1) if len(found) == 2 else None
    assert found[0] == found[1] != found[2] and len(set(found[0])) > 1


def test_without_pytorch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert torch_steps.main(["tiny"]) == 2
    assert capsys.readouterr().err == "torch_steps: PyTorch is not installed\n"
