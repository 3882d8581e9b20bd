"""The permitted imports between packages, and limits on sizes that keep the code readable, checked on the source."""

import ast
import functools
import graphlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from ragged_attention.calls import CACHE_FORMATS, CALLS

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "ragged_attention"
ROOT_FOLDERS = ("reference", "kernels_triton", "kernels_pallas", "kernels_cuda")
STANDARD = {
    "torch",
    "jax",
    "jaxlib",
    "jax_triton",
    "triton",
    "numpy",
    "numba",
    "llvmlite",
    "rich",
    "hypothesis",
    "pytest",
    "ml_dtypes",
}

# The third-party packages that each folder may import.
TOOLCHAINS = {
    "reference": {"numpy"},
    "kernels_triton": {"triton"},
    "kernels_pallas": {"jax", "jaxlib", "numpy"},
    "kernels_cuda": {"torch", "jax", "jaxlib", "numpy"},
    "portable/numba": {"numba", "llvmlite", "numpy"},
    "portable/torch_eager": {"torch", "numpy"},
    "portable/xla": {"jax", "jaxlib", "numpy"},
    "torch": {"torch", "numpy"},
    "jax": {"jax", "jaxlib", "numpy"},
    "jax_shared": {"jax", "jaxlib", "numpy"},
    "host": {"numpy"},
}
# The modules and packages of ragged_attention that a backend's folder may import besides its own.
FOR_BACKENDS = ("calls", "errors", "host.caches", "host.forking")
# The modules directly under ragged_attention. All other modules are in a package that is named after their subject.
TOP = {
    "__init__",
    "__main__",
    "config",
    "dispatch",
    "errors",
    "explain",
    "key_ranges",
    "protocols",
    "pytest_plugin",
    "tuning",
}
# The modules and packages that a bare `import ragged_attention` loads. For each, those that it may import itself.
CORE = {
    "errors": set(),
    "calls": {"errors"},
    "host": set(),
    "config": {"calls", "errors", "host"},
    "tuning": {"calls", "errors"},
    "operations": {"calls"},
    "protocols": {"calls"},
    "dispatch": {"calls", "config", "errors", "host", "protocols", "tuning"},
    "explain": {"calls", "dispatch", "errors"},
}


# Marks a test that also runs on every file in the covering tier.
EACH_FILE = pytest.mark.each("path")


def folder_of(name: str) -> Path:
    return ROOT / name if name in ROOT_FOLDERS else PACKAGE / name


def sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def installed_sources() -> list[Path]:
    paths = [path for folder in ROOT_FOLDERS for path in sources(ROOT / folder)]
    return paths + [path for path in sources(PACKAGE) if path.relative_to(PACKAGE).parts[0] not in ROOT_FOLDERS]


def all_sources() -> list[Path]:
    others = [path for name in ("tests", "benchmarks", "examples") for path in sources(ROOT / name)]
    return installed_sources() + others


def imported(tree: ast.AST) -> Iterator[str]:
    """The dotted names that a piece of source imports; `from a import b` counts as `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import in line {node.lineno}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_of(path: Path) -> set[str]:
    return set(imported(ast.parse(path.read_text())))


def module_of(path: Path) -> str:
    """The dotted name of the module in a file of the package."""
    inside = path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT).with_suffix("")
    return ".".join(["ragged_attention", *(part for part in inside.parts if part != "__init__")])


def modules_in(names: Iterable[str], modules: Mapping[str, Path]) -> set[str]:
    """The modules among `modules` that the names denote, or that contain what the names denote."""
    return {name if name in modules else name.rpartition(".")[0] for name in names} & modules.keys()


def needed(path: Path, modules: Mapping[str, Path]) -> set[str]:
    """The modules of the package that a file imports, including imports in functions and by name.

    A string that names another package counts as an import of all its modules. An f-string counts as an import of all
    modules that match its pattern.
    """
    tree, own = ast.parse(path.read_text()), module_of(path)
    found = modules_in(imported(tree), modules)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in modules:
            inside = {name for name in modules if f"{name}.".startswith(f"{node.value}.")}
            found |= inside if own not in inside else set()  # a module may name its own package
        elif isinstance(node, ast.JoinedStr):
            parts = [re.escape(str(v.value)) if isinstance(v, ast.Constant) else r"\w+" for v in node.values]
            if parts[0].startswith("ragged_attention"):
                found |= {name for name in modules if re.fullmatch("".join(parts), name)}
    return found - {own}


def of_us(names: set[str]) -> set[str]:
    """The top-level modules and folders of ragged_attention that occur in the dotted names."""
    return {name.split(".")[1] for name in names if name.startswith("ragged_attention.")}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@EACH_FILE
@pytest.mark.parametrize("path", all_sources(), ids=name_of)
def test_imports_are_absolute(path):
    imports_of(path)


@pytest.mark.parametrize("folder", TOOLCHAINS)
def test_a_folder_imports_its_own_toolchain_only(folder):
    for path in sources(folder_of(folder)):
        found = {name.partition(".")[0] for name in imports_of(path)} & STANDARD
        assert found <= TOOLCHAINS[folder], f"{name_of(path)} imports {', '.join(found - TOOLCHAINS[folder])}"


@pytest.mark.parametrize(
    "folder", [*ROOT_FOLDERS, "portable/numba", "portable/torch_eager", "portable/xla", "jax_shared"]
)
def test_a_room_knows_the_records_the_errors_and_itself(folder):
    own = [folder.partition("/")[0], *(["jax_shared"] if "jax" in TOOLCHAINS[folder] else [])]
    allowed = tuple(f"ragged_attention.{name}." for name in (*FOR_BACKENDS, *own))
    for path in sources(folder_of(folder)):
        others = {name for name in imports_of(path) if not f"{name}.".startswith(allowed)}
        assert not of_us(others), f"{name_of(path)} imports {', '.join(others)}"


def test_modules_directly_under_the_package_are_few():
    assert {path.stem for path in PACKAGE.glob("*.py")} == TOP


@pytest.mark.parametrize("module", CORE)
def test_the_core_is_acyclic_and_loads_no_framework(module):
    package = PACKAGE / module
    names = set().union(*map(imports_of, sources(package) if package.is_dir() else [PACKAGE / f"{module}.py"]))
    assert of_us(names) - {module} <= CORE[module]
    assert not {name.partition(".")[0] for name in names} & (STANDARD - {"numpy"})


def test_no_module_needs_itself_in_the_end():
    modules = {module_of(path): path for path in installed_sources()}
    assert modules["ragged_attention.kernels_triton.mla_decode"].is_file()
    graph = {name: needed(path, modules) for name, path in modules.items()}
    assert "ragged_attention.torch" in graph["ragged_attention.explain"]
    graphlib.TopologicalSorter(graph).prepare()  # a CycleError names the cycle


def test_no_module_of_the_benchmarks_needs_itself_in_the_end():
    files = {path.relative_to(ROOT).with_suffix("").parts: path for path in sources(ROOT / "benchmarks")}
    modules = {".".join(part for part in parts if part != "__init__"): path for parts, path in files.items()}
    graph = {name: modules_in(imports_of(path), modules) - {name} for name, path in modules.items()}
    assert "benchmarks.cases.paged" in graph["benchmarks.roofline.paged"]
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_front_end_knows_neither_rooms_nor_the_other(framework):
    other = {"torch": "jax", "jax": "torch"}[framework]
    for path in sources(PACKAGE / framework):
        found = of_us(imports_of(path))
        assert not found & {other, "portable", "compat", "testing", *ROOT_FOLDERS}, name_of(path)


def names_of(node: ast.FunctionDef) -> list[str]:
    """The names of a function's parameters."""
    return [each.arg for each in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]]


def calls_in(tree: ast.AST, *names: str) -> list[ast.Call]:
    """The calls of functions with these names in a piece of source."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) in names]


@functools.cache
def public_functions() -> dict[str, ast.FunctionDef]:
    """The public functions by operation. Of an overloaded function, this is the last definition, which has a body."""
    nodes = [node for path in sources(PACKAGE / "operations") for node in ast.walk(ast.parse(path.read_text()))]
    return {node.name: node for node in nodes if isinstance(node, ast.FunctionDef) and node.name in CALLS}


@pytest.mark.parametrize("operation", CALLS)
def test_public_functions_hand_on_each_argument_by_its_own_name(operation):
    """A public function passes each argument on once and under its own name.

    `dict(q=q, ...)` holds the arguments of the record. The arguments common to all operations follow it in the call.
    """
    function = public_functions()[operation]
    (record,) = calls_in(function, "dict")
    assert not record.args
    assert [ast.unparse(each.value) for each in record.keywords] == [each.arg for each in record.keywords]
    runs = calls_in(function, "self.run", "self.run_with_write", "self.run_prepared", "self.write")
    (beside,) = {tuple(map(ast.unparse, call.args[2:])) for call in runs}
    assert beside == ("backend", "options", *(["out"] if CALLS[operation].TAKES_OUT else []))
    own = (
        ["return_lse"] if operation == "varlen_attention" else []
    )  # not passed on: lse is always computed, for the gradient
    handed = [each.arg or "**" for each in record.keywords] + [*beside]
    assert sorted(["self", *handed, *own]) == sorted(names_of(function))


def test_arguments_are_found_neither_in_frames_nor_by_text():
    """No source calls `locals` or `eval`: Dynamo of older torch releases cannot trace them, and they hide arguments."""
    for path in installed_sources():
        lines = [call.lineno for call in calls_in(ast.parse(path.read_text()), "locals", "eval")]
        assert not lines, f"{name_of(path)} calls locals or eval in lines {lines}"


def test_kinds_are_asked_for_by_tuples_where_torch_compiles():
    """`isinstance` gets tuples of types in the modules that `torch.compile` traces.

    Before torch 2.10 it cannot trace `isinstance` with a union such as `tuple | list`.
    """
    folders = ("calls", "operations", "torch")
    for path in [PACKAGE / "config.py", *(path for folder in folders for path in sources(PACKAGE / folder))]:
        calls = calls_in(ast.parse(path.read_text()), "isinstance")
        lines = [call.lineno for call in calls if isinstance(call.args[1], ast.BinOp)]
        assert not lines, f"{name_of(path)} calls isinstance with a union in lines {lines}: expected a tuple of types"


def test_nothing_but_the_tests_imports_the_test_kit():
    for path in installed_sources():
        if not path.is_relative_to(PACKAGE / "testing"):
            assert "testing" not in of_us(imports_of(path)), name_of(path)


@EACH_FILE
@pytest.mark.parametrize("path", installed_sources(), ids=name_of)
def test_modules_and_public_names_have_docstrings(path):
    """Modules, and public classes and functions of at least 12 lines, have docstrings.

    Kernels and the names that every backend's module defines, such as `run`, need none.
    """
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), f"{name_of(path)} has no docstring"
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        known = node.name in ("Tile", "heuristic", "why_not", "run", "main") or is_kernel(node)
        short = (node.end_lineno or 0) - node.body[0].lineno < 12
        assert known or short or ast.get_docstring(node), f"{name_of(path)}: {node.name} has no docstring"


def is_kernel(node: ast.AST) -> bool:
    """Whether a function looks like a kernel that Triton compiles or Pallas traces."""
    decorators = getattr(node, "decorator_list", [])
    return any("jit" in ast.unparse(decorator) and "triton" in ast.unparse(decorator) for decorator in decorators)


@EACH_FILE
@pytest.mark.parametrize("path", [p for p in all_sources() if p.parent.name != "tests"], ids=name_of)
def test_functions_are_short(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.FunctionDef):
            continue
        start = node.body[1].lineno if ast.get_docstring(node) and len(node.body) > 1 else node.lineno
        lines = (node.end_lineno or 0) - start + 1
        limit = 250 if is_kernel(node) else 65
        assert lines <= limit, f"{name_of(path)}: {node.name} has {lines} lines, but only {limit} are allowed"


TRITON = [path for path in all_sources() if "kernels_triton" in path.parts]
MOST_PARAMETERS, MOST_POSITIONAL = 46, 8


@EACH_FILE
@pytest.mark.parametrize("path", TRITON, ids=name_of)
def test_kernels_have_few_parameters_and_calls_few_positional_arguments(path):
    """Functions have few parameters, and calls few positional arguments.

    Calls of classes, such as named tuples, are exempt: each field is named and explained in its declaration.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            count = len(node.args.args)
            assert count <= MOST_PARAMETERS, f"{name_of(path)}: {node.name} has {count} parameters"
        if isinstance(node, ast.Call) and not ast.unparse(node.func)[0].isupper():
            count = len(node.args)
            assert count <= MOST_POSITIONAL, f"{name_of(path)}:{node.lineno}: {count} positional arguments"


FORMAT_ROOMS = [
    path
    for path in all_sources()
    if {"kernels_triton", "kernels_pallas", "kernels_cuda", "portable", "jax_shared"} & set(path.parts)
]


@EACH_FILE
@pytest.mark.parametrize("path", FORMAT_ROOMS, ids=name_of)
def test_rooms_read_what_a_cache_format_is_and_never_its_name(path):
    for node in ast.walk(ast.parse(path.read_text())):
        assert not (isinstance(node, ast.Constant) and node.value in tuple(CACHE_FORMATS)), (
            f"{name_of(path)}:{node.lineno}: {node.value!r}, the name of a cache format"
        )


def test_the_environment_is_read_in_few_places():
    """The package's sources read no RAGGED_ATTENTION_* variable except those listed here.

    Most of them hold a setting. The last three reach our integrations in vLLM, which has no other channel.
    """
    ours = set()
    for path in all_sources():
        if path.parent.name == "tests":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                name = node.value
                if name.startswith("RAGGED_ATTENTION_") and name.isupper():
                    ours.add(name)
    assert ours == {
        f"RAGGED_ATTENTION_{name}"
        for name in ("BACKEND", "CONFIG", "VALIDATE", "BATCH_INVARIANT", "VLLM_CPU", "VLLM_INDEXER", "TPU_MLA")
    }
