"""The wheel contains every package and data file; importing the package is quick and prints nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest

import genai

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("genai", "cli", "configs", "kernels", "kvcache", "quant")


def installed_name(path: Path) -> str:
    """Return the installed path of a file in the checkout."""
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


@dataclass(frozen=True)
class Built:
    """The parts of a release, built only from the tracked files."""

    tracked: list[str]
    sdist: Path
    wheel: Path
    wheel_of_checkout: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build as CONTRIBUTING.md says (`python -m build` makes the wheel from the sdist), and build a wheel directly."""
    folder = tmp_path_factory.mktemp("built")
    source, release, direct = folder / "source", folder / "release", folder / "direct"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    tracked = [name for name in listed if not (ROOT / name).is_symlink()]
    for name in tracked:
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    subprocess.run([sys.executable, "-m", "build", "-o", str(release), str(source)], check=True, cwd=folder)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(direct), str(source)]
    subprocess.run(pip, check=True, cwd=folder)
    (sdist,), (wheel,), (other,) = release.glob("*.tar.gz"), release.glob("*.whl"), direct.glob("*.whl")
    return Built(tracked, sdist, wheel, other)


def contents(wheel: Path) -> dict[str, int]:
    """Return the names of files in a wheel, with checksums."""
    return {one.filename: one.CRC for one in zipfile.ZipFile(wheel).infolist()}


@pytest.mark.slow
def test_wheel_holds_every_file_and_no_other(built: Built) -> None:
    inside = contents(built.wheel)
    expected = {installed_name(ROOT / name) for name in built.tracked if name.split("/")[0] in ROOMS}
    assert {"genai/py.typed", "genai/__init__.pyi", "genai/configs/models/pebble/model.onnx.data"} <= expected
    information = {name for name in inside if name.startswith(f"onnx_genai_toolkit-{genai.__version__}.dist-info/")}
    assert set(inside) - information == expected
    assert inside == contents(built.wheel_of_checkout)
    assert built.wheel.name == built.wheel_of_checkout.name


@pytest.mark.slow
def test_wheel_works_in_an_empty_environment(built: Built, tmp_path: Path) -> None:
    """Only the wheel and its requirements are available: no checkout, no cache, and no user settings."""
    home, place = tmp_path / "home", tmp_path / "venv"
    home.mkdir()
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    bin_ = place / ("Scripts" if sys.platform == "win32" else "bin")
    subprocess.run([bin_ / "python", "-m", "pip", "install", "-q", str(built.wheel)], check=True, cwd=home)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GENAI_", "XDG_", "PYTHON"))}
    environment = {**kept, "HOME": str(home)}

    def output(program: str, *arguments: str) -> str:
        command = [bin_ / program, *arguments]
        done = subprocess.run(
            command, cwd=home, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert output("genai", "chat", "-p", "What is 12 + 7?") == "19\n"
    assert "fits with the full 1024 tokens" in output("genai", "info")
    assert output("genai", "--version") == f"genai {genai.__version__}\n"
    where = output("python", "-c", "import genai; genai.LLM; print(genai.__file__)")
    assert Path(where.strip()).is_relative_to(place)


def test_version_is_said_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"] and project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "genai.__version__"}
    assert version("onnx-genai-toolkit") == genai.__version__
    assert f"\n## {genai.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_import_is_quiet_and_lazy() -> None:
    code = (
        "import sys, genai; "
        "heavy = {'numpy', 'onnx', 'numba', 'tokenizers', 'typer', 'jinja2'} & set(sys.modules); "
        "assert not heavy, heavy; assert 'LLM' in dir(genai); assert genai.Generator.__name__ == 'Generator'"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd="/")


def test_module_runs_as_the_command_line() -> None:
    result = subprocess.run([sys.executable, "-m", "genai", "--version"], capture_output=True, text=True, check=True)
    assert result.stdout == f"genai {genai.__version__}\n"


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        genai.nothing  # noqa: B018


def test_no_message_or_page_names_a_package_of_ours_on_pypi() -> None:
    """The project is not on PyPI, so that anybody could register its name there."""
    advice = "pip install 'onnx-genai-" + "toolkit"
    paths = [path for folder in ("genai", "cli", "kernels", "docs") for path in (ROOT / folder).rglob("*.[pm][yd]")]
    assert len(paths) > 500
    assert [path for path in [*paths, ROOT / "README.md"] if advice in path.read_text(encoding="utf-8")] == []
