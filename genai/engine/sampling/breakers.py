"""DRY's sequence breakers as tokens, found as in llama.cpp.

A token that contains a breaker ends a match on its own. A token that ends with a prefix of a breaker ends a match
together with the tokens of the rest of the breaker.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...errors import OptionError

Ids = NDArray[np.int32]
# The tokens that contain a breaker, and of the others, those that end with its first n characters, by n.
_Found = tuple[Ids, dict[int, Ids]]
_NO_IDS = np.empty(0, np.int32)
# Cached sets of breakers: the maximum number of sets, and of characters in each.
_MOST_CACHED, _LONGEST_CACHED = 16, 4096


@dataclass(frozen=True, eq=False)
class Breakers:
    """Token sequences that DRY does not extend across.

    Attributes:
        whole: bool [V], True for tokens that are a sequence on their own.
        last: bool [V], True for the last tokens of longer sequences.
        firsts: the sorted first tokens of longer sequences, by the bytes of the other tokens (int32).
        lengths: the distinct numbers of other tokens.
    """

    whole: NDArray[np.bool_]
    last: NDArray[np.bool_]
    firsts: Mapping[bytes, Ids]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, sequences: Iterable[Sequence[int]]) -> Breakers:
        """Return the breakers for token sequences."""
        whole: list[int] = []
        firsts: dict[tuple[int, ...], list[Ids]] = {}
        for first, *others in sequences:
            if others:
                firsts.setdefault(tuple(others), []).append(np.asarray([first], np.int32))
            else:
                whole.append(first)
        return cls.joined(np.asarray(whole, np.int32), firsts)

    @classmethod
    def joined(cls, whole: Ids, firsts: Mapping[tuple[int, ...], Sequence[Ids]]) -> Breakers:
        """Return the breakers for single tokens, and for the first tokens of each sequence of other tokens."""
        last = np.asarray([others[-1] for others in firsts], np.int32)
        return cls(
            _mask(whole),
            _mask(last),
            {
                _key(others): ids[0] if len(ids) == 1 else np.unique(np.concatenate(ids))
                for others, ids in firsts.items()
            },
            tuple(sorted({len(others) for others in firsts})),
        )

    def ends(self, tokens: Ids, begin: int) -> list[int]:
        """Return the lengths, greater than `begin`, of the prefixes of `tokens` that end with a breaker."""
        new = tokens[begin:]
        is_whole = _look_up(self.whole, new)
        places = np.flatnonzero(is_whole | _look_up(self.last, new))
        return [begin + place + 1 for place in places.tolist() if is_whole[place] or self._ends(tokens, begin + place)]

    def _ends(self, tokens: Ids, index: int) -> bool:
        """Return True if a sequence of several tokens ends with the token at `index`."""
        for length in self.lengths:
            if length > index:
                return False
            firsts = self.firsts.get(tokens[index + 1 - length : index + 1].tobytes())
            if firsts is not None:
                first = tokens[index - length]
                place = int(np.searchsorted(firsts, first))
                if place < len(firsts) and firsts[place] == first:
                    return True
        return False


class BreakerFinder:
    """Finds the tokens of sequence breakers in a vocabulary.

    The vocabulary is indexed once, by character. A breaker then costs time in proportion to the number of occurrences
    of its first character. The results for the most recent sets of breakers are cached.

    Args:
        vocabulary: returns the text of each token id, as it appears in the output; called for the first breakers.
        encode: returns the tokens of texts, without special tokens.
    """

    def __init__(
        self, vocabulary: Callable[[], Sequence[str]], encode: Callable[[Sequence[str]], Sequence[Iterable[int]]]
    ) -> None:
        self._vocabulary, self._encode = vocabulary, encode
        self._index: _CharacterIndex | None = None
        self._known: OrderedDict[tuple[str, ...], Breakers] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, breakers: Sequence[str]) -> Breakers:
        """Return the token sequences in which breakers may appear; see SamplingParams.dry_sequence_breakers.

        Raises:
            OptionError: no token can start a breaker, so the breaker would never take effect.
        """
        key = tuple(breakers)
        if (known := self._known.get(key)) is None:
            known = self._found(key)
            with self._lock:
                if sum(map(len, key)) <= _LONGEST_CACHED:
                    self._known[key] = known
                if len(self._known) > _MOST_CACHED:
                    self._known.popitem(last=False)
        return known

    def _found(self, breakers: Sequence[str]) -> Breakers:
        if self._index is None:
            self._index = _CharacterIndex(self._vocabulary())
        found = self._index.find(breakers)
        texts = [*dict.fromkeys(breaker[n:] for breaker, (_, firsts) in found.items() for n in firsts)]
        rests = dict(zip(texts, map(tuple, self._encode(texts) if texts else ()), strict=True))
        joined: dict[tuple[int, ...], list[Ids]] = {}
        for breaker, (whole, firsts) in found.items():
            starts = [(rests[breaker[length:]], ids) for length, ids in firsts.items() if rests[breaker[length:]]]
            if not len(whole) and not starts:
                raise OptionError(
                    f"dry_sequence_breakers contains {breaker!r:.200}",
                    "no token in the vocabulary starts it",
                    "remove it",
                )
            for rest, ids in starts:
                joined.setdefault(rest, []).append(ids)
        return Breakers.joined(np.concatenate([_NO_IDS, *(whole for whole, _ in found.values())]), joined)


class _CharacterIndex:
    """The characters of all tokens in one array, and the positions of each character.

    It takes about 16 bytes for each character of the vocabulary.
    """

    def __init__(self, vocabulary: Sequence[str]) -> None:
        lengths = np.fromiter(map(len, vocabulary), np.int32, len(vocabulary))
        self._codes = _codes("".join(vocabulary))
        # The token of each position, and the number of characters from the position to the end of the token.
        self._token = np.repeat(np.arange(len(vocabulary), dtype=np.int32), lengths)
        self._left = (np.repeat(np.cumsum(lengths), lengths) - np.arange(len(self._codes))).astype(np.int32)
        order = np.argsort(self._codes, kind="stable").astype(np.int32)
        characters, starts = np.unique(self._codes[order], return_index=True)
        self._positions = dict(zip(characters.tolist(), np.split(order, starts[1:]), strict=False))

    def find(self, breakers: Sequence[str]) -> dict[str, _Found]:
        """Return the tokens of each breaker. Breakers with a common prefix share the search for the prefix."""
        starts: dict[str, Ids] = {}  # the positions at which a prefix occurs in a token
        ends: dict[str, Ids] = {}  # the tokens that end with a prefix
        return {breaker: self._find(breaker, starts, ends) for breaker in breakers}

    def _find(self, breaker: str, starts: dict[str, Ids], ends: dict[str, Ids]) -> _Found:
        codes = _codes(breaker)
        at = self._positions.get(int(codes[0]), _NO_IDS)
        firsts: dict[int, Ids] = {}
        for length in range(1, len(codes)):
            prefix, longer = breaker[:length], breaker[: length + 1]
            if prefix not in ends:
                ends[prefix] = self._token[at[self._left[at] == length]]
            firsts[length] = ends[prefix]
            if longer not in starts:
                inner = at[self._left[at] > length]
                starts[longer] = inner[self._codes[inner + length] == codes[length]]
            at = starts[longer]
            if not len(at):
                break
        whole = np.unique(self._token[at])
        for length, ids in firsts.items():
            if (both := np.isin(ids, whole)).any():
                firsts[length] = ids[~both]
        return whole, {length: ids for length, ids in firsts.items() if len(ids)}


def _codes(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


def _mask(ids: Ids) -> NDArray[np.bool_]:
    mask = np.zeros(1 + int(ids.max(initial=-1)), bool)
    mask[ids] = True
    return mask


def _look_up(mask: NDArray[np.bool_], ids: Ids) -> NDArray[np.bool_]:
    """Return the entries of a mask; False for ids beyond its end."""
    found = ids < len(mask)
    found[found] = mask[ids[found]]
    return found


def _key(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, np.int32).tobytes()


NO_BREAKERS = Breakers.of([])
