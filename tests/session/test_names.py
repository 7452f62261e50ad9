"""Every name of the installed onnxruntime: supported, ignored, or refused with a reason; docs say which."""

from __future__ import annotations

import inspect
import os
import re
from typing import Any

import numpy as np
import pytest
from onnx import helper

import genai
from genai.compat.refused import REASONS
from tools.name_table import RUNTIME

pytestmark = pytest.mark.oracle


@pytest.fixture(scope="module")
def theirs() -> list[str]:
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    return RUNTIME.names(pytest.importorskip("onnxruntime"))


def test_nothing_is_undecided(theirs):
    assert [name for name in theirs if RUNTIME.state(name) == "missing"] == []


def test_the_page_says_what_is_so(theirs):
    listed = dict(re.findall(r"^\| (\S+) \| (.+) \|$", RUNTIME.page.read_text(encoding="utf-8"), re.M))
    assert set(theirs) <= listed.keys()
    assert {name: listed[name] for name in theirs} == {name: RUNTIME.state(name) for name in theirs}


def test_refused_names_say_why(add):
    for name in REASONS:
        found = getattr(genai, name)
        with pytest.raises(genai.GenaiError, match=name) as caught:
            found.member() if name[0].isupper() else found()
        assert caught.value.why == REASONS[name]
        with pytest.raises(genai.GenaiError, match=name):
            found()
    subjects = [add, genai.RunOptions(), genai.SessionOptions(), genai.OrtMemoryInfo(), genai.OrtValue(np.ones(1))]
    refused = [
        (subject, name)
        for subject in subjects
        for name, member in inspect.getmembers(type(subject))
        if (getattr(member, "__doc__", None) or "").startswith("Not supported: ")
    ]
    assert len(refused) >= 10
    for subject, name in refused:
        with pytest.raises(genai.GenaiError, match=name):
            getattr(subject, name)("anything")


def test_class_list_is_whole():
    assert all(hasattr(genai, name) for name in RUNTIME.classes)


def test_an_ort_value_is_an_array():
    given = np.arange(3, dtype=np.float32)
    value = genai.OrtValue.ortvalue_from_numpy(given)
    assert np.asarray(value).dtype == np.float32
    assert np.shares_memory(np.asarray(value), given)
    assert not np.shares_memory(np.array(value, copy=True), given)
    assert np.asarray(value, np.int64).tolist() == [0, 1, 2]
    with pytest.raises(genai.GenaiError, match="only tensors"):
        np.asarray(genai.OrtValue([given]))


def test_dlpack_capsules():
    given = np.arange(4, dtype=np.int32)
    value = genai.OrtValue.from_dlpack(given.__dlpack__())
    assert value.data_ptr() == given.ctypes.data
    assert genai.OrtValue.from_dlpack(value.to_dlpack()).numpy().tolist() == [0, 1, 2, 3]
    capsule = given.__dlpack__()
    np.from_dlpack(
        type("Producer", (), {"__dlpack__": lambda self, **_: capsule, "__dlpack_device__": lambda self: (1, 0)})()
    )
    with pytest.raises(genai.GenaiError, match="DLPack"):
        genai.OrtValue.from_dlpack(capsule)  # used up


def test_copies_between_values():
    source, target = (genai.OrtValue.ortvalue_from_numpy(np.full(2, number, np.float32)) for number in (1, 2))
    genai.copy_tensors([source], [target])
    assert target.numpy().tolist() == [1, 1]
    source.update_inplace(genai.OrtValue.ortvalue_from_numpy(np.full(2, 9, np.float32)))
    assert source.numpy().tolist() == [9, 9]
    with pytest.raises(genai.GenaiError, match="1 tensors cannot be copied to 2 tensors"):
        genai.copy_tensors([source], [target, target])


def test_memory_of_a_session(add):
    (first, second), (result,) = add.get_input_memory_infos(), add.get_output_memory_infos()
    assert (first.name, first.device_id, first.mem_type) == ("Cpu", 0, genai.OrtMemType.DEFAULT)
    assert first == second == result
    assert genai.OrtDevice.make("cpu", 0).device_mem_type() == genai.OrtDeviceMemoryType.DEFAULT
    assert add.create_ortvalue_from_shape_and_type([2, 3], np.float32, "cpu").shape() == [2, 3]
    with pytest.raises(genai.GenaiError, match="'Cuda'"):
        genai.OrtMemoryInfo("Cuda", genai.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, genai.OrtMemType.DEFAULT)
    cpu, card = genai.OrtMemoryInfoDeviceType.CPU, genai.OrtMemoryInfoDeviceType.GPU
    plain, shared = genai.OrtDeviceMemoryType.DEFAULT, genai.OrtDeviceMemoryType.HOST_ACCESSIBLE
    kind = genai.OrtAllocatorType.ORT_DEVICE_ALLOCATOR
    for device, memory, alignment, wrong in ((card, plain, 0, "GPU"), (cpu, shared, 0, "5"), (cpu, plain, 64, "64")):
        with pytest.raises(genai.GenaiError, match=wrong):
            genai.OrtMemoryInfo.create_v2("any", device, 0, 0, memory, alignment, kind)


def test_providers_after_loading(add):
    add.set_providers(["CPUExecutionProvider"])
    with pytest.raises(genai.InvalidArgument, match="'Foo' is unknown"):
        add.set_providers(["Foo"])
    with pytest.warns(UserWarning, match="CUDAExecutionProvider"):
        add.set_providers(["CUDAExecutionProvider", "CPUExecutionProvider"])
    assert add.get_providers() == ["CPUExecutionProvider"]


@pytest.fixture
def restored_seed():
    from genai.ops import filling

    before = list(filling._process_seed)
    yield
    filling._process_seed[:] = before


def test_a_seed_for_the_process(make_model, restored_seed):
    nodes = [helper.make_node("RandomNormal", [], [name], shape=[3]) for name in ("a", "b")]
    model = make_model(nodes, {}, {"a": (1, [3]), "b": (1, [3])})

    def drawn(seed: int) -> list[list[float]]:
        genai.set_seed(seed)
        session = genai.InferenceSession(model)
        return [value.tolist() for _ in range(2) for value in session.run(None, {})]

    first = drawn(5)
    assert first == drawn(5)
    assert first != drawn(6)
    assert len({str(row) for row in first}) == 4
    for wrong in ("5", 1.5, True):
        with pytest.raises(genai.GenaiError, match="seed"):
            genai.set_seed(wrong)


def test_threads_for_all_sessions(add_model):
    from genai.compat.onnxruntime import module
    from genai.devices import open_threads
    from genai.session import prepare

    seen = []

    def opened(count: int | None = None) -> Any:
        seen.append(count)
        return open_threads(count)

    options = genai.SessionOptions()
    options.use_per_session_threads = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "open_threads", opened)
        patch.setattr(module, "_global_threads", [0])
        genai.InferenceSession(add_model, options)
        genai.set_global_thread_pool_sizes(1, 1)
        genai.InferenceSession(add_model, options)
        genai.InferenceSession(add_model)
        for wrong in ((-1, 0), (0, "2"), (True, 0)):
            with pytest.raises(genai.GenaiError, match="num_threads"):
                genai.set_global_thread_pool_sizes(*wrong)
    assert seen == [None, 1, None]


def test_loading_called_off(add_model):
    options = genai.SessionOptions()
    options.set_load_cancellation_flag(True)
    with pytest.raises(genai.ModelLoadCanceled, match="cancelled"):
        genai.InferenceSession(add_model, options)
    options.set_load_cancellation_flag(False)
    genai.InferenceSession(add_model, options)


def test_small_functions(capsys):
    assert not genai.has_collective_ops()
    assert genai.cuda_version == ""
    genai.preload_dlls()
    genai.enable_telemetry_events()
    genai.print_debug_info()
    assert genai.package_name == "onnx-genai-toolkit"
    assert "NumPy" in capsys.readouterr().out
    with pytest.raises(genai.GenaiError, match="'terminat'"):
        genai.RunOptions().terminat = True
