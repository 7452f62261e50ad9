"""Muon for the hidden matrices, AdamW for the rest, and their common learning-rate schedule."""

from typing import Any

import torch
from torch import nn

MUON_PEAK = 0.02
ADAMW_PEAK = 4e-3
WARM_UP_STEPS = 60
DECAY_START = 0.35  # share of the run after which the rate falls linearly
FINAL_SHARE = 0.01


class Optimiser:
    """Two torch optimisers behind one interface; `step` first sets their learning rates."""

    def __init__(self, model: nn.Module) -> None:
        hidden = [p for name, p in model.named_parameters() if _is_hidden_matrix(name, p)]
        others = [p for name, p in model.named_parameters() if not _is_hidden_matrix(name, p)]
        self._others = others
        self._muon = torch.optim.Muon(hidden, lr=MUON_PEAK, momentum=0.95, weight_decay=0.02)
        self._adamw = torch.optim.AdamW(others, lr=ADAMW_PEAK, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, step: int, progress: float) -> float:
        """Make one update; return the current rate as a share of the peak rate."""
        share = rate_share(step, progress)
        for optimiser, peak in ((self._muon, MUON_PEAK), (self._adamw, ADAMW_PEAK)):
            for group in optimiser.param_groups:
                group["lr"] = peak * share
        torch.nn.utils.clip_grad_norm_(self._others, 1.0)
        self._muon.step()
        self._adamw.step()
        self._muon.zero_grad(set_to_none=True)
        self._adamw.zero_grad(set_to_none=True)
        return share

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self._muon.state_dict(), "adamw": self._adamw.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._muon.load_state_dict(state["muon"])
        self._adamw.load_state_dict(state["adamw"])


def _is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim == 2 and "embed" not in name and "lm_head" not in name


def rate_share(step: int, progress: float) -> float:
    """Return the share of the peak rate: linear warm-up, constant, then linear decay to FINAL_SHARE."""
    warm = min(1.0, (step + 1) / WARM_UP_STEPS)
    decay = 1.0 - (1.0 - FINAL_SHARE) * max(0.0, (progress - DECAY_START) / (1.0 - DECAY_START))
    return min(warm, max(FINAL_SHARE, decay))
