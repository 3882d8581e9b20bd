"""How Numba compiles the functions of a kernel: it translates each of them, and optimises them together.

Numba by itself optimises each function with all that it calls, and makes machine code of it, so what a kernel's inner
functions hold would be optimised over and over. Here an inner function is a *part*: LLVM's code as it was first
written. Only the function that C calls is linked with its parts, optimised, and made machine code of. A part is
inlined always or never, since LLVM takes far longer for one large function than for many small ones.
"""

from typing import Any, ClassVar, Literal

from llvmlite.binding import Linkage
from numba.core import types
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder, _LowerResult
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.registry import CPUDispatcher
from numba.core.typed_passes import NativeLowering, NopythonTypeInference

# Passes for what the kernels do not contain: contexts, closures, arrays, exceptions, objects that must be deleted,
# loops over mixed tuples, functions that Numba itself inlines.
SPARED = {
    "WithLifting", "RewriteSemanticConstants", "GenericRewrites", "RewriteDynamicRaises", "InlineOverloads",
    "InlineClosureLikes", "InlineInlinables", "MakeFunctionToJitFunction", "FindLiterallyCalls", "LiteralUnroll",
    "LiteralPropagationSubPipelinePass", "NoPythonSupportedFeatureValidation", "IRLegalization", "NopythonRewrites",
    "AnnotateTypes", "DumpParforDiagnostics",
}  # fmt: skip


class Part(JITCodeLibrary):
    """The code of an inner function, not optimised."""

    def add_ir_module(self, ir_module: Any) -> None:
        for function in ir_module.functions:
            if function.blocks and "alwaysinline" not in function.attributes:
                function.attributes.add("noinline")
        super().add_ir_module(ir_module)

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def finalize(self) -> None:
        self._finalized = True

    def _mergeable(self) -> Any:
        """A copy of this function's code that may be linked with another one of the same name."""
        module = self._final_module.clone()
        for function in module.functions:
            if not function.is_declaration and function.linkage == Linkage.external:
                function.linkage = "linkonce_odr"
        return module

    def _get_module_for_linking(self) -> Any:
        """The code of this function and of all that it calls, for a library that is not a part."""
        if self._shared_module is None:
            libraries, whole = [self], self._mergeable()
            for library in libraries:  # which grows meanwhile
                if isinstance(library, Part):
                    libraries += [other for other in library._linking_libraries if other not in libraries]
            for library in libraries[1:]:  # those that are no parts are Numba's own
                module = (
                    library._mergeable() if isinstance(library, Part) else library._get_module_for_linking().clone()
                )
                whole.link_in(module)
            self._shared_module = whole
        return self._shared_module


@register_pass(mutates_CFG=True, analysis_only=False)
class PartLowering(NativeLowering):
    """Numba's lowering, into a `Part`."""

    _name = "ragged_attention_part_lowering"

    def run_pass(self, state: Any) -> Literal[True]:
        state.library = Part(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = state.flags.no_cfunc_wrapper = True
        super().run_pass(state)
        lowered, never = state["cr"], {}.__getitem__  # Numba asks for a builtin function that Python could call
        state["cr"] = _LowerResult(lowered.fndesc, lowered.call_helper, cfunc=never, env=lowered.env)
        state.targetctx.insert_user_function(never, lowered.fndesc, [state.library])
        return True


class Remembering:
    """Numba's typing context, which here finds the signature of an operator or intrinsic only once.

    Numba itself searches at each call, which takes as long as the rest of its type inference.
    """

    _found: ClassVar[dict[tuple[Any, ...], Any]] = {}

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def resolve_function_type(self, function: Any, args: Any, kws: Any) -> Any:
        if kws or not isinstance(function, types.Function):
            return self._context.resolve_function_type(function, args, kws)
        key = (function, args)
        if key not in self._found:
            self._found[key] = self._context.resolve_function_type(function, args, kws)
        return self._found[key]


@register_pass(mutates_CFG=True, analysis_only=False)
class PartInference(NopythonTypeInference):
    """Numba's type inference, with a memory."""

    _name = "ragged_attention_part_inference"

    def run_pass(self, state: Any) -> Literal[True]:
        context, state.typingctx = state.typingctx, Remembering(state.typingctx)
        try:
            return super().run_pass(state)
        finally:
            state.typingctx = context


REPLACED = {NativeLowering: PartLowering, NopythonTypeInference: PartInference}


class PartCompiler(CompilerBase):
    """The pipeline of inner functions."""

    def define_pipelines(self) -> list[Any]:
        usual, manager = DefaultPassBuilder.define_nopython_pipeline(self.state), PassManager("ragged_attention_part")
        for kind, told in usual.passes:
            if kind.__name__ not in SPARED:
                manager.add_pass(REPLACED.get(kind, kind), told)
        manager.finalize()
        return [manager]


class Inlined(CPUDispatcher):
    """A function that LLVM puts in the place of its calls, where it knows what is constant.

    So Numba need not compile it anew for each constant among its arguments.
    """

    def get_call_template(self, args: Any, kws: Any) -> Any:
        return super().get_call_template([types.unliteral(kind) for kind in args], kws)
