"""Write the latest state of a run as a Hugging Face folder: config.json, model.safetensors (float16), tokenizer."""

import argparse
from pathlib import Path

import torch

from tools.bundled_model.checkpoint import save_checkpoint
from tools.bundled_model.model import Pebble, PebbleConfig
from tools.bundled_model.tokenizer import load_tokenizer


def export(run: Path, folder: Path) -> int:
    """Write the folder; return the training step of the weights."""
    state = torch.load(run / "checkpoint.pt", weights_only=True)
    model = Pebble(PebbleConfig(**state["progress"]["extra"]["config"]))
    model.load_state_dict(state["model"])
    save_checkpoint(model, load_tokenizer(run / "data" / "tokenizer"), folder)
    return int(state["progress"]["step"])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.yardstick export", description=__doc__)
    parser.add_argument("run", type=Path, nargs="?", default=Path("runs/yardstick"))
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/yardstick/checkpoint"))
    options = parser.parse_args(arguments)
    print(f"{options.folder}: the weights of step {export(options.run, options.folder)}")
