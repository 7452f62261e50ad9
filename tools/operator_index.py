"""Writes which file knows which operator: genai/ops/index.py and genai/lowering/index.py.

Loading a model imports the files of its operators alone, so where they are must be known before anything is imported.
`python -m tools.operator_index [--check]`; `tests/ops/test_operator_table.py` says when to run it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Package -> what its files register operators with, by module and function; and the index's docstring.
PACKAGES = {
    "ops": (
        {"registry": ("register",), "shape_rules": ("shape_rule",)},
        "Which file of this folder has the kernels and shape rules of an operator.",
    ),
    "lowering": (
        {"rules": ("row_rule", "lowering_rule", "stored_weights")},
        "Which file of this folder has the rules of an operator.",
    ),
}
# Runs in a process that has imported nothing of these packages: notes which file calls what registers operators.
_PROGRAM = """
import importlib, json, pkgutil, sys
package, registering = sys.argv[1], json.loads(sys.argv[2])
found = {}

def noting(register):
    def note(*op_types, **options):
        frame = sys._getframe(1)
        while frame.f_globals["__name__"].rpartition(".")[2] in registering:
            frame = frame.f_back
        name = frame.f_globals["__name__"].rpartition(".")[2]
        for op_type in op_types:
            if isinstance(op_type, str):
                domains = [options["domain"]] if "domain" in options else defaults
                found.setdefault(name, {}).setdefault(domains[0], set()).add(op_type)
        return register(*op_types, **options)
    return note

for module, functions in registering.items():
    loaded = importlib.import_module(f"genai.{package}.{module}")
    for function in functions:
        register = getattr(loaded, function)
        defaults = ["com.microsoft" if function == "shape_rule" else ""]
        scope = {"sys": sys, "registering": registering, "found": found, "defaults": defaults}
        setattr(loaded, function, noting.__class__(noting.__code__, scope)(register))
folder = importlib.import_module(f"genai.{package}").__path__
for module in pkgutil.iter_modules(folder):
    importlib.import_module(f"genai.{package}.{module.name}")
print(json.dumps({name: {key: sorted(ops) for key, ops in domains.items()} for name, domains in found.items()}))
"""


def found(package: str) -> dict[str, dict[str, list[str]]]:
    """By file and domain, the operators that the files of a package register."""
    registering, _ = PACKAGES[package]
    command = [sys.executable, "-c", _PROGRAM, package, json.dumps(registering)]
    result: dict[str, dict[str, list[str]]] = json.loads(
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    )
    return result


def source(package: str) -> str:
    """The text of a package's index."""
    lines = [f'"""{PACKAGES[package][1]}', "", "Written by `python -m tools.operator_index`.", '"""', ""]
    lines += ["from __future__ import annotations", "", "OPERATORS: dict[str, dict[str, str]] = {"]
    for name, domains in sorted(found(package).items()):
        lines.append(f'    "{name}": {{')
        for domain, operators in sorted(domains.items()):
            parts = textwrap.wrap(" ".join(operators), width=100)
            if len(parts) == 1:
                lines.append(f'        "{domain}": "{parts[0]}",')
                continue
            lines.append(f'        "{domain}": (')
            lines += [f'            "{part} "' for part in parts[:-1]] + [f'            "{parts[-1]}"', "        ),"]
        lines.append("    },")
    return "\n".join([*lines, "}", '"""By file and domain, the names of operators."""', ""])


def main() -> None:
    """Write the indexes, or with --check compare them."""
    for package in PACKAGES:
        path = ROOT / "genai" / package / "index.py"
        if "--check" in sys.argv:
            if path.read_text(encoding="utf-8") != source(package):
                sys.exit(f"{path} is not up to date")
        else:
            path.write_text(source(package), encoding="utf-8")


if __name__ == "__main__":
    main()
