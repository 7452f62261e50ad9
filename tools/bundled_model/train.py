"""Train Pebble: seeded, with checkpoints, resumable after a kill, at low priority.

With `--steps`, the result depends only on the seed and the machine's arithmetic. With `--minutes`, the schedule follows
the clock; time spent in earlier runs counts. Near the end, INT4 quantisation of weights is enabled if quantising after
training would cost more than two points of held-out accuracy (`--qat auto`).
"""

import argparse
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from .held_out import Question, accuracy_by_task, held_out_questions
from .mixture import long_conversation, short_conversation
from .model import Pebble, PebbleConfig
from .optimiser import Optimiser
from .packing import Rows, RowStream
from .tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from .torch_replies import torch_replies
from .training_state import load_state, save_state, write_log

# Shapes of batches: rows, and tokens per row. Of CYCLE steps, one is long, MEDIUM_STEPS are medium, the rest are short.
SHORT_SHAPE, MEDIUM_SHAPE, LONG_SHAPE = (32, 128), (16, 256), (4, 1024)
CYCLE, MEDIUM_STEPS = 16, 3
CHECKPOINT_SECONDS, EVALUATION_SECONDS = 90, 900
QAT_LOSS_LIMIT = 2.0  # points of accuracy


@dataclass
class Progress:
    """The progress of a run, all of which the checkpoint stores."""

    step: int = 0
    seconds: float = 0.0
    qat: bool | None = None  # None: not decided yet
    extra: dict[str, Any] = field(default_factory=dict)

    def share(self, steps: int | None, minutes: float) -> float:
        """Return the finished share of the run: of `steps` if given, else of `minutes`."""
        return self.seconds / (60.0 * minutes) if steps is None else self.step / steps


def sample_loss(model: Pebble, ids: Tensor, documents: Tensor | None, weights: Tensor) -> Tensor:
    """Return the weighted mean cross-entropy of the next token."""
    hidden = model(ids, documents)
    logits = model.logits(hidden[:, :-1]).flatten(0, 1).float()
    losses = F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
    wanted = weights[:, 1:].flatten()
    return (losses * wanted).sum() / wanted.sum()


class Trainer:
    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(options.seed)
        torch.set_num_threads(options.threads)
        self.options = options
        self.folder: Path = options.out
        self.tokenizer = _tokenizer(self.folder / "tokenizer", options.seed)
        self.model = Pebble(PebbleConfig(vocab_size=self.tokenizer.get_vocab_size()))
        self.optimiser = Optimiser(self.model)
        self.progress = Progress()
        self.loss = torch.compile(sample_loss, dynamic=False) if options.compile else sample_loss
        self.short = RowStream(self.tokenizer, short_conversation, f"{options.seed}:short", *SHORT_SHAPE)
        self.medium = RowStream(self.tokenizer, short_conversation, f"{options.seed}:medium", *MEDIUM_SHAPE)
        self.long = RowStream(self.tokenizer, long_conversation, f"{options.seed}:long", *LONG_SHAPE)
        self.questions = held_out_questions()
        self._resume()

    def run(self) -> None:
        last = saved = evaluated = time.monotonic()  # evaluation and compilation count as training time
        while (share := self.progress.share(self.options.steps, self.options.minutes)) < 1.0:
            if self.progress.qat is None and share >= 1.0 - self.options.qat_share:
                self._decide_qat()
            loss, rate = self.train_step(share)
            now = time.monotonic()
            self.progress.seconds += now - last
            last = now
            if self.progress.step % 20 == 0:
                self._log(loss=round(loss, 4), rate=round(rate, 4))
            if now - saved > CHECKPOINT_SECONDS:
                self.save()
                saved = now
            if now - evaluated > EVALUATION_SECONDS:
                self._log(accuracy=self.accuracy(self.questions[::12]))
                evaluated = time.monotonic()
        self.save()
        self._log(final=self.accuracy(self.questions))

    def _rows(self) -> Rows:
        turn, place = divmod(self.progress.step, CYCLE)
        if place == 0:
            return self.long.batch(turn)
        if place <= MEDIUM_STEPS:
            return self.medium.batch(turn * MEDIUM_STEPS + place - 1)
        short_steps = CYCLE - 1 - MEDIUM_STEPS
        return self.short.batch(turn * short_steps + place - 1 - MEDIUM_STEPS)

    def train_step(self, share: float) -> tuple[float, float]:
        """Make one update at the point `share` of the run; return the loss and the rate as a share of the peak rate."""
        rows = self._rows()
        ids, documents = torch.from_numpy(rows.ids).long(), torch.from_numpy(rows.documents).long()
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.loss(self.model, ids, documents, torch.from_numpy(rows.weights))
        loss.backward()
        rate = self.optimiser.step(self.progress.step, share)
        self.progress.step += 1
        return loss.item(), rate

    def accuracy(self, questions: list[Question]) -> dict[str, float]:
        scores = accuracy_by_task(questions, torch_replies(self.model, self.tokenizer, questions))
        return {task: round(score, 1) for task, score in scores.items()}

    def _decide_qat(self) -> None:
        """Measure the current accuracy loss of INT4 weights; train with INT4 weights from now on if it is too large."""
        questions = self.questions[::4]
        plain = self.accuracy(questions)
        float_weights = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.model.round_weights()
        rounded = self.accuracy(questions)
        self.model.load_state_dict(float_weights)
        worst = max(plain[task] - rounded[task] for task in plain)
        self.progress.qat = {"auto": worst > QAT_LOSS_LIMIT, "always": True, "never": False}[self.options.qat]
        self.progress.extra["before_qat"] = {"float": plain, "rounded": rounded}
        self._log(float=plain, rounded=rounded, qat=self.progress.qat)
        self.model.set_fake_quantisation(self.progress.qat)
        self.save("before_qat.pt")

    def save(self, name: str = "checkpoint.pt") -> None:
        save_state(self.folder / name, self.model, self.optimiser, vars(self.progress))

    def _resume(self) -> None:
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            return
        self.progress = Progress(**load_state(path, self.model, self.optimiser))
        self.model.set_fake_quantisation(bool(self.progress.qat))
        self._log(resumed=True)

    def _log(self, **values: Any) -> None:
        line = {"step": self.progress.step, "seconds": round(self.progress.seconds), **values}
        write_log(self.folder / "log.jsonl", line)


def _tokenizer(folder: Path, seed: int) -> Tokenizer:
    if not (folder / "tokenizer.json").exists():
        save_tokenizer(train_tokenizer(seed), folder)
    return load_tokenizer(folder)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.bundled_model.train", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/pebble"))
    parser.add_argument("--minutes", type=float, default=75.0)
    parser.add_argument("--steps", type=int, default=None, help="fixed number of steps instead of --minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--qat", choices=("auto", "always", "never"), default="auto")
    parser.add_argument("--qat-share", type=float, default=0.18, help="share at the end of the run for INT4 training")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if os.getpriority(os.PRIO_PROCESS, 0) < 19:
        os.nice(19)
    options.out.mkdir(parents=True, exist_ok=True)
    Trainer(options).run()


if __name__ == "__main__":
    main()
