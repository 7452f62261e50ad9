"""docs/reference/operators.md and the indexes of files match the registries."""

from __future__ import annotations

from pathlib import Path

import pytest

from genai.onnx.node import MS, OURS
from genai.ops import registry
from tools import operator_index
from tools.contrib_operators import NO_CPU_KERNEL, NO_WRITER, NOT_REGISTERED, UNSUPPORTED
from tools.operator_table import DOMAINS, PAGE, page, rows


@pytest.mark.parametrize("package", operator_index.PACKAGES)
def test_the_index_is_up_to_date(package: str) -> None:
    path = operator_index.ROOT / "genai" / package / "index.py"
    assert path.read_text(encoding="utf-8") == operator_index.source(package), "run: python -m tools.operator_index"


def test_the_page_is_up_to_date():
    # An operator that a test registered is not of the source "ours", so it does not appear.
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tools.operator_table"


def test_every_domain_is_on_the_page():
    """Except the domain of the operators that only this package writes."""
    found = {entry.domain for entry in registry.entries() if entry.source == "ours"}
    missing = found - {*DOMAINS, OURS}
    assert not missing, f"tools/operator_table.py: DOMAINS has no {sorted(missing)}"


def test_every_standard_operator_can_run():
    missing = [name for domain in ("", "ai.onnx.ml") for name, source, _ in rows(domain) if source == "none"]
    assert not missing


def supported() -> set[str]:
    return {entry.op_type for entry in registry.entries() if entry.domain == MS and entry.source == "ours"}


def test_no_operator_with_a_kernel_has_a_reason_for_its_absence():
    assert not supported() & UNSUPPORTED.keys(), "tools/contrib_operators.py: remove these names"


@pytest.mark.oracle
def test_every_operator_of_onnxruntime_has_a_kernel_or_a_reason():
    state = pytest.importorskip("onnxruntime.capi.onnxruntime_pybind11_state")
    registered = {schema.name for schema in state.get_all_operator_schema() if schema.domain == MS}
    missing = registered - supported() - UNSUPPORTED.keys()
    assert not missing, "tools/contrib_operators.py: UNSUPPORTED lacks these names"
    assert not NOT_REGISTERED & registered
    kernels = {
        kernel.op_name
        for kernel in state.get_all_opkernel_def()
        if kernel.domain == MS and kernel.provider == "CPUExecutionProvider"
    }
    without = {name for name, reason in UNSUPPORTED.items() if reason == NO_CPU_KERNEL}
    assert not without & kernels, "tools/contrib_operators.py: onnxruntime has CPU kernels for these operators"
    assert (registered - kernels - supported()) <= without


@pytest.mark.oracle
def test_no_tool_of_onnxruntime_writes_the_operators_without_a_writer():
    package = Path(pytest.importorskip("onnxruntime").__file__).parent
    files = [path for folder in ("quantization", "transformers") for path in (package / folder).rglob("*.py")]
    sources = "".join(path.read_text(encoding="utf-8") for path in files)
    written = [name for name, reason in UNSUPPORTED.items() if reason == NO_WRITER and f'"{name}"' in sources]
    assert files
    assert not written
