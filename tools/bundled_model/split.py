"""The held-out split: a pure function of a question's key, so that no list has to be stored.

A key identifies what must not be memorised: an unordered pair of summands, a word or a phrasing.
"""

import hashlib
import string

HELD_OUT_PERCENT = 10
_DROPPED = str.maketrans("", "", string.punctuation)


def is_held_out(key: str | None) -> bool:
    """Return True for about HELD_OUT_PERCENT of all keys. A key of None belongs to the training set."""
    if key is None:
        return False
    digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % 100 < HELD_OUT_PERCENT


def normal_form(text: str) -> str:
    """Return lower-case text without punctuation and with single spaces, so that spelling variants become equal."""
    return " ".join(text.translate(_DROPPED).lower().split())
