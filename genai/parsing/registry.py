"""The parsers by name, and the choice by chat template."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ..errors import OptionError
from . import gpt_oss, hermes, llama3, mistral, think
from .events import Text
from .parser import Parser
from .source import Reader, Source, show_until


def _read_plain(source: Source) -> Reader[None]:
    yield from show_until(source, (), Text)


def _never_fits(template: str) -> bool:
    return False


NONE = Parser("none", (), _never_fits, _read_plain)

# In the order in which `detect` asks them: tool calls before plain reasoning.
PARSERS: Mapping[str, Parser] = MappingProxyType(
    {
        parser.name: parser
        for parser in (gpt_oss.PARSER, mistral.PARSER, hermes.PARSER, llama3.PARSER, think.PARSER, NONE)
    }
)


def get_parser(name: str) -> Parser:
    """The parser of that name.

    Raises:
        OptionError: there is none.
    """
    if name not in PARSERS:
        raise OptionError(
            f"parser = {name!r}", "no parser has this name", f"choose one of {', '.join(sorted(PARSERS))}"
        )
    return PARSERS[name]


def detect(chat_template: str) -> str:
    """The name of the parser whose markers a chat template (jinja source) has; "none" if it has none that is known."""
    return next((name for name, parser in PARSERS.items() if parser.fits(chat_template)), "none")
