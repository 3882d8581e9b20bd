"""Lowers the parts of a kernel to LLVM code, as Numba does, but without the code that kernels never need.

Numba's own code counts references to objects, passes exceptions on, checks each divisor and each step of a range, and
computes the length of a range before its loop. That is more than half of all code: Python would have to write it, and
LLVM to read and remove it. Kernels have no objects and raise nothing; a divisor or a step of 0 is a bug in the
kernel.
"""

import operator
from typing import Any

from llvmlite.ir import Constant, IntType, Undefined
from numba.core import cgutils, ir, types
from numba.core.lowering import Lower
from numba.core.typing.templates import signature
from numba.extending import intrinsic

I64 = IntType(64)
INTEGER_OPERATORS = {  # operators of two int64, and their LLVM instructions
    operator.add: "add", operator.sub: "sub", operator.mul: "mul",
    operator.iadd: "add", operator.isub: "sub", operator.imul: "mul",
    operator.and_: "and_", operator.or_: "or_", operator.xor: "xor",
}  # fmt: skip
WRAPPED = ("add", "sub", "mul")  # may assume that no result overflows, as in Numba
COMPARISONS = {
    operator.eq: "==", operator.ne: "!=", operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=",
}  # fmt: skip


def _extreme(symbol: str) -> Any:
    """An intrinsic for the minimum ("<") or maximum (">") of two numbers; the first number if one of them is NaN."""

    @intrinsic
    def extreme(context: Any, a: Any, b: Any) -> Any:
        kind = context.unify_types(types.unliteral(a), types.unliteral(b))

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            compare = builder.icmp_signed if isinstance(kind, types.Integer) else builder.fcmp_ordered
            return builder.select(compare(symbol, values[1], values[0]), values[1], values[0])

        return signature(kind, kind, kind), generate

    return extreme


# Replacements for Python's functions of two numbers; Numba would compile a function for each type of number.
BUILTINS = ((min, _extreme("<")), (max, _extreme(">")))


def replace_builtins(function: Any) -> None:
    """Replace BUILTINS in Numba's representation of a function."""
    for block in function.blocks.values():
        for value in (assignment.value for assignment in block.find_insts(ir.Assign)):
            if isinstance(value, ir.Global):
                value.value = next((code for builtin, code in BUILTINS if value.value is builtin), value.value)


def quotient_and_remainder(builder: Any, a: Any, b: Any) -> tuple[Any, Any]:
    """`a // b` and `a % b` of integers; the remainder has the sign of `b`, as in Python."""
    quotient, remainder = builder.sdiv(a, b), builder.srem(a, b)
    zero = Constant(a.type, 0)
    negative = builder.icmp_signed("<", builder.xor(remainder, b), zero)
    differs = builder.and_(builder.icmp_signed("!=", remainder, zero), negative)
    return (
        builder.sub(quotient, builder.zext(differs, a.type)),
        builder.add(remainder, builder.select(differs, b, zero)),
    )


def operate(builder: Any, op: Any, a: Any, b: Any) -> Any:
    """The result of an operator between two int64, or None if this module has no code for it."""
    if op in COMPARISONS:
        return builder.icmp_signed(COMPARISONS[op], a, b)
    if op in (operator.floordiv, operator.mod):
        return quotient_and_remainder(builder, a, b)[op is operator.mod]
    if (name := INTEGER_OPERATORS.get(op)) is None:
        return None
    return getattr(builder, name)(a, b, flags=["nsw"]) if name in WRAPPED else getattr(builder, name)(a, b)


def structure(builder: Any, kind: Any, *members: Any) -> Any:
    """A structure with the given members; members at the end may be missing."""
    value = Constant(kind, Undefined)
    for index, member in enumerate(members):
        value = builder.insert_value(value, member, index)
    return value


class PartLower(Lower):
    """Numba's lowering of a function, with shorter code for the operations that kernels use."""

    def storevar(self, value: Any, name: str, argidx: int | None = None) -> None:
        if name in self._singly_assigned_vars:
            self._blk_local_varmap[name] = value
        else:
            self._alloca_var(name, self.typeof(name))
            self.builder.store(value, self.getvar(name))

    def alloca_lltype(self, name: str, lltype: Any, datamodel: Any = None) -> Any:
        return cgutils.alloca_once(self.builder, lltype, name=name)

    def lower_assign(self, ty: Any, inst: Any) -> Any:
        return self.context.get_dummy_value() if isinstance(ty, types.Callable) else super().lower_assign(ty, inst)

    def lower_binop(self, resty: Any, expr: Any, op: Any) -> Any:
        kinds = [types.unliteral(self.typeof(side.name)) for side in (expr.lhs, expr.rhs)]
        if kinds == [types.int64, types.int64] and types.unliteral(resty) in (types.int64, types.boolean):
            result = operate(self.builder, op, self.loadvar(expr.lhs.name), self.loadvar(expr.rhs.name))
            if result is not None:
                return result
        return super().lower_binop(resty, expr, op)

    def _lower_call_normal(self, fnty: Any, expr: Any, signature: Any) -> Any:
        if signature.return_type is not types.range_state64_type:
            return super()._lower_call_normal(fnty, expr, signature)
        values = self.fold_call_args(fnty, signature, expr.args, expr.vararg, expr.kws)
        values = [Constant(I64, 0), *values] if len(values) == 1 else values
        kind = self.context.get_value_type(signature.return_type)
        return structure(self.builder, kind, *values, *[Constant(I64, 1)] * (3 - len(values)))

    def lower_expr(self, resty: Any, expr: Any) -> Any:
        if expr.op in ("pair_first", "pair_second"):
            return self.builder.extract_value(self.loadvar(expr.value.name), int(expr.op == "pair_second"))
        if self.generator_info is None:  # in a generator, variables on the stack would not survive a yield
            if resty is types.range_iter64_type:
                return self._begin_range(resty, self.loadvar(expr.value.name))
            if expr.op == "iternext" and self.typeof(expr.value.name) is types.range_iter64_type:
                return self._next_in_range(resty, self.loadvar(expr.value.name))
        return super().lower_expr(resty, expr)

    def _begin_range(self, kind: Any, value: Any) -> Any:
        """An iterator over a range: the address of its next number, the first number outside it, and the step."""
        start, stop, step = (self.builder.extract_value(value, index) for index in range(3))
        place = cgutils.alloca_once(self.builder, I64)
        self.builder.store(start, place)
        return structure(self.builder, self.context.get_value_type(kind), place, stop, step)

    def _next_in_range(self, kind: Any, iterator: Any) -> Any:
        """The next number of a range, and whether there is one."""
        builder = self.builder
        place, stop, step = (builder.extract_value(iterator, index) for index in range(3))
        value = builder.load(place)
        up, down = (builder.icmp_signed(symbol, value, stop) for symbol in "<>")
        exists = builder.select(builder.icmp_signed(">", step, Constant(I64, 0)), up, down)
        builder.store(builder.add(value, step), place)
        return structure(builder, self.context.get_value_type(kind), value, exists)


class PartCall:
    """A callable that emits the call of a part, which raises nothing. Numba reads `signature` and `libs`."""

    def __init__(self, part: Any, library: Any) -> None:
        self.part, self.signature, self.libs = part, part.argtypes, (library,)

    def __call__(self, context: Any, builder: Any, signature: Any, values: Any, loc: Any = None) -> Any:
        function = context.declare_function(builder.module, self.part)
        result = cgutils.alloca_once(builder, context.call_conv.get_return_type(self.part.restype).pointee)
        no_exception = Constant(function.args[1].type, None)
        packed = context.call_conv._get_arg_packer(self.part.argtypes).as_arguments(builder, values)
        builder.call(function, [result, no_exception, *packed])
        return context.get_returned_value(builder, self.part.restype, builder.load(result))
