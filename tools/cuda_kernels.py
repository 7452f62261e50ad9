"""What the compiler says of every CUDA kernel, and how fast it can be at most: `python -m tools.cuda_kernels`.

Compiles with NVRTC, which needs no GPU (`pip install -e '.[cuda-ci]'`), and writes docs/cuda_kernels.md: registers,
shared memory, spills and occupancy, and on paper the bytes and operations of one launch at the sizes of Llama 3.1 8B
with the time that an H200 needs for them at least.
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

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cuda_kernels.md"
ARCHITECTURE = "sm_90a"
_USE = re.compile(r"entry function '(\w+)'.*?(\d+) bytes stack frame.*?Used (\d+) registers([^\n]*)", re.DOTALL)


class CompilerError(RuntimeError):
    """NVRTC refused; the message is its log."""


@dataclass(frozen=True)
class Use:
    """What a kernel takes: registers of a thread, bytes of them that are spilled or of arrays that are indexed by what
    is computed (a stack frame, in memory), bytes of shared memory of a block.
    """

    registers: int
    spilled: int
    shared: int


def compiled(kernels: Sequence[CudaKernel], architecture: str) -> dict[str, Use]:
    """What the assembler reports of kernels, by name.

    Raises:
        CompilerError: they do not compile. ImportError: NVRTC is not installed.
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
    # As CuPy compiles it.
    options = [f"-arch={architecture}", "--std=c++17", "-ftz=true", "--device-as-default-execution-space"]
    flags = [option.encode() for option in (*options, "--ptxas-options=-v")]
    (failed,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
    log = b" " * int(done(nvrtc.nvrtcGetProgramLogSize(program)))  # type: ignore[call-overload]
    done(nvrtc.nvrtcGetProgramLog(program, log))
    if int(failed) or b"serialized" in log:  # products of warpgroups that wait for each other: registers are in use
        raise CompilerError(log.decode()[:4000])
    done(nvrtc.nvrtcDestroyProgram(program))
    found = {}
    for name, spilled, registers, rest in _USE.findall(log.decode()):
        shared = re.search(r"(\d+) bytes smem", rest)
        found[name] = Use(int(registers), int(spilled), int(shared[1]) if shared else 0)
    return found


# A multiprocessor of Hopper: registers, threads, blocks, bytes of shared memory (1 KiB of it goes with every block).
_REGISTERS, _THREADS, _BLOCKS, _SHARED, _OWN = 65536, 2048, 32, 228 << 10, 1 << 10


def occupancy(use: Use, threads: int) -> float:
    """Share of a multiprocessor's threads that run at the same time."""
    by_registers = _REGISTERS // (-(-use.registers // 8) * 8 * threads)
    by_shared = _SHARED // (use.shared + _OWN)
    return min(by_registers, by_shared, _THREADS // threads, _BLOCKS) * threads / _THREADS


# --- on paper --------------------------------------------------------------------------------------------------------

# An H200: bytes per second that reference notes measured for copies, operations per second by its data sheet (dense).
BANDWIDTH, TENSOR, INT8, FLOAT = 4.3e12, 989e12, 4 * 67e12, 67e12
# Llama 3.1 8B with weights of 4 bits in blocks of 32; one sequence decodes at 4,096 tokens, a prompt has 2,048.
HIDDEN, INNER, HEADS, KV_HEADS, HEAD, VOCABULARY, CONTEXT, PROMPT = 4096, 14336, 32, 8, 128, 128256, 4096, 2048
_WEIGHT = 0.5 + 2 / 32


@dataclass(frozen=True)
class Work:
    """What one launch has to do.

    Attributes:
        what: of which record at which size. nbytes: read and written in global memory. operations: multiplications
            and additions. rate: of the units that do them, per second.
    """

    what: str
    nbytes: float
    operations: float = 0.0
    rate: float = FLOAT

    @property
    def seconds(self) -> float:
        """The least time."""
        return max(self.nbytes / BANDWIDTH, self.operations / self.rate)


# What adapters, mixtures of experts, BERT and images add: rank; experts, how many are chosen, and their sizes.
RANK, EXPERTS, CHOSEN, NARROW, _EXPERT = 16, 128, 8, 2048, 2 * 768 * 2048
TEXT, WIDE, IMAGE = 128, 768, 3 * 224 * 224
_MATRIX, _ROWS = HIDDEN * INNER, 4 * (HIDDEN + INNER)
_SPEED = 512 * 4224 * 8 * 8  # rounds, blocks, warps, products of a warp
# By the name of a kernel's function.
WORK = {
    "embed_blocks": Work("embedding of a token, 8 bits", HIDDEN * (1 + 2 / 32 + 4)),
    "embed_dense": Work("embedding of a token, float16", HIDDEN * 6),
    "apply": Work("gated activation of a token", 3 * 4 * INNER, 10 * INNER),
    "combine": Work("sum of two rows of a token", 3 * 4 * HIDDEN, HIDDEN),
    "norm": Work("norm with residual of a token", 5 * 4 * HIDDEN, 6 * HIDDEN),
    "arrange_floats": Work("activations of a token", 2 * 4 * HIDDEN),
    "arrange_bfloats": Work("activations of a prompt", 6 * HIDDEN * PROMPT),
    "arrange_groups": Work("activations of a token, rounded", 5.25 * HIDDEN, 4 * HIDDEN),
    "arrange_bytes": Work("activations of a token, rounded", 5.25 * HIDDEN, 4 * HIDDEN),
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
    # Half of the pairs of tokens are visible; a tile of rows reads what is before it once, out of L2.
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
    "linear_recurrence": Work("states of 4,096 numbers, a token", 5 * 4 * HIDDEN, 2 * HIDDEN),
    "reorder": Work("columns of a token in another order", (4 + 4 + 8) * HIDDEN),
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
    "mix": Work("8 results of a token", 4 * (CHOSEN + 1) * NARROW, 2 * CHOSEN * NARROW),
    "gather_numbers": Work("one logit", 12),
    "take_chosen": Work("one token", 16),
    "read_memory": Work("a buffer of 1 GiB", 1 << 30),
    "multiply_bfloats": Work("512 rounds of 4,224 blocks", 0, _SPEED * 4096, TENSOR),
    "multiply_many_bytes": Work("512 rounds of 4,224 blocks", 0, _SPEED * 8192, 2 * TENSOR),
    "multiply_floats": Work("512 rounds of 4,224 blocks", 0, _SPEED * 2048),
    "sample_rows": Work("the likeliest of a row of logits", 4 * VOCABULARY, VOCABULARY),
    "map1": Work("a function of 128 x 3072 numbers of BERT", 8 * TEXT * 4 * WIDE, 10 * TEXT * 4 * WIDE),
    "map2": Work("a sum of 128 x 768 numbers of BERT", 12 * TEXT * WIDE, TEXT * WIDE),
    "map3": Work("a choice of 128 x 768 numbers", 13 * TEXT * WIDE, TEXT * WIDE),
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
    """The name of a kernel's function, without its arguments and its namespace."""
    return kernel.function.partition("<")[0].rpartition("::")[2]


def page(kernels: Sequence[CudaKernel], used: dict[str, Use]) -> str:
    """docs/cuda_kernels.md."""
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
        "| kernel | one launch | bytes | operations | least time | bound by |",
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


_HEAD = """# The CUDA kernels, as the compiler sees them

Made by `python -m tools.cuda_kernels`, which compiles all {count} kernels that usual models need for {architecture}
with NVRTC. What they need on a GPU is in [cuda.md](cuda.md#measured). Spilled are bytes of registers, or of arrays that
are indexed by what is computed, that lie in memory. Occupancy is the share of a multiprocessor's 2,048 threads that can
run at the same time, from registers and shared memory.
"""
_ON_PAPER = """## On paper

The least time of one launch on an H200: the bytes that it reads and writes at 4.3 TB/s, or its operations at what the
data sheet gives for the units that do them (989 TFLOP/s of tensor cores in bfloat16, 67 TFLOP/s in float32, four times
as many with bytes), whichever is longer. Where nothing else is said, sizes are those of Llama 3.1 8B; of 128
experts, 8 are chosen for a token, 2,048 by 768 with a gate. A launch in a captured graph costs about 1.3 µs besides, so
that short ones are bound by that.
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
    """See above."""
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
