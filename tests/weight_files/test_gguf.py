"""GGUF files are read as they are written, and no damaged or hostile one takes memory, time, or an untyped error."""

from __future__ import annotations

import resource
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from genai.errors import GenaiError, InputError, ModelFolderError
from genai.weight_files.gguf import GgufFile, GgufModel, is_gguf

gguf = pytest.importorskip("gguf")
ALIGNED = 32


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    sizes = struct.pack(f"<{len(dims)}Q", *dims)
    return text(name) + struct.pack("<I", len(dims)) + sizes + struct.pack("<IQ", kind, offset)


def file_of(
    keys: tuple[bytes, ...] = (), tensors: tuple[bytes, ...] = (), data: int = 4096, *, version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:  # fmt: skip
    """A file by its parts."""
    found = counts or (len(tensors), len(keys))
    header = b"GGUF" + struct.pack("<IQQ", version, *found) + b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % ALIGNED) + bytes(data)


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def written(content: bytes, name: str = "a.gguf") -> Path:
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return written


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    writer = gguf.GGUFWriter(str(tmp_path / "sound.gguf"), "llama")
    writer.add_array("list.texts", ["a", "", "éß", "▁x"])
    writer.add_array("list.numbers", [1.5, -2.5])
    writer.add_uint64("big", 2**63)
    writer.add_bool("yes", True)
    writer.add_tensor("f32", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("f16", np.arange(6, dtype=np.float16))
    blocks = np.arange(2 * 36, dtype=np.uint8).reshape(2, 36)
    writer.add_tensor("q4_0", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "sound.gguf"


def test_what_is_written_is_read(sound: Path) -> None:
    file = GgufFile(sound)
    assert file.metadata["list.texts"] == ["a", "", "éß", "▁x"]
    assert file.metadata["list.numbers"].tolist() == [1.5, -2.5]
    assert file.metadata["big"] == 2**63 and file.metadata["yes"] is True
    np.testing.assert_array_equal(file.read("f32"), np.arange(12, dtype=np.float32).reshape(3, 4))
    assert file.read("f16").dtype == np.float16
    info, blocks = file.tensors["q4_0"], file.read("q4_0")
    assert (info.kind, info.shape, blocks.shape) == ("Q4_0", (2, 64), (2, 2))
    assert blocks["Q4_0"].tobytes() == bytes(range(72))
    assert isinstance(file.read("f32").base, np.ndarray) and not file.read("f32").flags.owndata


def test_what_counts_as_gguf(sound: Path, write: Any, tmp_path: Path) -> None:
    assert is_gguf(sound) and is_gguf(write(sound.read_bytes(), "blob")) and is_gguf(write(b"", "empty.gguf"))
    assert not is_gguf(write(b"abc", "other")) and not is_gguf(tmp_path) and not is_gguf(tmp_path / "absent.gguf")


F32, Q4_K = 0, 12
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "does not start with the bytes GGUF"),
    "other": (b"PK\3\4" + bytes(100), "does not start with the bytes GGUF"),
    "magic alone": (b"GGUF", "needs 4 bytes, but only 0 are left in the file"),
    "version 1": (file_of(version=1), "version 1, but only versions 2 and 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "2^63 tensors": (file_of(counts=(2**63, 0)), f"{2**63} tensors"),
    "2^63 keys": (file_of(counts=(0, 2**63)), f"{2**63} keys"),
    "more tensors than bytes": (file_of(counts=(100_000, 0)), "100000 tensors exceed the remaining"),
    "a key of 2^60 bytes": (file_of((struct.pack("<Q", 2**60),)), "bytes of a key"),
    "a text of 2^60 bytes": (
        file_of((text("k") + struct.pack("<IQ", 8, 2**60),)),
        f"a string in 'k' has {2**60} bytes",
    ),
    "2^62 texts": (file_of((key("k", 9, struct.pack("<IQ", 8, 2**62)),)), f"{2**62} strings"),
    "2^62 numbers": (file_of((key("k", 9, struct.pack("<IQ", 6, 2**62)),)), f"{2**62} numbers"),
    "an array of arrays": (file_of((key("k", 9, struct.pack("<IQ", 9, 1)),)), "only numbers and strings"),
    "a value of type 99": (file_of((key("k", 99, b""),)), "type 99, which GGUF does not define"),
    "a key twice": (file_of((key("k", 0, b"1"), key("k", 0, b"2"))), "'k' occurs twice"),
    "a key of bytes": (file_of((struct.pack("<Q", 2) + b"\xff\xfe" + bytes(12),)), "is not UTF-8"),
    "no dimensions": (file_of(tensors=(tensor("t", (), F32, 0),)), "0 dimensions"),
    "nine dimensions": (file_of(tensors=(tensor("t", (1,) * 9, F32, 0),)), "9 dimensions"),
    "an empty dimension": (file_of(tensors=(tensor("t", (4, 0), F32, 0),)), "the invalid shape"),
    "2^63 columns": (file_of(tensors=(tensor("t", (2**63, 2**63), F32, 0),)), "the invalid shape"),
    "a tensor twice": (file_of(tensors=(tensor("t", (4,), F32, 0), tensor("t", (4,), F32, 32))), "'t' occurs twice"),
    "a long name": (file_of(tensors=(tensor("t" * 65, (4,), F32, 0),)), "65 bytes of a tensor's name"),
    "an unknown type": (file_of(tensors=(tensor("t", (4,), 99, 0),)), r"'t' has the type \(99\)"),
    "integers": (file_of(tensors=(tensor("t", (4,), 26, 0),)), r"has the type I32 \(26\)"),
    "rows of no whole block": (file_of(tensors=(tensor("t", (100, 2), Q4_K, 0),)), "not a multiple of 256"),
    "an odd offset": (file_of(tensors=(tensor("t", (4,), F32, 5),)), "not a multiple of the alignment"),
    "overlapping": (file_of(tensors=(tensor("a", (16,), F32, 0), tensor("b", (16,), F32, 32))), "'b' overlaps"),
    "behind the end": (file_of(tensors=(tensor("t", (2048,), F32, 0),)), "beyond the end of the file"),
    "far behind the end": (file_of(tensors=(tensor("t", (4,), F32, 2**62),)), "beyond the end of the file"),
    "alignment 3": (file_of((key("general.alignment", 4, struct.pack("<I", 3)),)), "general.alignment is 3"),
    "alignment 2^31": (file_of((key("general.alignment", 4, struct.pack("<I", 2**31)),)), "general.alignment is"),
    "alignment of text": (file_of((key("general.alignment", 8, text("32")),)), "general.alignment is '32'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files(name: str, write: Any) -> None:
    content, message = BAD[name]
    with pytest.raises(InputError, match=message) as caught:
        GgufFile(write(content))
    assert caught.value.why and caught.value.fix


def test_every_truncation(sound: Path, write: Any) -> None:
    content = sound.read_bytes()
    for length in range(0, len(content) - ALIGNED, 7):
        with pytest.raises(InputError):
            GgufFile(write(content[:length]))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(ModelFolderError, match="cannot be read"):
            GgufFile(path)


def test_mutations_end_soon_and_take_little(sound: Path, write: Any) -> None:
    """200 files with bytes, words and ends changed at random."""
    content, random = bytearray(sound.read_bytes()), np.random.RandomState(0)
    begin, before = time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    read = 0
    for _ in range(200):
        changed = bytearray(content)
        for _ in range(random.randint(1, 4)):
            place = random.randint(0, len(changed) - 8)
            if random.rand() < 0.5:
                changed[place] = random.randint(256)
            else:
                value = int(random.choice([0, 1, 255, 2**31, 2**32 - 1, 2**62])) + random.randint(3)
                changed[place : place + 8] = struct.pack("<Q", value)
        try:
            model = GgufModel(write(bytes(changed[: random.randint(len(changed) // 2, len(changed) + 1)])))
            read += sum(model[name].nbytes >= 0 for name in model)
        except GenaiError:
            pass
    assert read
    assert time.thread_time() - begin < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kilobytes


def test_split_files(sound: Path, write: Any, tmp_path: Path) -> None:
    parts = []
    for number in range(2):
        keys = (
            key("general.architecture", 8, text("llama")),
            key("split.no", 2, struct.pack("<H", number)),
            key("split.count", 2, struct.pack("<H", 2)),
        )
        content = file_of(keys, (tensor(f"t{number}", (8,), F32, 0),))
        parts.append(write(content, f"m-0000{number + 1}-of-00002.gguf"))
    for part in parts:  # whichever is given
        model = GgufModel(part)
        assert list(model) == ["t0", "t1"] and model["t1"].shape == (8,) and len(model.files) == 2
    parts[1].write_bytes(parts[0].read_bytes())
    with pytest.raises(InputError, match=r"split\.no is 0 and split\.count is 2 in the metadata"):
        GgufModel(parts[0])
    parts[1].unlink()
    with pytest.raises(ModelFolderError, match=r"1 of 2 files are missing, such as m-00002-of-00002.gguf"):
        GgufModel(parts[0])
    with pytest.raises(InputError, match="file 00003 of 00002"):
        GgufModel(parts[0].rename(tmp_path / "m-00003-of-00002.gguf"))
    alone = (tmp_path / "m-00003-of-00002.gguf").rename(tmp_path / "alone.gguf")
    with pytest.raises(InputError, match=r"by its name, the file has split\.no = 0 and split\.count = 1"):
        GgufModel(alone)


def test_a_tensor_in_two_files(write: Any) -> None:
    for number in range(2):
        keys = (key("split.no", 2, struct.pack("<H", number)), key("split.count", 2, struct.pack("<H", 2)))
        path = write(file_of(keys, (tensor("t", (8,), F32, 0),)), f"m-0000{number + 1}-of-00002.gguf")
    with pytest.raises(InputError, match=r"'t' is in m-00001-of-00002.gguf and in m-00002"):
        GgufModel(path)


def test_no_architecture(write: Any) -> None:
    with pytest.raises(InputError, match=r"general\.architecture is None"):
        _ = GgufModel(write(file_of())).architecture
