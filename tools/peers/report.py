"""docs/performance.md, from results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .adapter import RANK
from .cases import Case, Measured, cases
from .engines import ENGINES, OURS
from .results import Results, Run
from .shapes import SHAPES, Shape

Value = Callable[[Measured], float | None]
Row = Sequence[str]

_DASH = "-"

_INTRODUCTION = """\
# Performance

Written by `python -m tools.compare_peers`. The figures are medians of separate processes that run in turn: what the
machine can do at most (the ceilings), this toolkit, one peer after the other, and all of it again. The models have
random weights in the sizes of real models. Every engine gets the same checkpoint in its own INT4 form, the same random
prompts and the same number of threads, and chooses tokens greedily. Speeds are tokens per second over all sequences.
"""

_COMMANDS = """\
[bounds.md](bounds.md) says what bounds these figures, and what was tried.

## Again on your machine

```sh
python -m tools.compare_peers setup
python -m tools.compare_peers models
python -m tools.compare_peers run
python -m tools.compare_peers report
```

`setup` installs each peer into a virtual environment of its own below `~/.cache/genai/peers` (10 GB with models);
llama.cpp is compiled, which takes cmake and a C++ compiler. `run` takes hours with all peers, and goes on where it was
interrupted. `genai bench` measures one model. [tools/README.md](../tools/README.md) says more.
"""


def render(results: Results) -> str:
    """The page."""
    shapes = [SHAPES[name] for name in dict.fromkeys(run.shape for run in results.runs) if name in SHAPES]
    parts = [_INTRODUCTION, _machine(results), _engines(results)]
    parts += [_Section(results, shape).text() for shape in shapes]
    parts += [_failures(results), _COMMANDS]
    return "\n".join(part for part in parts if part)


@dataclass(frozen=True)
class _Column:
    """A figure of the tables of engines.

    Attributes:
        show: a number for people.
        less_is_better: seconds and bytes.
        bracket: what share stands beside the number: of the "bandwidth", of "products", or of the "quiet" speed.
    """

    title: str
    case: str
    value: Value
    show: Callable[[float], str]
    less_is_better: bool = False
    bracket: str = ""


def _speed(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}"


_COLUMNS = (
    _Column("decode at 128", "context-128", lambda found: found.decode, _speed, bracket="bandwidth"),
    _Column("decode at 2048", "context-2048", lambda found: found.decode, _speed, bracket="bandwidth"),
    _Column("prefill 512", "context-512", lambda found: found.prefill, _speed, bracket="products"),
    _Column("prefill 2048", "context-2048", lambda found: found.prefill, _speed, bracket="products"),
    _Column("batch 4", "batch-4", lambda found: found.decode, _speed),
    _Column("batch 8", "batch-8", lambda found: found.decode, _speed),
    _Column("batch 16", "batch-16", lambda found: found.decode, _speed),
    _Column("first token", "cold", lambda found: found.first_token, lambda number: f"{number:.2f} s", True),
    _Column("memory", "context-128", lambda found: found.peak_bytes, lambda number: f"{number / 1e9:.2f} GB", True),
    _Column("cores busy", "busy", lambda found: found.decode, _speed, bracket="quiet"),
)


class _Section:
    """One shape."""

    def __init__(self, results: Results, shape: Shape) -> None:
        self._results, self._shape = results, shape
        self._cores = int(results.machine["cores"])
        self._cases = cases(self._cores)
        self._engines = [
            name for name in ENGINES if any((run.engine, run.shape) == (name, shape.name) for run in results.runs)
        ]

    def text(self) -> str:
        shape = self._shape
        tables = [
            self._ceilings(),
            self._all_engines(),
            self._ratios(),
            self._contexts(),
            self._batches(),
            self._adapters(),
            self._threads(),
            self._spread(),
        ]
        sizes = f"{shape.packed_bytes / 1e9:.2f} GB of packed weights, {shape.kv_bytes_per_token / 1e3:.1f} kB of keys "
        head = f"## {shape.title}\n\n{sizes}and values per token.\n"
        return "\n".join([head, *(table for table in tables if table)])

    def _median(self, engine: str, case: str, value: Value) -> float | None:
        return self._results.median(engine, self._shape.name, case, value)

    def _share(self, case: Case, speed: float) -> float | None:
        """Of the read bandwidth measured beside the case: packed weights and keys and values, at the middle of it."""
        bandwidth = self._results.read_bandwidth(self._shape.name, case.name, case.threads or self._cores)
        step = self._shape.bytes_per_step(case.prompt + case.new / 2, case.batch)
        return speed / case.batch * step / bandwidth if bandwidth else None

    def _share_of_products(self, case: Case, speed: float) -> float | None:
        """Of the most products per second measured beside the case, whatever numbers they were of."""
        most = self._results.most_products(self._shape.name, case.name, case.threads or self._cores)
        return speed * self._shape.operations_per_token / most if most else None

    def _ceilings(self) -> str:
        beside = [ceiling for ceiling in self._results.ceilings if ceiling.shape == self._shape.name]
        rows = []
        for threads in sorted({threads for ceiling in beside for threads in ceiling.read}):
            read = statistics.median(ceiling.read[threads] for ceiling in beside if threads in ceiling.read)
            rates = [ceiling.products[threads] for ceiling in beside if threads in ceiling.products]
            kinds = {kind: statistics.median(rate[kind] for rate in rates if kind in rate) for kind in rates[0]}
            products = ", ".join(f"{kind} {rate / 1e12:.2f}" for kind, rate in kinds.items())
            rows.append((str(threads), f"{read / 1e9:.1f} GB/s", products))
        return _table(
            "Ceilings measured in the same run", ("threads", "read bandwidth", "products, 10^12 operations/s"), rows
        )

    def _all_engines(self) -> str:
        rows = [[ENGINES[name].title, *(self._cell(name, column) for column in _COLUMNS)] for name in self._engines]
        note = (
            "In brackets: for decode, the share of the read bandwidth (packed weights, and keys and values in float16, "
            "once per step, whatever an engine really reads); for prefill, the share of the fastest products (layers' "
            "matrices, whatever numbers an engine multiplies). First token: from the start of the process, prompt of "
            "128 tokens, files and compiled kernels in place. Memory: resident at most, decoding at 128. Cores busy: "
            "decode at 128 while each core also runs something else, and its share of the quiet speed."
        )
        return _table("All engines", ("", *(column.title for column in _COLUMNS)), rows, note)

    def _cell(self, engine: str, column: _Column) -> str:
        number = self._median(engine, column.case, column.value)
        if number is None:
            return _DASH
        share = self._bracketed(engine, column, number)
        return column.show(number) + (f" ({share:.0%})" if share is not None else "")

    def _bracketed(self, engine: str, column: _Column, number: float) -> float | None:
        case = self._cases[column.case]
        if column.bracket == "bandwidth":
            return self._share(case, number)
        if column.bracket == "products":
            return self._share_of_products(case, number)
        quiet = self._median(engine, "context-128", column.value) if column.bracket == "quiet" else None
        return number / quiet if quiet else None

    def _ratios(self) -> str:
        rows = []
        for name in self._engines:
            if name == OURS.name:
                continue
            ratios = [self._ratio(name, column) for column in _COLUMNS]
            rows.append([ENGINES[name].title, *(f"{ratio:.2f}x" if ratio else _DASH for ratio in ratios)])
        title = f"{OURS.title} over each peer (above 1: faster, or less memory)"
        return _table(title, ("", *(column.title for column in _COLUMNS)), rows)

    def _ratio(self, peer: str, column: _Column) -> float | None:
        ours, theirs = (self._median(name, column.case, column.value) for name in (OURS.name, peer))
        if not ours or not theirs:
            return None
        return theirs / ours if column.less_is_better else ours / theirs

    def _contexts(self) -> str:
        rows = []
        for case in sorted(self._cases.values(), key=lambda case: case.prompt):
            if not case.name.startswith("context-"):
                continue
            decode = self._median(OURS.name, case.name, lambda found: found.decode)
            prefill = self._median(OURS.name, case.name, lambda found: found.prefill)
            memory = self._median(OURS.name, case.name, lambda found: found.peak_bytes)
            if decode is None or prefill is None or memory is None:
                continue
            share = self._share(case, decode)
            least = self._shape.packed_bytes + (case.prompt + case.new + 1) * self._shape.kv_bytes_per_token
            cells = (f"{1e3 / decode:.1f} ms", f"{share:.0%}" if share is not None else _DASH, _speed(prefill))
            rows.append((f"{case.prompt:,}", _speed(decode), *cells, f"{memory / 1e9:.2f} GB, {memory / least:.2f}x"))
        titles = ("context", "decode", "per token", "of bandwidth", "prefill", "memory, of packed weights + KV")
        return _table(f"{OURS.title}: what context costs", titles, rows)

    def _batches(self) -> str:
        rows = []
        alone = self._median(OURS.name, "context-128", lambda found: found.decode)
        for case in self._cases.values():
            total = self._median(OURS.name, case.name, lambda found: found.decode)
            if not case.name.startswith("batch-") or total is None or alone is None:
                continue
            step = case.batch / total
            rows.append((str(case.batch), _speed(total), f"{total / alone:.1f}x", f"{step * alone:.2f}x"))
        titles = ("sequences", "tokens per second", "of one sequence", "time of a step")
        return _table(f"{OURS.title}: what a batch costs, at 128", titles, rows)

    def _adapters(self) -> str:
        rows = []
        for engine in self._engines:
            row = [ENGINES[engine].title]
            for plain, adapted in (("context-128", "adapter-batch-1"), ("batch-16", "adapter-batch-16")):
                without, with_one = (
                    self._median(engine, case, lambda found: found.decode) for case in (plain, adapted)
                )
                if without is None or with_one is None:
                    row += [_DASH] * 3
                else:
                    row += [_speed(without), _speed(with_one), f"{without / with_one - 1:.1%}"]
            if set(row[1:]) != {_DASH}:
                rows.append(row)
        titles = ("", "alone", "with it", "more time", "batch 16", "with it", "more time")
        note = "All sequences use the same adapter: peers do not decode different ones together."
        return _table(f"What an adapter of rank {RANK} on every projection costs, at 128", titles, rows, note)

    def _threads(self) -> str:
        rows = []
        counts = [*range(1, self._cores), self._cores]
        names = [f"threads-{count}" if count < self._cores else "context-512" for count in counts]
        for engine in self._engines:
            cells = []
            for name in names:
                decode = self._median(engine, name, lambda found: found.decode)
                prefill = self._median(engine, name, lambda found: found.prefill)
                cells.append(_DASH if decode is None or prefill is None else f"{_speed(decode)} / {_speed(prefill)}")
            if set(cells) != {_DASH}:
                rows.append([ENGINES[engine].title, *cells])
        if len(counts) < 2:
            return ""
        return _table("Threads: decode at 512 / prefill 512", ("", *map(str, counts)), rows)

    def _spread(self) -> str:
        """How far apart the runs of one median lie."""
        spreads = []
        for engine in self._engines:
            for case in self._cases:
                runs = self._results.of(engine, self._shape.name, case)
                speeds = [run.measured.decode for run in runs if run.measured and run.measured.decode]
                if len(speeds) > 1:
                    spreads.append((max(speeds) - min(speeds)) / statistics.median(speeds))
        if not spreads:
            return ""
        middle, worst = statistics.median(spreads), max(spreads)
        return f"Runs of one decode figure lie within {middle:.0%} of it (median), {worst:.0%} at worst.\n"


def _machine(results: Results) -> str:
    machine = results.machine
    facts = [
        f"{machine['processor']}, {machine['cores']} cores used",
        f"instructions: {', '.join(machine['features'])}",
        f"last-level cache {machine['last_level_cache'] / 2**20:.0f} MiB, memory {machine['memory'] / 2**30:.0f} GiB",
        f"{machine['system']}, Python {machine['python']}",
    ]
    return "## The machine\n\n" + "\n".join(f"- {fact}" for fact in facts) + "\n"


def _engines(results: Results) -> str:
    runs = {name: [run for run in results.runs if run.engine == name] for name in ENGINES}
    rows = [(engine.title, _versions(runs[name]), engine.form) for name, engine in ENGINES.items() if runs[name]]
    return "## The engines\n" + _table("", ("engine", "versions", "its INT4 model"), rows)


def _versions(runs: Sequence[Run]) -> str:
    """What most runs were of, and where others differ."""
    measured: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for run in runs:
        measured.setdefault(tuple(run.versions.items()), []).append(run.case)
    usual, *others = sorted(measured, key=lambda versions: -len(measured[versions]))
    texts = [", ".join(map(" ".join, usual))]
    for versions in others:
        different = [" ".join(package) for package in versions if package not in usual]
        texts.append(f"{', '.join(dict.fromkeys(measured[versions]))}: {', '.join(different)}")
    return "; ".join(texts)


def _failures(results: Results) -> str:
    failed = [run for run in results.runs if run.measured is None]
    if not failed:
        return ""
    lines = [f"- {run.engine}, {run.shape}, {run.case}: {run.error}" for run in failed]
    return "## What did not run\n\n" + "\n".join(lines) + "\n"


def _table(title: str, columns: Row, rows: Iterable[Row], note: str = "") -> str:
    """A Markdown table with a title; nothing without rows."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    if not lines:
        return ""
    head = [f"### {title}\n"] if title else [""]
    rule = "|" + "---|" * len(columns)
    return "\n".join([*head, f"| {' | '.join(columns)} |", rule, *lines, *(["", note] if note else []), ""])
