"""GPUs that are there and cannot be used: what is said, by whom, and that nobody looks for one without need."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import genai
from genai import devices
from genai.bench import speed
from genai.cli.app import run
from genai.compat.refused import is_cuda_available
from genai.doctor import checkup
from genai.doctor.model_info import describe
from genai.errors import CacheCapacityError, ConfigError, DeviceError, OptionError
from genai.kernels.cpu.executor import CpuExecutor
from genai.kernels.cuda import cupy_driver
from genai.kernels.cuda.driver import NoDevice
from genai.models import kv_types, loading
from genai.models.chosen_device import ChosenDevice
from genai.models.model_options import check_model_options

from .test_cupy_driver import CONTEXTS, CUDARuntimeError, NVRTCError, Stream, fake_cupy

Logged = Callable[[], list[str]]

BUSY = "cudaErrorDevicesUnavailable: CUDA-capable device(s) is/are busy or unavailable"


def busy(*_: object, **__: object) -> Any:
    raise CUDARuntimeError(BUSY)


class Left(Stream):
    """It cannot be left."""

    __exit__ = busy


def broken(which: str) -> Any:
    """A CuPy of one GPU of which something fails."""
    cupy = fake_cupy(**({"memory": busy} if which == "memory" else {}))
    if which == "stream":
        cupy.cuda.Stream = busy
    elif which == "capability":
        cupy.cuda.runtime.deviceGetAttribute = busy
    elif which == "context":
        cupy.cuda.runtime.setDevice = busy
    elif which == "properties":
        cupy.cuda.runtime.getDeviceProperties = busy
    elif which == "leaving":
        cupy.cuda.Stream = Left
    elif which == "architectures":
        cupy.cuda.nvrtc.getSupportedArchs = busy
    return cupy


WAYS = ("memory", "stream", "capability", "context", "properties", "leaving", "architectures")


@pytest.fixture(autouse=True)
def nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_told", set())


@pytest.mark.parametrize("which", WAYS)
def test_a_gpu_that_cannot_be_opened(
    monkeypatch: pytest.MonkeyPatch, logged: Logged, bundled_folder: Path, which: str
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", broken(which))
    for call in (genai.Model, genai.LLM, describe):
        with pytest.raises(DeviceError, match="cudaErrorDevicesUnavailable") as raised:
            call(bundled_folder, device="cuda")  # type: ignore[operator]
        assert "cuda" in raised.value.what and "genai doctor" in raised.value.fix
    assert not is_cuda_available() and genai.get_device() == "CPU"
    for quiet in (True, False, False):
        with genai.LLM(bundled_folder, device="auto", quiet=quiet) as llm:
            assert llm.model.device_type == "CPU"
        assert not quiet or "on the CPU" not in str(logged())
    assert describe(bundled_folder, device="auto")["memory"]["device"] == "cpu"
    (message,) = [message for message in logged() if "on the CPU" in message]
    assert message.startswith("computing on the CPU: GPU 0 ")


def model() -> onnx.ModelProto:
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", [x], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def test_sessions_on_the_cpu_look_for_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy_driver, "_counted", lambda: pytest.fail("somebody asked for a GPU"))
    for options in ({}, {"providers": ["CPUExecutionProvider"]}):
        session = genai.InferenceSession(model().SerializeToString(), **options)
        np.testing.assert_array_equal(session.run(None, {"x": np.ones(2, np.float32)})[0], [-1, -1])


def test_a_session_that_asks_for_a_gpu_is_told_why_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", broken("stream"))
    providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    with pytest.warns(UserWarning, match="not in available provider names(.|\n)*busy or unavailable"):
        session = genai.InferenceSession(model().SerializeToString(), providers=providers)
    np.testing.assert_array_equal(session.run(None, {"x": np.ones(2, np.float32)})[0], [-1, -1])
    with pytest.raises(DeviceError, match="busy or unavailable"):
        genai.OrtValue.ortvalue_from_numpy(np.ones(2), "cuda", 0)


def test_auto_takes_the_first_gpu_that_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = fake_cupy(count=lambda: 3, capability=lambda index: 75 if index < 2 else 90)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert devices.open_executor("auto").name == "cuda" and CONTEXTS.opened == {2}
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(capability=lambda index: 75))
    with pytest.raises(NoDevice, match="GPU 0 has compute capability 75"):
        cupy_driver.open_any()


@pytest.mark.parametrize("which", ["compiler", "memory"])
def test_auto_takes_the_cpu_where_the_model_does_not_work_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
    logged: Logged,
    bundled_folder: Path,
    tmp_path: Path,
    which: str,
) -> None:
    def no_memory(*_: object) -> None:
        raise NVRTCError("NVRTC_ERROR_OUT_OF_MEMORY")

    monkeypatch.setenv("GENAI_CACHE_DIR", str(tmp_path))
    cupy = fake_cupy(memory=lambda: (1 << 20 if which == "memory" else 1 << 30, 1 << 31))
    if which == "compiler":
        cupy.cuda.nvrtc.createProgram = no_memory
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with pytest.raises(DeviceError if which == "compiler" else CacheCapacityError) as raised:
        genai.Model(bundled_folder, device="cuda", quiet=True)
    assert ("OUT_OF_MEMORY" if which == "compiler" else "is free on the device cuda") in str(raised.value)
    with genai.Model(bundled_folder, device="auto", quiet=True) as loaded:
        assert loaded.device_type == "CPU"
    assert not logged()
    with genai.Model(bundled_folder, device="auto") as loaded:
        assert loaded.device_type == "CPU"
    (message,) = [message for message in logged() if "on the CPU" in message]
    assert "computing on the CPU: the " in message


def test_a_cupy_that_is_broken_is_not_one_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CuPy's own text is a page around the cause."""
    text = """
try:
    raise ImportError("libnvrtc.so.13: no such file")
except ImportError as error:
    raise ImportError(f"=====\\nFailed to import CuPy.\\n\\nOriginal error:\\n  {error}\\n=====") from error
"""
    (tmp_path / "cupy.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    with pytest.raises(NoDevice, match=r"^CuPy cannot be imported: ImportError: libnvrtc.so.13: no such file$"):
        cupy_driver.open_driver()
    found = checkup.check_gpu(checkup.Machine(tmp_path))
    assert "libnvrtc.so.13" in found.text and "not installed" not in found.text


@pytest.mark.parametrize(
    ("ending", "said"), [("sys.exit(3)", ": 3"), ("sys.exit('no licence')", ": no licence"), ("raise SystemExit", "")]
)
def test_a_cupy_that_ends_the_process_is_one_that_is_broken(
    monkeypatch: pytest.MonkeyPatch,
    logged: Logged,
    tmp_path: Path,
    bundled_folder: Path,
    ending: str,
    said: str,
) -> None:
    """Whoever asked for no GPU, or for one where there is one, goes on."""
    (tmp_path / "cupy.py").write_text(f"import sys\n{ending}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    with pytest.raises(NoDevice) as found:
        cupy_driver.open_any()
    assert str(found.value) == f"CuPy cannot be imported: SystemExit{said}"
    with pytest.raises(DeviceError, match="CuPy cannot be imported: SystemExit"):
        genai.LLM(bundled_folder, device="cuda")
    assert not is_cuda_available() and "SystemExit" in checkup.check_gpu(checkup.Machine(tmp_path)).text
    with genai.LLM(bundled_folder, device="auto") as llm:
        assert llm.model.device_type == "CPU"
    assert "computing on the CPU: CuPy cannot be imported: SystemExit" in str(logged())


def test_a_cupy_that_raises_anything_is_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cupy.py").write_text("raise BaseException('x')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    with pytest.raises(NoDevice, match="CuPy cannot be imported: BaseException: x"):
        cupy_driver.open_any()


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("os._exit(3)", "status 3"),
        ("os.kill(os.getpid(), 11)", "signal 11"),
        ("time.sleep(99)", "no result in 2 seconds"),
    ],
)
def test_doctor_lives_where_importing_cupy_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ending: str, said: str
) -> None:
    (tmp_path / "cupy.py").write_text(f"import os, time\n{ending}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(checkup, "_IMPORT_SECONDS", 2)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    found = checkup.check_gpu(checkup.Machine(tmp_path))
    assert f"importing cupy fails with {said}" in found.text and "reinstall cupy" in found.fix


def test_a_key_that_is_pressed_while_cupy_is_imported_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cupy.py").write_text("raise KeyboardInterrupt\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    with pytest.raises(KeyboardInterrupt):
        cupy_driver.open_any()


def test_a_gpu_is_looked_for_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr("genai.convert.resolve.loadable", lambda *_, **__: pytest.fail("it was looked for"))
    with pytest.raises(DeviceError, match="CuPy is not installed") as raised:
        genai.LLM("somebody/something", device="cuda", pull=True)
    assert "pip install cupy-cuda13x" in raised.value.fix


def test_looking_for_a_gpu_opens_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands and classes look one after the other; names that there are not are somebody else's to refuse."""
    cupy, opened = fake_cupy(), []
    properties = cupy.cuda.runtime.getDeviceProperties
    cupy.cuda.runtime.getDeviceProperties = lambda index: opened.append(index) or properties(index)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    for device in ("cuda", "cuda:0", "cpu", "auto", "cuda:x", "cuda:" + "9" * 5000):
        devices.check_device(device)
    assert opened == [0]
    with pytest.raises(DeviceError, match="there is no GPU 1"):
        devices.check_device("cuda:1")


def test_a_gpu_keeps_its_number(monkeypatch: pytest.MonkeyPatch, bundled_folder: Path, tmp_path: Path) -> None:
    """In facts, in errors and in what the doctor recommends: GPUs of one kind are told apart by nothing else."""
    cupy = fake_cupy(count=lambda: 2, memory=lambda: (1 << 20, 1 << 31))
    cupy.__spec__ = "it is installed"
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    for device, named in (("cuda", "cuda"), ("cuda:0", "cuda"), ("cuda:1", "cuda:1")):
        assert describe(bundled_folder, device=device)["memory"]["device"] == named
        assert devices.open_executor(device).device == named
        with pytest.raises(CacheCapacityError, match=f"is free on the device {named}\n"):
            genai.Model(bundled_folder, device=device)
    assert cupy_driver.open_driver(1).name == "a made-up GPU (cuda:1)"
    assert checkup.check_gpu(checkup.Machine(tmp_path)).text.endswith("--device cuda")
    cupy.cuda.runtime.deviceGetAttribute = lambda what, index: ((9, 0) if index else (7, 5))[what - 75]
    assert describe(bundled_folder, device="auto", available_bytes=1 << 30)["memory"]["device"] == "cuda:1"
    assert checkup.check_gpu(checkup.Machine(tmp_path)).text.endswith("--device cuda:1")
    monkeypatch.setattr(cupy_driver, "OLDEST_CAPABILITY", 91)
    with pytest.raises(DeviceError, match="GPU 1 has compute"):
        describe(bundled_folder, device="cuda:1")


def folder_that_asks(bundled_folder: Path, tmp_path: Path, *providers: object) -> Path:
    """The bundled model as a folder of onnxruntime-genai for other devices."""
    folder = Path(shutil.copytree(bundled_folder, tmp_path / "asks"))
    config = json.loads((folder / "genai_config.json").read_text())
    config["model"]["decoder"]["session_options"] = {"log_id": "x", "provider_options": list(providers)}
    (folder / "genai_config.json").write_text(json.dumps(config))
    return folder


def loaded_on(source: object, **options: Any) -> str:
    """The device that a model computes on."""
    with genai.Model(source, quiet=True, context_size=64, cache_bytes=1 << 20, **options) as model:  # type: ignore[arg-type]
        return model.decoder.executor.device


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """GPUs that models are loaded on: the CPU plays them."""
    opened = list[str]()

    class Played(CpuExecutor):
        def __init__(self, device: str, threads: int | None) -> None:
            super().__init__(threads)
            self.device = device
            opened.append(device)

    monkeypatch.setattr(devices, "_open_gpu", Played)
    return opened


@pytest.mark.parametrize(
    ("providers", "device"),
    [
        (({"cuda": {}},), "cuda"),
        (({"CUDAExecutionProvider": {"enable_cuda_graph": "0", "device_id": "1"}},), "cuda:1"),
        (({"QNN": {}}, {"cuda": {"device_id": 2}}), "cuda:2"),
        (({"DML": {}},), "cpu"),
        ((["cuda"], "cuda", {"webgpu": None}), "cpu"),
    ],
)
def test_a_folder_s_own_provider_is_followed(
    opened: list[str], bundled_folder: Path, tmp_path: Path, providers: tuple[object, ...], device: str
) -> None:
    """Unless somebody says something else, as in onnxruntime-genai."""
    folder = folder_that_asks(bundled_folder, tmp_path, *providers)
    assert loaded_on(folder) == loaded_on(genai.Config(folder)) == device
    config = genai.Config(folder)
    assert "model.decoder.session_options.log_id" in config.ignored_keys or device == "cpu"
    assert loaded_on(folder, device="cpu") == loaded_on(config, device="cpu") == "cpu"
    assert loaded_on(folder, device="cuda:3") == "cuda:3"
    config.overlay('{"search": {"top_k": 1}}')
    assert loaded_on(config) == device
    config.clear_providers()
    config.overlay('{"search": {"top_k": 2}}')
    assert loaded_on(config) == "cpu"
    config.append_provider("cuda")
    config.set_provider_option("cuda", "device_id", "4")
    assert loaded_on(config) == "cuda:4" and loaded_on(config, device="cpu") == "cpu"
    assert describe(folder, device="cpu")["memory"]["device"] == "cpu"
    assert describe(folder)["memory"]["device"] == device
    assert loaded_on(bundled_folder) == "cpu"
    with pytest.raises(OptionError, match="threads = 100000"):
        loaded_on(folder, threads=100000)


@pytest.mark.parametrize(
    "number", ["abc", "-1", -1, None, [0], {"a": 0}, 0.5, True, "", " 0 ", "0x1", float("nan"), "9" * 5000]
)
def test_a_folder_s_gpu_has_a_number(bundled_folder: Path, tmp_path: Path, number: object) -> None:
    """A slip must not compute on another GPU."""
    folder = folder_that_asks(bundled_folder, tmp_path, {"DML": {"device_id": "x"}}, {"cuda": {"device_id": number}})
    with pytest.raises(ConfigError, match=r"device_id = .* of provider cuda in genai_config\.json") as raised:
        genai.Config(folder)
    assert "decimal digits" in raised.value.why and len(str(raised.value)) < 400


@pytest.mark.parametrize("options", ["0", 0, None, [1]])
def test_a_folder_s_gpu_has_options(bundled_folder: Path, tmp_path: Path, options: object) -> None:
    folder = folder_that_asks(bundled_folder, tmp_path, {"cuda": options})
    with pytest.raises(ConfigError, match="provider_options of cuda = "):
        genai.Model(folder)


def test_a_gpu_that_the_caller_names_is_no_folder_s(bundled_folder: Path, tmp_path: Path) -> None:
    config = genai.Config(folder_that_asks(bundled_folder, tmp_path, {"cuda": {"device_id": 0}}))
    config.set_provider_option("cuda", "device_id", "7")
    assert config.choose_device(None) == ChosenDevice("cuda:7")
    with pytest.raises(DeviceError, match="device = 'cuda:7' cannot be used"):
        genai.Model(config)


def test_a_cache_that_gpus_alone_have_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, bundled_folder: Path
) -> None:
    """Nobody is sent from one error to the next."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(OptionError, match="because there is no GPU") as raised:
        genai.LLM(bundled_folder, kv_dtype="bf16")
    assert "cuda" not in raised.value.fix
    with pytest.raises(OptionError, match="with device = 'cpu'") as raised:
        genai.LLM(bundled_folder, kv_dtype="bf16", device="cpu")
    assert 'device="cuda"' in raised.value.fix


def test_a_folder_that_asks_for_a_gpu_works_without_one(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    logged: Logged,
    bundled_folder: Path,
    tmp_path: Path,
) -> None:
    """As it always did; why, and what to do, is said once. Whoever asks for it themselves gets the error."""
    folder = folder_that_asks(bundled_folder, tmp_path, {"cuda": {}})
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert describe(folder)["memory"]["device"] == "cpu"
    monkeypatch.setattr(devices, "_told", set())
    logged()
    assert run(["chat", str(folder), "-p", "What is 12 + 7?", "--temperature", "0", "-q"]) == 0
    with genai.Model(folder, quiet=True) as loaded:
        assert loaded.device_type == "CPU"
    shown = capsys.readouterr()
    assert shown.out == "19\n" and not shown.err and not logged()
    assert run(["chat", str(folder), "-p", "What is 12 + 7?", "--temperature", "0"]) == 0
    with genai.LLM(folder) as llm:
        assert llm.chat([{"role": "user", "content": "What is 12 + 7?"}], temperature=0).text == "19"
    shown = capsys.readouterr()
    lines = [line for line in shown.err.splitlines() if "on the CPU" in line]
    assert [f"genai: {message}" for message in logged() if "on the CPU" in message] == lines
    assert shown.out == "19\n" and len(lines) == 1
    why, _, fix = lines[0].partition(f". {folder / 'genai_config.json'} requests cuda: ")
    assert why == "genai: computing on the CPU: CuPy is not installed"
    assert "pip install cupy-cuda13x" in fix and "genai doctor" in fix and "--device cpu" in fix
    monkeypatch.setattr(devices, "_told", set())
    assert loaded_on(folder, device="cpu") == "cpu" and not logged()
    config = genai.Config(folder)
    config.append_provider("cuda")
    for source, options in ((folder, {"device": "cuda"}), (config, {})):
        with pytest.raises(DeviceError, match="CuPy is not installed"):
            loaded_on(source, **options)


def test_a_folder_that_asks_for_a_gpu_with_too_little_memory(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    logged: Logged,
    bundled_folder: Path,
    tmp_path: Path,
) -> None:
    folder = folder_that_asks(bundled_folder, tmp_path, {"cuda": {}})
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(memory=lambda: (1 << 20, 1 << 31)))
    with genai.Model(folder) as loaded:
        assert loaded.device_type == "CPU"
    (message,) = [message for message in logged() if "on the CPU" in message]
    assert "is free on the device cuda" in message and "genai_config.json requests cuda" in message
    monkeypatch.setattr(devices, "_told", set())
    assert run(["info", str(folder), "--json"]) == 0
    shown = capsys.readouterr()
    memory = json.loads(shown.out)["memory"]
    assert memory["device"] == "cpu" and memory["fits"] and shown.err == f"genai: {message}\n"
    monkeypatch.setattr(devices, "_told", set())
    assert describe(bundled_folder, device="auto")["memory"]["device"] == "cpu"
    assert "is free on the device cuda" in str(logged())
    for options in ({"device": "cuda"}, {"available_bytes": 1 << 20}):  # facts of that GPU, which was asked about
        memory = describe(folder, **options)["memory"]
        assert memory["device"] == "cuda" and not memory["fits"]


def full(*_: object, **__: object) -> Any:
    raise MemoryError("out of device memory: 12 GiB were asked for")


def test_benchmarks_say_where_they_measure(
    monkeypatch: pytest.MonkeyPatch, opened: list[str], bundled_folder: Path, tmp_path: Path
) -> None:
    """Threads are the CPU's, whatever the folder asks for; the others take --device."""
    folder = str(folder_that_asks(bundled_folder, tmp_path, {"cuda": {}}))
    assert run(["bench", "threads", folder, "-t", "1", "-c", "8", "-n", "2", "-r", "1"]) == 0
    assert run(["bench", "kernels", folder, "-m", "1", "-c", "8", "-r", "1", "--device", "cpu"]) == 0
    assert not opened
    asked = list[str]()

    def started(folder: Path, tokens: int, threads: int, device: str, cold: bool) -> list[float]:
        asked.append(device)
        return [0.1, 0.2, 0.3, 0.0]

    monkeypatch.setattr(speed, "_run", started)
    for given in ([], ["--device", "cpu"]):
        assert run(["bench", "startup", folder, "-r", "1", "--no-commands", *given]) == 0
    assert asked == ["", "", "cpu", "cpu"]
    monkeypatch.setitem(sys.modules, "cupy", None)
    for command in ("startup", "kernels"):
        assert run(["bench", command, "nobody/has-this", "--device", "cuda"]) == 1
        assert run(["bench", command, "--device", "tpu"]) == 2
    assert run(["bench", "kernels", "--formats", "--device", "cuda"]) == 2


def test_drafts_are_where_the_model_is(
    monkeypatch: pytest.MonkeyPatch, opened: list[str], bundled_folder: Path, tmp_path: Path
) -> None:
    """Unless the caller says where both are."""
    asking = folder_that_asks(bundled_folder, tmp_path, {"cuda": {"device_id": 1}})
    config = genai.Config(bundled_folder)
    config.append_provider("cpu")
    found = list[str]()
    for target, draft in ((asking, bundled_folder), (bundled_folder, asking), (genai.Model(config), asking)):
        with genai.LLM(target, speculation=genai.Speculation(draft=draft)) as llm:
            made = llm._speculation._draft  # type: ignore[union-attr]
            assert made is not None
            assert made.decoder.executor.device == llm.model.decoder.executor.device
            found.append(llm.model.decoder.executor.device)
    assert found == ["cuda:1", "cpu", "cpu"] and opened == ["cuda:1", "cuda:1"]
    monkeypatch.setattr("genai.bench.speculation.bench_speculation", lambda *_, **__: iter(()))
    assert run(["bench", "speculation", str(bundled_folder), "--draft", str(asking), "-r", "1"]) == 0
    assert opened == ["cuda:1", "cuda:1"]


@pytest.mark.parametrize("where", ["compile", "allocate"])
def test_a_gpu_that_is_full_while_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
    logged: Logged,
    opened: list[str],
    bundled_folder: Path,
    tmp_path: Path,
    where: str,
) -> None:
    """The CPU takes over where it serves as well; whoever asks for that GPU is told which one is full."""
    folder = folder_that_asks(bundled_folder, tmp_path, {"cuda": {"device_id": 1}})
    monkeypatch.setattr(devices._open_gpu, "name", "cuda", raising=False)
    own = getattr(CpuExecutor, where)
    monkeypatch.setattr(CpuExecutor, where, lambda self, *given: (own if self.device == "cpu" else full)(self, *given))
    with pytest.raises(CacheCapacityError, match=r"on the device 'cuda'(.|\n)*12 GiB were asked for"):
        genai.Model(bundled_folder, device="cuda", quiet=True)
    for source, options in ((folder, {}), (bundled_folder, {"device": "auto"})):
        monkeypatch.setattr(devices, "_told", set())
        opened.clear()
        with genai.Model(source, **options) as loaded:  # type: ignore[arg-type]
            assert loaded.decoder.executor.device == "cpu" and len(opened) == 1
        assert "on the CPU: the model needs more memory than is available" in str(logged())


def test_a_host_that_is_full_is_no_device_s_fault(monkeypatch: pytest.MonkeyPatch, bundled_folder: Path) -> None:
    monkeypatch.setattr(CpuExecutor, "compile", full)
    for device in ("cpu", "auto", None):
        monkeypatch.setitem(sys.modules, "cupy", None)
        with pytest.raises(CacheCapacityError, match=r"pebble: the model needs more memory than is available\n"):
            genai.Model(bundled_folder, device=device, quiet=True)


def test_types_of_keys_that_gpus_alone_have(
    monkeypatch: pytest.MonkeyPatch, bundled_folder: Path, tmp_path: Path
) -> None:
    """Nobody is told of a device that they did not name."""
    folder = folder_that_asks(bundled_folder, tmp_path, {"cuda": {}})
    for name in ("bf16", "fp8"):
        check_model_options(kv_dtype=name)
        for call in (genai.Model, describe):
            with pytest.raises(OptionError, match=r"because no GPU was requested(.|\n)*--device cuda"):
                call(bundled_folder, kv_dtype=name)  # type: ignore[operator]
            monkeypatch.setitem(sys.modules, "cupy", None)
            with pytest.raises(OptionError, match=r"because .*genai_config.json requests cuda, and there is no GPU"):
                call(folder, kv_dtype=name)  # type: ignore[operator]
            monkeypatch.setitem(sys.modules, "cupy", fake_cupy())
            assert describe(folder, kv_dtype=name)["kv_dtype"] == name
        with pytest.raises(OptionError, match="with device = 'cpu'"):
            genai.Model(folder, kv_dtype=name, device="cpu")


def test_types_of_keys_reach_the_gpu_that_a_folder_asks_for(
    monkeypatch: pytest.MonkeyPatch, opened: list[str], bundled_folder: Path, tmp_path: Path
) -> None:
    """The CPU, which has no kernels for them, does not take over there."""
    folder = folder_that_asks(bundled_folder, tmp_path, {"cuda": {"device_id": 2}})
    asked = list[tuple[str, str]]()

    def load(executor: Any, config: object, *, kv_dtype: str, **_: object) -> Any:
        asked.append((executor.device, kv_dtype))
        raise CacheCapacityError("it is full", "as this test says", "none")

    monkeypatch.setattr(devices._open_gpu, "name", "cuda", raising=False)
    monkeypatch.setattr(kv_types, "first_gpu", lambda: "cuda")
    monkeypatch.setattr(loading, "_load_on", load)
    for call in (genai.Model, genai.LLM):
        with pytest.raises(CacheCapacityError, match="it is full"):
            call(folder, kv_dtype="fp8")  # type: ignore[operator]
    assert run(["generate", str(folder), "-p", "x", "--kv-type", "bf16"]) == 1
    assert asked == [("cuda:2", "fp8"), ("cuda:2", "fp8"), ("cuda:2", "bf16")] and set(opened) == {"cuda:2"}
