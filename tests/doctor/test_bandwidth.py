"""Memory measurements: sizes are limited, every byte is read, and the arithmetic is right."""

from __future__ import annotations

import threading
import time

import pytest

from genai.doctor import speeds
from genai.doctor.speeds import Bandwidth, buffer_size, measure_bandwidth

MIB = 2**20


@pytest.mark.parametrize(
    ("cache", "free", "expected"),
    [
        (0, 2**40, 256 * MIB),
        (32 * MIB, 2**40, 256 * MIB),
        (100 * MIB, 2**40, 400 * MIB),
        (480 * MIB, 2**40, 512 * MIB),
        (480 * MIB, 800 * MIB, 100 * MIB),
        (0, 0, 0),
        (0, -5, 0),
    ],
)
def test_buffer_size(cache: int, free: int, expected: int) -> None:
    assert buffer_size(cache, free) == expected


@pytest.mark.parametrize("threads", [1, 3])
def test_a_measurement(threads: int) -> None:
    before = threading.active_count()
    found = measure_bandwidth(16 * MIB, threads=threads, seconds=0.01)
    assert 0 < found.slowest <= found.bytes_per_second <= found.fastest < 1e13
    assert (found.buffer_bytes, found.threads) == (16 * MIB, threads)
    assert threading.active_count() <= before + threads - 1


def test_too_small_a_buffer() -> None:
    with pytest.raises(ValueError, match="buffer_bytes is 4095"):
        measure_bandwidth(4095)


def test_the_ceiling() -> None:
    assert Bandwidth(40e9, 39e9, 41e9, 1, 2).tokens_per_second(4e9) == 10


def test_a_first_pass_that_compiles_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(speeds.Threads):
        passes = 0

        def run(self, *arguments: object, **options: object) -> None:
            time.sleep(0 if self.passes else 1)
            self.passes += 1

    monkeypatch.setattr(speeds, "Threads", Slow)
    assert measure_bandwidth(MIB, threads=1, seconds=0).slowest > 2 * MIB
