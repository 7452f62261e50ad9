"""Compare this engine's speed with other engines' on this machine, and write docs/reference/performance.md.

    python -m tools.compare_peers setup     # peers, each in its own virtual environment
    python -m tools.compare_peers models    # random checkpoints, converted for every engine
    python -m tools.compare_peers run       # measure in turns; resumes after an interruption
    python -m tools.compare_peers report    # docs/reference/performance.md from the results

Use a quiet machine. Figures are medians of separate processes, measured in turns, but this cannot compensate for a
program that occupies a core. Linux only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from genai.common.cores import default_threads

from .arguments import positive
from .peers.cases import cases
from .peers.engines import ENGINES, OURS
from .peers.measure import Comparison, install, make_models
from .peers.report import render
from .peers.results import ResultsError, load, load_or_begin
from .peers.shapes import DEFAULT_SHAPES, SHAPES

_ROOT = Path(__file__).resolve().parent.parent
DEFAULT_WORK = Path("~/.cache/genai/peers")
DEFAULT_REPORT = _ROOT / "docs" / "reference" / "performance.md"
DEFAULT_REPEAT = 5

Choice = TypeVar("Choice")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    asked = _parser().parse_args(arguments)
    asked.work = asked.work.expanduser().resolve()
    asked.json = (asked.json or asked.work / "results.json").expanduser()
    try:
        return int(asked.action(asked))
    except ResultsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _setup(asked: argparse.Namespace) -> int:
    return 0 if install(asked.work, _chosen(ENGINES, asked.engine), _say) else 1


def _models(asked: argparse.Namespace) -> int:
    shapes = _chosen(SHAPES, asked.shape or DEFAULT_SHAPES)
    return 0 if make_models(asked.work, shapes, _chosen(ENGINES, asked.engine), _say, adapter=asked.adapter) else 1


def _run(asked: argparse.Namespace) -> int:
    cores = default_threads()
    shapes = _chosen(SHAPES, asked.shape or DEFAULT_SHAPES)
    engines = _chosen(ENGINES, asked.engine)
    wanted = _chosen(cases(cores), asked.case)
    results = load_or_begin(asked.json)
    if asked.again:
        results.forget(*({item.name for item in items} for items in (engines, shapes, wanted)))
    Comparison(results, asked.json, asked.work, cores, asked.repeat, _say).run(shapes, engines, wanted)
    _say(f"results: {asked.json}")
    return 0


def _report(asked: argparse.Namespace) -> int:
    asked.output.write_text(render(load(asked.json)), encoding="utf-8")
    _say(f"wrote {asked.output}")
    return 0


def _chosen(known: Mapping[str, Choice], names: Sequence[str] | None) -> list[Choice]:
    """Return the items with these names, or all items."""
    return [known[name] for name in dict.fromkeys(names or known)]


def _say(line: str) -> None:
    print(line, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.compare_peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--work", type=Path, default=DEFAULT_WORK, help=f"engines and models [{DEFAULT_WORK}]")
    common.add_argument("--json", type=Path, help="results file [WORK/results.json]")
    named = argparse.ArgumentParser(add_help=False)
    named.add_argument(
        "--engine", action="append", choices=ENGINES, help=f"engine; may be repeated [all]; {OURS.name} is this toolkit"
    )
    shaped = argparse.ArgumentParser(add_help=False)
    shaped.add_argument("--shape", action="append", choices=SHAPES, help="shape; may be repeated [both real shapes]")
    actions = parser.add_subparsers(required=True)

    def command(
        name: str, action: object, parents: list[argparse.ArgumentParser], text: str
    ) -> argparse.ArgumentParser:
        added = actions.add_parser(name, parents=[common, *parents], help=text, description=text)
        added.set_defaults(action=action)
        return added

    command("setup", _setup, [named], "Install missing engines, and report those that cannot be installed.")
    models = command("models", _models, [named, shaped], "Make missing models.")
    models.add_argument("--adapter", action="store_true", help="also make an adapter of rank 16 for the adapter cases")
    run = command("run", _run, [named, shaped], "Measure the cases that have no results yet.")
    run.add_argument("--case", action="append", choices=cases(default_threads()), help="case; may be repeated [all]")
    run.add_argument("--repeat", type=positive, default=DEFAULT_REPEAT, help=f"processes per case [{DEFAULT_REPEAT}]")
    run.add_argument("--again", action="store_true", help="discard the existing results of the selection")
    report = command("report", _report, [], "Write the page from the results.")
    report.add_argument(
        "-o", "--output", type=Path, default=DEFAULT_REPORT, help="path of the page [docs/reference/performance.md]"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
