"""Print the random graphs whose results differ from onnxruntime's; with --save, also store these graphs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import onnx

from .checking import Finding, check_seed
from .operators import OPERATORS


def main() -> None:
    """Compare COUNT random graphs; return 1 if any graph differs for an unknown reason, else 0."""
    parser = argparse.ArgumentParser(prog="python -m tools.graph_fuzz", description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--operators", nargs="+", choices=OPERATORS, default=tuple(OPERATORS), metavar="NAME")
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    began, unknown = time.monotonic(), 0
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        findings = check_seed(seed, counts, operators=arguments.operators)
        for finding in findings:
            counts[f"known: {finding.reason}" if finding.reason else "UNKNOWN"] += 1
            if not finding.reason:
                unknown += 1
                _report(finding, seed, arguments.save)
    seconds = time.monotonic() - began
    print(f"\n{arguments.count} graphs in {seconds:.0f} s")
    for what, number in counts.most_common():
        print(f"{number:7d} {what}")
    sys.exit(bool(unknown))


def _report(finding: Finding, seed: int, folder: Path | None) -> None:
    print(f"seed {seed}: {finding.what}\n{onnx.printer.to_text(finding.model.graph)[:1500]}", flush=True)
    for name, value in finding.feed.items():
        for item in value if isinstance(value, list) else [value]:
            print(f"  {name} = {np.asarray(item).dtype} {json.dumps(np.asarray(item).tolist(), default=str)[:300]}")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        onnx.save(finding.model, folder / f"{seed}.onnx")


if __name__ == "__main__":
    main()
