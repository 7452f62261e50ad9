"""`genai doctor` in real processes: broken home folders, limited locales, small containers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

GENAI = [sys.executable, "-m", "genai"]
NAMES = [
    "versions",
    "processor",
    "features",
    "kernels",
    "memory",
    "bandwidth",
    "gpu",
    "cache",
    "bundled model",
    "terminal",
]
# The program prints a report on a simulated machine, whose root is the argument.
ON_A_ROOT = (
    "import sys; from pathlib import Path; from genai.cli.doctor import report; "
    "from genai.doctor.checkup import Machine; "
    "sys.exit(report(Machine(root=Path(sys.argv[1]), threads=1), as_json=True))"
)


def run(
    *command: str, changes: dict[str, str | None] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **{name: value for name, value in (changes or {}).items() if value is not None}}
    for name in (name for name, value in (changes or {}).items() if value is None):
        environment.pop(name, None)
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=120, env=environment, cwd=cwd
    )


def doctor(*arguments: str, **changes: str | None) -> subprocess.CompletedProcess[str]:
    return run(*GENAI, "doctor", *arguments, changes=changes)


def findings(result: subprocess.CompletedProcess[str]) -> dict[str, dict[str, object]]:
    assert "Traceback" not in result.stderr, result.stderr
    return {finding["name"]: finding for finding in json.loads(result.stdout)["findings"]}


def test_compiling_ahead(tmp_path: Path) -> None:
    code = (
        "import sys; from genai.kernels.cpu import warmup; from genai.cli.app import run; all_ = warmup.all_kernels; "
        "warmup.all_kernels = lambda: [one for one in all_() if one.name in ('serve', 'unary_abs')]; "
        "sys.exit(run(['doctor', '--compile', *sys.argv[1:]]))"
    )
    first = run(sys.executable, "-c", code, changes={"GENAI_CACHE_DIR": str(tmp_path)})
    assert (first.returncode, first.stderr) == (0, "Compiling 2 CPU kernels (once per kernel) ...\n")
    assert first.stdout.startswith("compiled 2 kernels in ") and first.stdout.endswith("; 0 were already cached\n")
    again = run(sys.executable, "-c", code, "--json", changes={"GENAI_CACHE_DIR": str(tmp_path)})
    assert json.loads(again.stdout)["loaded"] == 2


def test_text() -> None:
    result = doctor()
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    heads = [line for line in lines if line.startswith(("ok", "note", "problem"))]
    assert len(heads) == len(NAMES)
    column = heads[0].index("versions")
    assert [line[column:].split("  ")[0] for line in heads] == NAMES
    assert lines[-1].startswith("usable: 0 problems, ")
    assert max(map(len, lines)) <= 120 or any(len(word) > 90 for word in result.stdout.split())
    assert "\x1b" not in result.stdout


def test_json() -> None:
    result = doctor("--json")
    report = json.loads(result.stdout)
    assert report["usable"] is True
    assert [finding["name"] for finding in report["findings"]] == NAMES
    assert all(finding["mark"] in ("ok", "note") for finding in report["findings"])
    facts = findings(result)
    assert facts["bandwidth"]["facts"]["bytes_per_second"] > 1e8
    assert facts["memory"]["facts"]["available_bytes"] > 0
    assert facts["kernels"]["facts"]["vector_bits"] in (128, 256, 512)


def test_a_home_that_cannot_be_written_and_a_poor_locale(tmp_path: Path) -> None:
    blocked = tmp_path / "caf\u00e9"
    blocked.write_text("")
    poor = {
        "HOME": str(blocked),
        "XDG_CACHE_HOME": None,
        "GENAI_CACHE_DIR": None,
        "LANG": "C",
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
    }
    text = doctor(**poor)
    assert text.returncode == 0, text.stderr
    assert text.stdout.isascii()
    assert "caf" in text.stdout
    found = findings(doctor("--json", **poor))
    assert found["cache"]["mark"] == "note"
    assert "is not a folder" in found["cache"]["text"]
    assert "GENAI_CACHE_DIR" in found["cache"]["fix"]
    assert found["terminal"]["mark"] == "note"
    assert "PYTHONUTF8" in found["terminal"]["fix"]


def test_a_tiny_container(tmp_path: Path) -> None:
    for name, text in {
        "proc/meminfo": "MemTotal: 16000000 kB\nMemAvailable: 9000000 kB\n",
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{64 * 2**20}\n",
        "sys/fs/cgroup/memory.current": f"{32 * 2**20}\n",
        "sys/fs/cgroup/cpu.max": "25000 100000\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    result = run(sys.executable, "-c", ON_A_ROOT, str(tmp_path))
    assert result.returncode == 1
    assert json.loads(result.stdout)["usable"] is False
    found = findings(result)
    assert found["memory"]["mark"] == "problem"
    assert found["memory"]["facts"]["available_bytes"] == 32 * 2**20
    assert "control group" in found["memory"]["fix"]
    assert found["processor"]["facts"]["quota"] == 0.25
    assert found["bandwidth"]["facts"]["buffer_bytes"] == 4 * 2**20


def test_without_proc_and_sys(tmp_path: Path) -> None:
    result = run(sys.executable, "-c", ON_A_ROOT, str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    assert list(findings(result)) == NAMES


def test_a_compiler_that_is_switched_off() -> None:
    result = doctor("--json", NUMBA_DISABLE_JIT="1")
    assert result.returncode == 1
    assert findings(result)["kernels"]["fix"] == "unset NUMBA_DISABLE_JIT"


@pytest.mark.parametrize("package", ["numba", "numpy", "onnx"])
def test_a_package_that_cannot_be_imported(package: str, tmp_path: Path) -> None:
    """The broken package is named, and the doctor continues."""
    (tmp_path / f"{package}.py").write_text("raise ImportError('broken on purpose')")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
        "from genai.cli.doctor import report; sys.exit(report(as_json=True))"
    )
    result = run(sys.executable, "-c", code)
    # Extension modules may themselves print the error to stderr, but the report is complete.
    found = {finding["name"]: finding for finding in json.loads(result.stdout)["findings"]}
    assert list(found) == NAMES
    assert result.returncode == 1
    assert found["versions"]["mark"] == "problem"
    assert f"{package} (ImportError: broken on purpose)" in str(found["versions"]["text"])
    assert found["versions"]["fix"].startswith("pip install --force-reinstall ")


def test_cleaning_the_cache(tmp_path: Path) -> None:
    kernels = tmp_path / "genai" / "kernels"
    (kernels / ("f" * 32)).mkdir(parents=True)
    (kernels / ("f" * 32) / "x.o").write_bytes(bytes(4096))
    (kernels / "mine").mkdir()
    changes = {"GENAI_CACHE_DIR": str(tmp_path)}
    assert "--clean-cache" in str(findings(doctor("--json", **changes))["cache"]["fix"])
    result = doctor("--clean-cache", **changes)
    assert (result.returncode, result.stdout) == (0, f"removed {kernels / ('f' * 32)} (4.1 kB)\n")
    left = {path.name for path in kernels.iterdir()}  # kernels of this version may be among them
    assert "mine" in left and "f" * 32 not in left
    assert doctor("--clean-cache", **changes).stdout.startswith("nothing to remove")
    assert json.loads(doctor("--clean-cache", "--json", **changes).stdout) == {"removed": [], "kept": []}


def test_a_reader_that_goes_away() -> None:
    with subprocess.Popen([*GENAI, "doctor"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 0


def test_help() -> None:
    result = doctor("--help")
    assert result.returncode == 0
    assert "--clean-cache" in result.stdout


def test_unknown_options() -> None:
    assert doctor("--clean").returncode == 2
    assert doctor("extra").returncode == 2
