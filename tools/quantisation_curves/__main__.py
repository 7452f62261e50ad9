"""Measure divergence and size of quantised models, and write docs/reference/quantisation-curves.md.

    python -m tools.compare_peers setup --work PEERS --engine llama.cpp --engine ik_llama.cpp    # once: compiles
    python -m tools.quantisation_curves measure WORK --yardstick RUN --peers PEERS
    python -m tools.quantisation_curves report WORK

RUN is a folder that `tools.yardstick` exported. `measure` resumes after an interruption. The measured points are in
WORK/points.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from genai.evaluate.tasks import read_questions
from genai.models.folders import bundled_tasks

from . import gguf_peers, onnx_peer, ours
from .points import Points
from .report import write_report
from .subject import Measuring, Subject

_ROOT = Path(__file__).resolve().parent.parent.parent
PARTS = ("curve", "peers", "table", "bundled")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    asked = _parser().parse_args(arguments)
    asked.work.mkdir(parents=True, exist_ok=True)
    points = Points(asked.work / "points.json")
    if asked.action == "report":
        write_report(points.all, _ROOT / "docs" / "reference")
        return
    parts = asked.part or PARTS
    data = asked.yardstick / "data"
    yardstick = Subject("yardstick", asked.yardstick / "checkpoint", data / "calibration.txt", data / "evaluation.txt")
    bundled = Subject("bundled", _ROOT / "tools" / "bundled_model" / "checkpoint", None, bundled_tasks())
    for part in parts:
        if part == "curve":
            ours.measure(yardstick, ours.curve_ways(), asked.work, points)
        elif part == "peers":
            with Measuring(yardstick) as measuring:
                gguf_peers.measure(measuring, asked.peers, asked.work, points)
                onnx_peer.measure(measuring, asked.work, points)
        elif part == "table":
            ours.measure(yardstick, ours.table_ways(), asked.work, points)
        else:
            ways = chain(ours.table_ways(), ours.curve_ways())
            ours.measure(bundled, ways, asked.work, points, read_questions(bundled_tasks()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    measure = actions.add_parser("measure", help="make and measure the missing outputs")
    report = actions.add_parser("report", help="write the page and its figure")
    for one in (measure, report):
        one.add_argument("work", type=Path, help="folder of points and outputs")
    measure.add_argument("--yardstick", type=Path, required=True, help="exported folder of tools.yardstick")
    measure.add_argument("--peers", type=Path, required=True, help="folder of tools.compare_peers")
    measure.add_argument("--part", action="append", choices=PARTS, help="measure only this part; may be repeated")
    return parser


if __name__ == "__main__":
    main()
