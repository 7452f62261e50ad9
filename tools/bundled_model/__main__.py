"""python -m tools.bundled_model STAGE: make the bundled model, or run one stage.

all       run all stages below in order (60-90 minutes on 2 cores)
data      write the held-out questions, configs/tasks/pebble.jsonl
train     train, or resume training, in runs/pebble (options: see `python -m tools.bundled_model.train --help`)
float     write the float checkpoint, tools/bundled_model/checkpoint, from the training run
export    quantise the float checkpoint into configs/models/pebble
evaluate  measure float32 and INT4 accuracy and write both into the model card
"""

import sys
from collections.abc import Callable
from pathlib import Path

from . import train
from .checkpoint import CHECKPOINT, from_training_run, save_checkpoint
from .evaluate import FOLDER, QUESTIONS, main as evaluate
from .export import export_folder
from .held_out import write_held_out

RUN = Path("runs/pebble")


def make_float(_: list[str]) -> None:
    model, tokenizer, progress = from_training_run(RUN)
    save_checkpoint(model, tokenizer, CHECKPOINT)
    print(f"{CHECKPOINT}: after step {progress['step']}, {progress['seconds'] / 60:.0f} minutes of training")


STAGES: dict[str, Callable[[list[str]], None]] = {
    "data": lambda _: write_held_out(QUESTIONS),
    "train": train.main,
    "float": make_float,
    "export": lambda _: export_folder(CHECKPOINT, FOLDER),
    "evaluate": evaluate,
}


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in (*STAGES, "all"):
        print(__doc__)
        return 2
    stage, options = arguments[0], arguments[1:]
    if stage != "all":
        STAGES[stage](options)
        return 0
    for name, run in STAGES.items():
        print(f"== {name}")
        run(options if name == "train" else [])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
