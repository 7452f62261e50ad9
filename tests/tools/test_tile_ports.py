"""The loops of tools/tile_ports run, and take longer with more instructions."""

import pytest

from genai.kernels.cpu.jit.isa import isa
from tools.tile_ports import LOOPS, measure

pytestmark = pytest.mark.skipif(isa() != "amx", reason="this machine has no tiles, or is asked not to use them")


def test_loops_name_what_is_in_them() -> None:
    words = {"product": 0, "load": 1, "store": 2, "multiply-add": 3, "addition": 4}
    for name, counts in LOOPS.items():
        named = dict.fromkeys(words, 0)
        for part in name.split(", "):
            count, *_, what = part.split()
            named[what.rstrip("s")] = int(count)
        assert tuple(named.values()) == counts, name


def test_a_loop_runs() -> None:
    assert measure((8, 8, 4, 8, 8), turns=10) > 0.0
