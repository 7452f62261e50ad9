"""Environments in which the libraries below the package cannot be loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

import genai
from genai.common.start import out_of_memory
from genai.errors import CacheCapacityError

SUB_INTERPRETER = """
try:
    import _xxsubinterpreters as interpreters
except ImportError:
    import _interpreters as interpreters
other = interpreters.create()
interpreters.run_string(other, '''
import genai
try:
    genai.LLM
except RuntimeError as error:
    print(type(error).__name__, error, flush=True)
''')
"""


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="the module that creates sub-interpreters has another API")
def test_a_sub_interpreter_is_refused() -> None:
    done = subprocess.run([sys.executable, "-c", SUB_INTERPRETER], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("StateError genai was imported in a sub-interpreter"), done.stderr
    assert "why:" in done.stdout and "fix:" in done.stdout


def llvmlite_error(reason: str) -> OSError:
    """Return the error that llvmlite raises if its library cannot be loaded, whatever the reason."""
    try:
        try:
            raise OSError(reason)
        except OSError:
            raise OSError("Could not find/load shared object file 'libllvmlite.so'")  # noqa: B904
    except OSError as error:
        return error


def test_memory_is_named_as_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = "libllvmlite.so: failed to map segment from shared object"
    for error in (llvmlite_error(mapped), ImportError(mapped), MemoryError(), OSError(12, "Cannot allocate memory")):
        found = out_of_memory(error)
        assert isinstance(found, CacheCapacityError) and found.why and "ulimit -v" in found.fix
    for error in (llvmlite_error("no such file"), ImportError("no module named x")):
        assert out_of_memory(error) is None

    def load(name: str) -> None:
        raise llvmlite_error(mapped)

    monkeypatch.setattr(genai, "import_module", load)
    monkeypatch.delitem(vars(genai), "Speculation", raising=False)
    with pytest.raises(CacheCapacityError, match="not enough memory to load"):
        _ = genai.Speculation
