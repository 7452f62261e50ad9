"""Batches on a cluster of two workers on this machine. One of them is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from genai.errors import MissingPackageError, OptionError, StateError
from genai.llm.batch.cluster import Cluster, NodeEngine
from genai.llm.batch.lines import open_lines
from genai.llm.batch.run import BatchProgress, run_batch
from genai.llm.batch.settings import ModelSettings


def test_without_ray(monkeypatch: pytest.MonkeyPatch, bundled_folder: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingPackageError, match="need ray") as caught:
        Cluster(bundled_folder)
    assert "pip install ray" in caught.value.fix


def test_an_engine_with_another_model_is_refused(bundled_folder: Path) -> None:
    """A worker that died starts again, and may then find other files."""
    engine = NodeEngine(str(bundled_folder), {"threads": 1, "quiet": True})
    try:
        (answer,) = engine.answers(["Once"], {"max_tokens": 1}, engine.settings().model)
        assert len(answer.completions[0].token_ids) == 1
        with pytest.raises(StateError, match="the engines of the cluster have different models") as caught:
            engine.answers(["Once"], {"max_tokens": 1}, "another model")
        assert caught.value.why and caught.value.fix
    finally:
        engine._llm.close()


def test_the_settings_of_all_engines_count() -> None:
    def cluster_of(*settings: ModelSettings) -> Cluster:
        cluster = object.__new__(Cluster)
        cluster._workers = [SimpleNamespace(settings=SimpleNamespace(remote=lambda one=one: one)) for one in settings]
        cluster._get = lambda results, dead="": list(results)  # type: ignore[method-assign]
        return cluster

    same = cluster_of(ModelSettings("a", "AVX-512"), ModelSettings("a", "AVX2"), ModelSettings("a", "AVX-512"))
    assert same.settings() == ModelSettings("a", "AVX-512; AVX2") and same._expected == "a"
    with pytest.raises(StateError, match="different models"):
        cluster_of(ModelSettings("a", "AVX2"), ModelSettings("b", "AVX2")).settings()


@pytest.mark.slow
def test_no_cluster(bundled_folder: Path) -> None:
    pytest.importorskip("ray")
    with pytest.raises(StateError, match="no Ray cluster at 127"):
        Cluster(bundled_folder, "127.0.0.1:1")


@pytest.mark.slow
def test_a_worker_that_is_killed_loses_nothing(tmp_path: Path, bundled_folder: Path) -> None:
    pytest.importorskip("ray")
    source, output = tmp_path / "in.jsonl", tmp_path / "out"
    with source.open("w") as file:
        for number in range(2000):
            messages = [{"role": "user", "content": f"What is {number % 90} + 7?"}]
            wrong = {"top_p": 2} if number % 500 == 77 else {}
            file.write(json.dumps({"custom_id": f"q{number}", "messages": messages, **wrong}) + "\n")
    killed: list[int] = []
    with Cluster(bundled_folder, "local", workers=2, threads=1, quiet=True) as cluster:
        before = cluster.processes
        assert len(set(before)) == 2

        def kill(progress: BatchProgress) -> None:
            if progress.figures.done > 300 and not killed:
                killed.append(before[0])
                os.kill(before[0], signal.SIGKILL)

        report = run_batch(cluster, open_lines(source), output, progress=kill)
        after = cluster.processes
        with pytest.raises(OptionError, match="top_p = 2"):
            cluster.params(top_p=2)
        ordered = [one.index for one in cluster.map(["Once"] * 200, lambda item: item, max_tokens=1)]
    assert killed and before[0] not in after and before[1] in after, "another one took its place"
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(lines) == len(found) == 2000 and report.figures.failed == 4
    assert found["q77"]["error"]["code"] == "OptionError"
    assert found["q5"]["response"]["body"]["choices"][0]["message"]["content"] == "12"
    assert ordered == list(range(200))


@pytest.mark.slow
def test_items_that_kill_workers_end_the_run(bundled_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    from genai.llm.batch import cluster as module

    class Deadly(module.NodeEngine):
        def answers(self, items: object, options: object, model: str = "") -> None:  # type: ignore[override]
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(module, "NodeEngine", Deadly)
    with module.Cluster(bundled_folder, "local", workers=1, threads=1, quiet=True) as cluster:
        with pytest.raises(StateError, match="3 workers died with items 1 to 2"):
            list(cluster.map(["a", "b"], lambda item: item))


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    (tmp_path / "in.txt").write_text("What is 12 + 7?\n" * 5)
    command = [sys.executable, "-m", "genai", "batch", str(tmp_path / "in.txt"), "-o", str(tmp_path / "out"), "--chat"]
    done = subprocess.run([*command, "--ray", "local"], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [one["response"]["body"]["choices"][0]["message"]["content"] for one in lines] == ["19"] * 5


def local_cluster(dies_with: str = "") -> Any:
    """Return a cluster of one worker in this process; the worker dies if its group contains `dies_with`."""
    from genai.llm.batch import cluster as module
    from genai.llm.mapping import Answer

    class Death(Exception):
        pass

    def run(requests: list[Any], options: object, model: str) -> Any:
        answers = [Answer(index, None) for index in range(len(requests))]
        return Death("died") if dies_with in requests else answers

    def get(results: list[Any]) -> list[Any]:
        if isinstance(results[0], Death):
            raise results[0]
        return results

    class Call:
        """A reference to a result: hashable, as Ray's are."""

        def __init__(self, result: Any) -> None:
            self.result = result

    cluster: Any = module.Cluster.__new__(module.Cluster)
    cluster._ray = SimpleNamespace(
        wait=lambda calls, timeout: (calls, []),
        get=lambda calls: get([call.result for call in calls]),
        exceptions=SimpleNamespace(RayTaskError=KeyError, RayActorError=Death),
    )
    cluster._expected = ""
    cluster._workers = [SimpleNamespace(answers=SimpleNamespace(remote=lambda *group: Call(run(*group))))]
    return cluster


@pytest.mark.parametrize("in_order", [True, False])
def test_an_error_of_ask_comes_after_the_answers_to_those_before(in_order: bool) -> None:
    def ask(item: int) -> str:
        if item == 150:
            raise ZeroDivisionError("no more")
        return f"{item}"

    answers: list[int] = []
    with pytest.raises(ZeroDivisionError, match="no more"):
        answers.extend(one.index for one in local_cluster().map(range(200), ask, in_order=in_order))
    assert answers == list(range(150))


@pytest.mark.parametrize("in_order", [True, False])
def test_a_group_that_kills_workers_discards_no_other(in_order: bool) -> None:
    """The first group has no answers. The second one, which was sent to a worker at the same time, has."""
    answers: list[int] = []
    with pytest.raises(StateError, match="3 workers died with items 1 to 64"):
        cluster = local_cluster(dies_with="5")
        answers.extend(one.index for one in cluster.map(range(200), lambda item: f"{item}", in_order=in_order))
    assert answers == list(range(64, 128))
