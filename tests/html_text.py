"""HTML as a browser reads it: its elements must be closed, and none of them may run code or load anything."""

from __future__ import annotations

from collections import Counter
from html.parser import HTMLParser

_ALLOWED = {"div", "span", "small", "b", "pre", "code", "progress", "table", "tr", "th", "td", "details", "summary"}
_ATTRIBUTES = {"style", "value"}


class HtmlText(HTMLParser):
    """The text and the elements of a fragment."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.text, self.count, self._open = "", Counter[str](), list[str]()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag in _ALLOWED, tag
        assert {name for name, _ in attributes} <= _ATTRIBUTES, attributes
        assert not any("url" in (value or "") for _, value in attributes)
        self._open.append(tag)
        self.count[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        self.text += " "

    def handle_data(self, data: str) -> None:
        self.text += data

    @classmethod
    def _parsed(cls, html: str) -> HtmlText:
        parser = cls()
        parser.feed(html)
        parser.close()
        assert not parser._open
        return parser

    @classmethod
    def of(cls, html: str, *, keep_space: bool = False) -> str:
        """Return the text of a fragment, by default with single spaces."""
        text = cls._parsed(html).text
        return text if keep_space else " ".join(text.split())

    @classmethod
    def tags(cls, html: str) -> dict[str, int]:
        """Return the number of elements of each kind."""
        return dict(cls._parsed(html).count)
