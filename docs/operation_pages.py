"""Write the generated parts of docs/operations/ from the docstrings of the functions and docs/support.md.

    python docs/operation_pages.py

The introduction and the example of a page are written by hand. The generated part follows: the docstring, with the
signature before the arguments, and the operation's rows of docs/support.md. The script imports no function, because it
reads their source code.
"""

import ast
import functools
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "operations"
SOURCE = ROOT / "src" / "ragged_attention"
BEGIN, END = "<!-- written by `make docs` -->\n", "<!-- end of what is written -->\n"
SUPPORT = "<!-- support table: written by `make docs` -->\n", "<!-- end of support table -->\n"
TORCH_ONLY = ("out", "device")
REMARKS = "what follows the sections"
SECTIONS = {"Args:": "Arguments", "Returns:": "Returns", "Raises:": "Errors", REMARKS: "Remarks"}
ABOUT_SUPPORT = """\
The table lists the backends that support each call, in order of preference: `"auto"` uses the first. `portable` is
`eager` in torch and `xla` in jax. [Another page](../status.md) shows on which devices each kernel has been run."""
CODE = re.compile(r"(`[^`]+`)")


@functools.cache
def functions() -> dict[str, tuple[str, ast.FunctionDef]]:
    """The public functions of both front ends by name, each with the path of its file."""
    by_name: dict[str, tuple[str, ast.FunctionDef]] = {}
    for path in sorted((SOURCE / "operations").glob("*.py")):
        classes = (node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef))
        for node in (node for cls in classes if cls.name != "FrontEnd" for node in cls.body):
            if isinstance(node, ast.FunctionDef):
                by_name[node.name] = (path.relative_to(ROOT).as_posix(), node)
    return by_name


def offered(front_end: str) -> set[str]:
    """The operations that a front end's package offers."""
    body = ast.parse((SOURCE / front_end / "__init__.py").read_text()).body
    return {ast.unparse(node.targets[0]) for node in body if isinstance(node, ast.Assign)} & functions().keys()


def signature(function: ast.FunctionDef) -> str:
    """A function's signature with the arguments of both front ends, one argument per line."""
    parameters = function.args
    defaults = [None] * (len(parameters.args) - len(parameters.defaults)) + list(parameters.defaults)
    lines = [_argument(*pair) for pair in zip(parameters.args, defaults, strict=True)][1:]
    if parameters.kwonlyargs:
        lines.append("*")
    lines += [_argument(*pair) for pair in zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True)]
    arguments = "".join(f"    {line},\n" for line in lines)
    result = ast.unparse(function.returns) if function.returns else "None"
    text = f"def {function.name}(\n{arguments}) -> {result}\n".replace("Pages[Array]", "Pages")
    return re.sub(r"\bMemory\b", "Array", text)


def about_signature(operation: str) -> str:
    """The section of a page with the operation's signature and the differences between the front ends."""
    path, function = functions()[operation]
    text = signature(function)
    torch_only = [argument.arg for argument in function.args.kwonlyargs if argument.arg in TORCH_ONLY]
    only = " and ".join(f"`{name}`" for name in torch_only)
    only = f"; {only} {'are' if len(torch_only) > 1 else 'is'} for torch only" if torch_only else ""
    pages = ", and `Pages` one array or a pair of arrays" if "Pages" in text else ""
    return (
        f"## Signature\n\nImport it from `ragged_attention.torch` or from `ragged_attention.jax`. `Array` is "
        f"`torch.Tensor` or `jax.Array`{pages}{only}.\n\n```py\n{text}```\n\n"
        f"The function is in [{path}](../../{path}).\n"
    )


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    kind = f": {ast.unparse(argument.annotation)}" if argument.annotation else ""
    return f"{argument.arg}{kind}" + (f" = {ast.unparse(default)}" if default else "").replace("'", '"')


def prose(text: str, operation: str, operations: set[str]) -> str:
    """A paragraph of a docstring as Markdown. Names of other operations become links to their pages."""
    parts = []
    for part in CODE.split(text):
        if part.strip("`") in operations - {operation} and part.startswith("`"):
            parts.append(f"[{part}]({part.strip('`')}.md)")
        else:
            parts.append(part if part.startswith("`") else part.replace("*", "\\*").replace("<", "&lt;"))
    return "".join(parts)


def paragraphs(text: str) -> Iterator[tuple[bool, str]]:
    """Yield, for each paragraph of a dedented text, whether it is literal because it is indented, and the paragraph."""
    for paragraph in re.split(r"\n\n+", text.strip("\n")):
        yield paragraph.startswith("    "), paragraph


def entries(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the names and the parts of the description of each entry of an `Args:` or `Raises:` section.

    The first part is a paragraph. Each other part is a paragraph or a list item, which begins with `- `.
    """
    for entry in re.split(r"\n(?=\S)", text):
        names, _, description = entry.partition(":")
        first, *others = re.split(r"\n\s*\n", description)
        parts = [first]
        for part in map(inspect.cleandoc, others):
            parts += re.split(r"\n(?=- )", part) if part.startswith("- ") else [part]
        yield " ".join(names.split()), [" ".join(part.split()) for part in parts]


def entry(names: str, parts: list[str], operation: str, operations: set[str]) -> str:
    """An entry of a section as an item of a Markdown list. Its lists and further paragraphs are indented."""
    bold = ", ".join(f"`{name}`" for name in names.split(", "))
    text = f"- **{bold}**: {prose(parts[0], operation, operations)}"
    for before, part in itertools.pairwise(parts):
        in_list = before.startswith("- ") and part.startswith("- ")
        text += ("\n    " if in_list else "\n\n    ") + prose(part, operation, operations)
    return text + "\n" * (len(parts) > 1)


def sections(docstring: str) -> Iterator[tuple[str, str]]:
    """Yield the heading and the text of each section in order. The text before the first section has the heading ""."""
    heading, lines = "", []
    for line in inspect.cleandoc(docstring).splitlines():
        if line in SECTIONS or (heading not in ("", REMARKS) and line and not line.startswith(" ")):
            yield heading, textwrap.dedent("\n".join(lines)).strip("\n")
            heading, lines = (line, []) if line in SECTIONS else (REMARKS, [line])
        else:
            lines.append(line)
    yield heading, textwrap.dedent("\n".join(lines)).strip("\n")


def described(docstring: str, operation: str, operations: set[str]) -> str:
    """A docstring as Markdown, with its sections under headings."""
    lines = []
    for heading, text in sections(docstring):
        if heading:
            lines.append(f"## {SECTIONS[heading]}")
        if heading in ("Args:", "Raises:"):
            listed = [entry(names, parts, operation, operations) for names, parts in entries(text)]
            lines.append("\n".join(listed).rstrip("\n"))
        else:
            lines += [
                literal if is_literal else prose(literal, operation, operations)
                for is_literal, literal in paragraphs(text)
            ]
    return "\n\n".join(line for line in lines if line) + "\n"


def support(operation: str) -> str:
    """The operation's rows of the support table."""
    table = (ROOT / "docs" / "support.md").read_text().partition(SUPPORT[0])[2].partition(SUPPORT[1])[0].splitlines()
    rows = [*table[:2], *(row for row in table if row.startswith(f"| `{operation}` |"))]
    return "".join(f"|{row.split('|', 2)[2]}\n" for row in rows)


def written(operation: str) -> str:
    """The generated part of an operation's page."""
    docstring = ast.get_docstring(functions()[operation][1]) or ""
    text = described(docstring, operation, set(functions()))
    introduction, heading, rest = text.partition("\n## ")
    return (
        f"## What it does\n\n{introduction}\n{about_signature(operation)}{heading}{rest}\n"
        f"## What runs where\n\n{ABOUT_SUPPORT}\n\n{support(operation)}"
    )


def with_written(text: str, part: str) -> str:
    """A page's text with its generated part replaced. The text around the two marks is written by hand."""
    before, mark, rest = text.partition(BEGIN)
    if not mark or END not in rest:
        raise ValueError(f"expected a page with the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}{part}{END}{rest.partition(END)[2]}"


def pages() -> dict[Path, str]:
    """The up-to-date text of every operation's page, by path."""
    parts = {operation: written(operation) for operation in functions()}
    paths = {name: PAGES / f"{name}.md" for name in parts}
    return {path: with_written(path.read_text(), parts[name]) for name, path in paths.items()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
