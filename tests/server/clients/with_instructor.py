"""instructor: objects by schema, by tools and by the Responses API, as a stream, and errors."""

from __future__ import annotations

from typing import Any

import instructor
import openai
from common import LIMITED, MESSAGES, SERVER, TOO_LONG, raised
from pydantic import BaseModel, Field

PLACE: dict[str, Any] = {"base_url": f"{SERVER}/v1", "api_key": "none"}


class Pair(BaseModel, extra="forbid"):
    """Two numbers."""

    a: int = Field(ge=0, le=99)
    b: int = Field(ge=0, le=99)


def main() -> None:
    call: dict[str, Any] = {"model": "pebble", "messages": MESSAGES}
    modes = instructor.Mode
    for mode in (modes.TOOLS, modes.JSON_SCHEMA, modes.RESPONSES_TOOLS):
        client = instructor.from_openai(openai.OpenAI(**PLACE), mode=mode)
        options = call if mode != modes.RESPONSES_TOOLS else {name: call[name] for name in ("model", "messages")}
        made = client.create(response_model=Pair, max_retries=0, **options)
        assert isinstance(made, Pair), mode
    client = instructor.from_openai(openai.OpenAI(**PLACE), mode=modes.JSON_SCHEMA)
    made, reply = client.create_with_completion(response_model=Pair, **call)
    assert reply.usage.completion_tokens > 5 and isinstance(made, Pair)
    *parts, last = client.create_partial(response_model=Pair, **call)
    assert parts and last.model_dump() == made.model_dump(), (last, made)

    for place, key, text in ((LIMITED, "wrong", "Hi"), (SERVER, "none", TOO_LONG)):
        wrong = instructor.from_openai(openai.OpenAI(base_url=f"{place}/v1", api_key=key), mode=modes.TOOLS)
        messages = [{"role": "user", "content": text}]
        error = raised(
            Exception,
            lambda c=wrong, m=messages: c.create(response_model=Pair, model="pebble", messages=m, max_retries=0),
        )
        assert "API key" in str(error) or "maximum context length" in str(error), error


main()
