"""Parsing replies: text pieces go in as they are generated; answer, reasoning and tool calls come out as typed events.

One small file per format knows its markers (`parser` those of plain reasoning). Nothing here knows tokens or models:
the caller streams the text with the parser's `markers` visible (a tokenizer may hide them as special tokens) and runs
the tools. No reply is an error: a malformed tool call comes back as flagged text, and the raw text of all events is
always the reply itself.
"""

from .events import End, Event, Marker, Reasoning, Text, ToolCall
from .parser import Parser
from .splitter import PARSERS, Reply, ReplySplitter, detect, get_parser, split_reply

__all__ = [
    "End",
    "Event",
    "Marker",
    "PARSERS",
    "Parser",
    "Reasoning",
    "Reply",
    "ReplySplitter",
    "Text",
    "ToolCall",
    "detect",
    "get_parser",
    "split_reply",
]
