"""Parsers for replies. They convert pieces of generated text to typed events: text, reasoning and tool calls.

Each format has a small file with its markers (`parser` has the markers of plain reasoning). The package does not depend
on tokens or models: the caller streams text in which the parser's `markers` are visible (a tokenizer may hide them as
special tokens), and runs the tools. No reply raises an error: a malformed tool call is returned as flagged text, and
the raw texts of all events always add up to the reply.
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
