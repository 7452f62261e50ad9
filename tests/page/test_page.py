"""The chat page in a browser, which drive.mjs controls: one check per use of the page."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import genai
from genai.models.folders import bundled_adapter, bundled_model
from genai.server.keys import read_keys
from genai.server.routed import RoutedModel
from genai.server.router import Router
from genai.server.run import serve_on_thread
from genai.server.serving import Server, ServerOptions

ROOT, FOLDER = Path(__file__).parents[2], Path(__file__).parent
DRIVER = FOLDER / "drive.mjs"
CHECKS = re.findall(r"^  async (\w+)\(", DRIVER.read_text(encoding="utf-8"), re.MULTILINE)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
KEY = "k" * 20


def test_every_check_has_a_name() -> None:
    assert len(CHECKS) == len(set(CHECKS)) == 18


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables of the driver: the addresses of a server, of one that needs a key, and of one with two models."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    assert browser is not None, "the tests of the page need Chromium: run `apt-get install chromium`"
    keys = tmp_path_factory.mktemp("page") / "keys"
    keys.write_text(KEY, encoding="utf-8")
    with genai.LLM(threads=2, lora=True) as llm:
        llm.load_adapter(bundled_adapter("words"), "words")
        server, locked = Server(llm, name="pebble"), Server(llm, ServerOptions(keys=read_keys(keys)), name="pebble")
        models = [RoutedModel("pebble", bundled_model(), context_size=256), SlowModel("second", bundled_model())]
        router = Router(models, 10**9)
        with serve_on_thread(server) as address, serve_on_thread(locked) as other, serve_on_thread(router) as third:
            addresses = {"SERVER": f"{address}/", "LOCKED": f"{other}/", "ROUTER": f"{third}/"}
            yield {**addresses, "KEY": KEY, "BROWSER": browser}
        for one in (server, locked, router):
            one.close()


class SlowModel(RoutedModel):
    """A model whose load takes a few seconds."""

    def load(self) -> Any:
        time.sleep(5)
        return super().load()


def _installed() -> Path:
    """Return the folder with the driver and its npm packages, and install them unless they are installed."""
    lock = FOLDER / "package-lock.json"
    folder = ROOT / ".venv-clients" / f"page-{hashlib.sha256(lock.read_bytes()).hexdigest()[:12]}"
    if not (folder / "installed").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for file in ("package.json", "package-lock.json"):
            shutil.copy(FOLDER / file, folder)
        command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
        assert run.returncode == 0, run.stdout + run.stderr
        (folder / "installed").touch()
    shutil.copy(DRIVER, folder)  # node finds packages beside the program
    return folder


@pytest.mark.slow
@pytest.mark.drawn(len(CHECKS))
@pytest.mark.parametrize("check", CHECKS)
def test_page(check: str, environment: dict[str, str]) -> None:
    folder = _installed()
    command = ["node", str(folder / DRIVER.name), check]
    run = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300)
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
