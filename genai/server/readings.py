"""Readings of the metrics of running servers, and the speeds between two readings."""

from __future__ import annotations

import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException, InvalidURL

from ..errors import InputError, StateError

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_MOST_BYTES = 16 * 2**20


@dataclass(frozen=True)
class ModelReading:
    """The metrics of one model.

    Attributes:
        state: "loaded", or another state of a model of a router.
        values: the values of its metrics by name, without the prefix `genai_`.
    """

    state: str = "loaded"
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ServerReading:
    """The metrics of a server at one time.

    Attributes:
        seconds: the time of the reading on a monotonic clock.
        requests: number of HTTP requests since the start, without those of `/health` and `/metrics`.
        failed: number of requests with a status of at least 500.
        values: the values of the metrics of the whole server by name, without the prefix `genai_`.
        models: the models by name.
    """

    seconds: float
    requests: int
    failed: int
    values: Mapping[str, float]
    models: Mapping[str, ModelReading]


@dataclass(frozen=True)
class ModelFigures:
    """The state of a model, and its speed between two readings.

    Attributes:
        name: the name in requests.
        state: see ModelReading.
        running: number of sequences in the current batch.
        waiting: number of waiting requests.
        cache_usage: used part of the KV cache.
        prompt_tokens_per_second: prompt tokens per second, without those from the prefix cache.
        generated_tokens_per_second: generated tokens per second.
        cached_ratio: part of the prompt tokens that the prefix cache supplied; None = there were no prompts.
        first_token_seconds: mean time to the first token; None = no request ended.
        token_seconds: mean time between tokens; None = no request ended.
    """

    name: str
    state: str = "loaded"
    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0
    prompt_tokens_per_second: float = 0.0
    generated_tokens_per_second: float = 0.0
    cached_ratio: float | None = None
    first_token_seconds: float | None = None
    token_seconds: float | None = None


def read_metrics(url: str, key: str | None = None, timeout: float = 5.0) -> ServerReading:
    """Read the metrics of a server.

    Args:
        url: the address of the server, such as "http://127.0.0.1:8000".
        key: an API key of the server; None = the server has no keys.
        timeout: maximum number of seconds.

    Raises:
        InputError: the address is malformed, the server needs a key, or it is no server of this toolkit.
        StateError: the server cannot be reached.
    """
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        request = urllib.request.Request(f"{url}/metrics", headers=headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)
        with opener.open(request, timeout=timeout) as response:
            text = response.read(_MOST_BYTES).decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in (401, 403):
            raise InputError(
                f"{url}: the metrics cannot be read",
                "the server needs an API key" if key is None else "the server does not know this API key",
                "pass a file with a key of this server (--api-key-file)",
            ) from None  # fmt: skip
        raise _stranger(url, f"status {error.code}") from None
    except ssl.SSLError as error:
        raise _unreachable(url, error) from None
    except (ValueError, InvalidURL) as error:
        raise InputError(f"{url!r:.200} is not an address", str(error), "pass http://HOST:PORT") from None
    except (OSError, HTTPException) as error:
        raise _unreachable(url, getattr(error, "reason", error)) from None
    reading = parse_metrics(text, time.monotonic())
    if "connections_serving" not in reading.values:
        raise _stranger(url, "other metrics")
    return reading


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirects, so that no other server gets the API key."""

    def redirect_request(self, *_: object) -> None:
        """Return no further request."""


def _unreachable(url: str, reason: object) -> StateError:
    said = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
    return StateError(f"{url}: the server cannot be reached", said, "check the address, and that the server is running")


def _stranger(url: str, found: str) -> InputError:
    return InputError(
        f"{url}: this is no server of `genai serve`", f"the reply to /metrics was {found}",
        "pass the address that `genai serve` printed, without a path",
    )  # fmt: skip


def parse_metrics(text: str, seconds: float = 0.0) -> ServerReading:
    """Return the reading in a text of metrics. Other lines are ignored.

    Args:
        text: the text, in Prometheus' format.
        seconds: the time of the reading.
    """
    requests = failed = 0
    values: dict[str, float] = {}
    of_models: dict[str, dict[str, float]] = {}
    states: dict[str, str] = {}
    for name, labels, value in _samples(text):
        model = labels.get("model", "")
        if name == "http_requests_total":
            if labels.get("path") not in ("/health", "/metrics"):
                requests += int(value)
                failed += int(value) if labels.get("status", "") >= "500" else 0
        elif name == "model_state":
            states[model] = labels.get("state", "")
        elif name in _OF_SERVER:
            values[name] = value
        elif "le" not in labels and model:
            of_models.setdefault(model, {})[name] = value
    names = [*dict.fromkeys([*states, *of_models])]
    models = {name: ModelReading(states.get(name, "loaded"), of_models.get(name, {})) for name in names}
    return ServerReading(seconds, requests, failed, values, models)


_OF_SERVER = (
    "connections_serving", "encoder_requests_running", "encoder_requests_waiting", "refused_total", "models_bytes",
    "models_bytes_limit",
)  # fmt: skip


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield names without `genai_`, labels and values."""
    for line in text.splitlines():
        found = _SAMPLE.fullmatch(line)
        if found is None or not found[1].startswith("genai_"):
            continue
        try:
            value = float(found[3])
        except ValueError:
            continue
        labels = {name: _unescaped(value) for name, value in _LABEL.findall(found[2] or "")}
        yield found[1].removeprefix("genai_"), labels, value


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: "\n" if found[1] == "n" else found[1], text)


def figures(now: ServerReading, before: ServerReading) -> list[ModelFigures]:
    """Return the figures of each model between two readings of one server."""
    seconds = max(now.seconds - before.seconds, 1e-9)
    found: list[ModelFigures] = []
    for name, model in now.models.items():
        earlier = before.models.get(name, ModelReading()).values
        values = model.values
        # A restarted server counts from zero again.
        grown = {key: value - (earlier.get(key, 0.0) if earlier.get(key, 0.0) <= value else 0.0)
                 for key, value in values.items()}  # fmt: skip
        prompt, cached = grown.get("prompt_tokens_total", 0.0), grown.get("cached_tokens_total", 0.0)
        found.append(
            ModelFigures(
                name, model.state, int(values.get("requests_running", 0)),
                int(values.get("requests_waiting", 0) + values.get("model_requests_waiting", 0)),
                values.get("kv_cache_usage_ratio", 0.0),
                max(0.0, prompt - cached) / seconds, grown.get("generated_tokens_total", 0.0) / seconds,
                min(1.0, cached / prompt) if prompt else None,
                _mean(grown, "time_to_first_token_seconds"), _mean(grown, "time_per_token_seconds"),
            )
        )  # fmt: skip
    return found


def _mean(grown: Mapping[str, float], name: str) -> float | None:
    count = grown.get(f"{name}_count", 0.0)
    return grown[f"{name}_sum"] / count if count else None
