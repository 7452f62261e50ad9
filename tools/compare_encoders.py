"""Compare the speed of encoders with sentence-transformers, onnxruntime and llama.cpp, in turns.

    python -m tools.compare_encoders --peers PYTHON --llama-cpp SOURCES [--shape minilm-l6] [--cases 1x16,mixed]

PYTHON is an interpreter with torch, transformers, sentence-transformers, onnxruntime and gguf. SOURCES is the unpacked
source package of llama-cpp-python, with llama.cpp compiled in or beside it. An engine that is missing is named in the
table. Models with random weights are written once, and kept in --work. --model FOLDER measures a checkpoint instead,
which must have the files of sentence-transformers.

One process per engine loads the model. In each round, every process embeds the same texts in turn, while the others
wait; a figure is the median of the rounds. The vectors of the engines are compared, too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from genai.convert.encoders.build import build_encoder
from genai.convert.options import ExportOptions
from genai.doctor.processor import read_processor
from tools.arguments import folder, positive
from tools.peers.processes import PeerError, run_logged

WORKERS = Path(__file__).parent / "peers" / "encoders"
ROOT = Path(__file__).parents[1]
_PAUSE_SECONDS = 0.05
# The vectors of two texts have a cosine of at most 0.98 with these weights.
_LEAST_COSINE = 0.9999
# The vocabulary's size does not affect the time of a text.
_VOCABULARY = 30522
_BERT = {"vocab_size": _VOCABULARY, "max_position_embeddings": 512, "type_vocab_size": 2}


@dataclass(frozen=True)
class Shape:
    """A model's architecture, sizes and pooling."""

    model_type: str
    sizes: Mapping[str, Any]
    pooling: str
    begins: bool = True


SHAPES = {
    "minilm-l6": Shape(
        "bert",
        {**_BERT, "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
        "mean",
    ),
    "bert-base": Shape(
        "bert",
        {**_BERT, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
        "cls",
    ),
    "modernbert-base": Shape(
        "modernbert",
        {
            "vocab_size": _VOCABULARY, "hidden_size": 768, "num_hidden_layers": 22, "num_attention_heads": 12,
            "intermediate_size": 1152, "local_attention": 128, "global_attn_every_n_layers": 3,
            "max_position_embeddings": 8192, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3,
            "cls_token_id": 2, "sep_token_id": 3, "norm_eps": 1e-5, "layer_norm_eps": 1e-5,
        },
        "mean",
    ),
    "qwen3-embedding-0.6b": Shape(
        "qwen3",
        {
            "vocab_size": _VOCABULARY, "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "max_position_embeddings": 32768,
            "tie_word_embeddings": True, "use_cache": False, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3,
        },
        "lasttoken", begins=False,
    ),
}  # fmt: skip
CASES = ("1x16", "1x128", "32x16", "32x128", "mixed")


def lengths_of(case: str, mixed: int) -> list[int]:
    """Return the lengths in tokens of a case's texts; those of mixed length are log-normal with a median of 55."""
    if case == "mixed":
        drawn = np.random.default_rng(0).lognormal(4.0, 0.8, mixed)
        return np.clip(drawn, 4, 400).astype(int).tolist()
    texts, length = map(int, case.split("x"))
    return [length] * texts


@dataclass
class Engine:
    """An engine's process, started lazily.

    Attributes:
        name: name in the table.
        command: interpreter, worker and model.
        environment: variables of the process.
        missing: reason why it cannot run; "" = it runs.
        versions: versions of its packages.
    """

    name: str
    command: list[str]
    environment: dict[str, str]
    missing: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    _process: subprocess.Popen[str] | None = None

    def start(self, log: Path) -> None:
        """Start the process and wait until it has loaded the model; set `missing` if it fails."""
        if self.missing:
            return
        with log.open("a", encoding="utf-8") as file:
            print(f"$ {' '.join(self.command)}", file=file, flush=True)
            try:
                self._process = subprocess.Popen(
                    self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True,
                    env={**os.environ, **self.environment},
                )  # fmt: skip
            except OSError as error:
                self.missing = f"{self.command[0]} cannot be started: {error.strerror}"
                return
        answer = self._answer()
        if answer is None:
            lines = log.read_text(encoding="utf-8").strip().splitlines()
            self.missing = lines[-1].removeprefix("ModuleNotFoundError: ")
        else:
            self.versions = answer["versions"]

    def run(self, job: str) -> dict[str, Any] | None:
        """Time a job; None if the process has ended."""
        if self._process is None or self._process.stdin is None:
            return None
        try:
            self._process.stdin.write(job + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        return self._answer()

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _answer(self) -> dict[str, Any] | None:
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return dict(json.loads(line))
        self.stop()
        return None


@dataclass(frozen=True)
class Settings:
    """Where the engines are, and how they run."""

    peers: str
    llama_cpp: Path | None
    threads: int
    work: Path


def made(shape: str, settings: Settings) -> Path:
    """Return the checkpoint of a shape, which is written first if it does not exist.

    Raises:
        PeerError: it cannot be written.
    """
    target, described = settings.work / shape / "checkpoint", SHAPES[shape]
    if not (target / "modules.json").is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        job = {"model_type": described.model_type, "sizes": described.sizes, "pooling": described.pooling,
               "begins": described.begins}  # fmt: skip
        unfinished = target.with_name("unfinished")
        command = [settings.peers, str(WORKERS / "make_model.py"), str(unfinished), json.dumps(job)]
        run_logged(command, settings.work / "setup.log")
        unfinished.rename(target)
    return target


def engines_of(names: Sequence[str], checkpoint: Path, place: Path, settings: Settings) -> list[Engine]:
    """Return the engines; the graph and the GGUF files that they need are written first if they do not exist.

    Args:
        names: names of engines.
        checkpoint: folder of the model.
        place: folder for the graph and the GGUF files.
        settings: see `Settings`.
    """
    place.mkdir(parents=True, exist_ok=True)
    graph = place / "graph"
    if not graph.is_dir():
        build_encoder(checkpoint, graph, ExportOptions(precision="fp32"))
    threads = str(settings.threads)
    common = {"OMP_NUM_THREADS": threads, "RAYON_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
    known = {
        "genai": Engine("genai", [sys.executable, str(WORKERS / "ours.py"), str(graph), threads],
                        {**common, "PYTHONPATH": str(ROOT)}),
        "sentence-transformers": Engine(
            "sentence-transformers",
            [settings.peers, str(WORKERS / "with_sentence_transformers.py"), str(checkpoint), threads], common,
        ),
        "onnxruntime": Engine(
            "onnxruntime", [settings.peers, str(WORKERS / "with_onnxruntime.py"), str(graph), threads], common
        ),
    }  # fmt: skip
    found = []
    for name in names:
        if name in known:
            found.append(known[name])
        else:
            found.append(_llama(name, checkpoint, place, settings, common))
    return found


def _llama(name: str, checkpoint: Path, place: Path, settings: Settings, common: Mapping[str, str]) -> Engine:
    kind = name.rpartition("-")[2]
    file = place / f"{kind}.gguf"
    command = [settings.peers, str(WORKERS / "with_llama_cpp.py"), str(file), str(settings.threads)]
    engine = Engine(name, command, dict(common))
    sources = settings.llama_cpp
    if sources is None:
        engine.missing = "not installed: --llama-cpp is not given"
        return engine
    libraries = next(iter(sorted([*sources.glob("**/bin/libllama.so"), *sources.glob("../*/bin/libllama.so")])), None)
    if libraries is None:
        engine.missing = f"not installed: there is no compiled libllama.so in {sources}"
        return engine
    engine.environment |= {
        "LLAMA_CPP_BINDINGS": str(sources / "llama_cpp"), "LLAMA_CPP_LIB_PATH": str(libraries.parent),
        "LD_LIBRARY_PATH": str(libraries.parent),
    }  # fmt: skip
    if not file.is_file():
        unfinished = file.with_name(f"unfinished-{file.name}")
        vendored = str(sources / "vendor" / "llama.cpp")
        write = [settings.peers, str(WORKERS / "write_gguf.py"), vendored, str(checkpoint), str(unfinished), kind]
        try:
            run_logged(write, settings.work / "setup.log")
        except PeerError as error:
            engine.missing = f"no GGUF file: {error}"
            return engine
        unfinished.rename(file)
    return engine


ENGINES = ("genai", "sentence-transformers", "onnxruntime", "llama.cpp-f32", "llama.cpp-f16")


def texts_of(checkpoint: Path, lengths: Sequence[int], seed: int) -> dict[str, Any]:
    """Return random texts with the given numbers of tokens, special tokens included, and their token ids."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    around = len(tokenizer.encode("").ids)
    words = [word for word in tokenizer.get_vocab() if len(word) >= 3 and word.isascii() and word.isalpha()]
    words = sorted(word for word in words if len(tokenizer.encode(word).ids) == around + 1)[:20_000]
    generator = np.random.default_rng(seed)
    texts = [" ".join(generator.choice(words, max(1, length - around))) for length in lengths]
    return {"texts": texts, "ids": [one.ids for one in tokenizer.encode_batch(texts)]}


def measure(
    engines: Sequence[Engine], jobs: Mapping[str, str], rounds: int
) -> tuple[dict[str, dict[str, list[float]]], dict[str, dict[str, float]]]:
    """Time all jobs in turns.

    Returns:
        For each case, the seconds of each engine in each round; and the least cosine of an engine's vectors and those
        of the first engine that runs.
    """
    times: dict[str, dict[str, list[float]]] = {case: {} for case in jobs}
    cosines: dict[str, dict[str, float]] = {case: {} for case in jobs}
    for turn in range(rounds + 1):  # the first turn, which loads weights and compiles kernels, is not measured
        for case, job in jobs.items():
            expected: Any = None
            running = [engine for engine in engines if not engine.missing]
            for engine in running:
                time.sleep(_PAUSE_SECONDS)
                answer = engine.run(job)
                if answer is None:
                    engine.missing = engine.missing or f"ended during {case}; see the log"
                    continue
                vectors = np.array(answer["vectors"], np.float64)
                vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
                expected = vectors if expected is None else expected
                if turn:
                    times[case].setdefault(engine.name, []).append(answer["seconds"])
                    cosines[case][engine.name] = float((vectors * expected).sum(axis=1).min())
    return times, cosines


def table(times: Mapping[str, Mapping[str, Sequence[float]]], engines: Sequence[Engine]) -> list[str]:
    """Return a Markdown table: milliseconds per engine, and the best peer's time divided by that of this toolkit."""
    names = [engine.name for engine in engines]
    rows = [f"| texts x tokens | {' | '.join(f'{name} ms' for name in names)} | best peer / genai |"]
    rows.append("|---" * (len(names) + 2) + "|")
    for case, found in times.items():
        medians = {name: statistics.median(found[name]) * 1e3 for name in names if found.get(name)}
        shown = [f"{medians[name]:.1f}" if name in medians else "-" for name in names]
        peers = [value for name, value in medians.items() if name != "genai"]
        ratio = f"{min(peers) / medians['genai']:.2f}" if peers and "genai" in medians else "-"
        rows.append(f"| {case} | {' | '.join(shown)} | {ratio} |")
    return rows


def compare(checkpoint: Path, name: str, place: Path, asked: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    """Measure one model, print its table, and return the figures."""
    engines = engines_of(asked.engines, checkpoint, place, settings)
    lengths = {case: lengths_of(case, asked.mixed) for case in asked.cases}
    jobs = {case: json.dumps(texts_of(checkpoint, sizes, seed=1)) for case, sizes in lengths.items()}
    log = settings.work / "workers.log"
    try:
        for engine in engines:
            engine.start(log)
        times, cosines = measure(engines, jobs, asked.rounds)
    finally:
        for engine in engines:
            engine.stop()
    print(f"\n{name}, {settings.threads} threads, {read_processor().name}, median of {asked.rounds} rounds\n")
    print("\n".join(table(times, engines)))
    for engine in engines:
        if engine.missing:
            print(f"{engine.name}: {engine.missing}")
    for case, found in cosines.items():
        for other, cosine in found.items():
            if cosine < _LEAST_COSINE:
                print(f"{other}: the vectors of {case} differ from those of {engines[0].name}: cosine {cosine:.5f}")
    sys.stdout.flush()
    return {
        "model": name, "threads": settings.threads, "processor": read_processor().name, "rounds": asked.rounds,
        "tokens": {case: sum(sizes) for case, sizes in lengths.items()},
        "texts": {case: len(sizes) for case, sizes in lengths.items()},
        "seconds": times, "cosines": cosines, "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "engines": {engine.name: engine.missing or engine.versions for engine in engines},
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("~/.cache/genai/encoders"), help="folder of the models")
    parser.add_argument("--peers", default=sys.executable, metavar="PYTHON", help="interpreter that has the peers")
    parser.add_argument("--llama-cpp", type=folder, metavar="SOURCES", help="source folder of llama-cpp-python")
    parser.add_argument("--shape", choices=SHAPES, action="append", help="shape to measure (repeatable) [default: all]")
    parser.add_argument("--model", type=folder, action="append", help="checkpoint to measure instead (repeatable)")
    parser.add_argument("--cases", type=_list_of(CASES), default=CASES, help=f"of {','.join(CASES)} [default: all]")
    parser.add_argument("--mixed", type=positive, default=256, help="number of texts of the case mixed")
    parser.add_argument("--engines", type=_list_of(ENGINES), default=ENGINES, help=f"of {','.join(ENGINES)}")
    parser.add_argument("--rounds", type=positive, default=5, help="measured rounds")
    parser.add_argument("--threads", type=positive, default=2, help="threads of every engine")
    parser.add_argument("--prepare", action="store_true", help="only write the models")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    asked = parser.parse_args(arguments)
    work = asked.work.expanduser().resolve()
    work.mkdir(parents=True, exist_ok=True)
    sources = None if asked.llama_cpp is None else asked.llama_cpp.resolve()
    settings = Settings(asked.peers, sources, asked.threads, work)
    models = [(given.resolve(), given.name) for given in asked.model or []]
    if not models:
        try:
            models = [(made(shape, settings), shape) for shape in asked.shape or SHAPES]
        except PeerError as error:
            parser.error(f"the models cannot be written: {error}")
    results = []
    for checkpoint, name in models:
        if asked.prepare:
            engines_of(asked.engines, checkpoint, work / name, settings)
        else:
            results.append(compare(checkpoint, name, work / name, asked, settings))
    if asked.json is not None:
        asked.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def _list_of(known: Sequence[str]) -> Any:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(known)}")
        return names

    return parse


if __name__ == "__main__":
    main()
