"""Replies as instances of Python classes: Pydantic models, or other classes with the same two methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar, get_origin

from ..engine.sampling.grammar import OPTIONS
from ..errors import InputError, OptionError, ReplyFormatError
from .completion import Completion


class SchemaClass(Protocol):
    """A class with a JSON schema, such as a pydantic.BaseModel."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        """Return the JSON schema for the instances."""

    @classmethod
    def model_validate_json(cls, json_data: str) -> Any:
        """Return the instance that a JSON text describes. Raise ValueError if the text is invalid."""


Instance = TypeVar("Instance", bound=SchemaClass)


def with_schema(options: Mapping[str, Any], schema: type[SchemaClass] | None) -> dict[str, Any]:
    """Return the options of a call whose replies are instances of `schema`.

    Raises:
        InputError: `schema` is not a class of this kind.
        OptionError: the options already contain a grammar.
    """
    if schema is None:
        return dict(options)
    if get_origin(schema) is not None:
        raise InputError(
            f"schema = {schema!r:.80}",
            "a Pydantic model class is expected, and this is a type with parameters",
            "wrap it in a class, such as `class Reply(BaseModel): items: list[Item]`, or pass json_schema="
            "pydantic.TypeAdapter(…).json_schema() and parse the text",
        )
    if not isinstance(schema, type) or not hasattr(schema, "model_json_schema"):
        raise InputError(
            f"schema = {schema!r:.80}", "a Pydantic model class is expected", "pass a JSON schema as json_schema"
        )
    if conflicting := [name for name in OPTIONS if name in options]:
        raise OptionError(
            f"{conflicting[0]} contradicts schema", "a reply can follow only one grammar", "leave one of the two out"
        )
    return {**options, "json_schema": schema}


def instance_of(schema: type[Instance], text: str, completion: Completion) -> Instance:
    """Return a reply as an instance.

    Raises:
        ReplyFormatError: the reply was cut off, or the class rejects a reply that its own schema allows.
    """
    if completion.finish_reason != "stop":
        raise ReplyFormatError(
            f"the reply was cut off after {len(completion.token_ids)} tokens: {text[-80:]!r}",
            f"finish_reason is {completion.finish_reason!r}",
            "raise max_tokens, or set max_length for the strings and lists of the class",
        )
    try:
        instance: Instance = schema.model_validate_json(text)
    except ValueError as error:
        raise ReplyFormatError(
            f"the reply is not a valid {schema.__name__}: {text[:80]!r}",
            _rules(error),
            "if a validator of the class is stricter than its schema, add its rule to the schema; or generate again",
        ) from error
    return instance


def _rules(error: ValueError) -> str:
    """Return the rules that a reply breaks: of Pydantic's errors, the field and the rule, without links and types."""
    errors = getattr(error, "errors", None)
    if not callable(errors):
        return " ".join(str(error).split())[:300]
    found = [(".".join(map(str, one.get("loc", ()))) or "the reply", str(one.get("msg", ""))) for one in errors()]
    return "; ".join(f"{place}: {rule}" for place, rule in found)[:300]
