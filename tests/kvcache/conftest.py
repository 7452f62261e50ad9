"""Consistency checks of a pool."""

import pytest

from tests.integrity import check_pool


@pytest.fixture
def sound():
    """sound(pool, holders): every block is in exactly one state, and its references are those of the holders."""

    def check(pool, holders):
        check_pool(pool, holders)
        held = {block for blocks in holders for block in blocks}
        assert pool.num_free == pool.num_blocks - len(held)

    return check
