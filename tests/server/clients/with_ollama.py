"""`ollama`, the client of Ollama's API."""

from __future__ import annotations

import os

import ollama

client = ollama.Client(host=os.environ["SERVER"])
question = [{"role": "user", "content": "What is 12 + 7?"}]

assert "pebble" in [one.model for one in client.list().models]
assert "pebble" in [one.model for one in client.ps().models]
assert "completion" in client.show("pebble").capabilities
assert client.chat("pebble:latest", question).message.content == "19"
parts = [*client.chat("pebble", question, stream=True)]
assert "".join(part.message.content or "" for part in parts) == "19" and parts[-1].done_reason == "stop"
assert client.generate("pebble", "What is 12 + 7?", options={"num_predict": 1}).response == "1"
assert "".join(part.response for part in client.generate("pebble", "What is 20 - 5?", stream=True)) == "15"
schema = {"type": "object", "properties": {"sum": {"enum": [19]}}, "required": ["sum"], "additionalProperties": False}
assert client.chat("pebble", question, format=schema).message.content.replace(" ", "") == '{"sum":19}'
assert len(client.embed("bert", ["a cat", "a dog"]).embeddings) == 2
assert len(client.embeddings("bert", "a cat").embedding) > 8
try:
    client.chat("nope", question)
except ollama.ResponseError as error:
    assert error.status_code == 404 and "does not exist" in error.error
else:
    raise AssertionError("an unknown model was accepted")
