"""Grammars at work: compiled for a model's tokens, and followed by one sequence each. The automata are llguidance's."""

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

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Compiled grammars that are kept for later requests.
_MOST_KEPT = 64
# Time to compile one, on a thread; llguidance's own limits end most of what would take longer. It is the thread's own
# time: a machine on which much else runs refuses no other grammars. By the clock it is so many times as long at most.
SECONDS, _BUSY = 4.0, 30
# Subschemas that are tried, to say which of them is wrong.
_MOST_TRIED = 200


def _limits() -> LLParserLimits:
    """What a grammar may cost: about 20 ms for its regular expressions, 15 ms per mask, 100 MB for its states."""
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
    """A vocabulary as grammars see it.

    Attributes:
        tokens: the UTF-8 bytes that each id adds to a text; b"" for those that add none.
        special: ids of control tokens, which no text is made of; a grammar can name them.
        encode: the ids of a text, of which these bytes are the text again.
    """

    tokens: Sequence[bytes]
    special: Sequence[int]
    encode: Callable[[str], list[int]]


class Guidance:
    """Compiles grammars for one vocabulary. Safe to use from several threads.

    Args:
        vocabulary: makes the tokens known, when the first grammar comes.
        vocab_size: logits per row. eos_token_ids: tokens that end a reply.
    """

    def __init__(self, vocabulary: Callable[[], TokenBytes], vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._vocabulary, self._vocab_size = vocabulary, vocab_size
        self._eos = [token for token in eos_token_ids if 0 <= token < vocab_size]
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        renew_locks(self, "_lock")

    def matcher(self, grammar: Grammar) -> Matcher:
        """Follows the grammar from its beginning.

        Raises:
            GrammarError: it is malformed, nothing matches it, or it takes too much time or memory.
        """
        with self._lock:
            found = self._compiled.get(grammar)
            if found is None:
                found = self._compiled[grammar] = self._in_time(grammar)
                if len(self._compiled) > _MOST_KEPT:
                    self._compiled.popitem(last=False)
            else:
                self._compiled.move_to_end(grammar)
            return Matcher(found.deep_copy())

    def _in_time(self, grammar: Grammar) -> LLMatcher:
        try:
            task = Task(lambda: self._compile(grammar), "genai-grammar", stack_bytes=STACK_BYTES)
            finished = task.wait_for_work(SECONDS, SECONDS * _BUSY)
        except ThreadsRefused as error:
            raise no_threads(error) from error
        if not finished:
            raise _refused(grammar.shown, f"it is not compiled after {SECONDS:.0f} seconds", "make it simpler")
        return task.result()

    def _compile(self, grammar: Grammar) -> LLMatcher:
        compiled, why = self._tried(grammar.source)
        if compiled is None:
            raise self._explained(grammar, why)
        return compiled

    def _tried(self, source: str) -> tuple[LLMatcher | None, str]:
        """A grammar compiled and its first mask computed; or None, and what is wrong with it."""
        from llguidance import LLMatcher

        if self._tokenizer is None:
            self._tokenizer = self._known_tokens()
        found = LLMatcher(self._tokenizer, source, log_level=0, limits=_limits())
        if found.is_error():
            return None, _said(found.get_error())
        for _ in range(2):  # a limit that the first mask reached is said by the second
            first = found.deep_copy()
            if not any(first.compute_bitmask()) or first.is_error():
                return None, _said(first.get_error())
        return found, ""

    def _known_tokens(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        known = self._vocabulary()
        missing = self._vocab_size - len(known.tokens)
        tokens, eos = [*known.tokens[: self._vocab_size], *[b""] * missing], self._eos
        if not eos:  # a place behind the last logit, so that nothing ends the reply but the grammar
            tokens, eos = [*tokens, b"<end>"], [self._vocab_size]
        special = sorted({*(token for token in known.special if token < self._vocab_size), *eos})
        return LLTokenizer(_Wrapper(tokens, special, eos[0], known.encode), eos_token=eos)  # type: ignore[arg-type]

    def _explained(self, grammar: Grammar, why: str) -> GrammarError:
        """The error of a grammar that is refused: about the part that is refused by itself, where there is one."""
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
        """A JSON pointer to the smallest part of a schema that is refused by itself, "" where it is the whole."""
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
    """A tokenizer as llguidance takes it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self, tokens: Sequence[bytes], special: Sequence[int], eos: int, encode: Callable[[str], list[int]]
    ) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id, self._encode = tokens, special, eos, encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def _said(message: str) -> str:
    """What llguidance says, without its marks and on one line."""
    text = " ".join(message.replace("<non-verbose/>", "").split())
    return "nothing matches it" if text in ("NoExtensionBias", "NoExtension", "") else text[:300]


def _fix(why: str) -> str:
    if "too" in why or "limit" in why or "fuel" in why:
        return "make it simpler: fewer alternatives, smaller counts"
    return "correct it (docs/structured_output.md says what is understood)"


def _refused(shown: str, why: str, fix: str, where: str = "") -> GrammarError:
    at = f" at {where}" if where else ""
    return GrammarError(f"{shown} cannot be used{at}", why, fix)


@dataclass(frozen=True)
class FilledMask:
    """A row of an array of masks.

    Attributes:
        masks: uint32 [M, words], see `SamplingBatch`. row: which of them.
    """

    masks: NDArray[np.uint32]
    row: int


class Matcher:
    """One sequence's place in its grammar. Used by one thread at a time.

    Attributes:
        num_followed: tokens since its beginning.
        mask: which tokens may come next; None = not filled yet.
    """

    __slots__ = ("_matcher", "mask", "num_followed")

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self.num_followed = 0
        self.mask: FilledMask | None = None

    def fork(self) -> Matcher:
        """Another at the same place, which goes its own way."""
        other = Matcher(self._matcher.deep_copy())
        other.num_followed = self.num_followed
        return other

    @property
    def automaton(self) -> LLMatcher:
        """What fills the mask."""
        return self._matcher

    @property
    def is_over(self) -> bool:
        """Whether the grammar is complete and allows nothing more."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    @property
    def is_complete(self) -> bool:
        """Whether the reply could end here."""
        return bool(self._matcher.is_accepting())

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, from the first one on, may come next."""
        return 0 if self._matcher.is_stopped() else int(self._matcher.validate_tokens(list(tokens)))

    def follow(self, token: int) -> None:
        """A token was appended.

        Raises:
            GrammarError: the grammar does not allow it, or took more than its limits.
        """
        self.mask = None
        if not self._matcher.consume_token(token):
            raise self.failure()
        self.num_followed += 1

    def rewind(self, count: int) -> None:
        """The reply was cut to so many tokens."""
        if count < self.num_followed:
            self.mask = None
            if not self._matcher.rollback(self.num_followed - count):
                raise self.failure()
            self.num_followed = count

    def forced(self) -> list[int]:
        """The tokens that must come next; none where there is a choice, or at the end."""
        return [] if self._matcher.is_stopped() else list(self._matcher.compute_ff_tokens())

    def failure(self) -> GenaiError:
        """Why it cannot go on."""
        why = _said(self._matcher.get_error())
        return GrammarError(f"the grammar cannot be followed after {self.num_followed} tokens", why, _fix(why))
