"""Clients of other projects, unmodified: each is installed on its own, and runs against servers of this process."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

import genai
from genai.server.encoders import Encoders
from genai.server.keys import read_keys
from genai.server.serving import Server, ServerOptions

from .conftest import Running

ROOT, FOLDER = Path(__file__).parents[2], Path(__file__).parent / "clients"
CLIENTS = ("instructor", "javascript", "langchain", "litellm", "llm")
KEY = "k" * 20


@pytest.fixture(scope="module")
def addresses(llm: genai.LLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The addresses of a server that is open, and of one that accepts one request of a key at a time."""
    keys = tmp_path_factory.mktemp("clients") / "keys"
    keys.write_text(KEY, encoding="utf-8")
    with genai.Embedder(ROOT / "tests" / "embed" / "models" / "bert", threads=2) as embedder:
        server = Running(Server(llm, name="pebble", encoders=Encoders(embedder)))
        limited = Running(Server(llm, ServerOptions(keys=read_keys(keys), max_per_key=1), name="pebble"))
        yield {"SERVER": server.url, "LIMITED": limited.url, "KEY": KEY}
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


def _run(*command: str, cwd: Path, env: dict[str, str] | None = None) -> None:
    run = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.slow
@pytest.mark.drawn(len(CLIENTS))
@pytest.mark.parametrize("name", CLIENTS)
def test_client(name: str, addresses: dict[str, str], tmp_path: Path) -> None:
    """The drivers in the folder `clients` check what each client can do."""
    folder = _installed(name)
    environment = {
        **{name: value for name, value in os.environ.items() if "proxy" not in name.lower()},
        **addresses,
        "HOME": str(tmp_path),
        "LLM_USER_PATH": str(tmp_path),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise, litellm downloads it at its import
        "OPENAI_API_KEY": "none",
    }
    if name == "javascript":  # modules are found beside the program
        program = shutil.copy(FOLDER / "with_javascript.mjs", folder)
        _run("node", str(program), cwd=tmp_path, env=environment)
    else:
        _run(str(folder / "bin" / "python"), str(FOLDER / f"with_{name}.py"), cwd=tmp_path, env=environment)
