"""Train the yardstick: seeded, at low priority, and resumable at any step with the same result.

SIGTERM and Ctrl-C save the last complete step and end the process. The same command resumes from that step.
"""

import argparse
import os
import signal
import time
from dataclasses import asdict
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.bundled_model.model import Pebble, PebbleConfig
from tools.bundled_model.optimiser import Optimiser
from tools.bundled_model.tokenizer import load_tokenizer
from tools.bundled_model.train import Progress, sample_loss
from tools.bundled_model.training_state import load_state, save_state, write_log

from .data import prepared
from .stream import TokenStream

ROWS, PARTS = 4, 3  # rows computed at once; a step consists of PARTS such parts
LOG_STEPS, EVALUATION_STEPS, CHECKPOINT_SECONDS = 10, 200, 300
EVALUATION_ROWS = 64


def yardstick_config(vocab_size: int) -> PebbleConfig:
    """Return the config of a model with 33.6 million weights. All widths are multiples of 256; the head is not tied."""
    return PebbleConfig(
        vocab_size=vocab_size,
        hidden_size=512,
        intermediate_size=1536,
        num_layers=8,
        num_heads=8,
        num_kv_heads=4,
        head_size=64,
        context_length=1024,
        tie_embeddings=False,
    )


class Trainer:
    """One run in one folder: `data/`, `checkpoint.pt`, `log.jsonl`."""

    def __init__(self, options: argparse.Namespace, config: PebbleConfig | None = None) -> None:
        torch.manual_seed(options.seed)
        torch.set_num_threads(options.threads)
        self.options, self.folder = options, Path(options.run)
        data = prepared(self.folder / "data", options.seed)
        tokenizer = load_tokenizer(data / "tokenizer")
        self.config = config or yardstick_config(tokenizer.get_vocab_size())
        self.stream = TokenStream(data, options.seed, self.config.context_length)
        self.evaluation = _rows(tokenizer, data / "evaluation.txt", self.config.context_length)
        self.model = Pebble(self.config)
        self.optimiser = Optimiser(self.model)
        self.loss = torch.compile(sample_loss, dynamic=False) if options.compile else sample_loss
        self.progress = Progress(extra={"config": asdict(self.config)})
        self.stopped = False
        self.saved_step = 0
        if self._checkpoint.exists():
            self.progress = Progress(**load_state(self._checkpoint, self.model, self.optimiser))
            self.saved_step = self.progress.step
            self._log(resumed=True)

    @property
    def _checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    def run(self) -> None:
        """Train to the last step, or until `stopped` is set."""
        saved = last = time.monotonic()
        losses: list[float] = []
        while self.progress.step < self.options.steps and (loss := self.train_step()) is not None:
            losses.append(loss)
            now = time.monotonic()
            self.progress.seconds += now - last
            last = now
            if self.progress.step % LOG_STEPS == 0:
                self._log(loss=round(sum(losses) / len(losses), 4))
                losses.clear()
            evaluates = self.progress.step % EVALUATION_STEPS == 0
            if evaluates or now - saved > CHECKPOINT_SECONDS:
                self.save()
                saved = now
            if evaluates:
                self._log(evaluation_loss=round(self.evaluation_loss(), 4))
        self.save()

    def train_step(self) -> float | None:
        """Make one update and return its mean loss. If the run is stopped meanwhile, return None and make no update."""
        ids = self.stream.batch(self.progress.step, ROWS * PARTS)
        total = 0.0
        for part in ids.split(ROWS):
            loss = self._row_loss(part) / PARTS
            loss.backward()
            total += loss.item()
            if self.stopped:
                self.model.zero_grad(set_to_none=True)
                return None
        self.optimiser.step(self.progress.step, self.progress.step / self.options.steps)
        self.progress.step += 1
        return total

    def _row_loss(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.loss(self.model, ids, None, torch.ones(ids.shape))

    @torch.no_grad()
    def evaluation_loss(self) -> float:
        """Return the mean loss of the first rows of the evaluation text, in nats per token."""
        losses = [float(self._row_loss(ids)) * len(ids) for ids in self.evaluation.split(ROWS)]
        return sum(losses) / len(self.evaluation)

    def save(self) -> None:
        if self.progress.step > self.saved_step:
            save_state(self._checkpoint, self.model, self.optimiser, vars(self.progress))
            self.saved_step = self.progress.step

    def _log(self, **values: float) -> None:
        line = {"step": self.progress.step, "seconds": round(self.progress.seconds), **values}
        write_log(self.folder / "log.jsonl", line)


def _rows(tokenizer: Tokenizer, text: Path, length: int) -> Tensor:
    ids = tokenizer.encode(text.read_text(encoding="utf-8")).ids
    count = min(EVALUATION_ROWS, len(ids) // length)
    return torch.tensor(ids[: count * length]).view(count, length)


def stop_on_signals(trainer: Trainer) -> None:
    """Make SIGTERM and SIGINT end the run as soon as the current rows are processed."""

    def stop(*_: object) -> None:
        trainer.stopped = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.yardstick train", description=__doc__)
    parser.add_argument("run", type=Path, nargs="?", default=Path("runs/yardstick"))
    parser.add_argument("--steps", type=int, default=4000, help="number of steps, over which the learning rate falls")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if os.getpriority(os.PRIO_PROCESS, 0) < 19:
        os.setpriority(os.PRIO_PROCESS, 0, 19)
    options.run.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(options)
    stop_on_signals(trainer)
    trainer.run()


if __name__ == "__main__":
    main()
