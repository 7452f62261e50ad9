"""Schemas of Pydantic's types: replies match the schema, and Pydantic accepts them where a schema can say so."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import ipaddress
import json
import pathlib
import re
import typing
import uuid
from typing import Annotated, Any, Literal, NamedTuple

import jsonschema
import pydantic
import pytest
from pydantic import Field, TypeAdapter

from genai.engine.sampling.grammar import schema_text
from tests.drawing import Draw

from .schema_replies import Walk


class Colour(enum.Enum):
    """Values of several types."""

    RED = "red"
    ONE = 1


class Size(enum.IntEnum):
    """Whole numbers."""

    SMALL = 1
    LARGE = 2


class Cat(pydantic.BaseModel):
    """An alternative with the tag "cat"."""

    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=0, le=9)]


class Dog(pydantic.BaseModel):
    """An alternative with the tag "dog"."""

    kind: Literal["dog"]
    name: str | None = None


class Tree(pydantic.BaseModel):
    """A model that contains itself."""

    value: int
    children: list[Tree] = []


class Deep(pydantic.BaseModel):
    """A reference with other keywords, and a model in a model."""

    colour: Colour = Field(Colour.RED, description="A colour.")
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    sizes: frozenset[Size]
    when: datetime.date
    address: ipaddress.IPv4Address | None


class Pair(NamedTuple):
    """A tuple with names."""

    first: int
    second: str


# Types whose schema contains every rule of the type.
WHOLE: dict[str, Any] = {
    "date": datetime.date,
    "datetime": datetime.datetime,
    "aware": pydantic.AwareDatetime,
    "time": datetime.time,
    "timedelta": datetime.timedelta,
    "uuid": uuid.UUID,
    "uuid1": pydantic.UUID1,
    "uuid3": pydantic.UUID3,
    "uuid4": pydantic.UUID4,
    "uuid5": pydantic.UUID5,
    "url": pydantic.AnyUrl,
    "bytes": bytes,
    "base64": pydantic.Base64Bytes,
    "base64url": pydantic.Base64UrlBytes,
    "secret": pydantic.SecretStr,
    "secret bytes": pydantic.SecretBytes,
    "path": pathlib.Path,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "ipv4 network": ipaddress.IPv4Network,
    "ipv6 network": ipaddress.IPv6Network,
    "ipv4 interface": ipaddress.IPv4Interface,
    "ipv6 interface": ipaddress.IPv6Interface,
    "any address": pydantic.IPvAnyAddress,
    "any network": pydantic.IPvAnyNetwork,
    "any interface": pydantic.IPvAnyInterface,
    "set": set[int],
    "set of some": Annotated[set[int], Field(min_length=2, max_length=3)],
    "set of few": set[Literal["a", "b", "c"]],
    "set of bool": Annotated[set[bool], Field(min_length=2)],
    "set of enum": Annotated[set[Colour], Field(min_length=1)],
    "set of many": set[Annotated[int, Field(ge=0, le=60)]],
    "frozenset": frozenset[str],
    "sets in list": list[set[tuple[int, int]]],
    "deque": collections.deque[int],
    "bounded deque": Annotated[collections.deque[int], Field(max_length=2)],
    "dict": dict[str, int],
    "dict of literals": dict[Literal["a", "b"], int],
    "dict of dates": dict[datetime.date, int],
    "dict of uuids": dict[uuid.UUID, int],
    "dict of addresses": dict[ipaddress.IPv4Address, int],
    "dict of patterns": dict[Annotated[str, Field(pattern="^[a-z]+$")], int],
    "dict of lengths": dict[Annotated[str, Field(min_length=2, max_length=4)], int],
    "ordered dict": collections.OrderedDict[str, int],
    "counter": typing.Counter[str],
    "mapping": typing.Mapping[str, bool],
    "enum": Colour,
    "int enum": Size,
    "literal": Literal["a", 1, None],
    "tuple": tuple[int, str],
    "open tuple": tuple[int, ...],
    "empty tuple": tuple[()],
    "named tuple": Pair,
    "optional": int | None,
    "union": int | str | list[bool],
    "tagged union": Annotated[Cat | Dog, Field(discriminator="kind")],
    "union of models": Cat | Dog,
    "recursive model": Tree,
    "model": Deep,
    "multiple": Annotated[int, Field(multiple_of=3, gt=4, lt=70)],
    "float multiple": Annotated[float, Field(multiple_of=0.5)],
    "bounded float": Annotated[float, Field(gt=0, lt=1)],
    "bounded int": pydantic.conint(gt=3, lt=9),
    "positive": pydantic.PositiveInt,
    "list": pydantic.conlist(int, min_length=1, max_length=2),
    "string": pydantic.constr(min_length=2, max_length=3, pattern="^[a-z]+$"),
    "bool": bool,
    "null": None,
    "any": Any,
    "strict": pydantic.StrictInt,
    "secret int": pydantic.Secret[int],
}
# Types that have rules that are not in their schema.
IN_PART: dict[str, Any] = {
    "naive": pydantic.NaiveDatetime,
    "past": pydantic.PastDate,
    "finite": pydantic.FiniteFloat,
    "http": pydantic.HttpUrl,
    "postgres": pydantic.PostgresDsn,
    "file": pydantic.FilePath,
    "folder": pydantic.DirectoryPath,
    "json": pydantic.Json[int],
    "base64 text": pydantic.Base64Str,
    "decimal": decimal.Decimal,
    "fraction": fractions.Fraction,  # 1e999 is infinite
    "bounded decimal": Annotated[decimal.Decimal, Field(max_digits=5, decimal_places=2, ge=0)],
    "dict of int": dict[int, str],
    "dict of enum": dict[Size, str],
    "pattern": re.Pattern,
    "byte size": pydantic.ByteSize,
    "import": pydantic.ImportString,
}


def replies_of(kind: Any, walk: Walk, draw: Draw) -> tuple[TypeAdapter[Any], list[str]]:
    """Finished replies under the schema of a type, each of which is JSON and matches the schema."""
    adapter = TypeAdapter(kind)
    schema = adapter.json_schema()

    class Model:
        @staticmethod
        def model_json_schema() -> Any:
            return json.loads(json.dumps(schema))

    text = schema_text("json_schema", Model)
    assert text is not None
    first = draw.seed % 10**6
    replies = [reply for seed in range(first, first + 15) if (reply := walk(json.loads(text), seed)) is not None]
    assert replies
    for reply in replies:
        jsonschema.Draft202012Validator(schema).validate(json.loads(reply))
    return adapter, replies


@pytest.mark.parametrize("name", WHOLE)
def test_types_with_all_rules_in_their_schema(name: str, walk: Walk, draw: Draw) -> None:
    adapter, replies = replies_of(WHOLE[name], walk, draw)
    for reply in replies:
        adapter.validate_json(reply)


@pytest.mark.parametrize("name", IN_PART)
def test_types_with_other_rules(name: str, walk: Walk, draw: Draw) -> None:
    replies_of(IN_PART[name], walk, draw)
