"""Random operations on sequences of random decoders: each sequence gives the same results as alone, bit for bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genai.engine.decoder import compute
from genai.engine.paged import PagedDecoder
from genai.engine.paged_sequence import PagedSequence
from genai.engine.scheduler import plan_step
from genai.engine.state_file import Identity, SavedState, read_state, write_state
from genai.engine.stored import StoredTokens
from genai.errors import CacheCapacityError
from genai.kernels.cpu.executor import CpuExecutor
from genai.kernels.cuda.executor import CudaExecutor
from genai.kernels.device import Executor
from genai.kernels.reference.executor import ReferenceExecutor
from genai.kvcache.groups import GroupKind
from tests.drawing import Draw
from tests.integrity import check_pool, check_table

from ..kernels.cuda.devices import IS_THERE, open_device
from .random_decoders import KINDS, VOCAB, random_decoder, random_kinds

MOST_TOKENS = 220
IDENTITY = Identity("model", "numerics", VOCAB, 4096)


class Oracle:
    """The reference: a decoder with an unlimited cache computes one sequence alone."""

    def __init__(self, decoder: PagedDecoder) -> None:
        self.decoder = decoder
        self._known: dict[tuple[bytes, bytes], np.ndarray] = {}

    def row(self, tokens: list[int], numerics: bytes) -> np.ndarray:
        """The logits after the last token."""
        key = bytes(tokens), numerics
        if key not in self._known:
            sequence = self.decoder.open()
            sequence.resume(StoredTokens(tokens, numerics, 0))
            (logits,) = compute(self.decoder, [sequence])
            self._known[key] = self.decoder.executor.host(logits)[-1].copy()
            sequence.close()
        return self._known[key]


class Run:
    """Some sequences that share small pools; operations on them are random."""

    def __init__(self, decoder: PagedDecoder, oracle: Oracle, rng: random.Random, folder: Path) -> None:
        self.decoder, self.oracle, self.rng, self.folder = decoder, oracle, rng, folder
        self.live: list[PagedSequence] = []
        self.events: set[str] = set()
        self.compared = 0
        self.beginning = [rng.randrange(VOCAB) for _ in range(100)]

    def start(self) -> None:
        """A prompt with a prefix that other sequences may share."""
        sequence = self.decoder.open()
        common, own = self.rng.choice([0, 0, 33, 64, 100]), self.rng.randint(1, 50)
        sequence.append([*self.beginning[:common], *(self.rng.randrange(VOCAB) for _ in range(own))])
        if self.rng.random() < 0.3:
            sequence.mark_boundary(self.rng.randint(1, common + own))
        if self.rng.random() < 0.8 and sequence.reuse():
            self.events.add("prefix hit")
        self.live.append(sequence)

    def step(self) -> None:
        """Compute one step of all sequences, in chunks; check rows of completed ones and append their next tokens."""
        budget = self.rng.choice([1, 7, 40, 512])
        while self.live:
            plan = plan_step([sequence.pending() for sequence in self.live], budget)
            try:
                rows = self.decoder.step(self.live, plan)
                break
            except CacheCapacityError:
                self.events.add("preempted")
                guessing = [sequence for sequence in self.live if sequence.proposed]
                if guessing:
                    guessing[0].take_back()
                elif len(self.live) > 1:
                    self.live[-1].close()
                    self.live.pop()
                else:
                    self.live.pop().close()
        else:
            return
        for sequence, logits in zip([*self.live], rows, strict=True):
            if logits is not None and sequence.num_computed >= len(sequence.tokens):
                self.take(sequence, self.decoder.executor.host(logits))

    def take(self, sequence: PagedSequence, rows: np.ndarray) -> None:
        """Compare each row with the reference; continue as long as draft tokens are correct."""
        for index, row in enumerate(rows):
            expected = self.oracle.row(sequence.tokens, sequence.numerics)
            assert row.tobytes() == expected.tobytes(), (len(sequence.tokens), index)
            self.compared += 1
            token = int(row.argmax()) if self.rng.random() < 0.8 else self.rng.randrange(VOCAB)
            guessed = bool(sequence.proposed) and sequence.proposed[0] == token
            sequence.append([token])
            if not guessed:
                break
            self.events.add("a right guess")

    def change(self) -> None:
        """Perform a random operation on one of the sequences."""
        index = self.rng.randrange(len(self.live))
        sequence, length = self.live[index], len(self.live[index].tokens)
        what = self.rng.choice(["fork", "close", "rewind", "truncate", "guess", "save", "publish", "append", "settle"])
        self.events.add(what)
        if what == "fork" and len(self.live) < 6:
            self.live.append(sequence.fork())
        elif what == "close" and len(self.live) > 1:
            self.live.pop(index).close()
        elif what == "rewind":
            sequence.rewind(self.rng.randint(1, length))
        elif what == "truncate":
            asked = self.rng.randint(0, sequence.num_computed)
            assert sequence.truncate(asked) == sequence.num_computed <= asked
            if not sequence.num_computed and self.rng.random() < 0.5:
                sequence.reuse()
        elif what == "guess":
            sequence.propose(self.likely(sequence))
        elif what == "save":
            self.save(index)
        elif what == "publish":
            sequence.take_back()
            sequence.publish()
        elif what == "append":
            sequence.append([self.rng.randrange(VOCAB) for _ in range(self.rng.choice([1, 3, 40]))])
        elif what == "settle":
            sequence.settle_cache()

    def likely(self, sequence: PagedSequence) -> list[int]:
        """Propose draft tokens, some of them correct."""
        tokens, numerics = [*sequence.tokens], sequence.numerics
        if sequence.pending().num_tokens > 1:
            return []
        count = self.rng.randint(1, 4)
        for _ in range(count):
            wrong = self.rng.random() < 0.2
            tokens.append(self.rng.randrange(VOCAB) if wrong else int(self.oracle.row(tokens, numerics).argmax()))
            numerics += b"\0"
        return tokens[-count:]

    def save(self, index: int) -> None:
        """Save a sequence to a file and replace it by the loaded one."""
        sequence, path = self.live[index], self.folder / "state"
        sequence.take_back()
        write_state(path, self.decoder, sequence, IDENTITY, SavedState())
        sequence.close()
        try:
            loaded, _ = read_state(path, self.decoder, IDENTITY, lambda _: None)
        except CacheCapacityError:
            self.live.pop(index)
            return
        assert isinstance(loaded, PagedSequence)
        self.live[index] = loaded

    def check(self) -> None:
        pools = self.decoder.pools
        check_pool(pools[0], [sequence.cache.held_blocks for sequence in self.live])
        if len(pools) > 1:
            states = [sequence.cache.states for sequence in self.live]
            check_pool(pools[1], [[*one.slots.values()] for one in states if one is not None])
        for sequence in self.live:
            for table in sequence.cache.tables:
                check_table(table)

    def run(self, ticks: int) -> None:
        for _ in range(ticks):
            if not self.live or (len(self.live) < 6 and self.rng.random() < 0.15):
                self.start()
            if self.rng.random() < 0.4:
                self.change()
            for sequence in [one for one in self.live if len(one.tokens) > MOST_TOKENS]:
                sequence.publish()
                sequence.close()
                self.live.remove(sequence)
            self.step()
        self.check()
        for sequence in self.live:
            sequence.close()
        self.live.clear()
        self.check()
        assert all(pool.num_free == pool.num_blocks for pool in self.decoder.pools)


def run_many(
    executor: Executor, seed: int, runs: int, folder: Path, ticks: int = 60, *, chunked: bool = True
) -> set[str]:
    """Several runs of one random decoder with small pools; the prefix cache persists between runs."""
    rng = random.Random(seed)
    kinds = random_kinds(rng, chunked=chunked)
    decoder = random_decoder(executor, kinds, seed=seed, blocks=rng.choice([9, 14, 40]), slots=rng.choice([3, 9, 40]))
    if rng.random() < 0.3:
        decoder.keep_blocks_in(folder / "kv", 1 << 24, b"one decoder")
    oracle = Oracle(random_decoder(executor, kinds, seed=seed))
    events: set[str] = set()
    for _ in range(runs):
        run = Run(decoder, oracle, rng, folder)
        run.run(ticks)
        events |= run.events
        assert run.compared or ticks < 10
    for one in (decoder, oracle.decoder):
        one.close()
    return events


ALL_EVENTS = {
    "prefix hit", "preempted", "a right guess", "fork", "close", "rewind", "truncate", "guess", "save", "publish",
    "append", "settle",
}  # fmt: skip


def test_random_runs_on_the_cpu(draw: Draw, tmp_path: Path) -> None:
    """2,000 runs of 200 decoders were made when cache groups were added; each commit draws others."""
    rng, events = random.Random(draw.word), set[str]()
    executor = CpuExecutor(2)
    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        events |= run_many(executor, rng.randrange(2**32), 3, folder)
    assert events == ALL_EVENTS


@pytest.mark.parametrize("device", ["reference", "cuda"])
def test_random_runs_on_other_devices(device: str, draw: Draw, tmp_path: Path) -> None:
    if device == "cuda" and not IS_THERE:
        pytest.skip("kernels run on Linux through g++")
    rng = random.Random(draw.word + device)
    executor: Any = ReferenceExecutor() if device == "reference" else CudaExecutor(open_device(), 1)
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        run_many(executor, rng.randrange(2**32), 1, folder, ticks=30, chunked=device == "reference")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_logits_are_those_of_the_reference(device: str, kind: tuple[GroupKind, int]) -> None:
    """A prompt in two parts, then single tokens, through two layers of a kind and one with full attention."""
    if device == "cuda" and (not IS_THERE or kind[0] is GroupKind.CHUNKED):
        pytest.skip("kernels run on Linux through g++, and none of them has chunks")
    executor: Any = CpuExecutor(2) if device == "cpu" else CudaExecutor(open_device(), 1)
    kinds, rng = [kind, (GroupKind.FULL, 0), kind], np.random.default_rng(3)
    ours, theirs = (random_decoder(one, kinds, seed=5) for one in (executor, ReferenceExecutor()))
    tokens = rng.integers(0, VOCAB, 150).tolist()
    sequences = [ours.open(), theirs.open()]
    for part in (tokens[:70], tokens[70:120], *([token] for token in tokens[120:])):
        rows = []
        for decoder, sequence in zip((ours, theirs), sequences, strict=True):
            sequence.append(part)
            (logits,) = compute(decoder, [sequence], all_rows=True)
            rows.append(np.array(decoder.executor.host(logits)))
        assert np.abs(rows[0] - rows[1]).max() < 3e-2 * np.abs(rows[1]).max()
    for decoder, sequence in zip((ours, theirs), sequences, strict=True):
        sequence.close()
        assert all(pool.num_free == pool.num_blocks for pool in decoder.pools)
