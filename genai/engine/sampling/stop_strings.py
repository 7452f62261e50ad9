"""Ends a text at the first stop string; no part of one is ever shown."""

from __future__ import annotations

from collections.abc import Sequence

from .prefix_matcher import PrefixMatcher


class StopStrings:
    """Reads a text in pieces and passes on what cannot be part of a stop string any more.

    The result does not depend on where the text is cut into pieces. Where several stop strings end at the same
    character, the longest counts. Characters are compared as they are, without normalisation.

    Args:
        stops: the stop strings; none is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        # The longest first: it is the one that is found where several end.
        self._matchers = [PrefixMatcher(stop) for stop in sorted(stops, key=len, reverse=True)]
        self._held = ""
        self.found: str | None = None

    def feed(self, piece: str) -> str:
        """The text that may be shown now; `found` is the stop string once there is one, and all later text is dropped.

        What is held back is the longest end of the text so far that could begin a stop string.
        """
        if self.found is not None:
            return ""
        text = self._held + piece
        for i, character in enumerate(piece, len(self._held) + 1):
            for matcher in self._matchers:
                if matcher.feed(character) and self.found is None:
                    self.found = matcher.text
            if self.found is not None:
                self._held = ""
                return text[: i - len(self.found)]
        keep = max((matcher.matched for matcher in self._matchers), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def would_end(self, text: str) -> bool:
        """Whether a stop string would be found if this text came next."""
        before = [matcher.matched for matcher in self._matchers]
        found = any(matcher.feed(character) for character in text for matcher in self._matchers)
        for matcher, matched in zip(self._matchers, before, strict=True):
            matcher.matched = matched
        return found

    def flush(self) -> str:
        """The text is over: what was held back is no stop string and may be shown."""
        held, self._held = self._held, ""
        for matcher in self._matchers:
            matcher.reset()
        return held
