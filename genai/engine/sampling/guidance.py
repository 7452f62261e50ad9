"""Grammars compiled with llguidance: `Guidance` compiles them for a vocabulary; `Matcher` follows one sequence."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from genai.common.forks import renew_locks
from genai.common.interrupts import Task, ThreadsRefused

from ...errors import GenaiError, GrammarError, no_threads
from .grammar import STACK_BYTES, Grammar
from .json_schema import parts
from .unique_items import UniqueItems

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# The number of compiled grammars that are cached for later requests.
_MOST_KEPT = 64
# The time limit for compiling a grammar on a thread; llguidance's own limits usually apply first. It limits the
# thread's CPU time, so that grammars are not refused because the machine is busy. The wall-clock limit is this multiple
# of it.
SECONDS, _BUSY = 4.0, 30
# The maximum number of subschemas to compile in order to find the invalid one.
_MOST_TRIED = 200


def _limits() -> LLParserLimits:
    """Return the limits for a grammar: about 20 ms for regular expressions, 15 ms per mask, 100 MB for its states."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=2_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


@dataclass(frozen=True)
class TokenBytes:
    """A vocabulary in the form that grammars use.

    Attributes:
        tokens: the UTF-8 bytes that each id adds to the text; b"" for ids that add none.
        special: ids of control tokens, which do not encode text; a grammar can name them.
        encode: returns the token ids of a string; their bytes must be the same as those of the string.
    """

    tokens: Sequence[bytes]
    special: Sequence[int]
    encode: Callable[[str], list[int]]


class Guidance:
    """A compiler of grammars for one vocabulary. Several threads may use it.

    Args:
        vocabulary: returns the vocabulary; called when the first grammar is compiled.
        vocab_size: number of logits per row.
        eos_token_ids: tokens that end a reply.
    """

    def __init__(self, vocabulary: Callable[[], TokenBytes], vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._vocabulary, self._vocab_size = vocabulary, vocab_size
        self._eos = [token for token in eos_token_ids if 0 <= token < vocab_size]
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, tuple[LLMatcher, UniqueItems | None]] = OrderedDict()
        self._tokens: Sequence[bytes] = ()
        self._lock = threading.Lock()
        renew_locks(self, "_lock")

    def matcher(self, grammar: Grammar) -> Matcher:
        """Return a matcher at the start of the grammar.

        Raises:
            GrammarError: the grammar is malformed, matches nothing, or needs too much time or memory.
        """
        with self._lock:
            found = self._compiled.get(grammar)
            if found is None:
                matcher, schema = self._in_time(grammar), grammar.schema_of_unique_items()
                items = None if schema is None else UniqueItems(schema, self._tokens)
                found = self._compiled[grammar] = matcher, items
                if len(self._compiled) > _MOST_KEPT:
                    self._compiled.popitem(last=False)
            else:
                self._compiled.move_to_end(grammar)
            matcher, items = found
            return Matcher(matcher.deep_copy(), None if items is None else items.fork())

    def _in_time(self, grammar: Grammar) -> LLMatcher:
        try:
            task = Task(lambda: self._compile(grammar), "genai-grammar", stack_bytes=STACK_BYTES)
            finished = task.wait_for_work(SECONDS, SECONDS * _BUSY)
        except ThreadsRefused as error:
            raise no_threads(error) from error
        if not finished:
            raise _refused(
                grammar.shown, f"the compilation takes more than {SECONDS:.0f} seconds", "simplify the grammar"
            )
        return task.result()

    def _compile(self, grammar: Grammar) -> LLMatcher:
        compiled, why = self._tried(grammar.source)
        if compiled is None:
            raise self._explained(grammar, why)
        return compiled

    def _tried(self, source: str) -> tuple[LLMatcher | None, str]:
        """Compile a grammar and compute its first mask; return None and the reason if it is invalid."""
        from llguidance import LLMatcher

        if self._tokenizer is None:
            self._tokenizer = self._known_tokens()
        found = LLMatcher(self._tokenizer, source, log_level=0, limits=_limits())
        if found.is_error():
            return None, _said(found.get_error())
        for _ in range(2):  # if the first mask exceeds a limit, only the second call reports it
            first = found.deep_copy()
            if not any(first.compute_bitmask()) or first.is_error():
                return None, _said(first.get_error())
        return found, ""

    def _known_tokens(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        known = self._vocabulary()
        missing = self._vocab_size - len(known.tokens)
        tokens, eos = [*known.tokens[: self._vocab_size], *[b""] * missing], self._eos
        if not eos:  # an extra id after the last logit, so that only the grammar can end the reply
            tokens, eos = [*tokens, b"<end>"], [self._vocab_size]
        self._tokens = tokens
        special = sorted({*(token for token in known.special if token < self._vocab_size), *eos})
        return LLTokenizer(_Wrapper(tokens, special, eos[0], known.encode), eos_token=eos)  # type: ignore[arg-type]

    def _explained(self, grammar: Grammar, why: str) -> GrammarError:
        """Return the error for an invalid grammar; it names the smallest part that is invalid on its own."""
        for name, text in grammar.inner:
            schema = Grammar("json_schema", text)
            try:
                found, said = self._tried(schema.source)
            except GrammarError as error:
                return _refused(name, error.why, error.fix)
            if found is None:
                return _refused(name, said, _fix(said), self._wrong_part(schema))
        if grammar.body is not None:
            found, said = self._tried(grammar.body.source)
            if found is None:
                return self._explained(grammar.body, said)
        where = self._wrong_part(grammar) if grammar.option == "json_schema" else ""
        return _refused(grammar.shown, why, _fix(why), where)

    def _wrong_part(self, grammar: Grammar) -> str:
        """Return a JSON pointer to the smallest part of a schema that is invalid on its own; "" = the whole schema."""
        schema, path, tried = json.loads(grammar.text), "", 0
        names = ("$defs", "definitions") if isinstance(schema, Mapping) else ()
        definitions = {name: schema[name] for name in names if name in schema}
        while True:
            for step, part in parts(schema):
                tried += 1
                alone = {**definitions, **part} if isinstance(part, Mapping) else part
                if tried > _MOST_TRIED:
                    return path
                if self._tried(Grammar("json_schema", json.dumps(alone)).source)[0] is None:
                    schema, path = part, path + step
                    break
            else:
                return path


class _Wrapper:
    """A tokenizer with the interface that llguidance expects."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self, tokens: Sequence[bytes], special: Sequence[int], eos: int, encode: Callable[[str], list[int]]
    ) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id, self._encode = tokens, special, eos, encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def _said(message: str) -> str:
    """Return llguidance's message on one line, without markup."""
    text = " ".join(message.replace("<non-verbose/>", "").split())
    return "no reply can match the grammar" if text in ("NoExtensionBias", "NoExtension", "") else text[:300]


def _fix(why: str) -> str:
    if "too" in why or "limit" in why or "fuel" in why:
        return "use fewer alternatives or smaller counts"
    if "not disjoint" in why:
        return "change the patterns so that no key matches two of them"
    return "correct the grammar (for the supported features, see docs/how-to/structured-output.md)"


def _refused(shown: str, why: str, fix: str, where: str = "") -> GrammarError:
    at = f" at {where}" if where else ""
    return GrammarError(f"{shown} cannot be used{at}", why, fix)


@dataclass(frozen=True)
class FilledMask:
    """A row of an array of masks.

    Attributes:
        masks: uint32 [M, words]; see `SamplingBatch`.
        row: index of the row.
    """

    masks: NDArray[np.uint32]
    row: int


class Matcher:
    """The position of a sequence in its grammar. One thread at a time may use it.

    Attributes:
        num_followed: number of tokens since the start of the grammar.
        mask: mask of the tokens that may come next; None = not computed yet.
    """

    __slots__ = ("_followed", "_items", "_matcher", "_start", "mask", "num_followed")

    def __init__(self, matcher: LLMatcher, items: UniqueItems | None = None) -> None:
        self._matcher = matcher
        self._items, self._start = items, items
        self._followed: list[int] = []
        self.num_followed = 0
        self.mask: FilledMask | None = None

    def fork(self) -> Matcher:
        """Return an independent matcher at the same position."""
        other = Matcher(self._matcher.deep_copy(), self._start)
        other._items = None if self._items is None else self._items.fork()
        other._followed = list(self._followed)
        other.num_followed = self.num_followed
        return other

    @property
    def automaton(self) -> LLMatcher:
        """The llguidance object that computes the mask."""
        return self._matcher

    @property
    def is_over(self) -> bool:
        """True if the grammar is complete and allows no further token."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    @property
    def is_complete(self) -> bool:
        """True if the reply may end here."""
        return bool(self._matcher.is_accepting())

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """Return the number of leading tokens that the grammar allows next."""
        count = 0 if self._matcher.is_stopped() else int(self._matcher.validate_tokens(list(tokens)))
        return count if self._items is None else self._items.num_allowed(tokens[:count])

    def follow(self, token: int) -> None:
        """Advance by a token that was appended to the sequence.

        Raises:
            GrammarError: the grammar does not allow the token, or exceeded its limits.
        """
        self.mask = None
        if not self._matcher.consume_token(token):
            raise self.failure()
        if self._items is not None:
            self._followed.append(token)
            self._items = self._items.fork()
            if not self._items.follow(token):
                why = "the token repeats an item of an array with unique items"
                raise GrammarError(f"the grammar failed after {self.num_followed} tokens", why, "use another token")
        self.num_followed += 1

    def rewind(self, count: int) -> None:
        """Go back to the position after `count` tokens."""
        if count < self.num_followed:
            self.mask = None
            if not self._matcher.rollback(self.num_followed - count):
                raise self.failure()
            self.num_followed = count
            if self._start is not None:
                del self._followed[count:]
                self._items = self._start.fork()
                for token in self._followed:
                    self._items.follow(token)

    def forced(self) -> list[int]:
        """Return the tokens that must come next; empty if there is a choice, or at the end."""
        tokens = [] if self._matcher.is_stopped() else list(self._matcher.compute_ff_tokens())
        return tokens if self._items is None else tokens[: self._items.num_allowed(tokens)]

    def restrict(self, mask: NDArray[np.uint32]) -> None:
        """Remove the tokens from a mask, uint32 [words], that the grammar allows although an item must not repeat."""
        if self._items is not None and not self._matcher.is_stopped():
            self._items.restrict(mask, self._matcher)

    def failure(self) -> GenaiError:
        """Return the error that stopped the grammar."""
        why = _said(self._matcher.get_error())
        return GrammarError(f"the grammar failed after {self.num_followed} tokens", why, _fix(why))
