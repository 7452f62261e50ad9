"""The output: whole lines, each exactly once, after any failure of the process, the disk or the file."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from genai.errors import InputError, StateError
from genai.llm.batch import journal as module
from genai.llm.batch.journal import Answered, Journal, LineId, digest
from genai.llm.batch.lines import Line

SETTINGS, MOST = 0x1234ABCD, 10_000


def line(number: int, *, failed: bool = False, more: bytes = b"") -> bytes:
    error = b'{"code": "x"}' if failed else b"null"
    id_ = str(LineId(SETTINGS, number, digest(content(number)))).encode()
    return b'{"id": "' + id_ + b'", "error": ' + error + b', "custom_id": "x' + more + b'"}\n'


def content(number: int) -> bytes:
    return b"line %d" % number


def inputs(count: int) -> Iterator[Line]:
    return (Line(number, content(number), 1) for number in range(1, count + 1))


def opened(path: Path, begin: str = "resume", settings_: int = SETTINGS, most: int = MOST) -> Journal:
    return Journal(path, settings_, most, begin)


def test_what_was_written_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with opened(path, "new") as journal:
        for number in (3, 1, 2):
            journal.write(line(number, failed=number == 1))
    with opened(path) as journal:
        assert [number in journal.answered for number in range(6)] == [False, True, True, True, False, False]
        assert (journal.answered.count, journal.answered.failed, journal.was_cut) == (3, 1, False)
        assert journal.answered.fits(inputs(9)) and not journal.answered.in_order
        journal.write(line(5))
    assert path.read_bytes() == line(3) + line(1, failed=True) + line(2) + line(5)


def test_a_line_that_was_damaged_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged line does not count as an answer, even if its start is valid. Lines are read in pieces of any size."""
    path = tmp_path / "out"
    path.write_bytes(line(1) + line(2)[:-9] + b"\n" + line(3))
    with pytest.raises(InputError, match="line 2 of the output is damaged") as caught:
        opened(path)
    assert "process its request again" in caught.value.fix
    whole = line(1) + line(2, more=b"y" * 300)
    path.write_bytes(whole)
    for size in range(len(line(1)) - 3, len(line(1)) + 3):
        monkeypatch.setattr(module, "_PIECE", size)
        with opened(path) as journal:
            assert journal.answered.count == 2


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_an_unfinished_line_is_cut_wherever_it_ends(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("torn") / "out"
    whole = b"".join(line(number) for number in range(1, 5))
    place = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:place])
    with opened(path) as journal:
        kept = whole[:place].count(b"\n")
        assert journal.answered.count == kept
        assert journal.was_cut == (place > 0 and whole[place - 1 : place] != b"\n")
        journal.write(line(9))
    assert path.read_bytes() == b"".join(line(number) for number in range(1, kept + 1)) + line(9)


def test_a_tail_of_zeros_is_cut(tmp_path: Path) -> None:
    """A file system may leave zeros at the end of a file after a power failure."""
    path = tmp_path / "out"
    path.write_bytes(line(1) + bytes(5000))
    with opened(path) as journal:
        assert journal.was_cut and journal.answered.count == 1
    assert path.read_bytes() == line(1)


def test_lines_longer_than_a_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", 128)
    path = tmp_path / "out"
    long = [line(1, more=b"y" * 1000), line(2, failed=True, more=b"z" * 1000), line(3, more=b"y" * 1000)]
    path.write_bytes(b"".join(long) + line(4, more=b"w" * 1000)[:-3])
    with opened(path, "retry") as journal:
        assert journal.was_cut and (journal.answered.count, 2 in journal.answered) == (2, False)
        journal.write(line(2))
    assert path.read_bytes() == long[0] + long[2] + line(2)


def test_beginnings(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.touch()
    with opened(path, "new") as journal:  # there is nothing to lose
        journal.write(line(1, failed=True))
        journal.write(line(2))
    with pytest.raises(InputError, match="already exists") as caught:
        opened(path, "new")
    assert "--resume" in caught.value.fix and "--force" in caught.value.fix
    with opened(path, "retry") as journal:
        assert journal.answered.count == 1 and 2 in journal.answered
    assert path.read_bytes() == line(2) and not list(tmp_path.glob("*.part"))
    with opened(path, "force") as journal:
        assert not journal.answered.count
    assert path.read_bytes() == b""


@pytest.mark.parametrize("kept", ["my notes\n", "my notes", '{"id": "batch_req_123", "custom_id": "a"}\n', "{}\n"])
def test_other_files_are_not_touched(tmp_path: Path, kept: str) -> None:
    path = tmp_path / "out"
    path.write_text(kept)
    for begin in ("resume", "retry"):
        with pytest.raises(InputError, match="is not the output of a batch") as caught:
            opened(path, begin)
        assert caught.value.why and caught.value.fix and path.read_text() == kept
    path.write_bytes(line(1) + b"note\n" + line(2))
    with pytest.raises(InputError, match="line 2 is not a response"):
        opened(path)


def test_outputs_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(line(1) + line(2))
    with pytest.raises(InputError, match="other options"):
        opened(path, settings_=7)
    with pytest.raises(InputError, match="does not belong to this input"):
        opened(path, most=1)
    path.write_bytes(line(1) + line(1))
    with pytest.raises(InputError, match="two responses to line 1 of the input"):
        opened(path)
    huge = line(1).replace(b"_1_", b"_999999999999999999_")
    path.write_bytes(huge)
    with pytest.raises(InputError, match="does not belong"):  # and no memory was taken for so many lines
        opened(path)


def test_what_is_no_place_for_an_output(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a file"):
        opened(tmp_path)
    with pytest.raises(InputError, match="folder does not exist"):
        opened(tmp_path / "none" / "out")
    if os.getuid():
        tmp_path.chmod(0o500)
        with pytest.raises(InputError, match="Permission denied"):
            opened(tmp_path / "out")


def test_one_process_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with opened(path, "new"):
        with pytest.raises(StateError, match="another process is writing to the file"):
            opened(path)
    opened(path).close()
    code = (
        "import sys; from pathlib import Path; from genai.llm.batch.journal import Journal\n"
        f"j = Journal(Path({str(path)!r}), 1, 1); print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdin is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(StateError):
        opened(path)
    holder.kill()
    holder.wait()
    holder.stdin.close()
    holder.stdout.close()
    opened(path).close()


def test_locks_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with opened(tmp_path / "out", "new") as journal:
        journal.write(line(1))
    assert (tmp_path / "out").read_bytes() == line(1)


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, room = tmp_path / "out", 3 * len(line(1)) - 10
    write = os.write

    def limited(descriptor: int, data: bytes) -> int:
        left = room - os.fstat(descriptor).st_size
        if left <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[:left])

    monkeypatch.setattr(os, "write", limited)
    with opened(path, "new") as journal:
        journal.write(line(1))
        journal.write(line(2))
        with pytest.raises(InputError, match="No space left") as caught:
            journal.write(line(3))
        assert "--resume" in caught.value.fix and "cannot be written" in caught.value.what
    assert path.read_bytes() == line(1) + line(2)
    monkeypatch.undo()
    with opened(path) as journal:
        assert journal.answered.count == 2 and not journal.was_cut


def test_a_rewrite_that_fails_leaves_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out"
    before = line(1) + line(2, failed=True)
    path.write_bytes(before)

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(InputError, match="No space left"):
        opened(path, "retry")
    assert path.read_bytes() == before and not list(tmp_path.glob("*.part"))


def test_lines_are_synced_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, synced = [0.0], []
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(now[0]))
    with opened(tmp_path / "out", "new") as journal:
        synced.clear()
        for number in range(1, 101):
            now[0] += 0.05
            journal.write(line(number))
        assert len(synced) == 5 or len(synced) == 4
        journal.sync()
        assert synced[-1] == now[0] or len(synced) == 5


def test_what_input_it_belongs_to() -> None:
    answered = Answered()
    for number in (1, 2, 4):
        assert answered.add(LineId(0, number, digest(content(number))), failed=False)
    assert not answered.add(LineId(0, 2, 5), failed=False)
    assert answered.fits(inputs(4)) and answered.in_order
    answered.follow(3)
    assert answered.in_order is False, "line 3 comes after line 4"
    assert not answered.fits(inputs(3))
    changed = [one if one.number != 2 else Line(2, b"other", 1) for one in inputs(9)]
    assert not answered.fits(iter(changed))
    grown = Answered()
    grown.add(LineId(0, 1, digest(content(1))), failed=False)
    assert grown.fits(inputs(1)) and grown.in_order


def test_ten_million_lines_are_a_bit_each() -> None:
    answered = Answered()
    answered.add(LineId(0, 10**7, 1), failed=False)
    assert len(answered._bits) < 1.3e6 and 10**7 in answered and 10**7 - 1 not in answered
