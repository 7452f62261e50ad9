"""The files in configs/serve: a systemd unit, a Dockerfile, and the settings of Prometheus and Grafana."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

import genai
from genai.cli.app import command
from genai.models.folders import bundled_model
from genai.server.routed import RoutedModel
from genai.server.router import Router
from genai.server.serving import Server

FOLDER = Path(genai.__file__).parents[1] / "configs" / "serve"
INSTRUCTIONS = (
    "FROM", "RUN", "COPY", "USER", "WORKDIR", "EXPOSE", "VOLUME", "HEALTHCHECK", "STOPSIGNAL", "ENTRYPOINT", "CMD",
)  # fmt: skip
NAME = re.compile(r"\bgenai_[a-z_]+")


def check_command(words: list[str]) -> None:
    """Check that a command line of `genai serve` can be parsed."""
    assert words[0].endswith("genai") and words[1] == "serve"
    serve = command("serve").commands["serve"]
    serve.make_context("serve", words[2:], resilient_parsing=True)
    known = {name for parameter in serve.params for name in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known


@pytest.fixture(scope="module")
def metrics(llm: genai.LLM) -> set[str]:
    """The names of all metrics, of a server and of a router."""
    server, router = Server(llm), Router([RoutedModel("a", bundled_model())], 2**30)
    text = server.metrics.text(server) + router.metrics.text(router)
    server.close()
    router.close()
    return {*NAME.findall(text)}


def test_the_systemd_unit() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(FOLDER / "genai.service")
    assert unit.sections() == ["Unit", "Service", "Install"]
    words = shlex.split(unit["Service"]["ExecStart"])
    check_command(words)
    drain = int(words[words.index("--drain-timeout") + 1])
    assert int(unit["Service"]["TimeoutStopSec"]) > drain and unit["Service"]["KillSignal"] == "SIGTERM"


def test_the_dockerfile() -> None:
    lines = [line for line in (FOLDER / "Dockerfile").read_text().splitlines() if line and not line.startswith("#")]
    found = dict(line.split(" ", 1) for line in lines)
    assert {line.split()[0] for line in lines} == set(INSTRUCTIONS)
    check_command(json.loads(found["ENTRYPOINT"]) + json.loads(found["CMD"]))
    assert json.loads(found["HEALTHCHECK"].partition("CMD ")[2])[0] == "python" and found["USER"] == "genai"


def test_prometheus(metrics: set[str]) -> None:
    content: Any = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    (job,) = content["scrape_configs"]
    assert job["metrics_path"] == "/metrics" and job["static_configs"][0]["targets"] == ["127.0.0.1:8000"]
    for name in content["rule_files"]:
        rules = yaml.safe_load((FOLDER / name).read_text())["groups"][0]["rules"]
        assert {metric for rule in rules for metric in NAME.findall(rule["expr"])} <= metrics


def test_grafana(metrics: set[str]) -> None:
    panels = json.loads((FOLDER / "grafana.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) == 8
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    assert {metric for expression in expressions for metric in NAME.findall(expression)} <= metrics
