"""LoRA adapters under load: concurrent requests in one batch while adapters are loaded, unloaded and evicted.

    python -m tools.adapter_soak                                  # a minute
    python -m tools.adapter_soak --minutes 5 --kv-type int4 --seed 7

Each round sends 64 random requests, each from a separate thread: with no adapter, one adapter or two weighted adapters;
with short prompts, long prompts that are processed in chunks, and shared prefixes; with one sample or several. The
model's cache holds only a few requests, and its adapter memory holds only some of the loaded adapters. Meanwhile
adapters are loaded, unloaded while in use, and evicted. Some requests are cancelled, and some use an adapter whose
numbers overflow. Each finished request must return the same log-probabilities, to the last bit, as the same request
alone in a model with enough memory for everything. After each round all cache blocks must be free, and in the last
third of the rounds memory must not grow.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from genai import LLM, CacheCapacityError, OptionError, SamplingError
from genai.engine.paged import PagedDecoder
from genai.lora.targets import LoraTargets

REQUESTS = 64
RANKS = (4, 16, 3, 33, 8)
OVERFLOWING = "overflowing"
CONTEXT_SIZE, MOST_PROMPT, MOST_TOKENS = 512, 400, 24
# The adapter memory as a multiple of the largest adapter; the cache blocks of the model under load (enough for a few
# requests) and of the reference model.
ROOM, BLOCKS, ALONE_BLOCKS = 2.5, 40, 200
GROWTH = 1.02
_M_ARENA_MAX = -8  # malloc.h


def write_adapter(folder: Path, targets: LoraTargets, seed: int, rank: int, size: float = 0.1) -> Path:
    """Write a random adapter for all projections of a model, in PEFT's format."""
    folder.mkdir(parents=True)
    rng, tensors = np.random.default_rng(seed), {}
    for module, parts in targets.parts.items():
        if "." in module.projection or module.projection in ("qkv_proj", "gate_up_proj"):
            continue
        block = "self_attn" if module.projection[0] in "qkvo" else "mlp"
        name = f"base_model.model.model.layers.{module.layer}.{block}.{module.projection}"
        shapes = {"A": (rank, parts[0].target.columns), "B": (sum(part.width for part in parts), rank)}
        for factor, shape in shapes.items():
            tensors[f"{name}.lora_{factor}.weight"] = rng.standard_normal(shape, np.float32) * np.float32(size)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank, "lora_alpha": rank}))
    return folder


@dataclass(frozen=True)
class Request:
    """One request. It is cancelled after `cancel_after` tokens unless that is None."""

    prompt: tuple[int, ...]
    adapter: Any
    samples: int
    cancel_after: int | None

    @property
    def options(self) -> dict[str, Any]:
        """The options of generate and stream."""
        own = {"temperature": 1.0, "seed": len(self.prompt), "max_tokens": MOST_TOKENS, "ignore_eos": True}
        return {**own, "adapter": dict(self.adapter) if isinstance(self.adapter, tuple) else self.adapter}


def random_requests(rng: np.random.Generator, names: list[str], vocabulary: int) -> Iterator[Request]:
    """Yield the requests of one round, drawn from a set small enough that some requests repeat."""
    beginnings = [tuple(np.random.default_rng(seed).integers(3, vocabulary, 100).tolist()) for seed in range(3)]
    for _ in range(REQUESTS):
        own = np.random.default_rng(int(rng.integers(150)))
        prompt = tuple(own.integers(3, vocabulary, int(own.integers(1, MOST_PROMPT - 100))).tolist())
        if own.random() < 0.4:
            prompt = (*beginnings[int(own.integers(len(beginnings)))], *prompt)
        first, second = own.choice(names, 2, replace=False).tolist()
        choice = (None, first, ((first, float(own.uniform(-1, 1.5))), (second, 0.5)))[int(own.integers(3))]
        cancelled = int(rng.integers(1, MOST_TOKENS)) if rng.random() < 0.2 else None
        yield Request(prompt, choice, 1 if cancelled else int(own.choice([1, 1, 1, 3])), cancelled)


class Soak:
    """The model under load, a reference model that computes each request alone, and the results.

    Args:
        folders: the adapters' folders, by name.
        block: bytes of a cache block.
        options: options of both models.
    """

    def __init__(
        self, stack: ExitStack, folders: dict[str, Path], model: Path | None, block: int, options: dict[str, Any]
    ) -> None:
        self.folders, self.found, self.problems = folders, Counter[str](), list[str]()
        alone: dict[str, Any] = {"lora": True, "threads": 1, "cache_bytes": ALONE_BLOCKS * block, **options}
        self._alone = stack.enter_context(LLM(model, quiet=True, **alone))
        for name, folder in folders.items():
            self._alone.load_adapter(folder, name)
        self.room = int(ROOM * max(self._alone.adapters.info(name)["bytes"] for name in folders))
        small: dict[str, Any] = {"cache_bytes": BLOCKS * block, "context_size": CONTEXT_SIZE, **options}
        small |= {"max_sequences": REQUESTS, "max_adapter_bytes": self.room}
        self._llm = stack.enter_context(LLM(model, quiet=True, **small))
        for name, folder in folders.items():
            self._llm.load_adapter(folder, name)
        self._wanted: dict[Request, list[Any]] = {}
        self._lock = threading.Lock()

    @property
    def vocabulary(self) -> int:
        """The size of the vocabulary; prompts use ids from 3 upwards."""
        return self._alone.model.config.model.vocab_size

    def round(self, rng: np.random.Generator) -> None:
        """Send the requests of one round from many threads, while adapters are loaded and unloaded."""
        names = [name for name in self.folders if name != OVERFLOWING]
        waiting = list(random_requests(rng, names, self.vocabulary))
        ended = threading.Event()
        churn = threading.Thread(target=self._churn, args=(int(rng.integers(2**31)), ended))
        clients = [threading.Thread(target=self._client, args=(waiting,)) for _ in range(REQUESTS)]
        for thread in (churn, *clients):
            thread.start()
        for thread in clients:
            thread.join()
        ended.set()
        churn.join()
        pool, adapters = self._llm.model.decoder.pool, self._llm.adapters
        assert pool is not None
        if pool.num_free != pool.num_blocks:
            self.problems.append(f"{pool.num_blocks - pool.num_free} blocks are not free after the round")
        if adapters.nbytes > self.room or adapters.names != list(self.folders):
            self.problems.append(f"the adapters {adapters.names} use {adapters.nbytes} of {self.room} bytes")

    def _client(self, waiting: list[Request]) -> None:
        while True:
            with self._lock:
                if not waiting:
                    return
                request = waiting.pop()
            try:
                self._ask(request)
            except Exception as error:  # any error that _ask does not handle
                self.problems.append(f"{request.adapter}: {type(error).__name__}: {error}")

    def _ask(self, request: Request) -> None:
        prompt, options = list(request.prompt), request.options
        while True:
            try:
                if request.samples > 1:
                    given = self._llm.generate([prompt], n=request.samples, logprobs=1, **options)
                else:
                    with self._llm.stream(prompt, logprobs=1, **options) as stream:
                        for _ in stream:
                            if request.cancel_after and len(stream.completion.token_ids) >= request.cancel_after:
                                break
                    given = [stream.completion]
                break
            except CacheCapacityError:  # the adapters in use fill the adapter memory
                self.found["temporarily refused"] += 1
                time.sleep(0.01)
        for index, (completion, wanted) in enumerate(zip(given, self._wanted_of(request), strict=True)):
            count = len(completion.token_ids)
            whole = request.cancel_after is not None or count == len(wanted.token_ids)
            same = completion.token_ids == wanted.token_ids[:count] and completion.logprobs == wanted.logprobs[:count]
            self.found["cancelled" if request.cancel_after else "equal" if whole and same else "different"] += 1
            if not (whole and same):
                self.problems.append(f"sample {index} of {len(prompt)} tokens with adapter {request.adapter} differs")

    def _wanted_of(self, request: Request) -> list[Any]:
        key = Request(request.prompt, request.adapter, request.samples, None)
        with self._lock:
            if key not in self._wanted:
                options = {**request.options, "n": request.samples, "logprobs": 1}
                self._wanted[key] = self._alone.generate([list(request.prompt)], **options)
            return self._wanted[key]

    def _churn(self, seed: int, ended: threading.Event) -> None:
        """Load adapters under new names, use them in requests and unload them meanwhile; some of them overflow."""
        rng = np.random.default_rng(seed)
        for number in range(1 << 30):
            if ended.wait(float(rng.uniform(0, 0.02))):
                return
            name, choice = f"further {number}", str(rng.choice(list(self.folders)))
            try:
                self._llm.load_adapter(self.folders[choice], name)
                self.found["loaded"] += 1
                with self._llm.stream([5, 6, 7] * 20, adapter=name, max_tokens=int(rng.integers(1, 12))) as stream:
                    next(stream, None)
                    self._llm.unload_adapter(name)
                    for _ in stream:
                        pass
            except SamplingError as error:
                self.found["overflowed"] += 1
                if choice != OVERFLOWING:
                    self.problems.append(f"{choice}: {error}")
            except CacheCapacityError:
                self.found["temporarily refused"] += 1
            except Exception as error:
                self.problems.append(f"{choice}: {type(error).__name__}: {error}")
            finally:
                self._forget(name)

    def _forget(self, name: str) -> None:
        try:
            self._llm.unload_adapter(name)
        except OptionError:
            self.found["already unloaded"] += 1


def private_bytes() -> int:
    """Release unused heap memory; return the bytes of memory that only this process uses (Linux, glibc)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_Dirty"))


def soak(
    minutes: float, seed: int, model: Path | None = None, *, rounds: int | None = None, **options: Any
) -> tuple[Counter[str], list[str], list[int]]:
    """Run for `minutes`, or exactly `rounds` rounds; return counts of events, problems, and memory after each round."""
    # Each round starts new threads. Without this limit, they would leave half-used pages in more and more glibc arenas.
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    rng, sizes = np.random.default_rng(seed), []
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        with LLM(model, quiet=True, **options) as llm:
            targets, decoder = llm.model.lora_targets(), llm.model.decoder
            assert isinstance(decoder, PagedDecoder)
            block = decoder.storage.layout.bytes_per_block
        folders = {
            f"rank {rank}": write_adapter(work / str(index), targets, index, rank) for index, rank in enumerate(RANKS)
        }
        folders[OVERFLOWING] = write_adapter(work / OVERFLOWING, targets, 99, 4, 1e18)
        run = Soak(stack, folders, model, block, options)
        end = time.monotonic() + 60 * minutes
        while (len(sizes) < rounds) if rounds is not None else (time.monotonic() < end):
            run.round(rng)
            sizes.append(private_bytes())
            if run.problems:
                break
    return run.found, run.problems, sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="a model folder [default: the bundled model]")
    parser.add_argument("--kv-type", default="auto", help="auto, fp16, fp32, int8 or int4")
    given = parser.parse_args()
    options = {"kv_dtype": given.kv_type, **({"kv_dtype_force": True} if given.kv_type == "int4" else {})}
    found, problems, sizes = soak(given.minutes, given.seed, given.model, **options)
    print(f"{len(sizes)} rounds: " + ", ".join(f"{count} {what}" for what, count in sorted(found.items())))
    shown = sizes[:: max(1, len(sizes) // 12)]
    print("private memory, MiB: " + ", ".join(f"{size / 2**20:.1f}" for size in (*shown, sizes[-1])))
    third = -(-len(sizes) // 3)
    middle, last = max(sizes[third : 2 * third], default=0), max(sizes[2 * third :], default=0)
    if last > GROWTH * middle:
        problems.append(f"memory grew by {last / middle - 1:.1%} from the second third to the last")
    for problem in problems[:20]:
        print(f"WRONG: {problem}")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
