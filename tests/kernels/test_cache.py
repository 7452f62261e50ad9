"""The disk cache of compiled kernels: hits, misses, and everything that can be wrong with a disk."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import pickle
import shutil
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from genai.common import shown_tasks
from genai.common.log import to_stderr
from genai.kernels.cpu.jit import kernel_cache
from genai.kernels.cpu.jit.memory import read_int64, write_int64
from genai.kernels.cpu.jit.native import CompileReport, Library

Logged = Callable[[], list[str]]


def scale_by_three(x: int, begin: int, end: int) -> int:
    for i in range(begin, end):
        write_int64(x + 8 * i, read_int64(x + 8 * i) * 3)
    return 0


class Program:
    """What a process does: a library with one kernel, over a folder of sources."""

    def __init__(self, sources: Path) -> None:
        self.library = Library(sources)
        self.kernel = self.library.kernel(scale_by_three)

    def prepare(self, progress: Any = None) -> CompileReport:
        return self.library.prepare([self.kernel], progress)

    def assert_works(self) -> None:
        x = np.arange(4)
        self.kernel(x.ctypes.data, 1, 3)
        assert x.tolist() == [0, 3, 6, 3]


@pytest.fixture(autouse=True)
def nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    monkeypatch.setattr(kernel_cache, "_told", {})


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    (folder / "inner").mkdir(parents=True)
    (folder / "a.py").write_text("a = 1\n")
    (folder / "inner" / "b.py").write_text("b = 1\n")
    return folder


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    base = tmp_path / "cache"
    monkeypatch.setenv("GENAI_CACHE_DIR", str(base))
    return base / "genai"


def files(root: Path) -> list[Path]:
    """Return the files of kernels, without the description of the processor."""
    return sorted(path for path in root.rglob("*") if path.is_file() and not path.parent.name.startswith("host-"))


def test_compiles_once_and_then_loads(root: Path, sources: Path, logged: Logged) -> None:
    report = Program(sources).prepare()
    assert (report.compiled, report.loaded) == (1, 0)
    assert report.seconds > 0
    assert logged() == ["Compiling 1 CPU kernel (once per kernel) ..."]
    again = Program(sources)
    report = again.prepare()
    assert (report.compiled, report.loaded) == (0, 1)
    again.assert_works()
    assert (again.prepare().compiled, again.prepare().loaded) == (0, 0)
    assert logged() == []


def test_folder_is_private(root: Path, sources: Path) -> None:
    Program(sources).prepare()
    (file,) = files(root)
    for folder in (file.parent, file.parent.parent, root):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_first_call_compiles_and_says_so_once(root: Path, sources: Path, logged: Logged) -> None:
    program = Program(sources)
    program.assert_works()
    program.assert_works()
    assert logged() == ["Compiling 1 CPU kernel (once per kernel) ..."]
    Program(sources).assert_works()
    assert logged() == []


@pytest.mark.parametrize("change", ["edit", "edit inner", "add", "remove", "rename", "same again"])
def test_any_change_of_any_source_is_another_folder(root: Path, sources: Path, change: str) -> None:
    Program(sources).prepare()
    if change == "edit":
        (sources / "a.py").write_text("a = 2\n")
    elif change == "edit inner":
        (sources / "inner" / "b.py").write_text("b = 2\n")
    elif change == "add":
        (sources / "c.py").write_text("")
    elif change == "remove":
        (sources / "a.py").unlink()
    elif change == "rename":
        (sources / "a.py").rename(sources / "inner" / "a.py")
    else:
        (sources / "a.py").write_text("a = 1\n")
        (sources / "notes.txt").write_text("not a source")
    report = Program(sources).prepare()
    assert report.compiled == (change != "same again")
    assert len(files(root)) == (1 if change == "same again" else 2)


def test_key_covers_what_the_code_is_compiled_for(sources: Path) -> None:
    target = kernel_cache.compile_target()
    text = repr(target)
    for module in ("numba", "llvmlite"):
        assert __import__(module).__version__ in text
    assert sys.version.split()[0] in text
    assert kernel_cache.source_key(sources, target) == kernel_cache.source_key(sources, target)
    assert kernel_cache.source_key(sources, target) != kernel_cache.source_key(sources, (*target, "other processor"))


def damaged(content: bytes) -> dict[str, bytes]:
    digest = kernel_cache._DIGEST_BYTES
    foreign = pickle.dumps(("not", "a", "kernel"))
    unreadable = b"\0not an object file"
    return {
        "empty": b"",
        "truncated": content[: len(content) // 2],
        "one byte changed": content[:200] + bytes([content[200] ^ 1]) + content[201:],
        "digest only": content[:digest],
        "something else": hashlib.sha256(foreign).digest() + foreign,
        "no object file": hashlib.sha256(unreadable).digest() + unreadable,
    }


@pytest.mark.parametrize("damage", damaged(bytes(300)))
def test_damaged_files_are_rebuilt(root: Path, sources: Path, damage: str, logged: Logged) -> None:
    Program(sources).prepare()
    (file,) = files(root)
    content = file.read_bytes()
    file.write_bytes(damaged(content)[damage])
    program = Program(sources)
    assert program.prepare().compiled == 1
    program.assert_works()
    assert Program(sources).prepare().loaded == 1
    assert "Traceback" not in str(logged())


def assert_warned_once(messages: list[str], reason: str) -> None:
    """One message of three parts: what, why, what to do; and none but of compiling."""
    (message,) = [message for message in messages if not message.endswith("...")]
    assert "compiled CPU kernels are not stored on disk" in message
    assert reason in message
    assert "GENAI_CACHE_DIR" in message
    assert "Traceback" not in message and "\n" not in message


def test_a_base_that_is_no_folder(
    tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch, logged: Logged
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GENAI_CACHE_DIR", str(tmp_path / "file"))
    for _ in range(2):
        program = Program(sources)
        assert program.prepare().compiled == 1
        program.assert_works()
    assert_warned_once(logged(), "file")


def test_a_read_only_file_system(root: Path, sources: Path, monkeypatch: pytest.MonkeyPatch, logged: Logged) -> None:
    def refuse(self: Path, *arguments: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    Program(sources).assert_works()
    assert_warned_once(logged(), "Read-only file system")


@pytest.mark.parametrize("failing", ["write_bytes", "replace"])
def test_a_full_disk(root: Path, sources: Path, failing: str, monkeypatch: pytest.MonkeyPatch, logged: Logged) -> None:
    program = Program(sources)
    with monkeypatch.context() as patch:

        def fill(self: Path, *arguments: Any) -> None:
            with self.open("wb") as file:
                file.write(b"half of it")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

        patch.setattr(Path, failing, fill)
        program.assert_works()
    assert_warned_once(logged(), "No space left on device")
    assert files(root) == [], "no half-written files stay"
    assert Program(sources).prepare().compiled == 1
    assert Program(sources).prepare().loaded == 1


def test_an_unreadable_file(root: Path, sources: Path, monkeypatch: pytest.MonkeyPatch, logged: Logged) -> None:
    Program(sources).prepare()
    (file,) = files(root)
    logged()

    def refuse(path: Path, flags: int) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        folder = kernel_cache.CacheFolder(root, file.parent.name)
        assert folder.load(file.name) is None
    assert_warned_once(logged(), "Permission denied")


@pytest.mark.skipif(sys.platform == "win32", reason="mode bits say nothing on Windows")
@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_folder_that_others_can_write_is_refused(
    root: Path,
    sources: Path,
    level: int,
    mode: int,
    monkeypatch: pytest.MonkeyPatch,
    logged: Logged,
) -> None:
    """Machine code is run, so nothing is read from such a folder, nor written to it."""
    monkeypatch.setattr(kernel_cache, "_is_own_group", lambda group: False)
    Program(sources).prepare()
    (file,) = files(root)
    file.write_bytes(hashlib.sha256(pickle.dumps(Bomb())).digest() + pickle.dumps(Bomb()))
    before = file.read_bytes()
    (file.parent, file.parent.parent, root)[level].chmod(mode)
    logged()
    program = Program(sources)
    program.assert_works()
    assert_warned_once(logged(), "is writable by other users")
    assert files(root) == [file]
    assert file.read_bytes() == before


@pytest.mark.skipif(sys.platform == "win32", reason="no groups on Windows")
@pytest.mark.parametrize(
    ("group", "members", "primary", "is_own"),
    [
        ("me", [], 7, True),
        ("me", ["me"], 7, True),
        ("me", ["me", "you"], 7, False),
        ("staff", [], 7, False),
        ("me", [], 8, False),
        (None, [], 7, False),
    ],
)
def test_the_group_of_one_user_is_nobody_else(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    group: str | None,
    members: list[str],
    primary: int,
    is_own: bool,
) -> None:
    """Ubuntu and Fedora make a group for each user, and let groups write to new folders, such as ~/.cache."""
    import grp
    import pwd

    def found(number: int) -> SimpleNamespace:
        if group is None:
            raise KeyError
        return SimpleNamespace(gr_name=group, gr_mem=members)

    root.mkdir(parents=True)
    own = root.stat().st_gid
    user = SimpleNamespace(pw_name="me", pw_gid=own if primary == 7 else own + 1)
    monkeypatch.setattr(pwd, "getpwuid", lambda number: user)
    monkeypatch.setattr(grp, "getgrgid", found)
    kernel_cache._is_own_group.cache_clear()
    for level in (root.parent, root):
        level.chmod(0o775)
    reason = kernel_cache.reason_to_refuse(root / "kernels" / "key")
    assert (reason is None) == is_own and (is_own or f"{root.parent} is writable by other users" in str(reason))
    root.parent.chmod(0o777)
    assert "is writable by other users" in str(kernel_cache.reason_to_refuse(root / "kernels" / "key"))
    kernel_cache._is_own_group.cache_clear()


class Bomb:
    """A pickle that fails the test when it is loaded."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("a file from a refused folder was loaded",)


@pytest.mark.skipif(sys.platform == "win32", reason="no user ids on Windows")
def test_a_folder_of_another_user_is_refused(
    root: Path, sources: Path, monkeypatch: pytest.MonkeyPatch, logged: Logged
) -> None:
    Program(sources).prepare()
    logged()
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    program = Program(sources)
    program.assert_works()
    assert_warned_once(logged(), "belongs to another user")


@pytest.mark.skipif(sys.platform == "win32", reason="mode bits say nothing on Windows")
@pytest.mark.parametrize(
    ("mode", "refused"), [(0o777, True), (0o775, True), (0o2770, True), (0o1777, False), (0o755, False)]
)
def test_what_the_environment_names_must_not_be_open_to_others(
    root: Path,
    sources: Path,
    mode: int,
    refused: bool,
    monkeypatch: pytest.MonkeyPatch,
    logged: Logged,
) -> None:
    """They would put their own folders in the place of ours; not so in a sticky one."""
    monkeypatch.setattr(kernel_cache, "_is_own_group", lambda group: False)
    root.parent.mkdir()
    root.parent.chmod(mode)
    program = Program(sources)
    program.assert_works()
    assert (program.library.folder.path is None) == refused
    said = logged()
    if refused:
        assert_warned_once(said, f"{root.parent} is writable by other users")
    else:
        assert "not stored" not in str(said)
    assert root.exists() != refused


def test_what_is_made_for_it_is_private_whatever_others_may_do_with_new_files(
    root: Path, sources: Path, logged: Logged
) -> None:
    before = os.umask(0)
    try:
        Program(sources).prepare()
    finally:
        os.umask(before)
    assert Program(sources).prepare().loaded == 1
    assert "not stored" not in str(logged())


@pytest.mark.skipif(sys.platform == "win32", reason="mode bits say nothing on Windows")
@pytest.mark.parametrize("way", ["open to a group", "open to all", "a link", "a pipe", "a folder", "of somebody else"])
def test_files_that_others_may_have_written_are_rebuilt(
    root: Path, sources: Path, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    logged: Logged,
) -> None:  # fmt: skip
    """The folder may have been open to them before it was repaired."""
    Program(sources).prepare()
    (file,) = files(root)
    whole = file.read_bytes()
    logged()
    if way.startswith("open"):
        file.chmod(0o664 if way == "open to a group" else 0o646)
    elif way == "a link":
        file.symlink_to(file.rename(tmp_path / "elsewhere"))
    elif way in ("a pipe", "a folder"):
        file.unlink()
        (os.mkfifo if way == "a pipe" else os.mkdir)(file)
    program = Program(sources)
    folder = program.library.folder
    with monkeypatch.context() as patch:
        if way == "of somebody else":
            another_user_s(patch)
        assert folder.path == file.parent and folder.load(file.name) is None
    program.assert_works()
    if way == "a folder":  # which nothing can be written over
        return assert_warned_once(logged(), "directory")
    assert stat.S_ISREG(file.lstat().st_mode) and not file.stat().st_mode & 0o022
    assert len(file.read_bytes()) == len(whole) and Program(sources).prepare().loaded == 1
    return None if "not stored" not in str(logged()) else pytest.fail("it was said")


def another_user_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are opened are another user's, who is not root."""
    known = os.fstat

    def other(opened: int) -> os.stat_result:
        fields = list(known(opened))
        fields[stat.ST_UID] = os.getuid() + 1
        return os.stat_result(fields)

    monkeypatch.setattr(os, "fstat", other)


def test_it_is_said_once_whoever_looks(tmp_path: Path, logged: Logged) -> None:
    (tmp_path / "file").write_text("")
    together = threading.Barrier(8)

    def look() -> None:
        together.wait()
        kernel_cache.CacheFolder(tmp_path / "file" / "genai", "key")

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_warned_once(logged(), "file")


def test_no_home_folder(sources: Path, monkeypatch: pytest.MonkeyPatch, logged: Logged) -> None:
    for name in ("GENAI_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    Program(sources).assert_works()
    assert_warned_once(logged(), "the home folder is unknown")


def test_where_the_cache_is() -> None:
    both = {"GENAI_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}
    assert kernel_cache.cache_root(both) == Path("/a/genai")
    assert kernel_cache.cache_root({"XDG_CACHE_HOME": "/b"}) == Path("/b/genai")
    assert kernel_cache.cache_root({"GENAI_CACHE_DIR": ""}) == Path.home() / ".cache" / "genai"


def test_two_processes_at_once(root: Path, sources: Path, tmp_path: Path) -> None:
    """Both compile, both work, and what stays on disk is whole."""
    script = tmp_path / "program.py"
    script.write_text(
        textwrap.dedent(
            f"""
            from pathlib import Path
            from genai.kernels.cpu.jit.native import Library
            from genai.kernels.cpu.jit.memory import read_int64, write_int64
            import numpy as np

            library = Library(Path({str(sources)!r}))

            @library.kernel
            def double(x, begin, end):
                for i in range(begin, end):
                    write_int64(x + 8 * i, read_int64(x + 8 * i) * 2)
                return 0

            report = library.prepare([double], lambda current, total: None)
            x = np.ones(3, np.int64)
            double(x.ctypes.data, 0, 3)
            print(report.compiled + report.loaded, x.sum())
            """
        )
    )
    command = [sys.executable, str(script)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for process in processes:
        output, errors = process.communicate(timeout=120)
        assert (process.returncode, output, errors) == (0, "1 6\n", "")
    (file,) = files(root)
    content = file.read_bytes()
    assert hashlib.sha256(content[kernel_cache._DIGEST_BYTES :]).digest() == content[: kernel_cache._DIGEST_BYTES]
    loaded = subprocess.run([*command], capture_output=True, text=True, timeout=120, check=True)
    assert loaded.stderr == ""


def test_a_cache_deleted_while_running(root: Path, sources: Path, logged: Logged) -> None:
    program = Program(sources)
    assert program.library.folder.path is not None
    shutil.rmtree(root)
    program.assert_works()
    assert_warned_once(logged(), "No such file or directory")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_is_one_line_that_goes_away(
    root: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(shown_tasks, "SHOWN_AFTER", 0.0)
    with to_stderr():
        Program(sources).prepare()
    shown = terminal.getvalue().split("\r")
    assert shown[1] == "/ Compiling CPU kernels (once per kernel)"
    assert shown[2].startswith("- Compiling CPU kernels (once per kernel) [") and shown[2].endswith("  0%  0 of 1")
    assert shown[-2].isspace() and shown[-1] == ""
    assert "\n" not in terminal.getvalue()


def add_two(x: int, begin: int, end: int) -> int:
    for i in range(begin, end):
        write_int64(x + 8 * i, read_int64(x + 8 * i) + 2)
    return 0


def subtract_one(x: int, begin: int, end: int) -> int:
    for i in range(begin, end):
        write_int64(x + 8 * i, read_int64(x + 8 * i) - 1)
    return 0


def test_several_kernels_are_counted_on_a_terminal(root: Path, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(shown_tasks, "SHOWN_AFTER", 0.0)
    program = Program(sources)
    with to_stderr():
        program.library.prepare([program.kernel, program.library.kernel(add_two)])
    assert "  0%  0 of 2" in terminal.getvalue()


def test_foreseen_kernels_are_compiled_with_the_first(root: Path, sources: Path, logged: Logged) -> None:
    """One bar counts all kernels that a block needs."""
    program, calls, asked = Program(sources), [], []
    second, third = (program.library.kernel(one) for one in (add_two, subtract_one))

    def needed() -> Any:
        asked.append(True)
        return [second], [third]

    with program.library.foreseen(needed):
        program.prepare(lambda current, total: calls.append((current, total)))
        assert second.ready and program.library.prepare([second]).compiled == 0
    assert calls == [(1, 2), (2, 2)] and asked == [True]
    again = Program(sources)
    with again.library.foreseen(needed):
        assert again.prepare() == CompileReport(0, 1, pytest.approx(0, abs=60))
    assert asked == [True], "nothing is missing, so nobody has to know"


@pytest.mark.parametrize("error", [ValueError(), MemoryError()], ids=repr)
def test_what_cannot_be_foreseen_is_compiled_when_needed(root: Path, sources: Path, error: Exception) -> None:
    def needed() -> Any:
        raise error

    program = Program(sources)
    second = program.library.kernel(add_two)
    with program.library.foreseen(needed):
        assert program.prepare().compiled == 1
        assert program.library.prepare([second]).compiled == 1
    program.assert_works()


def test_outside_its_block_nothing_is_foreseen(root: Path, sources: Path) -> None:
    program = Program(sources)
    second = program.library.kernel(add_two)
    with program.library.foreseen(lambda: ([second], [])):
        pass
    assert program.prepare().compiled == 1 and not second.ready


@pytest.mark.parametrize("stderr", ["absent", "closed"])
def test_no_stderr_at_all(root: Path, sources: Path, stderr: str, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = Terminal()
    closed.close()
    monkeypatch.setattr(sys, "stderr", None if stderr == "absent" else closed)
    with to_stderr():
        assert Program(sources).prepare().compiled == 1
        Program(sources).assert_works()


def test_numba_switched_off(root: Path, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.config.DISABLE_JIT", 1)
    with pytest.raises(RuntimeError, match="NUMBA_DISABLE_JIT is set"):
        Program(sources).assert_works()


def test_own_progress(root: Path, sources: Path, logged: Logged) -> None:
    calls: list[tuple[int, int]] = []
    for _ in range(2):
        Program(sources).prepare(lambda current, total: calls.append((current, total)))
    assert calls == [(1, 1)], "called while compiling, not while loading"
    assert logged() == []


def test_no_module_with_kernels_imports_numba() -> None:
    modules = ", ".join(f"genai.kernels.cpu.{name}" for name in ("executor", "ceilings", "arrays.gemm.dense_attention"))
    source = f"import sys, {modules}; print('numba' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"
