"""A training run on disk: its state, replaced atomically, and its log."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .optimiser import Optimiser


def save_state(path: Path, model: nn.Module, optimiser: Optimiser, progress: dict[str, Any]) -> None:
    """Write weights, optimisers, random state and `progress`; a kill leaves the old file or the new one intact."""
    state = {
        "model": model.state_dict(),
        "optimiser": optimiser.state_dict(),
        "progress": progress,
        "torch_rng": torch.get_rng_state(),
    }
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def load_state(path: Path, model: nn.Module, optimiser: Optimiser) -> dict[str, Any]:
    """Load a saved state into the model, the optimisers and the random generator; return its `progress`."""
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimiser.load_state_dict(state["optimiser"])
    torch.set_rng_state(state["torch_rng"])
    progress: dict[str, Any] = state["progress"]
    return progress


def write_log(path: Path, line: dict[str, Any]) -> None:
    """Append one line of JSON to the log and print the line."""
    text = json.dumps(line)
    with path.open("a") as log:
        log.write(text + "\n")
    print(text, flush=True)
