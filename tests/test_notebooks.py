"""The notebooks are valid, run from top to bottom, print their stored outputs, and link to existing files."""

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "notebooks"
RUN = FOLDER / "run.py"
NOTEBOOKS = [pytest.param(path, id=path.stem) for path in sorted(FOLDER.glob("*.ipynb"))]
CELL_KEYS = {"cell_type", "id", "metadata", "source"}


def run(*arguments: str | Path, cwd: Path, packages: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A finished process of the runner, started as by a reader without settings. Warnings are errors.

    With `packages`, the process can import only the packages in that folder, and this project from its source.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAGGED_", "TRITON_"))}
    environment["TMPDIR"] = str(cwd)  # so that the test finds files that a notebook leaves behind
    if packages:
        environment["PYTHONPATH"] = os.pathsep.join([str(packages), str(ROOT / "src")])
    command = [sys.executable, *(["-S"] if packages else []), "-W", "error", str(RUN), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment)


def packages_without(folder: Path, *names: str) -> Path:
    """A folder of links to the installed packages, except those whose names begin with one of `names`."""
    folder.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(names):
            (folder / path.name).symlink_to(path)
    return folder


def add_backends(packages: Path, *names: str) -> None:
    """Install packages as pip would. Each is empty and registered as a backend under its own name."""
    for name in names:
        (packages / name).mkdir()
        (packages / name / "__init__.py").touch()
    record = packages / "strangers-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: strangers\nVersion: 1.0\n")
    entries = "".join(f"{name} = {name}\n" for name in names)
    (record / "entry_points.txt").write_text(f"[ragged_attention.backends]\n{entries}")


def code(source: str, printed: str = "", *tags: str) -> dict[str, Any]:
    """A code cell whose stored output is `printed`."""
    outputs = [{"name": "stdout", "output_type": "stream", "text": [printed]}] if printed else []
    metadata = {"tags": list(tags)} if tags else {}
    return {"cell_type": "code", "id": "it", "metadata": metadata, "outputs": outputs, "source": [source]}


def small(folder: Path, *cells: dict[str, Any]) -> Path:
    path = folder / "small.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    return path


@pytest.mark.parametrize("path", NOTEBOOKS)
def test_a_notebook_runs_and_prints_what_is_stored(path, tmp_path):
    pytest.importorskip("torch")
    done = run(path, cwd=tmp_path)
    again = f"if the new output is right: python docs/notebooks/run.py --write {path.relative_to(ROOT)}"
    assert done.returncode == 0, f"{done.stderr}\n{again}"
    assert not list(tmp_path.glob("tmp*"))


@pytest.mark.parametrize("path", NOTEBOOKS)
def test_a_notebook_runs_with_what_it_asks_for_alone_and_beside_other_backends(path, tmp_path):
    """A notebook runs with only the packages that it names, and beside backends with the names that guides use.

    Numba, jax, Triton and transformers are never among these packages.
    """
    pytest.importorskip("torch")
    needed = re.search(r"`pip install '\.\[([\w,]+)\]'`", "".join(json.loads(path.read_text())["cells"][0]["source"]))
    assert needed
    hidden = ["numba", "llvmlite", "jax", "triton", "transformers", "ragged_attention", "__editable__"]
    hidden += [] if "testing" in needed[1] else ["pytest", "_pytest", "hypothesis", "ml_dtypes"]
    packages = packages_without(tmp_path / "site-packages", *hidden)
    add_backends(packages, "mine", "yours", "faulty", "zebra")
    (tmp_path / "elsewhere").mkdir()
    done = run(path, cwd=tmp_path / "elsewhere", packages=packages)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", NOTEBOOKS)
def test_a_notebook_is_valid(path):
    """A notebook follows version 4.5 of the format, in the parts that these notebooks use."""
    notebook = json.loads(path.read_text())
    assert notebook.keys() == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in notebook["cells"]:
        assert re.fullmatch(r"[\w-]{1,64}", cell["id"], re.ASCII)
        assert all(isinstance(line, str) for line in cell["source"])
        if cell["cell_type"] == "markdown":
            assert cell.keys() == CELL_KEYS
            continue
        assert cell["cell_type"] == "code"
        assert cell.keys() == CELL_KEYS | {"execution_count", "outputs"}
        assert cell["execution_count"] is None
        for output in cell["outputs"]:
            assert output.keys() == {"name", "output_type", "text"}
            assert (output["name"], output["output_type"]) == ("stdout", "stream")


@pytest.mark.parametrize("path", NOTEBOOKS)
def test_links_lead_to_files(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "markdown"]
    text = "\n".join("".join(cell["source"]) for cell in cells)
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    assert targets
    for target in targets:
        assert (path.parent / target).exists(), target


def test_the_readme_and_the_concepts_lead_to_all_of_them():
    for document, folder in ((ROOT / "README.md", "docs/notebooks"), (ROOT / "docs" / "concepts.md", "notebooks")):
        for parameter in NOTEBOOKS:
            (path,) = parameter.values
            assert f"({folder}/{path.name})" in document.read_text()  # type: ignore[union-attr]


def test_a_failure_names_the_cell_and_shows_its_line(tmp_path):
    done = run(small(tmp_path, code("x = 1"), code("y = 0\nx / y")), cwd=tmp_path)
    assert done.returncode == 1
    assert 'File "small.ipynb, cell 2 (it)", line 2' in done.stderr
    assert "    x / y\n" in done.stderr
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_a_warning_is_a_failure(tmp_path):
    done = run(small(tmp_path, code("import warnings\nwarnings.warn('beware')")), cwd=tmp_path)
    assert done.returncode == 1
    assert "UserWarning: beware" in done.stderr


def test_other_output_is_a_failure_but_where_it_varies(tmp_path):
    cells = [code("print(1 + 1)", "3\n"), code("print('now')", "then\n", "varies"), code("print(5)", "5\n")]
    done = run(small(tmp_path, *cells), cwd=tmp_path)
    assert done.returncode == 1
    assert re.findall(r"^[-+](?![-+]).*$", done.stderr, re.MULTILINE) == ["-3", "+2"]


def test_what_is_printed_is_stored(tmp_path):
    path = small(tmp_path, code("print(1 + 1)", "3\n"), code("x = 1"))
    assert run("--write", path, cwd=tmp_path).returncode == 0
    first, second = json.loads(path.read_text())["cells"]
    assert first["outputs"] == [{"name": "stdout", "output_type": "stream", "text": ["2\n"]}]
    assert second["outputs"] == []
    assert run(path, cwd=tmp_path).returncode == 0


def test_a_cell_may_go_to_a_file(tmp_path):
    cell = code("%%writefile module.py\nx = 5", "Writing module.py\n")
    assert run(small(tmp_path, cell), cwd=tmp_path).returncode == 0
    assert (tmp_path / "module.py").read_text() == "x = 5\n"
