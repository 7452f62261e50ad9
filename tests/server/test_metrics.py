"""/metrics and the request log."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import genai
from genai.errors import InputError
from genai.server.metrics import Histogram
from genai.server.request_log import RequestLog
from genai.server.serving import Server

from .conftest import Running


def _samples(running: Running) -> dict[str, float]:
    with running.http as client:
        answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found, described = {}, set()
    for line in answer.text.splitlines():
        if line.startswith("# TYPE "):
            described.add(line.split()[2])
        elif not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            base = re.sub(r"_(bucket|sum|count)$", "", name.split("{")[0])
            assert base in described or name.split("{")[0] in described, line
            assert name not in found
            found[name] = float(value)
    return found


def test_metrics_count_requests(running: Running) -> None:
    before = _samples(running)
    for _ in range(2):
        running.chat(model="words")
    running.chat(temperature=-1)
    after = _samples(running)
    own = '{model="pebble"}'
    answered = '{model="pebble",path="/v1/chat/completions",status="%s"}'

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert grown("genai_http_requests_total" + answered % 200) == 2
    assert grown("genai_http_requests_total" + answered % 400) == 1
    assert grown(f"genai_time_to_first_token_seconds_count{own}") == 2
    assert grown(f"genai_generated_tokens_total{own}") >= 4
    vllm = '{model_name="pebble",engine="0"}'
    assert grown('vllm:request_success_total{model_name="pebble",engine="0",finished_reason="stop"}') == 2
    assert after[f"vllm:num_requests_running{vllm}"] == after[f"vllm:num_requests_waiting{vllm}"] == 0
    assert 0 <= after[f"vllm:kv_cache_usage_perc{vllm}"] <= 1
    assert any(name.startswith("vllm:cache_config_info{block_size=") for name in after)
    assert any(name.startswith('vllm:lora_requests_info{max_lora="1",running_lora_adapters="",') for name in after)
    assert grown('vllm:inter_token_latency_seconds_bucket{model_name="pebble",engine="0",le="+Inf"}') >= 2


def test_histograms() -> None:
    histogram = Histogram((1.0, 2.0))
    for value, count in ((0.5, 1), (1.0, 2), (1.5, 1), (9.0, 1)):
        histogram.add(value, count)
    assert list(histogram.lines("x", 'a="b"')) == [
        'x_bucket{a="b",le="1.0"} 3',
        'x_bucket{a="b",le="2.0"} 4',
        'x_bucket{a="b",le="+Inf"} 5',
        'x_sum{a="b"} 13.0',
        'x_count{a="b"} 5',
    ]


def _lines(llm: genai.LLM, path: Path, requests: Callable[[Running], None], *, with_prompts: bool = False) -> list[str]:
    log = RequestLog(path, with_prompts=with_prompts)
    running = Running(Server(llm, name="pebble", log=log))
    try:
        requests(running)
    finally:
        running.close()
        log.close()
    return path.read_text(encoding="utf-8").splitlines()


def test_the_request_log(llm: genai.LLM, tmp_path: Path) -> None:
    def requests(running: Running) -> None:
        running.chat("My secret", user="me", seed=3, max_tokens=2)
        running.chat("My secret", stream=True, max_tokens=2)
        running.post("/v1/completions", {"prompt": 5})
        message = {"role": "user", "content": "Hi"}
        running.post("/v1/messages", {"messages": [message], "max_tokens": 1}, **{"X-Claude-Code-Session-Id": "c1"})
        key = {"prompt_cache_key": "k" * 200, "max_output_tokens": 1}
        running.post("/v1/responses", {"input": "Hi", **key}, session_id="not this one")

    lines = _lines(llm, tmp_path / "log", requests)
    whole, streamed, wrong, message, response = map(json.loads, lines)
    assert "session" not in whole and message["session"] == "c1" and response["session"] == "k" * 100
    assert "ignored_fields" not in response
    assert whole["path"] == "/v1/chat/completions" and whole["status"] == streamed["status"] == 200
    assert whole["completion_tokens"] == streamed["completion_tokens"] == 2 and whole["seed"] == 3
    assert whole["finish_reasons"] == ["length"] and whole["ignored_fields"] == ["user"]
    assert wrong["status"] == 400 and "prompt" in wrong["error"] and whole["id"] != wrong["id"]
    assert "secret" not in "".join(lines) and (tmp_path / "log").stat().st_mode & 0o777 == 0o600
    more = _lines(llm, tmp_path / "log", lambda running: running.chat("My secret", max_tokens=1), with_prompts=True)  # type: ignore[arg-type, return-value]
    assert len(more) == 6 and "My secret" in json.loads(more[-1])["body"]


def test_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        RequestLog(tmp_path / "missing" / "log")


def test_a_full_disk(caplog: pytest.LogCaptureFixture) -> None:
    log = RequestLog(Path("/dev/full"))
    log.write({"id": 1})
    log.write({"id": 2})
    log.close()
    assert sum("not logged any more" in record.getMessage() for record in caplog.records) == 1
