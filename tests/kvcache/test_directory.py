"""Blocks in a folder: found again, limited in size, and ignored when damaged."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genai.kernels.cpu.jit.kernel_cache import reason_to_distrust
from genai.kernels.device import DeviceFailed
from genai.kernels.host_memory import HostMemory
from genai.kvcache.disk import BlockDirectory, DirectoryError
from genai.kvcache.pool import BlockPool
from genai.kvcache.sequence_cache import SequenceCache
from genai.kvcache.storage import CacheLayout, LayerShape, PagedStorage

LAYOUT = CacheLayout((LayerShape(2, 16, 16),), 32)
BLOCK = 2 * 32 * 32 * 4


def cache(folder: Path, max_bytes: int = 2**30, identity: bytes = b"model") -> tuple[BlockPool, PagedStorage]:
    storage = PagedStorage(LAYOUT, 8)
    pool = BlockPool(8)
    pool.backing = BlockDirectory(folder, identity, max_bytes, storage.blocks, HostMemory(), note_size=32)
    return pool, storage


def write(pool: BlockPool, storage: PagedStorage, tokens: list[int], numerics: bytes | None = None) -> None:
    """Fill blocks with their first tokens, publish and release them."""
    table = SequenceCache(pool, 32)
    table.append(len(tokens))
    for index, block in enumerate(table.tables[0].blocks):
        storage.blocks[block] = tokens[32 * index] % 256
    table.publish(tokens, 0, bytearray(numerics or bytes(len(tokens))))
    table.release()
    pool.backing.flush()  # type: ignore[union-attr]


def found(pool: BlockPool, tokens: list[int], numerics: bytearray | None = None) -> SequenceCache:
    table = SequenceCache(pool, 32)
    table.reuse([*tokens, 0], 0, numerics if numerics is not None else bytearray(len(tokens) + 1))
    return table


TOKENS = [7] * 32 + [9] * 32 + [11] * 32


def test_another_pool_finds_what_was_written(tmp_path: Path) -> None:
    pool, storage = cache(tmp_path / "a")
    write(pool, storage, TOKENS, numerics=bytes([1] * 32 + [0] * 64))
    other, memory = cache(tmp_path / "a")
    numerics = bytearray(97)
    table = found(other, TOKENS, numerics)
    assert table.length == 96 and numerics == bytearray([1] * 32 + [0] * 65)
    assert [int(memory.blocks[block][5]) for block in table.tables[0].blocks] == [7, 9, 11]
    assert other.backing is not None and other.backing.figures()["found"] == 3
    again = found(other, TOKENS)
    assert list(again.tables[0].blocks) == list(table.tables[0].blocks)  # in memory now
    assert other.backing.figures()["found"] == 3
    assert found(other, [7] * 32 + [8] * 32).length == 32


def test_blocks_of_another_model_are_not_found(tmp_path: Path) -> None:
    pool, storage = cache(tmp_path)
    write(pool, storage, TOKENS)
    assert found(cache(tmp_path, identity=b"other")[0], TOKENS).length == 0


class Failing(HostMemory):
    """A device's memory. lost: the error that every access raises, if set."""

    lost: BaseException | None = None

    def read_block(self, blocks: Any, index: int) -> Any:
        if self.lost:
            raise self.lost
        return super().read_block(blocks, index)

    def write_block(self, blocks: Any, index: int, content: Any) -> None:
        if self.lost:
            raise self.lost
        super().write_block(blocks, index, content)


def test_what_the_device_does_not_give_or_take(tmp_path: Path) -> None:
    """A block that cannot be read is not stored. If writing a found block fails, the error propagates and the block is
    freed.
    """
    pool, storage = cache(tmp_path)
    device, directory = Failing(), pool.backing
    assert isinstance(directory, BlockDirectory)
    directory._device, device.lost = device, DeviceFailed("lost")
    write(pool, storage, TOKENS)
    assert directory.figures()["dropped"] == 3 and not files(tmp_path)
    device.lost = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        write(pool, storage, [5] * 32)
    device.lost = None
    write(pool, storage, [6] * 32)  # nothing waits for what never came
    other, _ = cache(tmp_path)
    other.backing._device, device.lost = device, DeviceFailed("lost")  # type: ignore[union-attr]
    with pytest.raises(DeviceFailed):
        found(other, [6] * 32)
    assert other.num_free == other.num_blocks
    device.lost = None
    assert found(other, [6] * 32).length == 32


def test_a_miss_takes_no_block(tmp_path: Path) -> None:
    pool, storage = cache(tmp_path)
    write(pool, storage, TOKENS)
    before = len(pool._free)
    assert found(pool, [5] * 32).length == 0
    assert len(pool._free) == before


def test_a_full_pool_finds_nothing_more(tmp_path: Path) -> None:
    pool, storage = cache(tmp_path)
    write(pool, storage, TOKENS)
    other, _ = cache(tmp_path)
    held = other.allocate(6)
    assert found(other, TOKENS).length == 64
    assert len(held) == 6


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]


def test_the_limit_holds_and_what_was_used_last_stays(tmp_path: Path) -> None:
    size = BLOCK + 32 + 12 + 32
    pool, storage = cache(tmp_path, max_bytes=5 * size)
    for number in range(4):
        write(pool, storage, [number + 1] * 32)
        for path in files(tmp_path):
            os.utime(path, (time.time() - 100 + number, time.time() - 100 + number))
    other, memory = cache(tmp_path, max_bytes=5 * size)
    assert found(other, [1] * 32).length == 32  # used now
    for number in range(4, 9):
        write(other, memory, [number + 1] * 32)
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 5 * size
    fresh, _ = cache(tmp_path, max_bytes=5 * size)
    assert found(fresh, [9] * 32).length == 32
    assert found(fresh, [2] * 32).length == 0
    write(fresh, PagedStorage(LAYOUT, 8), [50] * 32)
    tiny, tiny_memory = cache(tmp_path / "tiny", max_bytes=BLOCK)
    write(tiny, tiny_memory, [1] * 32)
    assert not files(tmp_path / "tiny")


def test_damage_counts_as_absence(tmp_path: Path) -> None:
    pool, storage = cache(tmp_path)
    write(pool, storage, [7] * 32)
    (path,) = files(tmp_path)
    whole, rng = path.read_bytes(), random.Random(3)
    for _ in range(50):
        place = rng.randrange(len(whole))
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert found(cache(tmp_path)[0], [7] * 32).length == 0
    for length in (0, 5, 43, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert found(cache(tmp_path)[0], [7] * 32).length == 0
    path.write_bytes(whole + b"x")
    assert found(cache(tmp_path)[0], [7] * 32).length == 0
    path.write_bytes(whole)
    assert found(cache(tmp_path)[0], [7] * 32).length == 32


def test_a_block_in_the_place_of_another_counts_as_absent(tmp_path: Path) -> None:
    """A copy or a link of another block is detected, because the digest covers the name."""
    pool, storage = cache(tmp_path)
    write(pool, storage, [7] * 32)
    (first,) = files(tmp_path)
    write(pool, storage, [9] * 32)
    (second,) = {*files(tmp_path)} - {first}
    whole = second.read_bytes()
    second.write_bytes(first.read_bytes())
    assert found(cache(tmp_path)[0], [9] * 32).length == 0
    second.unlink()
    second.symlink_to(first)
    assert found(cache(tmp_path)[0], [9] * 32).length == 0
    second.unlink()
    second.write_bytes(whole)
    assert found(cache(tmp_path)[0], [9] * 32).length == found(cache(tmp_path)[0], [7] * 32).length == 32


@pytest.mark.parametrize("harm", [lambda whole: b"", lambda whole: whole[:-9], lambda whole: whole + b"x"])
def test_what_was_damaged_is_written_anew(tmp_path: Path, harm: Callable[[bytes], bytes]) -> None:
    """A sequence that misses the first block writes all of them again, and the total size is correct."""
    pool, storage = cache(tmp_path)
    write(pool, storage, TOKENS)
    sizes, paths = pool.backing.figures()["bytes"], files(tmp_path)  # type: ignore[union-attr]
    whole = [path.read_bytes() for path in paths]
    paths[1].write_bytes(harm(whole[1]))
    paths[2].write_bytes(harm(whole[2]))
    other, memory = cache(tmp_path)
    assert found(other, TOKENS).length < 96
    write(other, memory, TOKENS)
    assert [path.read_bytes() for path in paths] == whole
    assert other.backing.figures()["written"] == 2  # type: ignore[union-attr]
    assert found(cache(tmp_path)[0], TOKENS).length == 96
    (tmp_path / "lock").unlink()  # the sum is counted anew
    assert abs(cache(tmp_path)[0].backing.figures()["bytes"] - sizes) == 0  # type: ignore[union-attr]


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="mode bits")
def test_folders_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for inside, said in (("file", "file is a file"), ("file/kv", "a parent of .*kv is a file")):
        with pytest.raises(DirectoryError, match=said):
            cache(tmp_path / inside)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(DirectoryError, match="writable by other users"):
        cache(tmp_path / "open")
    with pytest.raises(DirectoryError, match="open is writable by other users"):
        cache(tmp_path / "open" / "inside")
    assert not (tmp_path / "open" / "inside").exists()
    for inside in ("open/a/b", "open/a/b/c/d", "link/kv"):
        (tmp_path / "open" / "a" / "b").mkdir(mode=0o700, parents=True, exist_ok=True)
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(tmp_path / "open" / "a" / "b", target_is_directory=True)
        with pytest.raises(
            DirectoryError, match="open is writable by other users, but keys and values are read from this path"
        ):
            cache(tmp_path / inside)
    (tmp_path / "open").chmod(0o1777)  # as /tmp: nobody renames what belongs to others
    assert cache(tmp_path / "open" / "inside")


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="mode bits")
@pytest.mark.parametrize("kind", ["owner", "mode", "link", "pipe"])
def test_blocks_that_others_could_have_written_are_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A digest is no secret: a forged block can have the right one. The folder may have been open to others before."""
    pool, storage = cache(tmp_path)
    write(pool, storage, [7] * 32)
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    directory = cache(tmp_path)[0].backing
    assert directory is not None
    key = next(iter(pool._block_of_key))
    assert directory.load(key) is not None and directory.note_of(key) is not None
    if kind == "owner":
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        monkeypatch.setattr(os, "fstat", other_owner(os.fstat))
    elif kind == "mode":
        path.chmod(0o666)
    else:
        path.unlink()
        (tmp_path / "elsewhere").write_bytes(whole)
        path.symlink_to(tmp_path / "elsewhere") if kind == "link" else os.mkfifo(path)
    assert directory.load(key) is None and directory.note_of(key) is None
    monkeypatch.undo()
    other, memory = cache(tmp_path)
    write(other, memory, [7] * 32)
    assert path.read_bytes() == whole and not path.is_symlink() and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert found(cache(tmp_path)[0], [7] * 32).length == 32


def other_owner(fstat: Callable[[int], os.stat_result]) -> Callable[[int], os.stat_result]:
    def made_up(descriptor: int) -> os.stat_result:
        found = fstat(descriptor)
        return os.stat_result((*found[:4], 54321, *found[5:]))

    return made_up


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="mode bits")
@pytest.mark.parametrize("name", ["kv", "./kv", "kv/../kv", "a/b", "."])
def test_folders_are_named_as_people_like(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    pool, storage = cache(Path(name))
    write(pool, storage, TOKENS)
    assert found(cache(Path(name))[0], TOKENS).length == 96


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="mode bits")
def test_folders_above_may_belong_to_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As /home for a folder in /home/user/kv; but the folder itself must not be root's, nor its parents another's."""
    owners = {tmp_path / "home": 1000, tmp_path / "home" / "kv": 1000, tmp_path: 0}
    (tmp_path / "home" / "kv").mkdir(parents=True)
    status = Path.stat

    def made_up(path: Path, **how: Any) -> Any:
        found = status(path, **how)
        return os.stat_result((*found[:4], owners.get(path, 0), *found[5:]))

    monkeypatch.setattr(Path, "stat", made_up)
    monkeypatch.setattr(Path, "lstat", lambda path: made_up(path, follow_symlinks=False))
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    assert reason_to_distrust(tmp_path / "home" / "kv") is None
    assert reason_to_distrust(tmp_path / "home") is None
    assert "another user" in str(reason_to_distrust(tmp_path))
    owners[tmp_path / "home"] = 1001
    assert "home belongs to another user" in str(reason_to_distrust(tmp_path / "home" / "kv"))


def test_a_full_disk_loses_nothing_but_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, storage = cache(tmp_path)

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(BlockDirectory, "_write", full)
    write(pool, storage, TOKENS)
    assert found(pool, TOKENS).length == 96
    assert not files(tmp_path)


def _work(folder: str, seed: int) -> None:
    rng = random.Random(seed)
    pool, storage = cache(Path(folder), max_bytes=20 * (BLOCK + 76))
    for _ in range(40):
        token = rng.randrange(1, 60)
        table = found(pool, [token] * 32)
        if table.length:
            assert (np.asarray(storage.blocks[table.tables[0].blocks[0]]) == token).all()
        table.release()
        write(pool, storage, [token] * 32)


def test_processes_share_a_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_work, args=(str(tmp_path), seed)) for seed in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 20 * (BLOCK + 76)
    assert not [path for path in files(tmp_path) if path.suffix == ".partial"]


KILLED = """
import sys
from pathlib import Path
from tests.kvcache.test_directory import cache, write
pool, storage = cache(Path(sys.argv[1]), max_bytes=10**6)
print("ready", flush=True)
number = 0
while True:
    number += 1
    write(pool, storage, [number % 250 + 1] * 32)
"""


def test_killed_while_writing_it_has_whole_blocks_only(tmp_path: Path) -> None:
    rng = random.Random(4)
    for _ in range(4):
        command = [sys.executable, "-c", KILLED, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as process:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            time.sleep(rng.uniform(0.01, 0.1))
            process.send_signal(signal.SIGKILL)
        pool, storage = cache(tmp_path, max_bytes=10**6)
        count = 0
        for token in range(1, 251):
            table = found(pool, [token] * 32)
            if table.length:
                count += 1
                assert (np.asarray(storage.blocks[table.tables[0].blocks[0]]) == token).all()
            table.release()
        assert count
        write(pool, storage, [255] * 32)
        assert sum(path.stat().st_size for path in files(tmp_path) if path.suffix != ".partial") <= 10**6
