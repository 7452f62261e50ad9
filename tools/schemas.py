"""Make JSON schemas of the kinds in JSONSchemaBench, and let a model generate instances of these schemas.

Every finished reply must be a valid instance, as judged by the `jsonschema` package. Replies that max_tokens truncates
are counted separately. A schema's number determines the schema, so that a failure can be reproduced.

    python -m tools.schemas --first 0 --count 100 --seeds 3
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import genai
from genai.engine.sampling.params import SamplingParams
from genai.errors import GenaiError
from genai.llm.completion import Completion

from .arguments import positive

Schema = dict[str, Any]

_NAMES = (
    "id name title email tags items price count status address street city zip country created updated children "
    "first_name lastName is_active rating größe naïve 名前 ключ ñandú a/b x~y $type with space"
).split()
_WORDS = ("red", "green", "on", "off", "naïve", "日本", 'a "quoted" word', "back\\slash", "tab\there", "🙂", "")
# Formats that jsonschema checks without other packages.
_FORMATS = ("date", "email", "ipv4", "ipv6", "uuid")
_PATTERNS = (
    "^[A-Z]{2,4}-[0-9]{1,5}$",
    "^(foo|bar|baz)+$",
    "^[a-z]+(_[a-z]+){0,3}$",
    "^\\d{3}-\\d{4}$",
    "^[^\\s@]{1,8}@[a-z]{1,8}\\.(com|org)$",
    "^v\\d+\\.\\d+\\.\\d+$",
    "[xyz]{2}",
    "^\\w{1,10}$",
    "^[äöü]{1,3}$",
)
_MOST_DEPTH = 4


@dataclass
class SchemaMaker:
    """A generator for one schema.

    Attributes:
        random: random generator for all choices.
        definitions: by name, the schemas that other schemas refer to.
    """

    random: Random
    definitions: dict[str, Schema] = field(default_factory=dict)

    def make(self) -> Schema:
        """Return a complete schema."""
        kinds = self.random.choices((self.object, self.array, self.any_of, self.scalar), (12, 3, 2, 2))
        schema = kinds[0](0)
        return {**schema, "$defs": self.definitions} if self.definitions else schema

    def any(self, depth: int) -> Schema:
        """Return a schema of any kind; deeper schemas are simpler."""
        if depth >= _MOST_DEPTH:
            return self.scalar(depth)
        made: list[Callable[[int], Schema]] = [self.scalar, self.object, self.array, self.any_of, self.reference]
        return self.random.choices(made, (10, 4, 3, 2, 2))[0](depth)

    def scalar(self, depth: int) -> Schema:
        """Return a schema for a string, a number or a few values."""
        made: list[Callable[[], Schema]] = [self.text, self.number, self.integer, self.values, self.constant, self.flag]
        return self.random.choices(made, (6, 3, 4, 4, 1, 2))[0]()

    def text(self) -> Schema:
        """Return a schema for a string with limits."""
        kind = self.random.randrange(6)
        if kind == 0:
            return {"type": "string", "pattern": self.random.choice(_PATTERNS), "maxLength": 40}
        if kind == 1:
            return {"type": "string", "format": self.random.choice(_FORMATS)}
        least = self.random.choice((0, 0, 1, 3))
        return {"type": "string", "minLength": least, "maxLength": least + self.random.choice((0, 1, 5, 20))}

    def number(self) -> Schema:
        """Return a schema of a number with bounds."""
        low = round(self.random.uniform(-1000, 1000), self.random.randrange(4))
        bounds = {
            self.random.choice(("minimum", "exclusiveMinimum")): low,
            self.random.choice(("maximum", "exclusiveMaximum")): low + self.random.choice((0.5, 10, 1e6)),
        }
        return {"type": "number", **bounds}

    def integer(self) -> Schema:
        """Return a schema of an integer with bounds, or of multiples of an integer."""
        low = self.random.choice((0, 1, -5, 100, self.random.randrange(-(10**6), 10**6)))
        schema: Schema = {"type": "integer", "minimum": low, "maximum": low + self.random.choice((0, 3, 100, 10**6))}
        if self.random.random() < 0.2:
            schema = {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": self.random.choice((2, 5, 7, 10))}
        return schema

    def values(self) -> Schema:
        """Return an enum of values of one or several types."""
        values: list[Any] = self.random.sample(_WORDS, self.random.randrange(1, 6))
        if self.random.random() < 0.3:
            values += self.random.sample([1, 2.5, None, True, -7], 2)
        return {"enum": values}

    def constant(self) -> Schema:
        """Return a schema of one constant."""
        return {"const": self.random.choice((1, "fixed", None, False, {"a": [1, {"b": "ü"}]}, [1, 2], 0.25))}

    def flag(self) -> Schema:
        """Return a schema of a boolean, null, or either."""
        return {"type": self.random.choice(("boolean", "null", ["boolean", "null"]))}

    def object(self, depth: int) -> Schema:
        """Return a schema of named values, some of which are required; it may allow additional properties."""
        names = self.random.sample(_NAMES, self.random.randrange(1, 6))
        schema: Schema = {"type": "object", "properties": {name: self.any(depth + 1) for name in names}}
        required = [name for name in names if self.random.random() < 0.6]
        if required:
            schema["required"] = required
        others = self.random.randrange(8)
        if others == 0:
            schema["additionalProperties"] = self.scalar(depth + 1)
            schema |= {"maxProperties": len(names) + 2, "required": names}  # llguidance counts only required names
        elif others == 1:
            schema = {"type": "object", "patternProperties": {"^k[0-9]{1,2}$": self.scalar(depth + 1)},
                      "additionalProperties": False, "maxProperties": 3}  # fmt: skip
        elif others > 2:
            schema["additionalProperties"] = False
        if self.random.random() < 0.3:
            schema |= {"title": "A thing", "description": "Said about it.", "$comment": "none"}
        return schema

    def array(self, depth: int) -> Schema:
        """Return a schema of an array with a minimum and a maximum length."""
        least = self.random.choice((0, 0, 1, 2))
        schema: Schema = {"type": "array", "minItems": least, "maxItems": least + self.random.choice((0, 1, 3))}
        if self.random.random() < 0.25:
            first = [self.scalar(depth + 1) for _ in range(self.random.randrange(1, 4))]
            return {"type": "array", "prefixItems": first, "items": False, "minItems": len(first)}
        return {**schema, "items": self.any(depth + 1)}

    def any_of(self, depth: int) -> Schema:
        """Return a schema of alternatives. An instance matches exactly one alternative, because their types differ."""
        kinds: list[Callable[[], Schema]] = [self.text, self.integer, self.flag, lambda: self.object(depth + 1)]
        chosen = self.random.sample(kinds, self.random.randrange(2, 4))
        schema: Schema = {self.random.choice(("anyOf", "oneOf")): [make() for make in chosen]}
        if self.random.random() < 0.15:
            return {"allOf": [{"type": "object", "properties": {"a": self.text()}, "required": ["a"]},
                              {"properties": {"b": self.integer()}, "required": ["b"]}]}  # fmt: skip
        return schema

    def reference(self, depth: int) -> Schema:
        """Return a reference to a definition, which is a recursive tree or a schema that is used once."""
        if self.random.random() < 0.3:
            tree = {"type": "object", "properties": {
                "value": self.scalar(depth),
                "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
            }, "required": ["value"], "additionalProperties": False}  # fmt: skip
            self.definitions.setdefault("tree", tree)
            return {"$ref": "#/$defs/tree"}
        name = f"part{len(self.definitions)}"
        self.definitions[name] = {}  # reserves the name while the schema is made
        self.definitions[name] = self.any(depth + 1)
        return {"$ref": f"#/$defs/{name}"}


def make_schema(number: int) -> Schema:
    """Return the schema with this number, which is always the same."""
    return SchemaMaker(Random(number)).make()


def problem(schema: Schema, text: str) -> str:
    """Return the reason why a reply is not an instance of a schema; "" if the reply is an instance."""
    import jsonschema

    try:
        value = json.loads(text)
    except ValueError as error:
        return f"not JSON: {error}"
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    errors = jsonschema.Draft202012Validator(schema, format_checker=checker).iter_errors(value)
    return next((f"{error.json_path}: {error.message}" for error in errors), "")


@dataclass
class Tally:
    """Counts of replies by result.

    Attributes:
        finished: replies that the model finished.
        cut: replies that max_tokens truncated.
        tokens: total number of tokens.
        invalid: faults of finished replies, by schema number and seed.
        refused: reasons why schemas are not supported, by schema number.
    """

    finished: int = 0
    cut: int = 0
    tokens: int = 0
    invalid: dict[tuple[int, int], str] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)

    def add(self, number: int, seed: int, schema: Schema, reply: Completion) -> None:
        """Judge and count a reply."""
        self.tokens += len(reply.token_ids)
        if reply.finish_reason == "length":
            self.cut += 1
            return
        self.finished += 1
        if why := problem(schema, reply.text):
            self.invalid[number, seed] = f"{why}\n  {reply.text[:300]}"


def ask(llm: genai.LLM, numbers: Iterable[int], seeds: Iterable[int], **options: Any) -> Tally:
    """Generate one reply per schema and seed."""
    tally = Tally()
    asked: list[tuple[int, int, Schema, SamplingParams]] = []
    for number in numbers:
        schema = make_schema(number)
        try:
            asked += [(number, seed, schema, llm.params(json_schema=schema, seed=seed, **options)) for seed in seeds]
        except GenaiError as error:
            tally.refused[number] = str(error.why)
    prompt = llm.render("Answer in JSON.")
    for part in _parts(asked, 128):
        replies = llm.generate([prompt] * len(part), [params for *_, params in part])
        for (number, seed, schema, _), reply in zip(part, replies, strict=True):
            tally.add(number, seed, schema, reply)
    return tally


def _parts(items: list[Any], size: int) -> Iterator[list[Any]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]


def main() -> None:
    """Generate replies and print the results; exit with 1 if a reply is invalid."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="model folder [default: the bundled model]")
    parser.add_argument("--first", type=int, default=0, help="number of the first schema")
    parser.add_argument("--count", type=positive, default=100, help="number of schemas")
    parser.add_argument("--seeds", type=positive, default=3, help="replies per schema")
    parser.add_argument("--max-tokens", type=positive, default=400)
    parser.add_argument("--temperature", type=float, default=1.0)
    given = parser.parse_args()
    with genai.LLM(given.model) as llm:
        numbers = range(given.first, given.first + given.count)
        options = {"max_tokens": given.max_tokens, "temperature": given.temperature}
        tally = ask(llm, numbers, range(given.seeds), **options)
    for (number, seed), why in tally.invalid.items():
        print(f"schema {number}, seed {seed}: {why}\n  {json.dumps(make_schema(number), ensure_ascii=False)[:600]}")
    for number, why in tally.refused.items():
        print(f"schema {number} is refused: {why}")
    asked = tally.finished + tally.cut
    print(
        f"{given.count} schemas, {len(tally.refused)} refused; {asked} replies: {tally.finished} finished, {tally.cut} "
        f"cut by max_tokens, {len(tally.invalid)} invalid; {tally.tokens} tokens"
    )
    sys.exit(bool(tally.invalid))


if __name__ == "__main__":
    main()
