"""Replies as instances of Python classes: Pydantic models, or whatever has their two methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

from ..engine.sampling.grammar import OPTIONS
from ..errors import InputError, OptionError, ReplyFormatError
from .completion import Completion


class SchemaClass(Protocol):
    """A class whose instances JSON can write, such as a pydantic.BaseModel."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        """The JSON schema of its instances."""

    @classmethod
    def model_validate_json(cls, json_data: str) -> Any:
        """The instance that a JSON text writes. Raises ValueError: it writes none."""


Instance = TypeVar("Instance", bound=SchemaClass)


def with_schema(options: Mapping[str, Any], schema: type[SchemaClass] | None) -> dict[str, Any]:
    """The options of a call that asks for instances of a class.

    Raises:
        InputError: it is no such class.
        OptionError: the options have a grammar of their own.
    """
    if schema is None:
        return dict(options)
    if not isinstance(schema, type) or not hasattr(schema, "model_json_schema"):
        raise InputError(
            f"schema = {schema!r:.80}", "a Pydantic model class is expected", "pass a schema itself as json_schema"
        )
    if conflicting := [name for name in OPTIONS if name in options]:
        raise OptionError(
            f"{conflicting[0]} contradicts schema", "a reply matches one grammar", "leave one of them out"
        )
    return {**options, "json_schema": schema}


def instance_of(schema: type[Instance], text: str, completion: Completion) -> Instance:
    """What a reply says, as an instance.

    Raises:
        ReplyFormatError: the reply was cut, or the class refuses what its own schema allows.
    """
    if completion.finish_reason != "stop":
        raise ReplyFormatError(
            f"the reply was cut after {len(completion.token_ids)} tokens: {text[-80:]!r}",
            f"finish_reason is {completion.finish_reason!r}",
            "raise max_tokens, or limit texts and lists in the class (max_length)",
        )
    try:
        instance: Instance = schema.model_validate_json(text)
    except ValueError as error:
        raise ReplyFormatError(
            f"the reply is no {schema.__name__}: {text[:80]!r}",
            " ".join(str(error).split())[:300],
            "a validator of the class asks for more than its schema says: say it there, or ask again",
        ) from error
    return instance
