"""The command line of the bombs."""

from __future__ import annotations

import argparse
import sys

from . import KINDS, __doc__ as purpose, workshop


def main() -> int:
    """Try the bombs of the selected seeds; return 1 if any bomb caused a fault, else 0."""
    parser = argparse.ArgumentParser(description=purpose, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=24 * len(KINDS))
    parser.add_argument(
        "--kind", choices=[kind.harm.__name__.removesuffix("_bomb") for kind in KINDS], help="try only this kind"
    )
    parser.add_argument("--patience", type=float, default=1.0, help="factor for the time limits on a busy machine")
    options = parser.parse_args()
    faults: list[str] = []
    tried = 0
    with workshop(patience=options.patience) as run:
        for seed in range(options.first, options.first + options.count):
            if options.kind not in (None, KINDS[seed % len(KINDS)].harm.__name__.removesuffix("_bomb")):
                continue
            tried += 1
            for fault in run(seed):
                print(fault, flush=True)
                faults.append(fault)
    print(f"{tried} bombs, {len(faults)} faults")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
