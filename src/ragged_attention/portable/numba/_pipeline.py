"""Compiles the functions of a kernel with Numba: each is translated alone, and all are optimised together.

By itself, Numba optimises each function together with all functions that it calls, and compiles it to machine code. So
a kernel's inner functions would be optimised over and over. Here an inner function is a *part*: LLVM code that is not
yet optimised. Only the function that C calls is linked with its parts, optimised, and compiled to machine code. A part
is always or never inlined, since LLVM takes far longer for one large function than for many small ones.
"""

from typing import Any, ClassVar, Literal

from llvmlite.binding import Linkage, parse_assembly
from numba.core import cgutils, types
from numba.core.codegen import CodeLibrary, JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder, _LowerResult
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.registry import CPUDispatcher
from numba.core.typed_passes import NativeLowering, NopythonTypeInference

from ragged_attention.portable.numba._lowering import PartCall, PartLower, replace_builtins

# Numba passes that are left out, because kernels have no contexts, closures, arrays, exceptions, objects that must be
# deleted, loops over mixed tuples, or functions that Numba itself inlines.
SPARED = {
    "WithLifting", "RewriteSemanticConstants", "GenericRewrites", "RewriteDynamicRaises", "InlineOverloads",
    "InlineClosureLikes", "InlineInlinables", "MakeFunctionToJitFunction", "FindLiterallyCalls", "LiteralUnroll",
    "LiteralPropagationSubPipelinePass", "NoPythonSupportedFeatureValidation", "IRLegalization", "NopythonRewrites",
    "AnnotateTypes", "DumpParforDiagnostics",
}  # fmt: skip


class Part(JITCodeLibrary):
    """The code of an inner function, as text, until it is linked with a function that C calls."""

    def __init__(self, codegen: Any, name: str) -> None:
        CodeLibrary.__init__(self, codegen, name)
        self._linking_libraries: list[Any] = []
        self._shared_module: Any = None
        self.texts: list[str] = []

    def add_ir_module(self, ir_module: Any) -> None:
        for function in ir_module.functions:
            if function.blocks and "alwaysinline" not in function.attributes:
                function.attributes.add("noinline")
        self.texts.append(cgutils.normalize_ir_text(str(ir_module)))
        for function in ir_module.functions:  # break the reference cycles of functions and their blocks
            for block in function.blocks:
                block.instructions.clear()
            function.blocks.clear()

    def finalize(self) -> None:
        self._finalized = True

    def _get_module_for_linking(self) -> Any:
        """The code of this part and of all parts that it calls, for a function that Numba's own pipeline compiles."""
        if self._shared_module is None:
            whole = JITCodeLibrary(self._codegen, self.name)
            whole.add_linking_library(self)
            link_parts(whole)
            for library in whole._linking_libraries:
                whole._final_module.link_in(library._get_module_for_linking(), preserve=True)
            for function in whole._final_module.functions:
                if not function.is_declaration and function.linkage == Linkage.external:
                    function.linkage = "linkonce_odr"
            self._shared_module = whole._final_module
        return self._shared_module


def link_parts(library: Any) -> None:
    """Link the code of a function that C calls with all the parts that it needs."""
    libraries = {library: None}
    waiting = [library]
    for each in waiting:  # the list grows during the loop
        new = [other for other in each._linking_libraries if other not in libraries]
        libraries |= dict.fromkeys(new)
        waiting += new if isinstance(each, Part) or each is library else []
    parts = [each for each in libraries if isinstance(each, Part)]
    for part in parts:
        library._reload_init.update(part._reload_init)
        for text in part.texts:
            library._final_module.link_in(parse_assembly(text))
    library._linking_libraries = [each for each in libraries if each not in (library, *parts)]


@register_pass(mutates_CFG=True, analysis_only=False)
class PartLowering(NativeLowering):
    """Numba's lowering, into a `Part`."""

    _name = "ragged_attention_part_lowering"

    @property
    def lowering_class(self) -> type[PartLower]:
        return PartLower

    def run_pass(self, state: Any) -> Literal[True]:
        state.library = Part(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = state.flags.no_cfunc_wrapper = True
        super().run_pass(state)
        lowered, never = state["cr"], {}.__getitem__  # Numba expects a builtin function that Python could call
        state["cr"] = _LowerResult(lowered.fndesc, lowered.call_helper, cfunc=never, env=lowered.env)
        call = PartCall(lowered.fndesc, state.library)
        state.targetctx._defns[never].append(call, call.signature)
        return True


class CachingContext:
    """Numba's typing context, but it searches for the signature of an operator or intrinsic only once.

    Numba itself searches at each call, which takes as long as the rest of its type inference.
    """

    _signatures: ClassVar[dict[tuple[Any, ...], Any]] = {}

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def resolve_function_type(self, function: Any, args: Any, kws: Any) -> Any:
        if kws or not isinstance(function, types.Function):
            return self._context.resolve_function_type(function, args, kws)
        key = (function, args)
        if key not in self._signatures:
            self._signatures[key] = self._context.resolve_function_type(function, args, kws)
        return self._signatures[key]


@register_pass(mutates_CFG=True, analysis_only=False)
class PartInference(NopythonTypeInference):
    """Numba's type inference, with a cache of signatures and with our own functions for BUILTINS."""

    _name = "ragged_attention_part_inference"

    def run_pass(self, state: Any) -> Literal[True]:
        replace_builtins(state.func_ir)
        context, state.typingctx = state.typingctx, CachingContext(state.typingctx)
        try:
            return super().run_pass(state)
        finally:
            state.typingctx = context


REPLACED = {NativeLowering: PartLowering, NopythonTypeInference: PartInference}


class PartCompiler(CompilerBase):
    """The pipeline of inner functions, which is the same for all of them."""

    _pipelines: ClassVar[list[Any]] = []

    def define_pipelines(self) -> list[Any]:
        if not self._pipelines:
            manager = PassManager("ragged_attention_part")
            for kind, description in DefaultPassBuilder.define_nopython_pipeline(self.state).passes:
                if kind.__name__ not in SPARED:
                    manager.add_pass(REPLACED.get(kind, kind), description)
            manager.finalize()
            self._pipelines.append(manager)
        return self._pipelines


class PartFunction(CPUDispatcher):
    """A function that becomes a part, with a cache of the templates that Numba requests at each call."""

    def __init__(self, function: Any, **options: Any) -> None:
        super().__init__(function, targetoptions=options, pipeline_class=PartCompiler)
        self._templates: dict[tuple[Any, ...], Any] = {}

    def get_call_template(self, args: Any, kws: Any) -> Any:
        if kws:
            return super().get_call_template(args, kws)
        key = tuple(args)
        if key not in self._templates:
            self._templates[key] = super().get_call_template(key, {})
        return self._templates[key]


class Inlined(PartFunction):
    """A function that LLVM inlines, and then specialises for constant arguments.

    So Numba need not compile it again for each constant among its arguments.
    """

    def get_call_template(self, args: Any, kws: Any) -> Any:
        return super().get_call_template([types.unliteral(kind) for kind in args], kws)
