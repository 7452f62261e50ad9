"""All checks and measurements for a first session on a GPU: `python -m tools.gpu_day -o FOLDER [MODEL...]`.

The stages run in order of importance, within a time limit: facts about the GPU; compilation of every kernel; the tests
of kernels and models on the GPU; the time and composition of models' steps, compared with PyTorch; kernels compared
with the GPU's ceilings; and NVIDIA's memory and race checks. If you name no model, models of Llama-3.2-1B's and
Llama-3.1-8B's shapes with random weights are built in the background. All results are written to FOLDER/gpu_day.json
and FOLDER/gpu_day.md after each stage, so that a later failure loses nothing. The exit code is 2 without a GPU, and 1
if a stage failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from genai.kernels.cache_layout import PAGE_TOKENS, PagedLayer
from genai.kernels.cuda.cupy_driver import open_driver
from genai.kernels.cuda.driver import NoDevice
from genai.kernels.cuda.executor import CudaExecutor
from genai.kernels.cuda.warmup import all_kernels
from genai.kernels.device import Factors, StepContext
from genai.kernels.float_bits import FLOAT_BITS
from genai.kernels.ir import (  # fmt: skip
    Attention,
    BlockWeight,
    DenseWeight,
    Linear,
    LoraDelta,
    LoraShrink,
    MoE,
    Op,
    Projection,
    Weight,
)
from genai.kernels.weights import uniform_format
from genai.kvcache.storage import ITEM_BYTES
from tests.kernels.cuda.programs import MadeUpConstants, program, step_of, with_adapters
from tools.cuda_steps import measured_steps

ROOT = Path(__file__).resolve().parent.parent
SHAPES = ("llama-3.2-1b", "llama-3.1-8b")
# Time limits in seconds for the tests, for building models, for PyTorch's steps of one model, for a sanitizer check.
_TESTED, _BUILT, _PYTORCH, _SANITIZED = 120, 240, 45, 60
_LAST_WORDS = 10
# Stages that run under the sanitizer, with small sizes: together, they use every kind of kernel.
_SMALL_STAGES = ("products", "experts", "attention", "adapters")
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_CHECKS = ("memcheck", "racecheck", "synccheck")
# The shares of the GPU's copy bandwidth and matmul speed that kernels should reach.
BANDWIDTH_SHARE, MATMUL_SHARE = 0.8, 0.5
Row = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """The sizes that are measured.

    Attributes:
        copied: number of bytes to copy.
        matrices: [outputs, columns] of matrix products.
        copies: number of copies of each matrix, too many for the GPU's cache to hold.
        tokens: numbers of rows with decode numerics.
        prompts: numbers of rows with prefill numerics.
        contexts: tokens of sequences.
        batches: numbers of sequences.
        repeats: repetitions of each timed run.
        experts: number of experts, experts per token, row size, and size between an expert's two matrix products.
        kinds: page types in addition to float16.
    """

    copied: int = 1 << 30
    matrices: tuple[tuple[int, int], ...] = ((4096, 4096), (14336, 4096), (4096, 14336))
    copies: int = 8
    tokens: tuple[int, ...] = (1, 8, 64)
    prompts: tuple[int, ...] = (512, 2048)
    contexts: tuple[int, ...] = (1024, 8192)
    batches: tuple[int, ...] = (1, 64)
    repeats: int = 20
    experts: tuple[int, int, int, int] = (128, 8, 2048, 768)
    kinds: tuple[str, ...] = ("bfloat16", "float8")


SMALL = Sizes(1 << 16, ((64, 256),), 2, (1,), (32,), (64,), (2,), 2, (4, 2, 64, 32), ())


@dataclass
class Day:
    """The tools of the session and its results so far."""

    driver: Any
    cupy: Any
    sizes: Sizes
    folder: Path
    models: list[Path]
    index: int
    building: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    stages: dict[str, list[Row]] = field(default_factory=dict)
    bandwidth: float = 0.0
    matmul: float = 0.0

    def seconds(self, work: Callable[[], None]) -> float:
        """Return the median time that the work takes on the GPU, by the GPU's clock."""
        return self.seconds_of(self.driver, work)

    def seconds_of(self, driver: Any, work: Callable[[], None]) -> float:
        """Return the median time for another driver's work, which runs on a separate stream."""
        work()
        return float(np.median([driver.seconds(work) for _ in range(self.sizes.repeats)]))


# --- stages ----------------------------------------------------------------------------------------------------------


def facts(day: Day) -> Iterator[Row]:
    """Report the GPU, its maximum copy and matmul speed, and the cost of a launch."""
    yield {"what": "device", "value": day.driver.name, "free bytes": day.driver.free_bytes()}
    for name in ("driverGetVersion", "runtimeGetVersion"):
        yield {"what": name, "value": getattr(day.cupy.cuda.runtime, name)()}
    source, target = (day.driver.zeros(day.sizes.copied) for _ in range(2))

    def copy() -> None:
        with day.driver.here():
            target[...] = source

    day.bandwidth = 2 * day.sizes.copied / day.seconds(copy)
    yield {"what": "copy bandwidth, both ways", "GB/s": day.bandwidth / 1e9}
    size = max(day.sizes.matrices[0])
    rng = np.random.default_rng(0)  # cuBLAS is faster on matrices of ones
    a, b = (day.driver.upload(rng.standard_normal((size, size), np.float32).astype(np.float16)) for _ in range(2))

    def multiply() -> None:
        with day.driver.here():
            a @ b

    try:
        day.matmul = 2 * size**3 / day.seconds(multiply)
        yield {"what": "cuBLAS, float16", "TFLOP/s": day.matmul / 1e12}
    except Exception as error:  # our optional dependencies do not include cuBLAS
        yield {"what": "cuBLAS, float16", "value": f"not available: {type(error).__name__}: {error}"}
    count = 1000
    begin = time.perf_counter()
    for _ in range(count):
        day.driver.zeros(256)
    day.driver.synchronize()
    yield {"what": "a CuPy launch with its allocation", "us": (time.perf_counter() - begin) / count * 1e6}


def compiled(day: Day) -> Iterator[Row]:
    """Compile every kernel with the compiler that users have."""
    kernels, begin = all_kernels(day.driver.capability), time.perf_counter()
    functions = day.driver.load(kernels)
    yield {"what": "kernels compiled", "value": len(functions), "s": time.perf_counter() - begin}


def checked(day: Day) -> Iterator[Row]:
    """Run the tests of kernels and models on the GPU; `tests.drawing` selects some cases of long sweeps."""
    processes = str(max((os.cpu_count() or 2) - 1, 1))
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-n", processes, "-p", "no:cacheprovider"]
    command += [f"--cases={os.environ.get('TEST_CASES', 'gpu')}"]  # without git, the default would be all cases
    environment = {"GENAI_CUDA_DEVICE": str(day.index)}
    code, said = _run([*command, "tests/kernels", "tests/convert", "tests/session"], _TESTED, environment)
    (day.folder / "tests.txt").write_text(said, encoding="utf-8")
    last = [line for line in said.splitlines() if line.strip()][-1:]
    what = {0: "passed", None: f"not finished after {_TESTED} s"}.get(code, "FAILED")
    yield {"what": "tests on the GPU", "value": what, "line": "".join(last)}
    if code:
        raise RuntimeError(f"tests failed: see {day.folder / 'tests.txt'}")


def _run(command: Sequence[str], seconds: float, environment: dict[str, str]) -> tuple[int | None, str]:
    """Run a program and kill its child processes; return the exit code (None on a timeout) and the output."""
    with subprocess.Popen(
        command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True,
    ) as process:  # fmt: skip
        code: int | None = None
        try:
            said, _ = process.communicate(timeout=seconds)
            code = process.returncode
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # so that the program prints its results
            try:
                said, _ = process.communicate(timeout=_LAST_WORDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                said, _ = process.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):  # kills child processes that outlive the program
                os.killpg(process.pid, signal.SIGKILL)
    return code, said


def begin_building(day: Day) -> None:
    """Build models in separate processes, during stages that are not timed."""
    for shape in SHAPES:
        folder = day.folder / "models" / shape
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-m", "tools.random_data", str(folder), "--shape", shape]
            day.building[shape] = subprocess.Popen(command, cwd=ROOT)
        day.models.append(folder)


def built(day: Day) -> Iterator[Row]:
    """Wait for the models that are being built."""
    for shape, process in day.building.items():
        code = process.wait(_BUILT)
        yield {"what": f"built with random weights: {shape}", "value": "done" if code == 0 else f"exit code {code}"}
        if code:
            raise RuntimeError(f"{shape} was not built")


def products(day: Day) -> Iterator[Row]:
    """Measure matmuls with float16 and 3- to 8-bit weights: weight bytes/s for few rows, operations/s for many."""
    rng = np.random.default_rng(0)
    for outputs, columns in day.sizes.matrices:
        for bits in (16, 3, 4, 8):
            constants = MadeUpConstants()
            weights = [_weight(constants, rng, outputs, columns, bits) for _ in range(day.sizes.copies)]
            executor = CudaExecutor(day.driver, 1)
            nbytes = sum(executor.packed_bytes(weight, constants) for weight in weights)
            for exact in (False,) if bits == 16 else (True, False):
                ops: list[Op] = [
                    Linear("x", Projection(weight), f"y{number}", exact) for number, weight in enumerate(weights)
                ]
                widths = {"x": columns} | {op.outputs[0]: outputs for op in ops}
                step = executor.compile(program(ops, widths, constants, []))
                counted = [(tokens, 0) for tokens in day.sizes.tokens]
                counted += [] if exact else [(tokens, tokens) for tokens in day.sizes.prompts]
                for tokens, prefill in counted:
                    x = rng.standard_normal((tokens, columns)).astype(np.float32)
                    counts = step.prepare(step_of([tokens], [tokens], prefill=int(prefill > 0)), {"x": x})
                    seconds = day.seconds(lambda step=step, counts=counts: step.start(counts))  # type: ignore[misc]
                    yield _product_row(day, (outputs, columns, bits), exact, tokens, prefill, nbytes, seconds)


def _share(rate: float, of: float) -> float | None:
    return rate / of if of else None  # None: `of` was not measured


def _weight(constants: MadeUpConstants, rng: np.random.Generator, outputs: int, columns: int, bits: int) -> Weight:
    if bits < 16:
        return constants.block_weight(rng, outputs, columns, bits=bits)
    name = f"floats{len(constants.arrays)}"
    constants.arrays[name] = rng.standard_normal((outputs, columns), np.float32).astype(np.float16)
    return DenseWeight(name, outputs, columns, transposed=True)


def _product_row(
    day: Day, shape: tuple[int, int, int], exact: bool, tokens: int, prefill: int, nbytes: int, seconds: float
) -> Row:
    outputs, columns, bits = shape
    kind = "bf16 tensor cores" if prefill else "fp32" if exact or bits == 16 else "int8"
    row: Row = {"what": f"{outputs} x {columns}, {bits} bits, {kind}", "rows": tokens}
    row |= {"us": seconds / day.sizes.copies * 1e6}
    if prefill:
        rate = 2 * outputs * columns * tokens * day.sizes.copies / seconds
        reached = _share(rate, day.matmul)
        return row | {"TFLOP/s": rate / 1e12, "share": reached, "floor": MATMUL_SHARE}
    rate = nbytes / seconds
    return row | {"GB/s": rate / 1e9, "share": _share(rate, day.bandwidth), "floor": BANDWIDTH_SHARE}


def experts(day: Day) -> Iterator[Row]:
    """Measure mixtures of 4-bit experts: bytes/s of the selected experts for few rows, operations/s for many."""
    (count, per_token, hidden, width), rng, constants = day.sizes.experts, np.random.default_rng(0), MadeUpConstants()

    def branch(name: str, rows: int, columns: int) -> Projection:
        constants.arrays[name] = rng.integers(0, 256, (count, rows, columns // 2), np.uint8)
        constants.arrays[f"{name}.scales"] = np.full((count, rows, columns // 32), 0.01, np.float16)
        return Projection(
            BlockWeight(name, f"{name}.scales", "", rows, columns, uniform_format(4, 32), count, rows != hidden)
        )

    layers = branch("first", 2 * width, hidden), branch("second", hidden, width)
    names = [str(number) for number in range(day.sizes.copies)]  # each has its own scores and selects other experts
    ops: list[Op] = [MoE("x", f"scores{name}", f"y{name}", per_token, True, *layers, "swiglu", False) for name in names]
    widths = {"x": hidden} | {f"y{name}": hidden for name in names} | {f"scores{name}": count for name in names}
    executor = CudaExecutor(day.driver, 1)
    nbytes = sum(executor.packed_bytes(layer.weight, constants) for layer in layers) / count
    step = executor.compile(program(ops, widths, constants, []))
    for tokens, prefill in [*((rows, 0) for rows in day.sizes.tokens), *((rows, 1) for rows in day.sizes.prompts)]:
        given = {name: rng.standard_normal((tokens, wide)).astype(np.float32) for name, wide in widths.items()}
        scores = [given[f"scores{name}"] for name in names]
        counts = step.prepare(step_of([tokens], [tokens], prefill=prefill), given)
        seconds = day.seconds(lambda counts=counts: step.start(counts))  # type: ignore[misc]
        row: Row = {"what": f"{per_token} of {count} experts of {hidden} x {width}, 4 bits", "rows": tokens}
        row |= {"us": seconds / len(names) * 1e6}
        if prefill:
            rate = 2 * 3 * hidden * width * tokens * per_token * len(names) / seconds
            reached = _share(rate, day.matmul)
            yield row | {"TFLOP/s": rate / 1e12, "share": reached, "floor": MATMUL_SHARE}
        else:
            used = sum(len(np.unique(np.argsort(-one, axis=1)[:, :per_token])) for one in scores)
            rate = used * nbytes / seconds
            yield row | {"GB/s": rate / 1e9, "share": _share(rate, day.bandwidth), "floor": BANDWIDTH_SHARE}


def attention(day: Day) -> Iterator[Row]:
    """Measure attention with 32 heads and 8 KV heads of 128: bytes/s for decoding, operations/s for prompts.

    All cases run on float16 pages. On other page types, only the largest decoding case and the largest prompt run.
    """
    cases = [(context, batch) for context in day.sizes.contexts for batch in day.sizes.batches]
    for kind, some in (("float16", cases), *((kind, cases[-1:]) for kind in day.sizes.kinds)):
        for context, batch in some:
            blocks = batch * -(-context // PAGE_TOKENS)
            seconds = attended(day, blocks, step_of([context] * batch, [1] * batch, num_blocks=blocks), kind)
            rate = batch * context * 8 * 128 * ITEM_BYTES[kind] * 2 / seconds
            yield {
                "what": f"attention, {context} tokens{_named(kind)}", "rows": batch, "us": seconds * 1e6,
                "GB/s": rate / 1e9, "share": _share(rate, day.bandwidth), "floor": BANDWIDTH_SHARE,
            }  # fmt: skip
        prompts = day.sizes.prompts if kind == "float16" else day.sizes.prompts[-1:]
        for tokens in prompts:  # a row attends to half of the tokens on average, two products per token
            blocks = -(-tokens // PAGE_TOKENS)
            seconds = attended(day, blocks, step_of([tokens], [tokens], num_blocks=blocks, prefill=1), kind)
            rate = 2 * 2 * 32 * 128 * tokens * (tokens + 1) / 2 / seconds
            yield {
                "what": f"attention of a prompt{_named(kind)}", "rows": tokens, "us": seconds * 1e6,
                "TFLOP/s": rate / 1e12, "share": _share(rate, day.matmul), "floor": MATMUL_SHARE,
            }  # fmt: skip


def _named(kind: str) -> str:
    return "" if kind == "float16" else f", {kind}"


def attended(day: Day, blocks: int, which: StepContext, kind: str) -> float:
    """Return the seconds of a step over pages of one type in `blocks` blocks."""
    op = Attention("q", "k", "v", "out", layer=0, heads=32, kv_heads=8, head_size=128, v_head_size=128)
    widths = {"q": 4096, "k": 1024, "v": 1024, "out": 4096}
    size, numbers = blocks * 8 * 128 * PAGE_TOKENS * ITEM_BYTES[kind], FLOAT_BITS.get(kind, kind)
    memory = [day.driver.zeros(size).view(numbers) for _ in range(2)]
    keys = memory[0].reshape(blocks, 8, 128, PAGE_TOKENS)
    layer = PagedLayer(keys, memory[1].reshape(blocks, 8, PAGE_TOKENS, 128))
    step = CudaExecutor(day.driver, 1).compile(program([op], widths, MadeUpConstants(), []), [layer])
    given = {name: np.ones((len(which.tokens), widths[name]), np.float32) for name in ("q", "k", "v")}
    counts = step.prepare(which, given)
    return day.seconds(lambda: step.start(counts))


def adapters(day: Day) -> Iterator[Row]:
    """Measure the extra time of rank-16 adapters: rows with a different adapter each, and a prompt with one adapter."""
    rng, (outputs, columns), targets = np.random.default_rng(0), day.sizes.matrices[0], range(day.sizes.copies)
    constants, rank = MadeUpConstants(), 16
    weights = [constants.block_weight(rng, outputs, 32, bits=8) for _ in targets]
    ops: list[Op] = []
    for target, weight in zip(targets, weights, strict=True):
        ops.append(LoraShrink("x", target, f"h{target}"))
        ops.append(Linear("small", Projection(weight, delta=LoraDelta(f"h{target}", target)), f"y{target}", True))
    widths = {"x": columns, "small": 32} | {f"y{target}": outputs for target in targets}
    executor = CudaExecutor(day.driver, 1)
    step = executor.compile(program(ops, widths, constants, []))
    shapes = (rank, columns), (outputs, rank)
    a, b = (rng.standard_normal(shape).astype(np.float16) for shape in shapes)
    for tokens, prefill in [*((count, 0) for count in day.sizes.tokens), *((count, 1) for count in day.sizes.prompts)]:
        counts = [tokens] if prefill else [1] * tokens
        given = {name: np.ones((tokens, widths[name]), np.float32) for name in ("x", "small")}
        loaded = [executor.load_adapter([[Factors(0, a, b)] for _ in targets]) for _ in counts]
        which, taken = step_of(counts, counts, prefill=prefill), []
        for mixes in ([[(number, 1.0)] for number in range(len(counts))], [[]] * len(counts)):
            made = step.prepare(with_adapters(which, loaded, mixes), given)
            taken.append(day.seconds(lambda made=made: step.start(made)))  # type: ignore[misc]
        seconds = max(taken[0] - taken[1], 1e-9)
        rate = sum(one.nbytes for one in loaded) / seconds
        row: Row = {"what": f"adapters of rank {rank}, {outputs} x {columns}", "rows": tokens}
        yield row | {"us": seconds / len(targets) * 1e6} | ({} if prefill else {"GB/s": rate / 1e9})


def models(day: Day) -> Iterator[Row]:
    """Run `genai bench decode` on the GPU with the bundled model and the named models."""
    for model in (None, *day.models):
        command = [sys.executable, "-m", "genai", "bench", "decode", *([str(model)] if model else []), "--json"]
        done = subprocess.run([*command, "--device", f"cuda:{day.index}"], cwd=ROOT, capture_output=True, text=True)
        name = model.name if model else "the bundled model"
        if done.returncode:
            raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
        yield {"what": f"decode, {name}", "value": json.loads(done.stdout)}


def steps(day: Day) -> Iterator[Row]:
    """Measure the composition of the named models' steps, and the time of their prompts."""
    for model in day.models:
        sizes = {"batches": day.sizes.batches, "context": day.sizes.contexts[0], "prompts": day.sizes.prompts}
        for row in measured_steps(model, f"cuda:{day.index}", day.seconds_of, **sizes):
            yield row | {"what": f"{model.name}, {row['what']}"}


def _named_device(index: int) -> str:
    """Return the CUDA_VISIBLE_DEVICES value that limits a process to one of the GPUs that this process can use."""
    visible = [name.strip() for name in os.environ.get(_VISIBLE, "").split(",") if name.strip()]
    return visible[index] if index < len(visible) else str(index)


def pytorch(day: Day) -> Iterator[Row]:
    """Measure steps of the same shapes in PyTorch, if installed: int4 and bfloat16 weights, each in a CUDA graph."""
    for shape in SHAPES:
        command = [sys.executable, "-m", "tools.torch_steps", shape, "--context", str(day.sizes.contexts[0])]
        command += [word for batch in day.sizes.batches for word in ("--batch", str(batch))]
        code, said = _run(command, _PYTORCH, {_VISIBLE: _named_device(day.index)})
        yield from (json.loads(line) for line in said.splitlines() if line.startswith("{"))
        if code:
            yield {"what": f"PyTorch, {shape}", "value": f"ended with {code}: {said[-500:]}"}
        elif code is None:
            yield {"what": f"PyTorch, {shape}", "value": f"not finished after {_PYTORCH} s"}


def sanitized(day: Day) -> Iterator[Row]:
    """Check kernels with NVIDIA's compute-sanitizer, if installed: out-of-bounds accesses, races, barriers."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        yield {"what": "compute-sanitizer", "value": "not installed"}
        return
    work = [sys.executable, "-m", "tools.gpu_day", "--small", "--no-pool", "--device", str(day.index)]
    work += [word for stage in _SMALL_STAGES for word in ("--stage", stage)]
    code, said = _run([*work, "-o", str(day.folder / "unchecked")], _SANITIZED, {})  # compiles the kernels first
    if code != 0:
        raise RuntimeError(f"the run without a sanitizer ended with {code}: {said[-1000:]}")
    failed = []
    for check in _CHECKS:
        command = [tool, "--tool", check, "--target-processes", "all", *work, "-o", str(day.folder / check)]
        code, said = _run(command, _SANITIZED, {})
        (day.folder / f"{check}.txt").write_text(said, encoding="utf-8")
        found = re.findall(r"ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: (\d+) hazards?", said)
        errors = sum(int(number) for pair in found for number in pair if number)
        yield {"what": check, "value": f"{errors} errors" if found else f"no summary, exit code {code}"}
        failed += [check] if errors or not found or code else []
    if failed:
        raise RuntimeError(f"{', '.join(failed)} failed: see the files with these names")


STAGES = (
    facts, compiled, checked, built, steps, pytorch, products, attention, sanitized, experts, adapters, models,
)  # fmt: skip


# --- the session -----------------------------------------------------------------------------------------------------


def run(day: Day, minutes: float, names: Sequence[str] = ()) -> int:
    """Run the named stages, or all stages; return the number of failures. No stage starts after the time limit."""
    end, failed = time.monotonic() + 60 * minutes, 0
    chosen = [stage for stage in STAGES if not names or stage.__name__ in names]
    if built in chosen and not day.models:
        begin_building(day)
    try:
        for stage in chosen:
            failed += _tried(day, stage, end, minutes)
    finally:
        for process in day.building.values():
            process.kill()
            process.wait()
    return failed


def _tried(day: Day, stage: Callable[[Day], Iterator[Row]], end: float, minutes: float) -> bool:
    """Run a stage; return True if it failed."""
    rows = day.stages[stage.__name__] = []
    if time.monotonic() > end:
        rows.append({"what": "not started", "value": f"the limit of {minutes:g} minutes was reached"})
        return False
    failed = False
    try:
        for row in stage(day):
            rows.append(row)
            write(day)  # so that an interrupted stage loses nothing
            print(_line(row), file=sys.stderr, flush=True)
    except Exception as error:
        failed = True
        rows.append({"what": "FAILED", "value": f"{type(error).__name__}: {error}"})
        print(traceback.format_exc(), file=sys.stderr)
    write(day)
    return failed


def write(day: Day) -> None:
    """Write the results as a JSON file and a Markdown page."""
    day.folder.mkdir(parents=True, exist_ok=True)
    (day.folder / "gpu_day.json").write_text(json.dumps(day.stages, indent=1), encoding="utf-8")
    lines = [f"# {day.driver.name}"]
    for name, rows in day.stages.items():
        lines += ["", f"## {name}", "", *(f"- {_line(row)}" for row in rows)]
    (day.folder / "gpu_day.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _line(row: Row) -> str:
    parts = [str(row["what"])]
    for name, value in row.items():
        if name != "what" and value is not None:
            parts.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    under = row.get("share") is not None and row["share"] < row["floor"]
    return ", ".join(parts) + (" (below its floor)" if under else "")


def main(arguments: list[str] | None = None) -> int:
    """Run the stages; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--device", type=int, default=0, metavar="N", help="index of the GPU")
    parser.add_argument("--minutes", type=float, default=9.0, help="time after which no stage starts")
    parser.add_argument("--small", action="store_true", help="use small sizes to test this program")
    parser.add_argument("--no-pool", action="store_true", help="allocate each array from the driver, for a sanitizer")
    known = [stage.__name__ for stage in STAGES]
    parser.add_argument(
        "--stage", action="append", default=[], choices=known, help="run only this stage; may be repeated"
    )
    parser.add_argument("models", type=Path, nargs="*", metavar="MODEL")
    options = parser.parse_args(arguments)
    try:
        driver = open_driver(options.device)
    except NoDevice as error:
        print(f"gpu_day: no GPU can be used: {error}", file=sys.stderr)
        return 2
    import cupy

    if options.no_pool:
        cupy.cuda.set_allocator(None)
    sizes = SMALL if options.small else Sizes()
    day = Day(driver, cupy, sizes, options.output.resolve(), options.models, options.device)
    day.folder.mkdir(parents=True, exist_ok=True)
    return 1 if run(day, options.minutes, options.stage) else 0


if __name__ == "__main__":
    sys.exit(main())
