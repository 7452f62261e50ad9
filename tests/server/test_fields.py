"""The tables of fields: complete for the official SDKs, and obeyed fields are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from genai.errors import RequestError
from genai.server import sampling
from genai.server.fields import field_table, read_fields
from genai.server.wire.chat import ChatRequest
from genai.server.wire.completions import CompletionRequest
from genai.server.wire.messages_input import MessagesRequest
from genai.server.wire.responses_input import ResponsesRequest
from tools import server_fields

GUIDED = {"structured_outputs", *(f"guided_{name}" for name in ("json", "regex", "choice", "grammar"))}
SHARED = {*sampling.BY_NAME, "max_tokens", "stop", "n", *GUIDED}


def test_the_tables_have_every_field_of_the_sdks() -> None:
    assert server_fields.problems() == []


def test_the_page_is_up_to_date() -> None:
    assert server_fields.PAGE.read_text(encoding="utf-8") == server_fields.page()


def test_a_new_field_of_an_sdk_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table = json.loads((server_fields.TABLES / "chat.json").read_text(encoding="utf-8"))
    table["ignored"].remove("store")
    table["sdk"]["version"] = "0.0.1"
    (tmp_path / "chat.json").write_text(json.dumps(table), encoding="utf-8")
    monkeypatch.setattr(server_fields, "TABLES", tmp_path)
    version, new = server_fields.problems()
    assert "compared with openai 0.0.1" in version and "no list has store" in new


@pytest.mark.parametrize(
    ("endpoint", "kind", "more"),
    [("chat", ChatRequest, {"max_completion_tokens"}), ("completions", CompletionRequest, set[str]())],
)
def test_obeyed_fields_are_those_that_are_read(endpoint: str, kind: Any, more: set[str]) -> None:
    assert field_table(endpoint).obeyed == {*kind.__struct_fields__} | SHARED | more


@pytest.mark.parametrize(("endpoint", "kind"), [("messages", MessagesRequest), ("responses", ResponsesRequest)])
def test_obeyed_fields_of_other_apis_are_those_that_are_read(endpoint: str, kind: Any) -> None:
    assert field_table(endpoint).obeyed == {*kind.__struct_fields__, *sampling.BY_NAME}


@pytest.mark.parametrize(
    ("name", "meant"),
    [("temprature", "temperature"), ("top_pp", "top_p"), ("max_token", "max_tokens"), ("sotp", "stop"),
     ("sede", "seed"),
     ("modle", "model"), ("messagges", "messages")],
)  # fmt: skip
def test_names_one_edit_away(name: str, meant: str) -> None:
    with pytest.raises(RequestError, match=f"did you mean '{meant}'") as raised:
        read_fields("chat", {name: 1}, strict=False)
    assert raised.value.param == name


def test_other_names_are_ignored() -> None:
    body = {"client_metadata": 1, "x" * 200: 2, "nn": 3, "thinking": None, "stop_sequence": 4, "seed": None}
    found = read_fields("chat", body, strict=False)
    assert found.values == {} and found.ignored == ["client_metadata", "x" * 200, "nn", "stop_sequence"]


def test_refused_fields_have_neutral_values() -> None:
    assert read_fields("chat", {"modalities": ["text"], "audio": None, "best_of": 1}, strict=True).ignored == []
    with pytest.raises(RequestError, match="text only"):
        read_fields("chat", {"modalities": ["text", "audio"]}, strict=False)
