"""Files and folders that are complete or absent, and a full disk in each writer of a file that the user names."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genai.common.atomic_files import replacing, whole_folder, write_whole
from genai.common.plots import Chart
from genai.compat.onnxruntime.adapter_format import AdapterFormat
from genai.errors import GenaiError, InputError, ModelFolderError
from genai.evaluate.tasks import write_page as write_task_page
from genai.llm.batch.page import write_page as write_batch_page
from genai.llm.batch.run import BatchReport
from genai.lora.peft import write_peft
from genai.lora.read import read_adapter
from genai.models.folders import bundled_adapter
from genai.onnx.writer import write_model
from genai.quantize.onnx_graph.tensors_data import CalibrationMethod, TensorData, TensorsData, save_tensors_data
from genai.session.arrays import save_arrays
from genai.session.loop import OpCall
from genai.session.running import Profiler


@contextmanager
def full_disk(limit: int = 100) -> Iterator[None]:
    """Let files grow to `limit` bytes only. The error is EFBIG, in place of ENOSPC."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _write_tensors_data(path: Path) -> None:
    ranges: dict[str, Any] = {f"value{index}": (np.float32(0), np.float32(1)) for index in range(50)}
    save_tensors_data(
        TensorsData(
            CalibrationMethod.MinMax, {name: TensorData(lowest=a, highest=b) for name, (a, b) in ranges.items()}
        ),
        path,
    )


def _write_chart(path: Path) -> None:
    pytest.importorskip("matplotlib")
    Chart("title", "axis", ["a", "b"], {"label": [1.0, 2.0]}).save(path)


WRITERS: dict[str, Callable[[Path], object]] = {
    "adapter.onnx_adapter": lambda path: AdapterFormat.of({"a": np.ones(999, np.float32)}).export_adapter(path),
    "arrays.npz": lambda path: save_arrays(path, {"a": np.ones(999)}),
    "tasks.html": lambda path: write_task_page(path, "page" * 999),
    "batch.html": lambda path: write_batch_page(BatchReport("in", Path("out"), "model"), path),
    "ranges.json": _write_tensors_data,
    "chart.svg": _write_chart,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    for old in (None, b"old"):
        if old is not None:
            path.write_bytes(old)
        with full_disk(), pytest.raises(GenaiError) as caught:
            WRITERS[name](path)
        assert "File too large" in str(caught.value) and caught.value.why and caught.value.fix
        assert [file.read_bytes() for file in tmp_path.iterdir()] == ([] if old is None else [old])
    WRITERS[name](path)
    assert path.stat().st_size > 100 and len(list(tmp_path.iterdir())) == 1


def test_a_profile_on_a_full_disk(tmp_path: Path) -> None:
    profiler = Profiler(str(tmp_path / "profile"))
    for index in range(99):
        profiler.record(OpCall("node", "Add", np.add, (), (), (), ()), index, index + 1)
    with full_disk(), pytest.raises(InputError, match="profile cannot be written") as caught:
        profiler.write()
    assert "profile_file_prefix" in caught.value.fix and not list(tmp_path.iterdir())
    assert Path(profiler.write()).stat().st_size > 100


@pytest.mark.parametrize("exists", [False, True])
def test_a_folder_on_a_full_disk_can_be_written_again(tmp_path: Path, exists: bool) -> None:
    adapter, folder = read_adapter(bundled_adapter("words")), tmp_path / "new" / "peft"
    if exists:
        folder.mkdir(parents=True)
    for limit in (100, 5000):  # a part of the config, and a part of the weights
        with full_disk(limit), pytest.raises(InputError, match="cannot be written") as caught:
            write_peft(adapter, folder, "float32")
        assert "File too large" in caught.value.why and caught.value.fix
        assert folder.exists() == exists and not list(folder.parent.glob("*/*"))
        assert list(folder.parent.iterdir()) == ([folder] if exists else [])
    write_peft(adapter, folder, "float32")
    again = read_adapter(folder)
    assert set(again.pairs) == set(adapter.pairs) and len(list(folder.iterdir())) == 2


def test_a_folder_that_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".out.0123456789abcdef.unfinished").mkdir()
    with whole_folder(tmp_path / "out") as folder:
        (folder / "file").write_text("x")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "file"]


def test_permissions_of_results_and_of_private_files(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_whole(tmp_path / "result", b"x")
        with replacing(tmp_path / "private") as file:
            file.write(b"x")
        with whole_folder(tmp_path / "folder") as folder:
            (folder / "file").write_text("x")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert modes == {"result": 0o644, "private": 0o600, "folder": 0o755, "file": 0o644}
    (tmp_path / "result").chmod(0o640)
    write_whole(tmp_path / "result", b"y")
    assert (tmp_path / "result").stat().st_mode & 0o777 == 0o640


def test_links_streams_and_long_names(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_whole(tmp_path / "link", b"x")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_bytes() == b"x"
    write_whole(Path(os.devnull), b"x")
    assert not Path(os.devnull).is_file()
    read, write = os.pipe()
    write_whole(Path(f"/dev/fd/{write}"), b"through a pipe")
    assert os.read(read, 99) == b"through a pipe"
    os.close(read)
    os.close(write)
    longest = tmp_path / ("ä" * 127)
    write_whole(longest, b"x")
    assert longest.read_bytes() == b"x"
    with pytest.raises(OSError):
        write_whole(tmp_path, b"x")


def test_a_model_is_not_written_over_a_device(tmp_path: Path) -> None:
    from genai.onnx.ir import Graph, OnnxModel

    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelFolderError, match="a pipe or a device") as caught:
        write_model(OnnxModel(Graph("g"), 10, {"": 20}), tmp_path / "pipe")
    assert caught.value.why and caught.value.fix and (tmp_path / "pipe").is_fifo()
