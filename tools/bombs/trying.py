"""The kinds of bombs: how each is prepared, made and used; and the check of the outcome."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import genai
from genai.convert import build_model
from genai.doctor.model_info import describe
from genai.hub import client
from genai.llm.batch.lines import open_lines
from genai.llm.batch.run import run_batch
from genai.lora.describe import find_adapters
from tools.local_hub import LocalHub

from .files import adapter_bomb, checkpoint_bomb, gguf_bomb, state_bomb
from .folders import config_bomb, decoder_bomb, template_bomb, tokenizer_bomb
from .odd import loaded
from .requests import batch_bomb, grammar_bomb, hub_bomb
from .sound import TEXT, Sound

SECONDS = 5.0
SECONDS_AFTER_INTERRUPT = 1.5
MEMORY_BYTES = 2**30
# The hard memory limit of a process, so that no bomb can harm the machine that runs this program.
_SAFETY_BYTES = 3 * 2**30
_UNTIL_INTERRUPT = 0.6


@dataclass(frozen=True)
class Kind:
    """One kind of bomb.

    Attributes:
        place: function that puts valid files into an existing folder.
        harm: function that turns the files into a bomb and returns a description.
        use: function that uses the folder as a user would; it may raise typed errors.
    """

    place: Callable[[Sound, Path], object]
    harm: Callable[[Path, random.Random], str]
    use: Callable[[Path], object]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one use of a bomb; `fault` is "" if the outcome is acceptable."""

    fault: str
    seconds: float
    memory_bytes: int


# --- kinds -----------------------------------------------------------------------------------------------------------


def _answers(*calls: Callable[[], object]) -> None:
    """Make all calls, so that a refused call does not hide the others; then raise the first typed error, if any."""
    errors = []
    for call in calls:
        try:
            call()
        except genai.GenaiError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _place_model(sound: Sound, folder: Path) -> None:
    shutil.copytree(sound.model, folder, dirs_exist_ok=True)


def _use_model(folder: Path) -> None:
    """Use every function that reads a model folder."""
    with contextlib.suppress(genai.GenaiError):
        describe(folder)
    with genai.LLM(folder, threads=1, quiet=True) as llm:
        _answers(
            lambda: llm.chat(TEXT, max_tokens=2),
            lambda: llm.tokenizer.decode(llm.tokenizer.encode(TEXT)),
            lambda: llm.generate([5, 6, 7], max_tokens=2),
            lambda: genai.Generator(llm.model, genai.GeneratorParams(llm.model)).append_tokens([5, 6]),
        )


def _use_gguf(folder: Path) -> None:
    _use_model(build_model(folder / "model.gguf", folder / "built"))


def _use_checkpoint(folder: Path) -> None:
    _use_model(build_model(folder, folder / "built"))


def _place_beside(*names: str) -> Callable[[Sound, Path], None]:
    """Return a function that links the model as `model` and copies the named files or folders to the same folder."""

    def place(sound: Sound, folder: Path) -> None:
        (folder / "model").symlink_to(sound.model)
        for name in names:
            source = sound.model.parent / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)

    return place


def _use_adapter(folder: Path) -> None:
    which = (folder / "which").read_text() if (folder / "which").exists() else "peft"
    path = folder / "adapters" / which
    find_adapters(folder / "adapters")
    with genai.LLM(folder / "model", threads=1, quiet=True) as llm:
        llm.load_adapter(path, "a")
        llm.generate(TEXT, max_tokens=2, adapter="a")


def _use_state(folder: Path) -> None:
    with genai.LLM(folder / "model", threads=1, quiet=True) as llm:
        _answers(
            lambda: llm.load_state(folder / "a.state").resume(max_tokens=2),
            lambda: llm.load_state(folder / "a.state").generate("more", max_tokens=2),
            lambda: genai.Generator(llm.model, genai.GeneratorParams(llm.model)).load_state(folder / "a.state"),
        )


def _place_grammar(sound: Sound, folder: Path) -> None:
    _place_beside()(sound, folder)
    (folder / "request.json").write_text('{"regex": "[a-z]+"}')


def _use_grammar(folder: Path) -> None:
    request = loaded((folder / "request.json").read_text())
    with genai.LLM(folder / "model", threads=1, quiet=True) as llm:
        llm.generate(TEXT, max_tokens=8, **request)


def _place_batch(sound: Sound, folder: Path) -> None:
    _place_beside()(sound, folder)
    (folder / "input.jsonl").write_text('{"prompt": "Once", "max_tokens": 2}\n{"messages": [], "max_tokens": 2}\n')


def _use_batch(folder: Path) -> None:
    with genai.LLM(folder / "model", threads=1, quiet=True) as llm:
        for path in sorted(folder.glob("input.*")):
            with contextlib.suppress(genai.GenaiError):
                run_batch(llm, open_lines(path), folder / f"{path.name}.out.jsonl", max_tokens=2)


def _place_hub(sound: Sound, folder: Path) -> None:
    files = {path.name: path.read_bytes() for path in sound.checkpoint.iterdir()}
    files["README.md"] = b"---\nlicense: mit\n---\n"
    facts: dict[str, Any] = {}
    faults: dict[str, Any] = {}
    (folder / "hub.pickle").write_bytes(pickle.dumps((files, facts, faults)))


def _use_hub(folder: Path) -> None:
    files, facts, faults = pickle.loads((folder / "hub.pickle").read_bytes())
    with LocalHub() as hub:
        hub.add("org/name", files, facts=facts)
        hub.faults.update(faults)
        client._WAITS = (0.05,) * 4  # the usual number of attempts, but without long waits for a recovery
        os.environ |= {"HF_ENDPOINT": hub.url, "GENAI_CACHE_DIR": str(folder / "cache")}
        genai.pull("org/name")


_GGUF = Kind(lambda sound, folder: shutil.copy(sound.gguf, folder), gguf_bomb, _use_gguf)
_CHECKPOINT = Kind(
    lambda sound, folder: shutil.copytree(sound.checkpoint, folder, dirs_exist_ok=True),
    checkpoint_bomb,
    _use_checkpoint,
)
KINDS = (
    *(Kind(_place_model, harm, _use_model) for harm in (template_bomb, tokenizer_bomb, config_bomb, decoder_bomb)),
    _GGUF,
    _CHECKPOINT,
    Kind(_place_beside("adapters"), adapter_bomb, _use_adapter),
    Kind(_place_beside("a.state"), state_bomb, _use_state),
    Kind(_place_grammar, grammar_bomb, _use_grammar),
    Kind(_place_batch, batch_bomb, _use_batch),
    Kind(_place_hub, hub_bomb, _use_hub),
)


# --- trying them -----------------------------------------------------------------------------------------------------


def try_bomb(
    use: Callable[[], object], *, interrupted: bool, patience: float = 1.0, memory_bytes: int = MEMORY_BYTES,
    sound: bool = False,
) -> Outcome:  # fmt: skip
    """Run a function in a separate process; if `interrupted`, send Ctrl-C shortly after the start.

    Args:
        memory_bytes: memory limit of the process, on top of the inherited memory.
        sound: True if a typed error also counts as a fault.
    """
    start = time.monotonic()
    inherited = _statm(1)
    pid = os.fork()
    if not pid:
        _use_apart(use, sound=sound)
    allowed = _UNTIL_INTERRUPT + SECONDS_AFTER_INTERRUPT * patience if interrupted else SECONDS * patience
    sent = False
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        now = time.monotonic()
        if done:
            break
        if interrupted and not sent and now > start + _UNTIL_INTERRUPT:
            os.kill(pid, signal.SIGINT)
            sent = True
        if now > start + 3 * allowed:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    took, code = time.monotonic() - start, os.waitstatus_to_exitcode(status)
    allowed_codes = {0, *(() if sound else (_REFUSED,)), *((_INTERRUPTED,) if sent else ())}
    fault = "" if code in allowed_codes else f"ended with {code}"
    fault = fault or (f"took {took:.1f} s" if took > allowed else "")
    memory = usage.ru_maxrss * 1024 - inherited
    return Outcome(fault or (f"took {memory >> 20} MiB" if memory > memory_bytes else ""), took, memory)


_INTERRUPTED, _REFUSED = 130, 10


def _statm(field: int) -> int:
    """Return a field of /proc/self/statm in bytes: 1 is the resident memory, 5 the memory that RLIMIT_DATA limits."""
    return int(Path("/proc/self/statm").read_text().split()[field]) * resource.getpagesize()


def _use_apart(use: Callable[[], object], *, sound: bool) -> None:
    """Run in the child process; exit with 0 (success), 10 (typed error), 130 (Ctrl-C), else 1 with a traceback."""
    code = 1
    try:
        most = _statm(5) + _SAFETY_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with open(os.devnull, "w") as silence:  # noqa: PTH123
            os.dup2(silence.fileno(), 2)
        use()
        code = 0
    except genai.GenaiError as error:
        code = _REFUSED if error.what and error.why and error.fix else 3
        if sound or code != _REFUSED:
            traceback.print_exc(file=sys.stdout)
    except KeyboardInterrupt:
        code = _INTERRUPTED
    except BaseException:
        traceback.print_exc(file=sys.stdout)
    finally:
        sys.stdout.flush()
        os._exit(code)


@contextlib.contextmanager
def workshop(*, patience: float = 1.0) -> Iterator[Callable[[int], list[str]]]:
    """Yield a function that makes a seed's bomb, uses it twice, and returns the faults.

    Args:
        patience: factor for the time limits; use a larger one on a busy machine.
    """
    with tempfile.TemporaryDirectory(prefix="genai-bombs-") as name:
        root = Path(name)
        (root / "sound").mkdir()
        sound = Sound(root / "sound")
        # Valid uses come first. They show that everything works, and compile the kernels, so that bombs need not.
        uses: list[Callable[[], object]] = [sound.save_state]
        for number, kind in enumerate(KINDS):
            folder = root / f"sound-{number}"
            uses.append(lambda kind=kind, folder=folder: (folder.mkdir(), kind.place(sound, folder), kind.use(folder)))
        for use in uses:
            done = try_bomb(use, interrupted=False, patience=100, memory_bytes=_SAFETY_BYTES, sound=True)
            if done.fault:
                raise RuntimeError(f"a use of valid files failed: {done.fault}")

        def run(seed: int) -> list[str]:
            kind, faults = KINDS[seed % len(KINDS)], []
            for interrupted in (False, True):
                folder = root / f"{seed}-{interrupted}"
                folder.mkdir()
                kind.place(sound, folder)
                what = kind.harm(folder, random.Random(seed))
                outcome = try_bomb(lambda folder=folder: kind.use(folder), interrupted=interrupted, patience=patience)
                shutil.rmtree(folder)
                if outcome.fault:
                    faults.append(f"{seed} {kind.harm.__name__} {what}: {outcome.fault}")
            return faults

        yield run
