"""External data: mapped once, never copied, and confined to the model's folder."""

from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from genai.errors import ExternalDataError, GraphError
from genai.onnx.reader import read_model
from genai.onnx.writer import to_proto


def edit_entries(path: Path, tensor: int = 1, **entries: object) -> None:
    """Change the external-data entries of a tensor of a stored model; None removes one."""
    model = onnx.load(path, load_external_data=False)
    proto = model.graph.initializer[tensor]
    known = {entry.key: entry.value for entry in proto.external_data} | entries
    del proto.external_data[:]
    for key, value in known.items():
        if value is not None:
            proto.external_data.add(key=key, value=str(value))
    path.write_bytes(model.SerializeToString())


def refused(path: Path) -> ExternalDataError:
    with pytest.raises(ExternalDataError) as error:
        read_model(path)
    assert error.value.what
    assert error.value.why
    assert error.value.fix
    return error.value


def base_of(array: np.ndarray) -> object:
    """Return the object that owns an array's memory."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base.obj if isinstance(base, memoryview) else base


def test_tensors_are_views_of_one_mapping(external_model):
    tensors = read_model(external_model).graph.initializers
    weight, bias = tensors["w"].array(), tensors["b"].array()
    np.testing.assert_array_equal(weight, np.arange(64 * 32, dtype=np.float32).reshape(64, 32))
    np.testing.assert_array_equal(bias, np.arange(32, dtype=np.float32))
    assert isinstance(base_of(weight), mmap.mmap)
    assert base_of(weight) is base_of(bias)
    assert np.shares_memory(weight, tensors["w"].array())
    assert not weight.flags.writeable
    assert tensors["w"].is_external
    assert tensors["w"].nbytes == 64 * 32 * 4


def test_unaligned_offsets_are_views_too(external_model):
    bias = read_model(external_model).graph.initializers["b"].array()
    assert not bias.flags.aligned
    assert isinstance(base_of(bias), mmap.mmap)
    assert bias.sum() == sum(range(32))


def test_released_pages_come_back(external_model):
    weight = read_model(external_model).graph.initializers["w"]
    before = weight.array().copy()
    weight.release_pages()
    np.testing.assert_array_equal(weight.array(), before)


def test_a_mapping_outlives_its_file_name(external_model):
    model = read_model(external_model)
    (external_model.parent / "weights.bin").unlink()
    assert model.graph.initializers["w"].array()[0, 1] == 1


def test_length_and_offset_are_optional(external_model):
    data = external_model.parent / "weights.bin"
    data.write_bytes(data.read_bytes()[131:])
    model = onnx.load(external_model, load_external_data=False)
    del model.graph.initializer[0]
    model.graph.node[0].output[0] = "y"
    del model.graph.node[1]
    external_model.write_bytes(model.SerializeToString())
    edit_entries(external_model, 0, offset=None, length=None)
    assert read_model(external_model).graph.initializers["w"].array()[1, 0] == 32


def test_references_are_written_back_as_they_were(external_model):
    edit_entries(external_model, checksum="abc")
    original = onnx.load(external_model, load_external_data=False)
    assert to_proto(read_model(external_model)) == original


def test_attributes_may_be_external(external_model):
    model = onnx.load(external_model, load_external_data=False)
    constant = model.graph.node.add(op_type="Constant", output=["c"])
    constant.attribute.add(name="value", type=onnx.AttributeProto.TENSOR).t.CopyFrom(model.graph.initializer[0])
    external_model.write_bytes(model.SerializeToString())
    assert read_model(external_model).graph.constant("c").tolist() == list(range(32))


def test_data_may_be_given_as_bytes(external_model):
    source = external_model.read_bytes()
    data = (external_model.parent / "weights.bin").read_bytes()
    given = {"weights.bin": data}
    tensor = read_model(source, external_data=given).graph.initializers["w"]
    assert tensor.array()[0, 5] == 5
    assert np.shares_memory(tensor.array(), np.frombuffer(data, np.uint8))
    tensor.release_pages()
    proto = onnx.load(external_model, load_external_data=False)
    assert read_model(proto, external_data=given).graph.initializers["w"].array()[0, 5] == 5


def test_given_data_takes_the_place_of_a_missing_file(external_model):
    data = (external_model.parent / "weights.bin").read_bytes()
    (external_model.parent / "weights.bin").unlink()
    assert read_model(external_model, external_data={"weights.bin": data}).graph.initializers["w"].array()[0, 5] == 5


def test_bytes_without_a_folder_have_no_external_data(external_model):
    with pytest.raises(ExternalDataError, match="no folder"):
        read_model(external_model.read_bytes())


def test_given_data_is_checked_for_length(external_model):
    with pytest.raises(ExternalDataError, match="truncated") as error:
        read_model(external_model.read_bytes(), external_data={"weights.bin": b"short"})
    assert "which has 5" in error.value.what


def test_missing_file(external_model):
    (external_model.parent / "weights.bin").unlink()
    error = refused(external_model)
    assert "missing" in error.what
    assert "weights.bin" in error.what


def test_truncated_file(external_model):
    data = external_model.parent / "weights.bin"
    data.write_bytes(data.read_bytes()[:-1])
    assert "truncated" in refused(external_model).why


def test_empty_file(external_model):
    (external_model.parent / "weights.bin").write_bytes(b"")
    assert "truncated" in refused(external_model).why


@pytest.mark.parametrize("offset", [10**6, 2**62, "9" * 30, -1, "x", "1.5", ""])
def test_bad_offsets(external_model, offset):
    edit_entries(external_model, offset=offset)
    refused(external_model)


@pytest.mark.parametrize("length", [0, 8191, 8193, 2**62, -8192, "many"])
def test_lengths_that_contradict_the_shape(external_model, length):
    edit_entries(external_model, length=length)
    refused(external_model)


def test_an_absurd_shape_is_refused_before_anything_is_allocated(external_model):
    model = onnx.load(external_model, load_external_data=False)
    model.graph.initializer[1].dims[:] = [2**40, 2**10]
    external_model.write_bytes(model.SerializeToString())
    edit_entries(external_model, length=None)
    assert "truncated" in refused(external_model).why


@pytest.mark.parametrize(
    "location",
    ["/etc/passwd", "../secret.bin", "sub/../../secret.bin", "..", "\\\\host\\share", "", "a\0b", "x" * 5000],
)
def test_paths_that_leave_the_folder(external_model, location):
    (external_model.parent.parent / "secret.bin").write_bytes(bytes(10000))
    edit_entries(external_model, location=location)
    refused(external_model)


def test_a_link_that_leaves_the_folder(external_model, tmp_path_factory):
    secret = tmp_path_factory.mktemp("elsewhere") / "secret.bin"
    secret.write_bytes(bytes(10000))
    (external_model.parent / "link.bin").symlink_to(secret)
    edit_entries(external_model, location="link.bin")
    assert "outside the model folder" in refused(external_model).what


def test_a_linked_folder_that_leaves_the_folder(external_model, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "secret.bin").write_bytes(bytes(10000))
    (external_model.parent / "sub").symlink_to(elsewhere, target_is_directory=True)
    edit_entries(external_model, location="sub/secret.bin")
    assert "outside the model folder" in refused(external_model).what


def test_a_link_to_itself(external_model):
    (external_model.parent / "loop.bin").symlink_to("loop.bin")
    edit_entries(external_model, location="loop.bin")
    refused(external_model)


def test_links_within_the_folder_are_followed(external_model):
    (external_model.parent / "weights.bin").rename(external_model.parent / "real.bin")
    (external_model.parent / "weights.bin").symlink_to("real.bin")
    assert read_model(external_model).graph.initializers["w"].array()[0, 1] == 1


def test_a_download_cache_of_links_works(external_model, tmp_path_factory):
    """Hubs store models like this: names are links to files in another folder."""
    snapshot = tmp_path_factory.mktemp("snapshot")
    for name in ("model.onnx", "weights.bin"):
        (snapshot / name).symlink_to(external_model.parent / name)
    assert read_model(snapshot / "model.onnx").graph.initializers["w"].array()[0, 1] == 1


def test_data_in_a_sub_folder(external_model):
    (external_model.parent / "sub").mkdir()
    (external_model.parent / "weights.bin").rename(external_model.parent / "sub" / "weights.bin")
    for tensor in (0, 1):
        edit_entries(external_model, tensor, location="sub/weights.bin")
    assert read_model(external_model).graph.initializers["w"].array()[0, 1] == 1


def test_a_folder_in_place_of_the_file(external_model):
    edit_entries(external_model, location=".")
    refused(external_model)


def test_a_pipe_in_place_of_the_file_does_not_block(external_model):
    os.mkfifo(external_model.parent / "pipe.bin")
    edit_entries(external_model, location="pipe.bin")
    assert "is a pipe" in refused(external_model).what


def test_a_file_that_may_not_be_read(external_model, monkeypatch):
    open_path = Path.open

    def refuse(self, *args, **options):
        if self.name != external_model.name:
            raise PermissionError(13, "Permission denied")
        return open_path(self, *args, **options)

    monkeypatch.setattr(Path, "open", refuse)
    assert "Permission denied" in refused(external_model).what


def test_a_mapped_file_that_changes_is_noticed_while_somebody_looks_at_it(external_model):
    model = read_model(external_model)
    (file,) = model.files
    file.check()
    data = next(path for path in external_model.parent.iterdir() if path != external_model)
    os.utime(data, ns=(1, 1))
    with pytest.raises(ExternalDataError, match="was changed") as error:
        file.check()
    assert "rename" in error.value.fix
    del model, error  # its frames too
    gc.collect()
    file.check()  # passes, because no array uses the mapping any more


def test_external_strings_are_refused(external_model):
    model = onnx.load(external_model, load_external_data=False)
    model.graph.initializer[0].data_type = TensorProto.STRING
    with pytest.raises(GraphError, match="string tensor"):
        read_model(model)
