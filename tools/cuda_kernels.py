"""Report the resources and the minimum time of every CUDA kernel: `python -m tools.cuda_kernels`.

Compile with NVRTC, which needs no GPU (`pip install -e '.[cuda-ci]'`), and write docs/reference/cuda-kernels.md. The
page lists the registers, shared memory, spills and occupancy of each kernel. It also lists the bytes, operations and
minimum time on an H200 that are calculated for one launch at the sizes of Llama 3.1 8B.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from genai.kernels.cuda.sources import CudaKernel, modules
from genai.kernels.cuda.warmup import all_kernels

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "cuda-kernels.md"
ARCHITECTURE = "sm_90a"
_USE = re.compile(r"entry function '(\w+)'.*?(\d+) bytes stack frame.*?Used (\d+) registers([^\n]*)", re.DOTALL)


class CompilerError(RuntimeError):
    """NVRTC rejected the source; the message is its log."""


@dataclass(frozen=True)
class Use:
    """The resources of a kernel.

    Attributes:
        registers: registers of a thread.
        spilled: bytes in the stack frame: spilled registers, and arrays that are indexed by computed values.
        shared: bytes of shared memory of a block.
    """

    registers: int
    spilled: int
    shared: int


def compiled(kernels: Sequence[CudaKernel], architecture: str) -> dict[str, Use]:
    """Return the resources of each kernel, keyed by its name, as reported by the assembler.

    Raises:
        CompilerError: the kernels do not compile.
        ImportError: NVRTC is not installed.
    """
    found: dict[str, Use] = {}
    for source, ones in modules(kernels):
        dynamic = {kernel.name: kernel.shared for kernel in ones}
        for name, use in _compiled(source, architecture).items():
            found[name] = replace(use, shared=use.shared + dynamic[name])
    return found


def _compiled(source: str, architecture: str) -> dict[str, Use]:
    from cuda.bindings import nvrtc

    def done(result: tuple[object, ...]) -> object:
        if int(result[0]):  # type: ignore[call-overload]
            raise CompilerError(str(result[0]))
        return result[1] if len(result) > 1 else None

    program = done(nvrtc.nvrtcCreateProgram(source.encode(), b"kernels.cu", 0, [], []))
    # The options that CuPy uses.
    options = [f"-arch={architecture}", "--std=c++17", "-ftz=true", "--device-as-default-execution-space"]
    flags = [option.encode() for option in (*options, "--ptxas-options=-v")]
    (failed,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
    log = b" " * int(done(nvrtc.nvrtcGetProgramLogSize(program)))  # type: ignore[call-overload]
    done(nvrtc.nvrtcGetProgramLog(program, log))
    if int(failed) or b"serialized" in log:  # warpgroup matrix products that wait for each other
        raise CompilerError(log.decode()[:4000])
    done(nvrtc.nvrtcDestroyProgram(program))
    found = {}
    for name, spilled, registers, rest in _USE.findall(log.decode()):
        shared = re.search(r"(\d+) bytes smem", rest)
        found[name] = Use(int(registers), int(spilled), int(shared[1]) if shared else 0)
    return found


# A Hopper multiprocessor: registers, threads, blocks, bytes of shared memory, and the 1 KiB reserved for each block.
_REGISTERS, _THREADS, _BLOCKS, _SHARED, _OWN = 65536, 2048, 32, 228 << 10, 1 << 10


def occupancy(use: Use, threads: int) -> float:
    """Return the share of a multiprocessor's threads that can run at the same time."""
    by_registers = _REGISTERS // (-(-use.registers // 8) * 8 * threads)
    by_shared = _SHARED // (use.shared + _OWN)
    return min(by_registers, by_shared, _THREADS // threads, _BLOCKS) * threads / _THREADS


# --- calculated times ------------------------------------------------------------------------------------------------

# An H200: bytes per second measured for copies (reference notes), operations per second from its data sheet (dense).
BANDWIDTH, TENSOR, INT8, FLOAT = 4.3e12, 989e12, 4 * 67e12, 67e12
# Llama 3.1 8B with 4-bit weights in blocks of 32; one sequence decodes after 4,096 tokens, a prompt has 2,048.
HIDDEN, INNER, HEADS, KV_HEADS, HEAD, VOCABULARY, CONTEXT, PROMPT = 4096, 14336, 32, 8, 128, 128256, 4096, 2048
_WEIGHT = 0.5 + 2 / 32


@dataclass(frozen=True)
class Work:
    """The work of one launch.

    Attributes:
        what: the operation and its size.
        nbytes: bytes read and written in global memory.
        operations: multiplications and additions.
        rate: operations per second of the units that perform them.
    """

    what: str
    nbytes: float
    operations: float = 0.0
    rate: float = FLOAT

    @property
    def seconds(self) -> float:
        """The minimum time."""
        return max(self.nbytes / BANDWIDTH, self.operations / self.rate)


# Sizes for adapters (rank), mixtures of experts (experts, selected experts, inputs, weights), BERT and images.
RANK, EXPERTS, CHOSEN, NARROW, _EXPERT = 16, 128, 8, 2048, 2 * 768 * 2048
TEXT, WIDE, IMAGE = 128, 768, 3 * 224 * 224
_MATRIX, _ROWS = HIDDEN * INNER, 4 * (HIDDEN + INNER)
_SPEED = 512 * 4224 * 8 * 8  # rounds, blocks, warps, products per warp
# One launch of each kernel, by the name of the kernel's function.
WORK = {
    "embed_blocks": Work("embedding of a token, 8 bits", HIDDEN * (1 + 2 / 32 + 4)),
    "embed_dense": Work("embedding of a token, float16", HIDDEN * 6),
    "apply": Work("gated activation of a token", 3 * 4 * INNER, 10 * INNER),
    "combine": Work("sum of two rows of a token", 3 * 4 * HIDDEN, HIDDEN),
    "norm": Work("norm with residual of a token", 5 * 4 * HIDDEN, 6 * HIDDEN),
    "arrange_floats": Work("activations of a token", 2 * 4 * HIDDEN),
    "arrange_bfloats": Work("activations of a prompt", 6 * HIDDEN * PROMPT),
    "arrange_groups": Work("activations of a token, quantised", 5.25 * HIDDEN, 4 * HIDDEN),
    "arrange_bytes": Work("activations of a token, quantised", 5.25 * HIDDEN, 4 * HIDDEN),
    "product_exact": Work("gate projection of a token, 4 bits", _WEIGHT * _MATRIX + _ROWS, 2 * _MATRIX),
    "decode_few": Work("gate projection of a token, 4 bits", _WEIGHT * _MATRIX + _ROWS, 2 * _MATRIX, INT8),
    "decode": Work("gate projection of 64 tokens, 4 bits", _WEIGHT * _MATRIX + 64 * _ROWS, 128 * _MATRIX, 2 * TENSOR),
    "decode_gated_few": Work("gate and up of a token, 4 bits", 2 * _WEIGHT * _MATRIX + _ROWS, 4 * _MATRIX, INT8),
    "decode_gated": Work(
        "gate and up of 32 tokens, 4 bits", 2 * _WEIGHT * _MATRIX + 32 * _ROWS, 128 * _MATRIX, 2 * TENSOR
    ),
    "product_dense": Work("gate projection of a token, float16", 2 * _MATRIX + _ROWS, 2 * _MATRIX),
    "gemm": Work(
        "gate projection of a prompt, 4 bits", _WEIGHT * _MATRIX + _ROWS * PROMPT, 2 * _MATRIX * PROMPT, TENSOR
    ),
    "arrange_tiles": Work("activations of a prompt", 6 * HIDDEN * PROMPT),
    "warpgroup_gemm": Work(
        "gate projection of a prompt, 4 bits", _WEIGHT * _MATRIX + _ROWS * PROMPT, 2 * _MATRIX * PROMPT, TENSOR
    ),
    "store_heads": Work("keys and values of a token, float16", 8 * HIDDEN + 12 * KV_HEADS * HEAD, 6 * HIDDEN),
    "attend_split": Work("attention of a token, float16", 4 * KV_HEADS * HEAD * CONTEXT, 4 * HEADS * HEAD * CONTEXT),
    # Half of the pairs of tokens are visible; a tile of rows reads the preceding keys and values once, from L2.
    "attend_tile": Work(
        "attention of a prompt, float16",
        (8 * HEADS + 4 * KV_HEADS) * HEAD * PROMPT,
        2 * HEADS * HEAD * PROMPT**2,
        TENSOR,
    ),
    "attend_any": Work("attention of a token, float16", 4 * HEADS * HEAD * CONTEXT, 4 * HEADS * HEAD * CONTEXT),
    "join_any": Work("32 splits of a token", 4 * HEADS * (HEAD + 2) * 33, 4 * HEADS * HEAD * 32),
    "hadamard_back": Work("attention of a token, int4", 8 * HIDDEN, HIDDEN * 7),
    "rotate_keys": Work("keys of 2,048 tokens, float16", 4 * KV_HEADS * HEAD * 2048, 3 * KV_HEADS * HEAD * 2048),
    "pack_codes": Work("gate projection, 4 bits, once", _MATRIX),
    "linear_recurrence": Work("states of 4,096 numbers, one token", 5 * 4 * HIDDEN, 2 * HIDDEN),
    "causal_convolution": Work("4,096 channels, four taps, one token", 4 * (2 + 4 + 3 + 3) * HIDDEN, 8 * HIDDEN),
    "linear_attention": Work("32 heads of 128 x 128, one token", 2 * 4 * 32 * 128 * 128, 7 * 32 * 128 * 128),
    "reorder": Work("reordered columns of a token", (4 + 4 + 8) * HIDDEN),
    "shrink_few": Work("rank 16 of a token, float16", 2 * RANK * HIDDEN + 4 * HIDDEN, 2 * RANK * HIDDEN),
    "shrink_many": Work(
        "rank 16 of a prompt", (2 * RANK / 16 + 4) * HIDDEN * PROMPT, 8 * RANK * HIDDEN * PROMPT, TENSOR
    ),
    "expand_few": Work("rank 16 of a token, float16", 2 * RANK * HIDDEN + 8 * HIDDEN, 2 * RANK * HIDDEN),
    "expand_many": Work("rank 16 of a prompt", (2 * RANK / 16 + 8) * HIDDEN * PROMPT, 2 * RANK * HIDDEN * PROMPT),
    "route": Work("128 experts of a prompt", 4 * EXPERTS * PROMPT, 8 * EXPERTS * PROMPT),
    "order_pairs": Work("8 experts of every token of a prompt", 12 * CHOSEN * PROMPT),
    "route_and_order": Work("128 experts of a token", 4 * EXPERTS + 12 * CHOSEN, 8 * EXPERTS),
    "expert_product": Work(
        "first products of 8 experts of a token, 4 bits", CHOSEN * _WEIGHT * _EXPERT, 2 * CHOSEN * _EXPERT, INT8
    ),
    "expert_gemm": Work(
        "first products of all experts of a prompt, 4 bits",
        EXPERTS * _WEIGHT * _EXPERT + 8 * CHOSEN * NARROW * PROMPT,
        2 * CHOSEN * _EXPERT * PROMPT,
        TENSOR,
    ),
    "mix": Work("8 expert results of a token", 4 * (CHOSEN + 1) * NARROW, 2 * CHOSEN * NARROW),
    "gather_numbers": Work("one logit", 12),
    "take_chosen": Work("one token", 16),
    "read_memory": Work("a buffer of 1 GiB", 1 << 30),
    "multiply_bfloats": Work("512 rounds of 4,224 blocks", 0, _SPEED * 4096, TENSOR),
    "multiply_many_bytes": Work("512 rounds of 4,224 blocks", 0, _SPEED * 8192, 2 * TENSOR),
    "multiply_floats": Work("512 rounds of 4,224 blocks", 0, _SPEED * 2048),
    "sample_rows": Work("the likeliest token of a row of logits", 4 * VOCABULARY, VOCABULARY),
    "map1": Work("a function of 128 x 3072 numbers of BERT", 8 * TEXT * 4 * WIDE, 10 * TEXT * 4 * WIDE),
    "map2": Work("a sum of 128 x 768 numbers of BERT", 12 * TEXT * WIDE, TEXT * WIDE),
    "map3": Work("an elementwise selection of 128 x 768 numbers", 13 * TEXT * WIDE, TEXT * WIDE),
    "float_product": Work("128 x 768 by 768 x 3072 of BERT", 4 * (TEXT * 5 + 4 * WIDE) * WIDE, 8 * TEXT * WIDE**2),
    "half_product": Work(
        "128 x 768 by 768 x 3072 of BERT", 2 * (TEXT * 5 + 4 * WIDE) * WIDE, 8 * TEXT * WIDE**2, TENSOR
    ),
    "softmax": Work("scores of BERT, 12 heads", 8 * 12 * TEXT**2, 12 * 12 * TEXT**2),
    "row_norm": Work("128 rows of BERT", 8 * TEXT * WIDE, 6 * TEXT * WIDE),
    "reduce_rows": Work("128 rows of BERT", 4 * TEXT * WIDE, TEXT * WIDE),
    "reduce_columns": Work("128 rows of BERT", 4 * TEXT * WIDE, TEXT * WIDE),
    "gather": Work("128 rows of BERT's table", 8 * TEXT * WIDE),
    "gather_tuples": Work("128 rows of BERT's table", 8 * TEXT * WIDE),
    "pad": Work("an image of 3 x 224 x 224", 8 * IMAGE),
    "pool": Work("64 x 112 x 112, windows of 3 x 3", 5 * 64 * 112**2, 9 * 64 * 56**2),
    "convolve_channels": Work("96 x 56 x 56, windows of 7 x 7", 8 * 96 * 56**2, 98 * 96 * 56**2),
}


def family(kernel: CudaKernel) -> str:
    """Return the name of a kernel's function, without arguments and namespace."""
    return kernel.function.partition("<")[0].rpartition("::")[2]


def page(kernels: Sequence[CudaKernel], used: dict[str, Use]) -> str:
    """Return the text of docs/reference/cuda-kernels.md."""
    by_family: dict[str, list[CudaKernel]] = {}
    for kernel in kernels:
        by_family.setdefault(family(kernel), []).append(kernel)
    lines = [_HEAD.format(count=len(kernels), architecture=ARCHITECTURE)]
    lines += ["| kernel | variants | threads | registers | spilled | shared | occupancy |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for name, ones in by_family.items():
        uses = [used[one.name] for one in ones]
        shares = [occupancy(use, one.threads) for use, one in zip(uses, ones, strict=True)]
        cells = (
            _range({one.threads for one in ones}), _range({use.registers for use in uses}),
            f"{max(use.spilled for use in uses)} B", f"{max(use.shared for use in uses) / 1024:.1f} KiB",
            _range({round(100 * share) for share in shares}) + " %",
        )  # fmt: skip
        lines.append(f"| `{name}` | {len(ones)} | {' | '.join(cells)} |")
    lines += [
        "",
        _ON_PAPER,
        "| kernel | one launch | bytes | operations | minimum time | bound by |",
        "|---|---|---|---|---|---|",
    ]
    for name in by_family:
        work = WORK[name]
        bound = "memory" if work.nbytes / BANDWIDTH >= work.operations / work.rate else "arithmetic"
        lines.append(
            f"| `{name}` | {work.what} | {_number(work.nbytes)} | {_number(work.operations)} | "
            f"{_microseconds(work.seconds)} µs | {bound} |"
        )
    return "\n".join(lines) + "\n"


_HEAD = """# CUDA kernels

This page is for developers of the CUDA kernels. It lists the registers, occupancy and time limits of every kernel, and
is generated by `python -m tools.cuda_kernels`, which compiles all {count} kernels that common models need for
{architecture} with NVRTC. [CUDA measurements](cuda-measurements.md) lists the times on a GPU. *Spilled* is the number
of bytes that the compiler stores in memory: registers, and arrays that are indexed by computed values. *Occupancy* is
the share of a multiprocessor's 2,048 threads that can run at the same time, which registers and shared memory limit.
"""
_ON_PAPER = """## Calculated minimum times

The minimum time of one launch on an H200 is the longer of two times: the time to read and write its bytes at 4.3 TB/s,
and the time to perform its operations at the rate in the data sheet (989 TFLOP/s on tensor cores in bfloat16, 67
TFLOP/s in float32, four times this rate for bytes). Unless noted otherwise, the sizes are those of Llama 3.1 8B.
Mixtures of experts have 128 gated experts of 2,048 by 768, and 8 of them are selected per token. A launch in a captured
graph takes about 1.3 µs in addition, which limits short launches.
"""


def _range(values: set[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.3g}" if seconds >= 1e-8 else "< 0.01"


def _number(value: float) -> str:
    for size, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {name}"
    return f"{value:.0f}"


def main(arguments: list[str] | None = None) -> int:
    """Compile the kernels and write the page; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    kernels = all_kernels()
    try:
        used = compiled(kernels, ARCHITECTURE)
    except ImportError:
        print("cuda_kernels: NVRTC is not installed: pip install -e '.[cuda-ci]'", file=sys.stderr)
        return 2
    options.output.write_text(page(kernels, used), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
