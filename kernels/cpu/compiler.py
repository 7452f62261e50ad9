"""From a Python function to an object file: the one place where Numba works.

Numba types and lowers; the machine code is then made at one go for a whole kernel, helpers included. A helper's code
is kept as it was written until it is part of a kernel: Numba's own way optimises and assembles each helper by itself
first, which takes several times as long. The entry of every object, ENTRY, is a plain C function: integers and
addresses travel as int64, floats as float64, an array as the address of its Python object. So what has been compiled
once is loaded without Numba (see `objects`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from llvmlite import ir
from numba.core import config, sigutils, typed_passes, types, untyped_passes
from numba.core.codegen import CPUCodeLibrary
from numba.core.compiler import CompilerBase, Flags, compile_extra
from numba.core.compiler_lock import global_compiler_lock
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.cpu_options import FastMathOptions
from numba.core.llvm_bindings import create_pass_builder
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys
from numba.core.targetconfig import ConfigStack
from numba.core.types.misc import unliteral
from numba.core.typing.templates import AbstractTemplate
from numba.core.utils import pysignature
from numba.np.arrayobj import populate_array

from . import vector_types  # noqa: F401 - its operators must be known before anything is compiled
from .lazy import Helper, Intrinsic
from .objects import ENTRY, FAILED, pack
from .vector import numba_type

_INT64, _DOUBLE, _POINTER = ir.IntType(64), ir.DoubleType(), ir.PointerType()
# Of an array object (NumPy's PyArrayObject_fields, which its C interface guarantees): after the Python object's head
# come the address of the data, the number of axes, and the addresses of shape and strides.
_DATA = object.__basicsize__
_SHAPE, _STRIDES = _DATA + 16, _DATA + 24
# How the names of Numba's own functions begin; other functions are the C library's.
_NUMBAS = ("numba_", "NRT_")


@register_pass(mutates_CFG=True, analysis_only=False)
class _TypeInference(typed_passes.NopythonTypeInference):  # type: ignore[misc]
    """A helper may return any array: where none are made, no reference is ever counted."""

    _name = "kernel_type_inference"

    def run_pass(self, state: Any) -> bool:
        """Type a function."""
        counted, state.targetctx.enable_nrt = state.targetctx.enable_nrt, True
        mutated = bool(super().run_pass(state))
        state.targetctx.enable_nrt = counted
        return mutated


# Numba's passes without those for what kernels do not have: closures, `with`, exceptions, parallel loops, lists.
_PASSES = (
    untyped_passes.TranslateByteCode,
    untyped_passes.FixupArgs,
    untyped_passes.IRProcessing,
    untyped_passes.RewriteSemanticConstants,
    untyped_passes.DeadBranchPrune,
    untyped_passes.GenericRewrites,
    untyped_passes.ReconstructSSA,
    _TypeInference,
    typed_passes.PreLowerStripPhis,
    typed_passes.IRLegalization,
    typed_passes.NativeLowering,
    typed_passes.NoPythonBackend,
)


class _Pipeline(CompilerBase):  # type: ignore[misc]
    def define_pipelines(self) -> list[Any]:
        manager = PassManager("kernel")
        for one in _PASSES:
            manager.add_pass(one, one.__name__)
        manager.finalize()
        return [manager]


class _Library(CPUCodeLibrary):  # type: ignore[misc]
    """LLVM code that is only collected: neither optimised nor assembled."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        """Whoever links it does."""

    def _finalize_final_module(self) -> None:
        self._finalized = True

    def add_linking_library(self, library: Any) -> None:
        """Numba's functions for arrays join a kernel once, at its end."""
        if library is not rtsys.library:
            super().add_linking_library(library)

    @property
    def module(self) -> Any:
        """The LLVM module."""
        return self._final_module


def compile_object(
    function: Callable[..., Any], signature: str, fastmath: Collection[str] = (), *, allocates: bool = False
) -> bytes:
    """The object file of a kernel.

    Args:
        signature: as Numba writes it; the result is void or int64.
        allocates: whether it makes arrays.

    Raises:
        RuntimeError: Numba's compiler is switched off.
    """
    if config.DISABLE_JIT:
        raise RuntimeError(
            "CPU kernels cannot run: NUMBA_DISABLE_JIT is set, and they exist as compiled code only. Unset it."
        )
    with global_compiler_lock:
        module = _optimised(function, signature, fastmath, allocates)
        needs_numba = any(symbol.is_declaration and symbol.name.startswith(_NUMBAS) for symbol in module.functions)
        return pack(_codegen()._tm.emit_object(module), needs_numba=needs_numba)


def make_ready() -> None:
    """Do what comes before the first kernel, which takes longer than most kernels; Numba's functions can be linked."""
    with global_compiler_lock:
        cpu_target.typing_context.refresh()
        cpu_target.target_context.refresh()


def assembly(
    function: Callable[..., Any], signature: str, fastmath: Collection[str] = (), *, allocates: bool = False
) -> str:
    """The machine code of a kernel, to look at."""
    with global_compiler_lock:
        return str(_codegen()._tm.emit_assembly(_optimised(function, signature, fastmath, allocates)))


def _codegen() -> Any:
    return cpu_target.target_context.codegen()


def _optimised(function: Callable[..., Any], signature: str, fastmath: Collection[str], allocates: bool) -> Any:
    arguments, result = sigutils.normalize_signature(signature)
    library, compiled = _compile(function, arguments, result, _flags(fastmath, allocates))
    library.add_ir_module(_entry(compiled.fndesc, signature))
    library.finalize()
    module = library.module
    if allocates:
        module.link_in(rtsys.library._get_module_for_linking().clone())
    for symbol in (*module.functions, *module.global_variables):
        if not symbol.is_declaration and symbol.name != ENTRY:
            symbol.linkage = "linkonce_odr"
    builder = create_pass_builder(
        _codegen()._tm, opt=config.OPT, loop_vectorize=config.LOOP_VECTORIZE, slp_vectorize=config.SLP_VECTORIZE
    )
    builder.getModulePassManager().run(module, builder)
    return module


def _flags(fastmath: Collection[str], allocates: bool) -> Any:
    flags = Flags()
    flags.error_model = "numpy"
    flags.fastmath = FastMathOptions(set(fastmath))
    flags.nrt = allocates
    flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    return flags


def _compile(function: Callable[..., Any], arguments: Any, result: Any, flags: Any) -> tuple[_Library, Any]:
    library = _Library(_codegen(), function.__name__)
    context, typing = cpu_target.target_context, cpu_target.typing_context
    compiled = compile_extra(typing, context, function, arguments, result, flags, {}, library, _Pipeline)
    return library, compiled


def _entry(fndesc: Any, signature: str) -> Any:
    """A module with the C function that calls a kernel."""
    context = cpu_target.target_context
    module = context.create_module("entry")
    callee = ir.Function(
        module, context.call_conv.get_function_type(fndesc.restype, fndesc.argtypes), fndesc.llvm_func_name
    )
    given = [_DOUBLE if isinstance(type_, types.Float) else _INT64 for type_ in fndesc.argtypes]
    entry = ir.Function(module, ir.FunctionType(_INT64, given), ENTRY)
    builder = ir.IRBuilder(entry.append_basic_block("entry"))
    arguments = [
        _unpack(context, builder, type_, value) for type_, value in zip(fndesc.argtypes, entry.args, strict=True)
    ]
    status, out = context.call_conv.call_function(builder, callee, fndesc.restype, fndesc.argtypes, arguments)
    if fndesc.restype == types.none:
        out = _INT64(0)
    elif fndesc.restype != types.int64:
        raise ValueError(f"the kernel's signature is {signature}, expected one that returns void or int64")
    builder.ret(builder.select(status.is_error, _INT64(FAILED), out))
    return module


def _unpack(context: Any, builder: Any, type_: Any, value: Any) -> Any:
    """An argument as Numba has it."""
    if isinstance(type_, types.Array):
        return _array(context, builder, type_, value)
    return context.cast(builder, value, types.float64 if isinstance(type_, types.Float) else types.int64, type_)


def _array(context: Any, builder: Any, type_: Any, value: Any) -> Any:
    """Numba's array from the address of a NumPy array."""

    def read(address: Any, offset: int, result: Any) -> Any:
        place = builder.inttoptr(builder.add(address, _INT64(offset)), _POINTER)
        return builder.load(place, typ=result)

    shape, strides = read(value, _SHAPE, _INT64), read(value, _STRIDES, _INT64)
    array = context.make_array(type_)(context, builder)
    data = builder.inttoptr(read(value, _DATA, _INT64), array.data.type)
    itemsize = context.get_abi_sizeof(context.get_data_type(type_.dtype))
    populate_array(
        array,
        data=data,
        shape=[read(shape, 8 * axis, _INT64) for axis in range(type_.ndim)],
        strides=[read(strides, 8 * axis, _INT64) for axis in range(type_.ndim)],
        itemsize=itemsize,
        meminfo=None,
    )
    return array._getvalue()


def helper_type(helper: Helper) -> Any:
    """What Numba sees in a helper: a function whose code it compiles once per types of arguments."""
    made: dict[Any, Any] = {}
    parameters = pysignature(helper.function)

    class Template(AbstractTemplate):  # type: ignore[misc]
        key = helper

        def generic(self, args: Any, kws: Any) -> Any:
            bound = parameters.bind(*args, **kws)
            arguments = tuple(unliteral(given) for given in bound.arguments.values())
            variant = _allocates(), arguments
            if variant not in made:
                made[variant] = _compile_helper(helper, arguments)
            signature, _ = made[variant]
            return signature.replace(pysig=parameters)

        def get_impl_key(self, sig: Any) -> Any:
            return made[_allocates(), sig.args][1]

    return types.Function(Template)


def _allocates() -> bool:
    """Whether the kernel that is being compiled makes arrays."""
    return bool(ConfigStack().top().nrt)


def _compile_helper(helper: Helper, arguments: Any) -> tuple[Any, Any]:
    """Its signature, and the function that writes a call of it."""
    flags = _flags(helper.fastmath, _allocates())
    flags.forceinline = helper.always_inline
    library, compiled = _compile(helper.function, arguments, None, flags)

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        context.active_code_library.add_linking_library(library)
        return context.call_internal(builder, compiled.fndesc, compiled.signature, args)

    cpu_target.target_context.insert_func_defn([(lower, lower, compiled.signature.args)])
    return compiled.signature, lower


def intrinsic_type(intrinsic: Intrinsic) -> Any:
    """What Numba sees in an intrinsic."""
    made: dict[Any, Any] = {}
    parameters = pysignature(intrinsic.typing)
    parameters = parameters.replace(parameters=list(parameters.parameters.values())[1:])

    class Template(AbstractTemplate):  # type: ignore[misc]
        key = intrinsic

        def generic(self, args: Any, kws: Any) -> Any:
            found = intrinsic.typing(self.context, *args, **kws)
            if found is None:
                return None
            signature, lower = found
            arguments = tuple(numba_type(given) for given in signature.args)
            if arguments not in made:
                made[arguments] = lower
                cpu_target.target_context.insert_func_defn([(lower, lower, arguments)])
            return signature.replace(args=arguments, pysig=parameters)

        def get_impl_key(self, sig: Any) -> Any:
            return made[sig.args]

    return types.Function(Template)
