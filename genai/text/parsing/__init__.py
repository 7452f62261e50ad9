"""Parsing replies: text pieces go in as they are generated; answer, reasoning and tool calls come out as typed events.

One small file per format knows its markers (`parser` those of plain reasoning). Nothing here knows tokens or models:
the caller streams the text with the parser's `markers` visible (a tokenizer may hide them as special tokens) and runs
the tools. No reply is an error: a malformed tool call comes back as flagged text, and the raw text of all events is
always the reply itself.
"""

from .events import (
    End as End,
    Event as Event,
    Marker as Marker,
    Reasoning as Reasoning,
    Text as Text,
    ToolCall as ToolCall,
)
from .parser import Parser as Parser
from .splitter import (
    PARSERS as PARSERS,
    Reply as Reply,
    ReplySplitter as ReplySplitter,
    detect as detect,
    get_parser as get_parser,
    split_reply as split_reply,
)
