"""`llm`, the command and the library, with the server in extra-openai-models.yaml."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from common import LIMITED, QUESTION, SERVER, STORY, TOO_LONG, cancels, long_bias, raised

MODELS = f"""
- model_id: pebble
  model_name: pebble
  api_base: "{SERVER}/v1"
  supports_schema: true
  supports_tools: true
- model_id: responses
  model_name: pebble
  api_base: "{SERVER}/v1"
  responses: true
  supports_schema: true
  supports_tools: true
- model_id: raw
  model_name: pebble
  api_base: "{SERVER}/v1"
  completion: true
- model_id: locked
  model_name: pebble
  api_base: "{LIMITED}/v1"
"""
(Path(os.environ["LLM_USER_PATH"]) / "extra-openai-models.yaml").write_text(MODELS)
import llm  # noqa: E402 - reads the models above

SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["sum"],
    "additionalProperties": False,
}


def command(*arguments: str) -> str:
    run = subprocess.run([sys.executable, "-m", "llm", *arguments], check=True, capture_output=True, text=True)
    return run.stdout.strip()


def main() -> None:
    assert command("-m", "pebble", QUESTION) == "19"
    assert command("-m", "pebble", "--no-stream", "-s", "Be exact.", QUESTION).isdigit()
    assert command("-c", "What is 20 - 5?") == "15"
    model = llm.get_model("pebble")
    usage = (reply := model.prompt(QUESTION, seed=1, max_tokens=9)).usage()
    assert reply.text() == "19" and usage.input > 10 and usage.output == 2, usage
    assert llm.get_model("responses").prompt(QUESTION).text() == "19"
    for name in ("pebble", "responses"):
        made = json.loads(llm.get_model(name).prompt(QUESTION, schema=SCHEMA).text())
        assert 0 <= made["sum"] <= 99
    raw = llm.get_model("raw").prompt("Once upon a time", max_tokens=5)
    assert raw.text()

    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    # The library has no tool_choice, and this model calls no tools by itself, so only the result of a call is sent.
    result = llm.ToolResult(name="add", output="19", tool_call_id="call_1")
    assert model.prompt(QUESTION, tools=[add], tool_results=[result], max_tokens=5).text() is not None

    conversation = model.conversation()
    assert conversation.prompt(QUESTION).text() == "19" and conversation.prompt("What is 20 - 5?").text() == "15"
    options = ("-o", "max_tokens", "900", "-o", "logit_bias", json.dumps(long_bias()))
    with (
        cancels(),
        subprocess.Popen(
            [sys.executable, "-m", "llm", "-m", "pebble", *options, STORY],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as running,
    ):
        assert running.stdout is not None and running.stdout.read(5)
        running.send_signal(signal.SIGINT)
    error = raised(Exception, lambda: model.prompt(TOO_LONG).text())
    assert "maximum context length" in str(error), error
    assert "API key" in str(raised(Exception, lambda: llm.get_model("locked").prompt(QUESTION, key="no").text()))


main()
