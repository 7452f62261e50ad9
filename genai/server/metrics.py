"""Metrics in the text format of Prometheus, with this project's names and those of vLLM, which routers read."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..llm.completion import Completion

if TYPE_CHECKING:  # an import cycle
    from .serving import Server

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
_PER_TOKEN = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_WHOLE = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)


@dataclass
class Histogram:
    """Counts of values by upper limits.

    Attributes:
        limits: the upper limits, ascending.
    """

    limits: Sequence[float]
    total: float = 0.0
    _counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._counts = [0] * (len(self.limits) + 1)

    def add(self, value: float, count: int = 1) -> None:
        """Count a value."""
        index = next((i for i, limit in enumerate(self.limits) if value <= limit), len(self.limits))
        self._counts[index] += count
        self.total += value * count

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """Yield the samples of the histogram."""
        count = 0
        for limit, more in zip([*self.limits, "+Inf"], self._counts, strict=True):
            count += more
            yield f'{name}_bucket{{{labels},le="{limit}"}} {count}'
        yield f"{name}_sum{{{labels}}} {self.total}"
        yield f"{name}_count{{{labels}}} {count}"


@dataclass
class Metrics:
    """The counters of a server. Only the event loop's thread uses them.

    Attributes:
        requests: the number of HTTP requests by path and status.
        finished: the number of completions by their reason.
        adapters: the number of requests in the server by adapter.
        last_adapter: the time of the last change of `adapters`, in seconds since 1970.
    """

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    adapters: Counter[str] = field(default_factory=Counter)
    last_adapter: float = 0.0
    _first_token: Histogram = field(default_factory=lambda: Histogram(_FIRST_TOKEN))
    _per_token: Histogram = field(default_factory=lambda: Histogram(_PER_TOKEN))
    _whole: Histogram = field(default_factory=lambda: Histogram(_WHOLE))

    def note(self, completion: Completion) -> None:
        """Count a completion. The time between tokens is the mean of the completion, counted once per token."""
        self.finished[completion.finish_reason] += 1
        count, timings = len(completion.token_ids), completion.timings
        if count:
            self._first_token.add(timings.time_to_first_token)
        if count > 1:
            self._per_token.add(timings.decode_seconds / (count - 1), count - 1)
        self._whole.add(timings.time_to_first_token + timings.decode_seconds)

    def note_adapter(self, name: str, change: int) -> None:
        """Count a request that uses an adapter; "" = no adapter."""
        if name:
            self.adapters[name] += change
            self.adapters += Counter()  # drops adapters without requests
            self.last_adapter = time.time()

    def text(self, server: Server) -> str:
        """Return all metrics."""
        found = [*self._of_requests(server), *server.metric_lines()]
        for one in server.loaded:
            if one.has_llm:
                found += [*one.metrics._own(one), *one.metrics._of_vllm(one)]
        return "\n".join(_grouped(found)) + "\n"

    def _of_requests(self, server: Server) -> Iterator[str]:
        labels = f'model="{escaped(server.name)}"'
        encoders = [one.encoders.admission for one in server.loaded]
        running, waiting = sum(one.num_running for one in encoders), sum(one.num_waiting for one in encoders)
        gauges = {
            "connections_serving": ("Requests in the server.", server.admission.num_requests),
            "encoder_requests_running": ("Requests for embeddings and reranking that run.", running),
            "encoder_requests_waiting": ("Requests for embeddings and reranking that wait.", waiting),
        }
        for name, (said, value) in gauges.items():
            yield from metric(f"genai_{name}", "gauge", said, [f"{{{labels}}} {value}"])
        refused = server.admission.refused
        said = "Requests that were refused because of the load."
        yield from metric("genai_refused_total", "counter", said, [f"{{{labels}}} {refused}"])
        served = [
            f'{{{labels},path="{escaped(path)}",status="{status}"}} {count}'
            for (path, status), count in sorted(self.requests.items())
        ]
        yield from metric("genai_http_requests_total", "counter", "HTTP requests.", served)

    def _own(self, server: Server) -> Iterator[str]:
        labels = f'model="{escaped(server.name)}"'
        stats, admission = server.llm.stats(), server.admission
        gauges = {
            "requests_running": ("Sequences in the current batch.", stats.running),
            "requests_waiting": ("Requests that wait.", stats.waiting + admission.num_waiting),
            "kv_cache_usage_ratio": ("Used part of the KV cache.", _usage(stats.cache_blocks, stats.cache_blocks_free)),
        }
        for name, (said, value) in gauges.items():
            yield from metric(f"genai_{name}", "gauge", said, [f"{{{labels}}} {value}"])
        counters = {
            "prompt_tokens_total": ("Tokens of prompts.", stats.prompt_tokens),
            "cached_tokens_total": ("Tokens of prompts that the prefix cache supplied.", stats.cached_tokens),
            "generated_tokens_total": ("Generated tokens.", stats.generated_tokens),
            "steps_total": ("Steps of the engine.", stats.steps),
            "preemptions_total": ("Preemptions.", stats.preempted),
            "cancelled_total": ("Cancelled sequences.", stats.cancelled),
            "failed_total": ("Failed sequences.", stats.failed),
        }
        for name, (said, value) in counters.items():
            yield from metric(f"genai_{name}", "counter", said, [f"{{{labels}}} {value}"])
        for name, said, histogram in (
            ("time_to_first_token_seconds", "Time from the submission to the first token.", self._first_token),
            ("time_per_token_seconds", "Time between tokens, the mean of each completion.", self._per_token),
            ("completion_seconds", "Time from the submission to the last token.", self._whole),
        ):
            yield from _header(f"genai_{name}", "histogram", said)
            yield from histogram.lines(f"genai_{name}", labels)

    def _of_vllm(self, server: Server) -> Iterator[str]:
        labels = f'model_name="{escaped(server.name)}",engine="0"'
        stats, waiting = server.llm.stats(), server.admission.num_waiting
        usage = _usage(stats.cache_blocks, stats.cache_blocks_free)
        gauges = {"num_requests_running": stats.running, "num_requests_waiting": stats.waiting + waiting}
        for name, value in {**gauges, "kv_cache_usage_perc": usage, "gpu_cache_usage_perc": usage}.items():
            yield from metric(f"vllm:{name}", "gauge", "See vLLM.", [f"{{{labels}}} {value}"])
        counters = {
            "prompt_tokens_total": stats.prompt_tokens,
            "generation_tokens_total": stats.generated_tokens,
            "num_preemptions_total": stats.preempted,
            "prefix_cache_queries_total": stats.prompt_tokens,
            "prefix_cache_hits_total": stats.cached_tokens,
        }
        for name, value in counters.items():
            yield from metric(f"vllm:{name}", "counter", "See vLLM.", [f"{{{labels}}} {value}"])
        reasons = {"stop": "stop", "length": "length", "timeout": "abort", "cancelled": "abort"}
        ended = Counter[str]()
        for reason, count in self.finished.items():
            ended[reasons[reason]] += count
        done = [f'{{{labels},finished_reason="{reason}"}} {ended[reason]}' for reason in ("stop", "length", "abort")]
        yield from metric("vllm:request_success_total", "counter", "See vLLM.", done)
        for name, histogram in (
            ("time_to_first_token_seconds", self._first_token),
            ("inter_token_latency_seconds", self._per_token),
            ("time_per_output_token_seconds", self._per_token),
            ("e2e_request_latency_seconds", self._whole),
        ):
            yield from _header(f"vllm:{name}", "histogram", "See vLLM.")
            yield from histogram.lines(f"vllm:{name}", labels)
        config = f'block_size="{stats.block_tokens}",num_gpu_blocks="{stats.cache_blocks or 0}",engine="0"'
        yield from metric("vllm:cache_config_info", "gauge", "See vLLM.", [f"{{{config}}} 1"])
        running = ",".join(sorted(self.adapters))
        lora = f'max_lora="{len(server.adapters)}",running_lora_adapters="{escaped(running)}",waiting_lora_adapters=""'
        yield from metric("vllm:lora_requests_info", "gauge", "See vLLM.", [f"{{{lora}}} {self.last_adapter}"])


def _grouped(lines: Sequence[str]) -> Iterator[str]:
    """Yield lines in groups: the samples of all models follow the one description of their metric."""
    groups: dict[str, list[str]] = {}
    group: list[str] = []
    for line in lines:
        if line.startswith("# HELP "):
            name = line.split(" ", 3)[2]
            is_known, group = name in groups, groups.setdefault(name, [])
        if not (line.startswith("# ") and is_known):
            group.append(line)
    for group in groups.values():
        yield from group


def _usage(blocks: int | None, free: int | None) -> float:
    return 0.0 if not blocks or free is None else 1 - free / blocks


def _header(name: str, kind: str, said: str) -> list[str]:
    return [f"# HELP {name} {said}", f"# TYPE {name} {kind}"]


def metric(name: str, kind: str, said: str, samples: Sequence[str]) -> list[str]:
    """Return the lines of a metric.

    Args:
        name: its name.
        kind: "gauge" or "counter".
        said: its description.
        samples: labels in braces, and values.
    """
    return [*_header(name, kind, said), *(f"{name}{sample}" for sample in samples)]


_ESCAPES: Mapping[str, str] = {"\\": r"\\", '"': r"\"", "\n": r"\n"}


def escaped(text: str) -> str:
    """Return a text as the value of a label."""
    return "".join(_ESCAPES.get(character, character) for character in text)
