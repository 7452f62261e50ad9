"""What the host reads from kernels: structs, and one text that makes them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from genai.kernels.cuda.driver import CudaError
from genai.kernels.cuda.launches import bind
from genai.kernels.cuda.lowering import apply_kernel
from genai.kernels.cuda.sources import CudaKernel, source_of, structs, text_of
from genai.kernels.cuda.warmup import all_kernels

from .host_driver import HostDriver

NORM = CudaKernel("norm.cu", "norm<true>", "NormArguments", 256)


def test_a_struct_is_read_as_the_compiler_lays_it_out() -> None:
    layout = structs("gemv.cu")["ProductArguments"]
    fields = layout.fields
    assert fields is not None
    assert (fields["matrix"][0].itemsize, fields["x"][1], fields["addend_stride"][1], layout.itemsize) == (
        176,
        176,
        216,
        248,
    )
    assert NORM.is_pointer["x"] and not NORM.is_pointer["width"]


def test_every_kernel_has_a_name_of_its_own_and_a_struct() -> None:
    kernels = all_kernels()
    assert len({kernel.name for kernel in kernels}) == len(kernels) > 100
    assert all(kernel.layout.itemsize % 8 == 0 for kernel in kernels)


def test_a_file_stands_in_a_module_once() -> None:
    source = source_of([NORM, replace(NORM, function="norm<false>"), NORM])
    assert source.count("struct NormArguments {") == source.count("struct half_bits {") == 1
    assert source.count("KERNEL(norm_norm_") == 2 and "#include" not in source


def test_kernels_include_no_header_of_the_toolkit() -> None:
    for file in {kernel.file for kernel in all_kernels()}:
        assert "#include <" not in text_of(file)


def test_every_field_is_given() -> None:
    kernel = apply_kernel("silu")
    with pytest.raises(TypeError, match="missing or unknown: up, wide"):
        given = {name: 0 for name in kernel.is_pointer if name != "up"}
        bind(kernel, wide=1, **given)
    arguments = bind(kernel, **dict.fromkeys(kernel.is_pointer, 7))
    assert arguments["p"].tolist() == [7.0] * 3 and arguments.dtype == kernel.layout


def test_a_struct_of_another_size_does_not_compile(driver: HostDriver) -> None:
    class Larger(CudaKernel):
        @property
        def layout(self) -> np.dtype[np.void]:
            return np.dtype([("bytes", "u8", 99)])

    with pytest.raises(CudaError, match="the host lays out NormArguments otherwise"):
        driver.load([Larger(NORM.file, NORM.function, NORM.arguments, NORM.threads)])
