"""The Pallas kernels use no construct that the TPU interpreter cannot run, because the suite runs them in it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "kernels_pallas"
SHAPERS = ("reshape", "bitcast")
ACCESSES = ("load", "store", "swap")
SLICES = ("ds", "dslice")
# Calls whose results are known only on the device.
DEVICE = ("program_id", "when", "minimum", "maximum", "where", "clip", "min", "max", "sum", "cdiv")
KNOWN = ("pl.cdiv", "min", "max", "sum", "math.min")  # calls on Python numbers, known while tracing


Function = ast.FunctionDef | ast.Lambda


def broken_rules(source: str) -> list[str]:
    """A line for each construct in a module's source that the interpreter cannot run."""
    tree = ast.parse(source)
    found = set(_in_scope(tree, set(), set()))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found |= {(node.lineno, text) for text in _in_call(node)}
    return [f"line {line}: {text}" for line, text in sorted(found)]


def _in_call(call: ast.Call) -> Iterator[str]:
    """The rules that a call breaks, whatever its context."""
    keywords = {keyword.arg for keyword in call.keywords}
    name = ast.unparse(call.func)
    last = name.rpartition(".")[2]
    if "interpret" in keywords:
        yield "interpret= is for the caller to choose, by pltpu.force_tpu_interpret_mode"
    if last in ACCESSES and "mask" in keywords and "." in name:
        yield f"{name}(mask=): select the values, then store them all"
    if last == "bitcast" and name not in ("pltpu.bitcast", "bitcast"):
        yield f"{name}: bitcast values (jax.lax.bitcast_convert_type), not references"
    if last in SHAPERS and isinstance(call.func, ast.Attribute) and _is_view(call.func.value):
        yield f"{name}: a reference is not reshaped or bitcast; load it, then reshape the values"


def _is_view(node: ast.expr) -> bool:
    """Whether an expression is `x.at[...]` or a view of such an expression."""
    if isinstance(node, ast.Subscript):
        return isinstance(node.value, ast.Attribute) and node.value.attr == "at"
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_view(node.func.value)


def _nodes_in(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope, including the nodes of nested functions themselves but not their contents."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, Function):
            yield from _nodes_in(child)


def _in_scope(scope: ast.AST, references: set[str], device: set[str]) -> Iterator[tuple[int, str]]:
    """The (line, text) of broken rules about references and device values.

    `references` and `device` are the names of the references and device values of outer scopes.
    """
    nodes = list(_nodes_in(scope))
    if isinstance(scope, Function):
        parameters = {argument.arg for argument in (*scope.args.args, *scope.args.kwonlyargs)}
        references, device = references - parameters, device - parameters
    references = references | set(filter(None, map(_reference_name, nodes)))
    for _ in range(3):  # a value may depend on a device value through up to three assignments
        for node in nodes:
            if isinstance(node, ast.Assign) and _on_device(node.value, references, device):
                device = device | {name for target in node.targets for name in _bound_names(target)}
    for node in nodes:
        if isinstance(node, Function):
            yield from _in_scope(node, references, device)
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        called, on = node.func.attr, node.func.value
        if called in SHAPERS and isinstance(on, ast.Name) and on.id in references:
            text = f"{on.id}.{called}: a reference is not reshaped or bitcast; load it, then reshape the values"
            yield node.lineno, text
        if called in SLICES and len(node.args) > 1 and _on_device(node.args[1], references, device):
            yield node.lineno, f"{ast.unparse(node)}: a slice has a size that is known when the kernel is traced"


def _bound_names(target: ast.expr) -> list[str]:
    """The names that an assignment binds."""
    if isinstance(target, ast.Tuple):
        return [name for element in target.elts for name in _bound_names(element)]
    return [target.id] if isinstance(target, ast.Name) else []


def _reference_name(node: ast.AST) -> str | None:
    """The name that a node uses as a reference, such as x in `x.at` or `x[...]`, or None."""
    if isinstance(node, ast.Attribute) and node.attr == "at" and isinstance(node.value, ast.Name):
        return node.value.id
    whole = isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and node.slice.value is ...
    return node.value.id if whole and isinstance(node.value, ast.Name) else None  # type: ignore[attr-defined]


def _on_device(node: ast.AST, references: set[str], device: set[str]) -> bool:
    """Whether an expression's value is known only on the device, judged by its text."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and part.id in device:
            return True
        if isinstance(part, ast.Subscript) and isinstance(part.value, ast.Name):
            name = part.value.id
            if name in references or name.endswith("_ref"):
                return True
        if isinstance(part, ast.Call):
            name = ast.unparse(part.func)
            if name not in KNOWN and name.rpartition(".")[2] in DEVICE and "." in name:
                return True
    return False


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_the_interpreter_can_run_the_room(path: Path) -> None:
    assert broken_rules(path.read_text()) == []


PLANTED = {
    "a = x_ref.bitcast(jnp.uint32)": "x_ref.bitcast: bitcast values",
    "a = x_ref.at[0].reshape(8, 128)": "a reference is not reshaped or bitcast",
    "a = x_ref.at[0].at[1].bitcast(jnp.int32)": "bitcast values",
    "a = buffer[...]\n    b = buffer.reshape(8, 128)": "buffer.reshape: a reference",
    "a = buffer.at[0]\n    b = buffer.bitcast(jnp.int32)": "buffer.bitcast: a reference",
    "pltpu.store(x_ref, a, mask=m)": "pltpu.store(mask=): select the values",
    "pl.load(x_ref, (0,), mask=m)": "pl.load(mask=): select the values",
    "a = x_ref.at[pl.ds(0, lens_ref[0])]": "a size that is known when the kernel is traced",
    "n = pl.program_id(0)\n    a = x_ref[pl.ds(0, n)]": "a size that is known",
    "n = lens_ref[1]\n    m = n + 1\n    a = x_ref[pl.dslice(0, m)]": "a size that is known",
    "n = jnp.minimum(a, 8)\n    a = x_ref[pl.ds(0, n)]": "a size that is known",
    "pl.pallas_call(kernel, interpret=True)": "interpret= is for the caller",
}


@pytest.mark.parametrize("line", PLANTED)
def test_each_rule_bites(line: str) -> None:
    broken = broken_rules(f"def kernel(x_ref, lens_ref, buffer):\n    {line}\n")
    assert any(PLANTED[line] in rule for rule in broken), broken


SOUND = (
    "a = x_ref[...].reshape(8, 128)",
    "a = jax.lax.bitcast_convert_type(x_ref[...], jnp.uint32)",
    "a = pltpu.bitcast(x_ref[...], jnp.uint32)",
    "x_ref[...] = jnp.where(mask, new, x_ref[...])",
    "a = x_ref.at[lens_ref[0], pl.ds(lens_ref[1], 8)]",
    "rows = min(8, pl.cdiv(total, 8))\n    a = x_ref[pl.ds(first, rows)]",
    "a = values.reshape(8, 128)",
)


@pytest.mark.parametrize("line", SOUND)
def test_what_is_sound_breaks_none(line: str) -> None:
    assert broken_rules(f"def kernel(x_ref, lens_ref, buffer):\n    {line}\n") == []
