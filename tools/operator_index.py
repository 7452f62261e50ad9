"""Write the indexes genai/ops/index.py and genai/lowering/index.py, which map files to their operators.

Loading a model imports only the files of the model's operators, so the index must say where each operator is, without
importing any file. Run `python -m tools.operator_index [--check]` when `tests/ops/test_operator_table.py` fails.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Package -> the functions that register operators, by module; and the first line of the index's docstring.
PACKAGES = {
    "ops": (
        {"registry": ("register",), "shape_rules": ("shape_rule",)},
        "The file of this folder that contains an operator's kernels and shape rules.",
    ),
    "lowering": (
        {"rules": ("row_rule", "lowering_rule", "stored_weights")},
        "The file of this folder that contains an operator's rules.",
    ),
}
# A program for a process that has not imported these packages; it records which file registers which operators.
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
    """Return the operators that a package's files register, by file and domain."""
    registering, _ = PACKAGES[package]
    command = [sys.executable, "-c", _PROGRAM, package, json.dumps(registering)]
    result: dict[str, dict[str, list[str]]] = json.loads(
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    )
    return result


def source(package: str) -> str:
    """Return the text of a package's index."""
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
    return "\n".join([*lines, "}", '"""The names of operators by file and domain."""', ""])


def main() -> None:
    """Write the indexes; with --check, compare them with the code instead."""
    for package in PACKAGES:
        path = ROOT / "genai" / package / "index.py"
        if "--check" in sys.argv:
            if path.read_text(encoding="utf-8") != source(package):
                sys.exit(f"{path} is outdated: run `python -m tools.operator_index`")
        else:
            path.write_text(source(package), encoding="utf-8")


if __name__ == "__main__":
    main()
