"""The kernel cache is found, judged and cleaned; nothing else changes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from genai.doctor.caches import inspect_caches, kernel_key, remove_stale
from genai.doctor.checkup import Machine, check_cache
from genai.kernels.cpu.jit import kernel_cache
from genai.kernels.cpu.jit.native import LIBRARY

KEY, OLD, OLDER = "a" * 32, "b" * 32, "0123456789abcdef" * 2


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    """Kernels of three versions, in a folder with files of other programs."""
    folder = tmp_path / "genai" / "kernels"
    for key in (KEY, OLD, OLDER):
        (folder / key).mkdir(parents=True)
        for level in (folder.parent, folder, folder / key):
            level.chmod(0o755)
        (folder / key / "one.o").write_bytes(bytes(100))
        (folder / key / "two_4x8.o").write_bytes(bytes(50))
    (folder / "notes.txt").write_text("mine")
    (folder / "not-a-key").mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("keep")
    (folder / ("c" * 32)).symlink_to(elsewhere)
    return folder


def environment(tmp_path: Path) -> dict[str, str]:
    return {"GENAI_CACHE_DIR": str(tmp_path)}


def test_what_is_there(kernels: Path, tmp_path: Path) -> None:
    caches = inspect_caches(environment(tmp_path), key=KEY)
    assert caches.folder == kernels / KEY
    assert (caches.reason, caches.num_files, caches.num_bytes) == ("", 2, 150)
    assert [(path.name, num_bytes) for path, num_bytes in caches.stale.items()] == [(OLDER, 150), (OLD, 150)]


def test_cleaning_removes_stale_folders_only(kernels: Path, tmp_path: Path) -> None:
    removed, kept = remove_stale(inspect_caches(environment(tmp_path), key=KEY))
    assert [path.name for path in removed] == [OLDER, OLD]
    assert kept == {}
    assert sorted(path.name for path in kernels.iterdir()) == sorted([KEY, "notes.txt", "not-a-key", "c" * 32])
    assert (tmp_path / "elsewhere" / "precious").read_text() == "keep"
    assert inspect_caches(environment(tmp_path), key=KEY).stale == {}


def test_what_others_put_into_such_a_folder_stays(kernels: Path, tmp_path: Path) -> None:
    """The result is the same if a link leads to the folder."""
    photo, deep, alone = (
        kernels / OLD / "photo.jpg",
        kernels / OLDER / "d" / "one.o",
        kernels / ("d" * 32) / "notes.o.txt",
    )
    for path in (photo, deep, alone):
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    (kernels / OLD / f"left.o.77.{'e' * 32}.tmp").write_bytes(bytes(7))
    (kernels / OLD / "link.o").symlink_to(photo)
    (kernels / ("f" * 32)).mkdir()
    moved = kernels.rename(tmp_path / "store")
    kernels.symlink_to(moved)
    caches = inspect_caches(environment(tmp_path), key=KEY)
    assert {path.name: size for path, size in caches.stale.items()} == {OLD: 157, OLDER: 150, "f" * 32: 0}
    removed, kept = remove_stale(caches)
    assert {path.name for path in removed} == {OLD, OLDER, "f" * 32} and not kept
    assert all(path.read_text() == "mine" for path in (photo, deep, alone))
    assert not (kernels / ("f" * 32)).exists()
    assert sorted(path.name for path in (kernels / OLD).iterdir()) == ["link.o", "photo.jpg"]


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="modes say nothing there")
@pytest.mark.parametrize("which", [OLD, ".", ".."])
def test_folders_that_the_engine_would_not_read_stay(kernels: Path, tmp_path: Path, which: str) -> None:
    (kernels / which).resolve().chmod(0o777)
    caches = inspect_caches(environment(tmp_path), key=KEY)
    assert [path.name for path in caches.stale] == ([OLDER] if which == OLD else [])


def test_what_cannot_be_removed_is_said(kernels: Path, tmp_path: Path) -> None:
    caches = inspect_caches(environment(tmp_path), key=KEY)
    remove_stale(caches)
    removed, kept = remove_stale(caches)  # the files were removed by the first call
    assert removed == {}
    assert list(kept.values()) == ["No such file or directory"] * 2


def test_kernels_for_gpus_go_when_nobody_has_used_them_for_long(kernels: Path, tmp_path: Path) -> None:
    """The version that compiled such a kernel is unknown, and does not matter."""
    (kernels / "cuda").mkdir()
    for number, days in enumerate((0, 29, 31)):
        file = kernels / "cuda" / f"{number:064x}.cubin"
        file.write_bytes(bytes(10))
        os.utime(file, (then := time.time() - 86400 * days, then))
    (kernels / "cuda" / "notes.txt").write_text("mine")
    os.utime(kernels / "cuda" / "notes.txt", (0, 0))
    caches = inspect_caches(environment(tmp_path), key=KEY)
    assert len(caches.for_gpus) == 3 and len(caches.stale) == 2
    found = check_cache(Machine(environment=environment(tmp_path)))
    assert "; 3 GPU kernels, 30 B, of which 1 (10 B) have not been used for 30 days;" in found.text
    assert "--clean-cache" in found.fix and found.facts["num_gpu_files"] == 3 and found.facts["num_gpu_bytes"] == 30
    removed, kept = remove_stale(caches)
    assert [path.name for path in removed] == [OLDER, OLD, f"{2:064x}.cubin"] and not kept
    assert sorted(path.name for path in (kernels / "cuda").iterdir())[2:] == ["notes.txt"]
    assert "; 2 GPU kernels, 20 B" in check_cache(Machine(environment=environment(tmp_path))).text


def old_kernel(folder: Path) -> Path:
    """A kernel for GPUs that has not been used for a long time."""
    folder.mkdir(exist_ok=True)
    file = folder / f"{1:064x}.cubin"
    file.write_bytes(bytes(10))
    os.utime(file, (then := time.time() - 86400 * 99, then))
    return file


def test_kernels_for_gpus_behind_a_link_stay(kernels: Path, tmp_path: Path) -> None:
    """The target of a link in the cache may belong to another program, so it stays."""
    file = old_kernel(tmp_path / "elsewhere")
    (kernels / "cuda").symlink_to(tmp_path / "elsewhere")
    caches = inspect_caches(environment(tmp_path), key=KEY)
    assert not caches.for_gpus
    assert [path.name for path in remove_stale(caches)[0]] == [OLDER, OLD] and file.exists()


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="modes say nothing there")
@pytest.mark.parametrize("which", ["cuda", ".", ".."])
def test_kernels_for_gpus_stay_where_the_compiler_would_not_read_them(
    kernels: Path, tmp_path: Path, which: str
) -> None:
    file = old_kernel(kernels / "cuda")
    (kernels / which).resolve().chmod(0o777)
    caches = inspect_caches(environment(tmp_path), key=KEY)
    assert not caches.for_gpus
    remove_stale(caches)
    assert file.exists()


def test_kernels_for_gpus_of_somebody_else_stay(kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old_kernel(kernels / "cuda")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert not inspect_caches(environment(tmp_path), key=KEY).for_gpus


def test_nothing_there_yet_and_nothing_is_made(tmp_path: Path) -> None:
    caches = inspect_caches(environment(tmp_path / "new"), key=KEY)
    assert (caches.reason, caches.num_files, caches.stale) == ("", 0, {})
    assert not (tmp_path / "new").exists()


def test_a_home_that_is_a_file(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert inspect_caches(environment(blocked), key=KEY).reason == f"{blocked} is not a folder"


def test_a_folder_that_others_can_write(kernels: Path, tmp_path: Path) -> None:
    kernels.chmod(0o777)
    assert "is writable by other users" in inspect_caches(environment(tmp_path), key=KEY).reason


def test_a_cache_in_a_folder_that_others_can_write(
    kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_cache, "_is_own_group", lambda group: False)
    tmp_path.chmod(0o775)
    assert f"{tmp_path} is writable by other users" in inspect_caches(environment(tmp_path), key=KEY).reason
    tmp_path.chmod(0o1777)
    assert inspect_caches(environment(tmp_path), key=KEY).reason == ""


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        assert "is not writable" in inspect_caches(environment(tmp_path), key=KEY).reason
    finally:
        tmp_path.chmod(0o700)


def test_the_key_is_the_engines() -> None:
    path = LIBRARY.folder.path
    assert path is None or path.name == kernel_key()
