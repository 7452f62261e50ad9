"""Clients of other projects, unmodified: each is installed on its own, and runs against servers of this process."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import genai
from genai.evaluate.prediction import perplexity
from genai.evaluate.tasks import evaluate, read_questions
from genai.server.encoders import Encoders
from genai.server.keys import read_keys
from genai.server.serving import Server, ServerOptions

from .conftest import Running

ROOT, FOLDER = Path(__file__).parents[2], Path(__file__).parent / "clients"
CLIENTS = ("instructor", "javascript", "langchain", "litellm", "llm", "lm_eval", "ollama", "vllm_router")
KEY = "k" * 20
TEXT = "Once upon a time there was a cat. Tom and Luna went home for bread and honey, tired and happy. " * 4


@pytest.fixture(scope="module")
def addresses(llm: genai.LLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The addresses of two servers that are open, and of one that accepts one request of a key at a time."""
    keys = tmp_path_factory.mktemp("clients") / "keys"
    keys.write_text(KEY, encoding="utf-8")
    with genai.Embedder(ROOT / "tests" / "embed" / "models" / "bert", threads=2) as embedder:
        server = Running(Server(llm, ServerOptions(ollama=True), name="pebble", encoders=Encoders(embedder)))
        limited = Running(Server(llm, ServerOptions(keys=read_keys(keys), max_per_key=1), name="pebble"))
        second = Running(Server(llm, name="pebble"))
        yield {"SERVER": server.url, "SECOND": second.url, "LIMITED": limited.url, "KEY": KEY}
        second.close()
        limited.close()
        server.close()


def _installed(name: str) -> Path:
    """Return the folder of a client's environment, and install the client unless it is installed."""
    lock = FOLDER / ("package-lock.json" if name == "javascript" else f"{name}.txt")
    folder = ROOT / ".venv-clients" / f"{name}-{hashlib.sha256(lock.read_bytes()).hexdigest()[:12]}"
    if not (folder / "installed").exists():
        shutil.rmtree(folder, ignore_errors=True)
        if name == "javascript":
            folder.mkdir(parents=True)
            for file in ("package.json", "package-lock.json"):
                shutil.copy(FOLDER / file, folder)
            _run("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", cwd=folder)
        else:
            venv.create(folder, with_pip=False)
            pip = (sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"))
            _run(*pip, "install", "-q", "--no-deps", "--no-compile", "-r", str(lock), cwd=folder)
        (folder / "installed").touch()
    return folder


def _run(*command: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Run a command, and return the last line of its output."""
    run = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout.strip().rpartition("\n")[2]


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files for lm-eval: held-out questions and a text."""
    folder = tmp_path_factory.mktemp("scored")
    lines = (ROOT / "configs" / "tasks" / "pebble.jsonl").read_text(encoding="utf-8").splitlines()
    chosen = [line for line in lines if '"number"' in line][::8][:40]
    (folder / "questions.jsonl").write_text("\n".join(chosen), encoding="utf-8")
    (folder / "text.jsonl").write_text(json.dumps({"text": TEXT}), encoding="utf-8")
    return {"QUESTIONS_FILE": str(folder / "questions.jsonl"), "TEXT_FILE": str(folder / "text.jsonl")}


def _check_scores(found: dict[str, Any], llm: genai.LLM, questions: Path) -> None:
    """Compare the results of lm-eval with those of `genai eval tasks` and `genai eval ppl`."""
    outcomes = evaluate(llm.model, read_questions(questions))
    assert found["replies"] == [outcome.reply for outcome in outcomes]
    assert found["exact_match,number"] == pytest.approx(sum(one.right for one in outcomes) / len(outcomes), abs=1e-6)
    # lm-eval predicts the first token from the token that ends a text.
    own = perplexity(llm.model, llm.tokenizer.token_text(llm.tokenizer.eos_token_ids[0]) + TEXT, bos=False)
    assert found["bits_per_byte,none"] == pytest.approx(own.bits_per_byte, abs=1e-6)


@pytest.mark.slow
@pytest.mark.drawn(len(CLIENTS))
@pytest.mark.parametrize("name", CLIENTS)
def test_client(name: str, addresses: dict[str, str], scored: dict[str, str], llm: genai.LLM, tmp_path: Path) -> None:
    """The drivers in the folder `clients` check what each client can do."""
    folder = _installed(name)
    environment = {
        **{name: value for name, value in os.environ.items() if "proxy" not in name.lower()},
        **addresses,
        **scored,
        "HF_HUB_OFFLINE": "1",
        "HOME": str(tmp_path),
        "LLM_USER_PATH": str(tmp_path),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise, litellm downloads it at its import
        "OPENAI_API_KEY": "none",
    }
    if name == "javascript":  # modules are found beside the program
        program = shutil.copy(FOLDER / "with_javascript.mjs", folder)
        _run("node", str(program), cwd=tmp_path, env=environment)
    else:
        said = _run(str(folder / "bin" / "python"), str(FOLDER / f"with_{name}.py"), cwd=tmp_path, env=environment)
        if name == "lm_eval":
            _check_scores(json.loads(said), llm, Path(scored["QUESTIONS_FILE"]))
