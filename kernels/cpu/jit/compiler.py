"""Compilation of a Python function to an object file. Only this module runs Numba.

Numba types and lowers the functions; then LLVM compiles a whole kernel, including its helpers, in one step. Until then,
a helper's code is stored without optimisation. Numba would normally optimise and assemble each helper separately first,
which takes several times as long. The entry point of every object, ENTRY, is a plain C function of integers and
addresses, all int64. So compiled kernels can be loaded without Numba (see `object_files`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from inspect import Parameter, Signature
from typing import Any

from llvmlite import ir
from numba.core import config, typed_passes, types, untyped_passes
from numba.core.codegen import CPUCodeLibrary
from numba.core.compiler import CompilerBase, Flags, compile_extra
from numba.core.compiler_lock import global_compiler_lock
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.cpu_options import FastMathOptions
from numba.core.llvm_bindings import create_pass_builder
from numba.core.registry import cpu_target
from numba.core.types.misc import unliteral
from numba.core.typing.templates import AbstractTemplate
from numba.core.utils import pysignature

from .arguments import Arguments
from .dsl import Helper, Intrinsic, numba_type
from .emit import INT64, Emitter
from .numba_types import View  # also registers the operators of vectors
from .object_files import ENTRY, FAILED, pack

# Prefixes of the names of Numba's own functions; other functions are the C library's.
_NUMBAS = ("numba_", "NRT_")


@register_pass(mutates_CFG=True, analysis_only=False)
class _TypeInference(typed_passes.NopythonTypeInference):  # type: ignore[misc]
    """Type inference that lets a helper return any array. No kernel allocates arrays, so references are not counted."""

    _name = "kernel_type_inference"

    def run_pass(self, state: Any) -> bool:
        """Infer the types of a function."""
        counted, state.targetctx.enable_nrt = state.targetctx.enable_nrt, True
        mutated = bool(super().run_pass(state))
        state.targetctx.enable_nrt = counted
        return mutated


# Numba's passes except those for features that kernels do not use: closures, `with`, exceptions, parallel loops, lists.
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
    """LLVM code that is only collected, neither optimised nor assembled."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        """Do nothing: the kernel that links this code optimises it."""

    def _finalize_final_module(self) -> None:
        self._finalized = True


def compile_object(function: Callable[..., Any], declared: type[Arguments] | None = None) -> bytes:
    """Return the object file of a kernel, a function of int64 numbers that returns an int64.

    Args:
        declared: declaration of the arguments that the first parameter, an address, points to.

    Raises:
        RuntimeError: Numba's compiler is disabled.
        ValueError: the kernel allocates arrays, or needs functions of Numba for another reason.
    """
    if config.DISABLE_JIT:
        raise RuntimeError(
            "CPU kernels cannot run: NUMBA_DISABLE_JIT is set, but kernels require compilation. Unset the variable."
        )
    with global_compiler_lock:
        module = _optimised(function, declared)
        needed = [one.name for one in module.functions if one.is_declaration and one.name.startswith(_NUMBAS)]
        if needed:
            raise ValueError(
                f"kernel {function.__name__} calls {', '.join(needed)}, so the kernel cannot run without Numba"
            )
        return pack(_codegen()._tm.emit_object(module))


def make_ready() -> None:
    """Initialise Numba's target, which takes longer than compiling most kernels."""
    with global_compiler_lock:
        cpu_target.typing_context.refresh()
        cpu_target.target_context.refresh()


def _codegen() -> Any:
    return cpu_target.target_context.codegen()


def _optimised(function: Callable[..., Any], declared: type[Arguments] | None) -> Any:
    arguments: list[Any] = [types.int64] * len(pysignature(function).parameters)
    if declared is not None:
        arguments[0] = View(declared)
    library, compiled = _compile(function, tuple(arguments), types.int64, _flags())
    library.add_ir_module(_entry(compiled.fndesc))
    library.finalize()
    module = library._final_module
    for symbol in (*module.functions, *module.global_variables):
        if not symbol.is_declaration and symbol.name != ENTRY:
            symbol.linkage = "linkonce_odr"
    builder = create_pass_builder(
        _codegen()._tm, opt=config.OPT, loop_vectorize=config.LOOP_VECTORIZE, slp_vectorize=config.SLP_VECTORIZE
    )
    builder.getModulePassManager().run(module, builder)
    return module


def _flags(fastmath: Collection[str] = ()) -> Any:
    flags = Flags()
    flags.error_model = "numpy"
    flags.fastmath = FastMathOptions(set(fastmath))
    flags.nrt = False
    flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    return flags


def _compile(function: Callable[..., Any], arguments: Any, result: Any, flags: Any) -> tuple[_Library, Any]:
    library = _Library(_codegen(), function.__name__)
    context, typing = cpu_target.target_context, cpu_target.typing_context
    compiled = compile_extra(typing, context, function, arguments, result, flags, {}, library, _Pipeline)
    return library, compiled


def _entry(fndesc: Any) -> Any:
    """Return a module with the C function that calls a kernel."""
    context = cpu_target.target_context
    module = context.create_module("entry")
    type_ = context.call_conv.get_function_type(fndesc.restype, fndesc.argtypes)
    callee = ir.Function(module, type_, fndesc.llvm_func_name)
    entry = ir.Function(module, ir.FunctionType(INT64, [INT64] * len(fndesc.argtypes)), ENTRY)
    builder = ir.IRBuilder(entry.append_basic_block("entry"))
    status, out = context.call_conv.call_function(builder, callee, fndesc.restype, fndesc.argtypes, entry.args)
    builder.ret(builder.select(status.is_error, INT64(FAILED), out))
    return module


def helper_type(helper: Helper) -> Any:
    """Return the Numba type of a helper: a function whose code is compiled once per combination of argument types."""
    made: dict[Any, Any] = {}
    parameters = pysignature(helper.function)

    class HelperTemplate(AbstractTemplate):  # type: ignore[misc]
        key = helper

        def generic(self, args: Any, kws: Any) -> Any:
            bound = parameters.bind(*args, **kws)
            arguments = tuple(unliteral(given) for given in bound.arguments.values())
            if arguments not in made:
                made[arguments] = _compile_helper(helper, arguments)
            signature, _ = made[arguments]
            return signature.replace(pysig=parameters)

        def get_impl_key(self, sig: Any) -> Any:
            return made[sig.args][1]

    return types.Function(HelperTemplate)


def _compile_helper(helper: Helper, arguments: Any) -> tuple[Any, Any]:
    """Return the signature of a helper, and the function that emits a call to the helper."""
    flags = _flags(helper.fastmath)
    flags.forceinline = helper.always_inline
    library, compiled = _compile(helper.function, arguments, None, flags)

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        context.active_code_library.add_linking_library(library)
        return context.call_internal(builder, compiled.fndesc, compiled.signature, args)

    cpu_target.target_context.insert_func_defn([(lower, lower, compiled.signature.args)])
    return compiled.signature, lower


def intrinsic_type(intrinsic: Intrinsic) -> Any:
    """Return the Numba type of an intrinsic."""
    made: dict[Any, Any] = {}
    parameters = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in intrinsic.parameters])

    class IntrinsicTemplate(AbstractTemplate):  # type: ignore[misc]
        key = intrinsic

        def generic(self, args: Any, kws: Any) -> Any:
            signature, emit = intrinsic.typing(*parameters.bind(*args, **kws).args)
            arguments = tuple(numba_type(given) for given in signature.args)
            if arguments not in made:
                made[arguments] = _lowering(emit)
                cpu_target.target_context.insert_func_defn([(made[arguments], made[arguments], arguments)])
            return signature.replace(args=arguments, pysig=parameters)

        def get_impl_key(self, sig: Any) -> Any:
            return made[sig.args]

    return types.Function(IntrinsicTemplate)


def _lowering(emit: Callable[..., Any]) -> Callable[..., Any]:
    """Return `emit` in the form that Numba calls."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value = emit(Emitter(context, builder), *args)
        return context.get_dummy_value() if sig.return_type == types.void else value

    return lower
