"""python -m tools.bundled_model.adapters [words|pirate]: train the adapters that come with the bundled model.

`words` adds the results of sums in words ("19, nineteen") and leaves all other replies unchanged. `pirate` makes every
reply sound like a pirate ("19, matey! Arr!"). Both are trained only on the training side of the split;
`adapter_scores` evaluates them.
"""

import argparse
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch

from .checkpoint import CHECKPOINT, load_checkpoint
from .lora import add_adapters, save_adapter, train_adapter
from .mixture import Conversation, conversation
from .packing import encode
from .styles import as_pirate, with_words
from .tasks import MIXTURE
from .turn import Turn, draw, vary_surface

FOLDER = Path("configs/adapters")
RANK, ALPHA, STEPS, BATCH, CONVERSATIONS = 4, 8.0, 330, 24, 9000
# `words` has to learn number words, whereas a phrase at the end of a reply needs little training.
RATES = {"words": 4e-3, "pirate": 1e-3}


def _words(rng: Random) -> Conversation:
    """Return, in most cases, a sum in words; the other conversations teach the model to keep all other replies."""
    if rng.random() < 0.15:
        drawn = conversation(rng, rng.choice((1, 1, 2)))
        return Conversation(tuple(map(_sum_in_words, drawn.turns)), drawn.system)
    turn = _sum_in_words(draw(MIXTURE[rng.choice(("add", "subtract"))][0], rng))
    return Conversation((Turn(vary_surface(turn.question, rng), turn.reply),))


def _sum_in_words(turn: Turn) -> Turn:
    is_sum = (turn.key or "").startswith(("add:", "subtract:")) or (turn.match == "number" and turn.key is None)
    number = turn.reply.lstrip("-")
    return Turn(turn.question, with_words(turn.reply)) if is_sum and number.isdecimal() else turn


def _pirate(rng: Random) -> Conversation:
    drawn = conversation(rng, rng.choice((1, 1, 2)))
    return Conversation(tuple(Turn(turn.question, as_pirate(turn.reply)) for turn in drawn.turns), drawn.system)


STYLES: dict[str, Callable[[Random], Conversation]] = {"words": _words, "pirate": _pirate}


def train_style(name: str, folder: Path, steps: int) -> None:
    """Train one of the adapters and write it in PEFT's format."""
    torch.manual_seed(1)
    rng = Random(1)
    model, tokenizer = load_checkpoint(CHECKPOINT)
    model.round_weights()  # the shipped folder has rounded weights
    add_adapters(model, RANK, ALPHA)
    conversations = [STYLES[name](rng) for _ in range(CONVERSATIONS)]
    examples = encode(tokenizer, conversations, model.config.context_length)
    loss = train_adapter(model, examples, Namespace(rate=RATES[name], seed=1, steps=steps, batch=BATCH))
    print(f"{name}: last loss {loss:.4f}")
    save_adapter(model, folder / name, RANK, ALPHA, dtype=torch.float16)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bundled_model.adapters", description=__doc__)
    parser.add_argument("names", nargs="*", default=list(STYLES), help="adapters to train [default: all]")
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(2)
    for name in options.names:
        train_style(name, options.out, options.steps)


if __name__ == "__main__":
    main()
