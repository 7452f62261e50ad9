"""`genai build`, and commands that receive a checkpoint instead of a model folder."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from genai.cli.app import run as run_here
from genai.convert import DecoderSpec
from genai.models.folders import bundled_model
from tools.random_weights import RandomWeights

GENAI = [sys.executable, "-m", "genai"]


def make_checkpoint(folder: Path, *, layers: int = 2, hidden: int = 32) -> Path:
    """Write a Llama with random weights, a byte tokenizer and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<pad>", "<s>", "</s>", *letters]
    sizes = {"vocab_size": len(tokens), "hidden_size": hidden, "intermediate_size": 2 * hidden}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    spec = DecoderSpec(model_type="llama", num_layers=layers, head_size=16, context_length=256, **sizes, **heads)
    config = {**sizes, **heads, "num_hidden_layers": layers, "head_dim": 16, "max_position_embeddings": 256}
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-5, **config})
    )
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "</s>"}))
    save_file(dict(RandomWeights(spec)), folder / "model.safetensors")
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "tiny")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Use a separate model cache, but the existing cache of compiled kernels."""
    kernels = Path(os.environ.get("GENAI_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    (tmp_path / "cache" / "genai").mkdir(mode=0o700, parents=True)
    for place in (kernels / "genai").glob("*"):
        if place.name != "models":
            (tmp_path / "cache" / "genai" / place.name).symlink_to(place)
    return {**os.environ, "GENAI_CACHE_DIR": str(tmp_path / "cache")}


def run(*arguments: str | Path, environment: dict[str, str], text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*GENAI, *map(str, arguments)], input=text, capture_output=True, text=True, timeout=120, env=environment
    )


def test_build_prints_the_folder(checkpoint: Path, environment: dict[str, str], tmp_path: Path) -> None:
    done = run("build", checkpoint, "-o", tmp_path / "out", "--precision", "int8", environment=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / 'out'}\n"
    assert done.stderr.splitlines()[-1].startswith("llama: ")  # kernels may have to be compiled before
    assert (tmp_path / "out" / "genai_config.json").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--precision", "int5"], 2, "precision is 'int5'"),
        (["--block-size", "17"], 2, "--block-size is 17"),
        (["--accuracy-level", "9"], 2, "--accuracy-level is 9"),
        (["--head-precision", "fp8"], 2, "--head-precision is 'fp8'"),
    ],
)
def test_options_are_checked(
    checkpoint: Path, environment: dict[str, str], tmp_path: Path, arguments: list[str], code: int, text: str
) -> None:
    done = run("build", checkpoint, "-o", tmp_path / "out", *arguments, environment=environment)
    assert (done.returncode, done.stdout) == (code, "")
    assert text in done.stderr


def test_existing_output(checkpoint: Path, environment: dict[str, str], tmp_path: Path) -> None:
    done = run("build", checkpoint, "-o", tmp_path, environment=environment)
    assert done.returncode == 1
    assert "already exists" in done.stderr


def test_generate_from_a_checkpoint(checkpoint: Path, environment: dict[str, str]) -> None:
    """The first use builds the model and reports this; the second starts at once; --no-build refuses unbuilt models."""
    refused = run("generate", checkpoint, "--no-build", "-n", "3", environment=environment, text="hello")
    assert refused.returncode == 1
    assert "has not been built" in refused.stderr
    first = run("generate", checkpoint, "-n", "3", environment=environment, text="hello")
    assert first.returncode == 0, first.stderr
    assert "Building an INT4 model of" in first.stderr
    second = run("generate", checkpoint, "--no-build", "-n", "3", environment=environment, text="hello")
    assert (second.returncode, second.stdout) == (0, first.stdout)
    assert "Building" not in second.stderr


def terminal(*arguments: str | Path, environment: dict[str, str], answers: list[tuple[str, str]]) -> tuple[str, int]:
    """Run a command in a pseudo-terminal; type each answer when its question appears."""
    pid, fd = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [*GENAI, *map(str, arguments)], environment)
    seen, deadline = "", time.monotonic() + 40
    while time.monotonic() < deadline:
        if answers and answers[0][0] in seen:
            os.write(fd, answers.pop(0)[1].encode())
        if select.select([fd], [], [], 0.1)[0]:
            try:
                seen += os.read(fd, 65536).decode("utf-8", "replace")
            except OSError:
                break
    else:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return seen, os.waitstatus_to_exitcode(status)


def test_a_terminal_is_asked(checkpoint: Path, environment: dict[str, str]) -> None:
    for no in ("n\r", "\x04"):  # \x04 is Ctrl-D
        seen, code = terminal("chat", checkpoint, environment=environment, answers=[("[Y/n] ", no)])
        assert code == 1
        assert "was not built" in " ".join(seen.split())
    seen, code = terminal("chat", checkpoint, environment=environment, answers=[("[Y/n] ", "\x03")])
    assert code == 130 and "interrupted; nothing was built" in " ".join(seen.split())
    # The terminal may show ^C before or after the line end.
    assert "\ngenai: interrupted" in seen.replace("^C", ""), "on a new line"
    seen, code = terminal("chat", checkpoint, environment=environment, answers=[("[Y/n] ", "y\r"), (">>>", "/bye\r")])
    assert code == 0, seen
    assert "stored in" in seen and "INT4" in seen and "run `genai rm " in " ".join(seen.split())


def test_a_folder_that_is_built_and_a_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(["build", str(bundled_model()), "-o", str(tmp_path / "out")]) == 1
    assert "is already built" in (message := capsys.readouterr().err) and "genai chat" in message
    assert run_here(["build", str(tmp_path / "nosuch.gguf"), "-o", str(tmp_path / "out")]) == 1
    assert "there is no such file" in (message := capsys.readouterr().err) and "genai build" not in message


def test_interrupted_build(environment: dict[str, str], tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "larger", layers=24, hidden=512)
    process = subprocess.Popen(
        [*GENAI, "build", str(checkpoint), "-o", str(tmp_path / "out")], env=environment, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".out.*")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, message = process.communicate(timeout=60)
    assert process.returncode == 130, message
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out.*"))
