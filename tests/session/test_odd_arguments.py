"""Every call of the session's API with odd values: it works, or says what is wrong with a typed error."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import genai as ort
from genai.compat.onnxruntime import module


class Producer:
    """An object that offers memory, and does not give it."""

    def __init__(self, error: Exception, device: tuple[int, int] = (1, 0)) -> None:
        self.error, self.device = error, device

    def __dlpack__(self, **options: Any) -> Any:
        raise self.error

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


ODD: list[Any] = [
    None, True, -1, 0, 2**31, 2**63, 10**30, 1.5, float("nan"), "", "a", "c", "cpu", "cuda", b"\xff", [], [-1], [2.5],
    ["a"], [2**40, 2**40], [1] * 70, [[1], [1, 2]], (), {}, {"a": 1}, {1: 2}, object(), np.int64(2), np.bool_(True),
    np.zeros((2, 3), np.float32), np.zeros((2, 3), ">f4"), np.zeros((2, 3))[::-1, ::-1], np.zeros(3, "U2"),
    np.array([1, None], object), np.zeros(2, "M8[s]"), np.zeros(2, [("a", "f4")]), np.zeros(2, ml_dtypes.bfloat16),
    np.broadcast_to(np.zeros(1, np.float32), (2, 3)), np.dtype("float32"), np.float32, "float32", int, str, range(2),
    ort.OrtValue([np.zeros(1)]), ort.OrtValue(None), ort.OrtValue(np.array(["a"], object)), 99, 16, 8,
    Producer(KeyError("k")), Producer(BufferError("k")), Producer(ValueError("v"), (2, 0)), np.array([2.0, 2.0]),
]  # fmt: skip
MEMORY = np.zeros((2, 3), np.float32)
GOOD: dict[str, Any] = {
    "shape": [2, 3], "element_type": np.float32, "name": "a", "device_type": "cpu", "device_id": 0,
    "buffer_ptr": MEMORY.ctypes.data, "output_names": None, "ortvalue": ort.OrtValue(MEMORY), "arr_on_cpu": MEMORY,
    "input_feed": {"a": MEMORY, "b": MEMORY}, "input_dict_ort_values": {"a": MEMORY, "b": MEMORY},
}  # fmt: skip
# They start threads, write files or change the process, or have an effect only on what a run gave.
LEFT_OUT = {"run_async", "end_profiling", "set_seed", "set_global_thread_pool_sizes", "accept"}


def odd_result(call: Callable[..., Any], *given: Any, **named: Any) -> str:
    """What is wrong with how a call failed; "" if it did not fail, or with a whole message."""
    try:
        call(*given, **named)
    except ort.GenaiError as error:
        return "" if error.what and error.why and error.fix else f"{error!r} is not whole"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def members(subject: Any) -> list[tuple[str, Any, list[inspect.Parameter]]]:
    """Its public functions and what they take besides themselves."""
    found = []
    for name in dir(subject):
        member = getattr(subject, name, None)
        if name.startswith("_") or name in LEFT_OUT or not inspect.isroutine(member):
            continue
        taken = [p for p in inspect.signature(member).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        if taken and taken[0].name != "self":
            found.append((name, member, taken))
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        lambda add: ort.OrtValue, lambda add: ort.OrtDevice, lambda add: ort.OrtMemoryInfo, lambda add: add,
        lambda add: ort.OrtValue(MEMORY.copy()), lambda add: ort.OrtValue([MEMORY]), lambda add: add.io_binding(),
        lambda add: ort.SessionOptions(), lambda add: ort.RunOptions(), lambda add: module,
    ],
    ids="OrtValue OrtDevice OrtMemoryInfo session tensor sequence binding options run_options machine".split(),
)  # fmt: skip
def test_one_odd_argument(add, make):
    for name, member, taken in members(make(add)):
        for odd_one in taken:
            for odd in ODD:
                named = {p.name: GOOD.get(p.name, "c") for p in taken if p.default is p.empty or p.name in GOOD}
                if name.endswith("output"):
                    named["name"] = "c"
                wrong = odd_result(member, **{**named, odd_one.name: odd})
                assert not wrong, f"{name}({odd_one.name}={odd!r}): {wrong}"


@pytest.mark.filterwarnings("ignore")
def test_odd_sessions(add_model, add):
    good = add_model.SerializeToString()
    for odd in ODD:
        calls = {
            "source": lambda odd=odd: ort.InferenceSession(odd),
            "options": lambda odd=odd: ort.InferenceSession(good, odd),
            "providers": lambda odd=odd: ort.InferenceSession(good, None, odd),
            "provider's options": lambda odd=odd: ort.InferenceSession(good, None, [("CPUExecutionProvider", odd)]),
            "feed": lambda odd=odd: add.run(None, {"a": odd, "b": MEMORY}),
            "output": lambda odd=odd: add.run([odd], {"a": MEMORY, "b": MEMORY}),
            "vector": lambda odd=odd: add.run_with_ortvaluevector(None, ["a", "b"], [odd, MEMORY], ["c"], []),
            "domain": lambda odd=odd: ort.register_op(odd, "a"),
            "version": lambda odd=odd: ort.register_op("a", "b", odd),
            "device": lambda odd=odd: ort.OrtDevice(odd),
            "memory": lambda odd=odd: ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.INVALID, odd),
            "source of a copy": lambda odd=odd: ort.copy_tensors([ort.OrtValue(MEMORY)], odd),
        }
        for option in ort.SessionOptions.__annotations__:
            calls[option] = lambda odd=odd, option=option: setattr(ort.SessionOptions(), option, odd)
        for name, call in calls.items():
            wrong = odd_result(call)
            assert not wrong, f"{name} = {odd!r}: {wrong}"


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: str(type(odd).__name__))
@pytest.mark.filterwarnings("ignore")
def test_odd_bindings(add, odd):
    def run(side: str) -> None:
        binding = add.io_binding()
        binding.bind_cpu_input("b", MEMORY)
        if side == "in":
            binding.bind_ortvalue_input("a", odd)
            binding.bind_output("c")
        else:
            binding.bind_cpu_input("a", MEMORY if side == "out" else odd)
            binding.bind_ortvalue_output("c", odd)
        add.run_with_iobinding(binding)

    assert [odd_result(run, side) for side in ("in", "out", "both")] == ["", "", ""]


@pytest.mark.parametrize("number", [1, np.int64(1), np.int32(1), np.dtype(np.float32), np.float32, "float32"])
def test_element_types(add, number):
    value = ort.OrtValue.ortvalue_from_shape_and_type([2, 3], number)
    assert (value.data_type(), value.shape()) == ("tensor(float)", [2, 3])
    binding = add.io_binding()
    binding.bind_input("a", "cpu", 0, number, (2, 3), MEMORY.ctypes.data)
    assert binding.feed()["a"].dtype == np.float32


def test_strings_from_a_shape():
    value = ort.OrtValue.ortvalue_from_shape_and_type([2], np.str_)
    assert value.data_type() == "tensor(string)"
    assert value.numpy().tolist() == ["", ""]


def test_memory_of_no_elements(make_model):
    model = make_model([ort_node("Identity", "a", "c")], {"a": (1, ["N"])}, {"c": (1, ["N"])})
    session = ort.InferenceSession(model)
    binding = session.io_binding()
    binding.bind_input("a", "cpu", 0, np.float32, [0], MEMORY.ctypes.data)
    binding.bind_output("c")
    session.run_with_iobinding(binding)
    assert binding.get_outputs()[0].shape() == [0]


def ort_node(op_type: str, source: str, target: str) -> Any:
    from onnx import helper

    return helper.make_node(op_type, [source], [target])


def test_calls_of_wrong_arity_are_pythons_affair():
    with pytest.raises(TypeError, match="missing 1 required"):
        ort.OrtValue.ortvalue_from_shape_and_type()


def test_threads_of_numpy(add_model):
    options = ort.SessionOptions()
    options.intra_op_num_threads = np.int64(2)
    assert type(options.intra_op_num_threads) is int
    ort.InferenceSession(add_model, options)
    for wrong in (True, np.bool_(True), -1, np.int64(-1), 2.0, "2"):
        with pytest.raises(ort.GenaiError, match="intra_op_num_threads"):
            options.intra_op_num_threads = wrong
