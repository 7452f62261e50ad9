"""Inputs from files and made-up ones, differences, and the benchmark."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest

from genai.bench.session import bench_session
from genai.errors import InputError, OptionError
from genai.onnx.ir import Value
from genai.onnx.types import DataType, SequenceType, TensorType
from genai.session.arrays import Peer, differences, load_arrays, random_feed, save_arrays


def test_files(tmp_path):
    arrays = {"a": np.arange(3), "text": np.array(["x", "yy"], object)}
    save_arrays(tmp_path / "all.npz", arrays)
    found = load_arrays(tmp_path / "all.npz")
    assert found["a"].tolist() == [0, 1, 2]
    assert found["text"].tolist() == ["x", "yy"]
    np.save(tmp_path / "one.npy", arrays["a"])
    assert load_arrays(tmp_path / "one.npy")["one"].tolist() == [0, 1, 2]


def test_bad_files(tmp_path):
    (tmp_path / "junk.npz").write_bytes(b"junk")
    np.save(tmp_path / "pickled.npy", np.array([{"a": 1}], object), allow_pickle=True)
    for name in ("junk.npz", "pickled.npy", "absent.npy"):
        with pytest.raises(InputError, match=name):
            load_arrays(tmp_path / name)
    with pytest.raises(InputError, match=r"neither an \.npy nor an \.npz file: it begins with b'root:x'") as caught:
        (tmp_path / "passwd").write_bytes(b"root:x:0:0:root:/root:/bin/bash\n")
        load_arrays(tmp_path / "passwd")
    assert "np.save" in caught.value.fix
    with pytest.raises(InputError, match="Python objects") as caught:
        load_arrays(tmp_path / "pickled.npy")
    assert "pickle" not in str(caught.value).replace("pickled.npy", "")
    with pytest.raises(InputError, match="list"):
        save_arrays(tmp_path / "x.npz", {"a": [1]})
    with pytest.raises(InputError, match="cannot be written"):
        save_arrays(tmp_path / "no" / "x.npz", {"a": np.ones(1)})


def test_random_feed():
    def tensor(name, kind, *shape):
        return Value(name, TensorType(kind, shape))

    arguments = [
        tensor("ids", DataType.INT64, "batch", 4), tensor("attention_mask", DataType.INT64, "batch", 4),
        tensor("x", DataType.FLOAT16, 2, None), tensor("flag", DataType.BOOL),
        tensor("s", DataType.STRING, 2),
        tensor("q", DataType.INT4, 3),
    ]  # fmt: skip
    feed = random_feed(arguments, {"batch": 3}, seed=1)
    assert feed["ids"].shape == (3, 4)
    assert feed["attention_mask"].min() == 1
    assert feed["x"].dtype == np.float16
    assert feed["q"].dtype.name == "int4"
    assert np.array_equal(feed["ids"], random_feed(arguments, {"batch": 3}, seed=1)["ids"])
    with pytest.raises(InputError, match="seq"):
        random_feed([Value("l", SequenceType(TensorType(DataType.FLOAT)))], {})
    with pytest.raises(InputError, match="too large"):
        random_feed([tensor("x", DataType.FLOAT, 10**6, 10**6)], {})


def test_sizes_of_unnamed_dimensions():
    image = Value("image", TensorType(DataType.FLOAT, (None, 3, "side", None)))
    random_feed([image], {"image:0": 2, "side": 5})
    found = random_feed([image], {"image:0": 2, "side": 5})
    assert found["image"].shape == (2, 3, 5, 1)
    for wrong in ("image:1", "image:2", "image:4", "image", "other:0"):
        with pytest.raises(OptionError, match=f"--dim {wrong}=2") as caught:
            random_feed([image], {wrong: 2})
        assert caught.value.fix == "use one of the model's dimensions: image:0, side, image:3"
    with pytest.raises(OptionError) as caught:
        random_feed([Value("x", TensorType(DataType.FLOAT, (2,)))], {"x:0": 2})
    assert caught.value.fix == "remove --dim; all dimensions of the inputs have fixed sizes"


def test_differences():
    a = {"x": np.array([1.0, np.nan, np.inf]), "y": np.array([1.0, 2.0]), "z": np.ones(2), "m": [{"k": 1.0}]}
    b = {"x": np.array([1.0, np.nan, np.inf]), "y": np.array([1.0, 2.5]), "z": np.ones(3), "m": [{"k": 1.0}]}
    found = {name: (absolute, relative) for name, absolute, relative in differences(a, b)}
    assert found["x"] == (0, 0)
    assert found["y"] == (0.5, 0.2)
    assert found["z"][0] == np.inf
    assert found["m"] == (0, 0)


@pytest.mark.oracle
def test_bench_beside_the_peer(saved):
    pytest.importorskip("onnxruntime")
    result = bench_session(saved, dims={"N": 5}, repeat=3, compare=True)
    assert result["runs"] == 3
    assert result["run_ratio"] == result["run_ms"] / result["onnxruntime_run_ms"]


@pytest.mark.oracle
def test_the_peer_refuses(tmp_path, saved):
    pytest.importorskip("onnxruntime")
    with pytest.raises(InputError, match="refuses"):
        Peer(str(tmp_path / "absent.onnx"))
    with pytest.raises(InputError, match="cannot run the model"):
        Peer(str(saved)).run({"a": np.ones(3)})


def npy(shape: str) -> bytes:
    """Return an .npy file whose header has any shape, followed by one number."""
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}}}".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(8)


@pytest.mark.parametrize(
    "shape", [f"({10**15},)", f"(0, {2**64})", f"({'1,' * 65})", f"(0, {2**62})", "(-1,)", f"({2**63},)", "('a',)"]
)
@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_shapes_that_no_array_can_have(tmp_path: Path, shape: str, suffix: str) -> None:
    path = tmp_path / f"x.{suffix}"
    path.write_bytes(npy(shape))
    if suffix == "npz":
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("x.npy", npy(shape))
    with pytest.raises(InputError, match="cannot be read as arrays") as caught:
        load_arrays(path)
    assert caught.value.why and caught.value.fix


def test_an_archive_that_cannot_be_opened(tmp_path: Path) -> None:
    """An encrypted one, one with an unknown compression, and damaged compressed data."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("x.npy", npy("(1,)") + bytes(999))
    for offset, value in ((6, 1), (8, 99), (40, 0xFF), (45, 0xFF), (60, 0xFF)):
        data = bytearray(content.getvalue())
        data[offset] = value
        entry = data.index(b"PK\x01\x02")
        if offset < 10:  # the directory at the end has the same flags and the same compression
            data[entry + offset + 2] = value
        (tmp_path / "x.npz").write_bytes(data)
        with pytest.raises(InputError, match="cannot be read as arrays") as caught:
            load_arrays(tmp_path / "x.npz")
        assert caught.value.why and caught.value.fix
