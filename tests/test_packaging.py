"""The wheel holds every package and data file, and importing is quick and quiet."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("genai", "cli", "configs", "kernels", "kvcache", "quant")


def installed_name(path: Path) -> str:
    """Where a file of the checkout lies once installed."""
    relative = path.relative_to(ROOT).as_posix()
    return relative if relative.startswith("genai/") else f"genai/{relative}"


def room_files() -> list[Path]:
    return [
        path
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    ]


def test_every_package_is_listed() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {
        str(Path(installed_name(path)).parent).replace("/", ".") for path in room_files() if path.name == "__init__.py"
    }
    assert listed == found


@pytest.mark.slow
def test_wheel_holds_every_file(tmp_path: Path) -> None:
    source = tmp_path / "source"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    for name in tracked:
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(tmp_path), str(source)]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    expected = {installed_name(ROOT / name) for name in tracked if name.split("/")[0] in ROOMS}
    assert expected <= inside, sorted(expected - inside)
    stray = {name for name in inside if not name.startswith(("genai/", "onnx_genai_toolkit-"))}
    assert not stray


def test_import_is_quiet_and_lazy() -> None:
    code = (
        "import sys, genai; "
        "heavy = {'numpy', 'onnx', 'numba', 'tokenizers', 'typer', 'jinja2'} & set(sys.modules); "
        "assert not heavy, heavy; assert 'Generator' in dir(genai); assert genai.Generator.__name__ == 'Generator'"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd="/")


def test_module_runs_as_the_command_line() -> None:
    result = subprocess.run([sys.executable, "-m", "genai", "--version"], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("genai ")


def test_unknown_name_is_an_attribute_error() -> None:
    import genai

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        genai.nothing  # noqa: B018
