"""What a pool says of its blocks."""

import pytest

from tests.integrity import check_pool


@pytest.fixture
def sound():
    """sound(pool, holders): every block is in one state, and has as many references as these holders have of it."""

    def check(pool, holders):
        check_pool(pool, holders)
        held = {block for blocks in holders for block in blocks}
        assert pool.num_free == pool.num_blocks - len(held)

    return check
