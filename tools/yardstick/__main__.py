"""python -m tools.yardstick STAGE ...: either train (prepare the text if needed, then train or resume) or export."""

import sys

from . import export, train

STAGES = {"train": train.main, "export": export.main}


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in STAGES:
        sys.exit(f"{__doc__}\nFor a stage's options, run it with --help.")
    STAGES[sys.argv[1]](sys.argv[2:])


if __name__ == "__main__":
    main()
