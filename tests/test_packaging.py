"""The wheel, the sdist and the editable install, built from a copy of the tree without a network, are complete."""

import datetime
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from tests import scripts

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "ragged_attention"
ROOT_FOLDERS = ("reference", "kernels_triton", "kernels_pallas", "kernels_cuda")
SHIPPED = ("src", *ROOT_FOLDERS, "pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]


def folders_with_code() -> set[str]:
    """The dotted names of all folders that should be packages, with the kernel folders under their installed names."""
    found = set()
    for top, name in (
        (SOURCE, "ragged_attention"),
        *((ROOT / folder, f"ragged_attention.{folder}") for folder in ROOT_FOLDERS),
    ):
        for path in top.rglob("*.py"):
            parts = path.relative_to(top).parent.parts
            if not parts or parts[0] not in (*ROOT_FOLDERS, "__pycache__"):
                found.add(".".join((name, *parts)))
    return found


def test_packages_are_the_folders():
    assert set(SETUPTOOLS["packages"]) == folders_with_code()


def test_rooms_are_mapped_and_linked():
    mapped = {"ragged_attention": "src/ragged_attention"} | {
        f"ragged_attention.{folder}": folder for folder in ROOT_FOLDERS
    }
    assert SETUPTOOLS["package-dir"] == mapped
    links = {path.name: os.readlink(path) for path in SOURCE.iterdir() if path.is_symlink()}
    assert links == {folder: f"../../{folder}" for folder in ROOT_FOLDERS}


def test_every_package_has_an_init_file():
    for package in SETUPTOOLS["packages"]:
        parts = package.split(".")[1:]
        folder = SOURCE.joinpath(*parts)
        assert (folder / "__init__.py").is_file(), folder


def test_data_files_ship():
    """Every file in a package's folder is matched by package-data, except Python files and documents."""
    for package in SETUPTOOLS["packages"]:
        folder = SOURCE.joinpath(*package.split(".")[1:])
        patterns = SETUPTOOLS["package-data"].get(package, [])
        matched = {path for pattern in patterns for path in folder.glob(pattern)}
        for path in folder.iterdir():
            if path.is_file() and path.suffix not in (".py", ".md") and not path.name.startswith("."):
                assert path in matched, f"{path.relative_to(ROOT)} is in no package-data"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the shipped files, so that building leaves nothing in the working tree."""
    copy = tmp_path_factory.mktemp("tree")
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, copy / name)
    for folder in ("tests", "benchmarks"):  # by default, setuptools would package tests
        (copy / folder).mkdir()
        (copy / folder / "test_nothing.py").touch()
    return copy


@pytest.fixture(scope="module")
def built(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A wheel built directly from the tree, an sdist, and a wheel built from that sdist."""
    straight, through = tmp_path_factory.mktemp("straight"), tmp_path_factory.mktemp("through")
    build = [sys.executable, "-m", "build", "--no-isolation"]
    run([*build, "--wheel", "--outdir", straight, tree])
    run([*build, "--outdir", through, tree])
    return {
        "wheel": next(straight.glob("*.whl")),
        "sdist": next(through.glob("*.tar.gz")),
        "wheel from sdist": next(through.glob("*.whl")),
    }


def run(command: list, **environment: str) -> str:
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("RAGGED_", "PYTHONPATH"))}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=keep | environment, cwd=Path(sys.prefix)
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def members(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def expected_members(tree: Path) -> set[str]:
    """The installed names of all Python and data files of the tree, without documents inside packages."""
    found = set()
    for top, name in ((tree / "src/ragged_attention", "ragged_attention"), *(
        (tree / folder, f"ragged_attention/{folder}") for folder in ROOT_FOLDERS)):  # fmt: skip
        for path in top.rglob("*"):
            relative = path.relative_to(top)
            if path.is_file() and relative.parts[0] not in ROOT_FOLDERS and path.suffix != ".md":
                found.add(f"{name}/{relative}")
    return found


@pytest.mark.parametrize("kind", ["wheel", "wheel from sdist"])
def test_wheel_holds_all_and_nothing_else(tree, built, kind):
    found = members(built[kind])
    tops = {name.partition("/")[0] for name in found}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"ragged_attention"}
    assert {name for name in found if name.startswith("ragged_attention/")} == expected_members(tree)
    assert any(name.endswith("licenses/LICENSE") for name in found)
    weights = ("demo/weights.npz", "demo/weights_mla.npz")
    for needed in ("py.typed", *weights, "kernels_cuda/csrc/api.h", "kernels_cuda/csrc/xla_ffi.cc"):
        assert f"ragged_attention/{needed}" in found
    assert any(name.startswith("ragged_attention/kernels_cuda/csrc/sm90/") and name.endswith(".cu") for name in found)
    assert not [name for name in found if "__pycache__" in name or "/tests/" in name]


def test_entry_points_lead_somewhere(built):
    with zipfile.ZipFile(built["wheel"]) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt"))
        text = archive.read(name).decode()
    for group in ("console_scripts", "pytest11", "vllm.general_plugins"):
        assert f"[{group}]" in text
    for module in re.findall(r"= ([\w.]+)", text):
        assert f"{module.replace('.', '/')}.py" in members(built["wheel"])


def test_sdist_mirrors_the_repository(built):
    with tarfile.open(built["sdist"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "pyproject.toml", "src/ragged_attention/calls/mla.py"} <= names
    assert {f"{folder}/__init__.py" for folder in ROOT_FOLDERS} <= names
    assert not [name for name in names if name.startswith(("tests", "benchmarks"))]


def fresh(folder: Path) -> Path:
    """The Python of a new, empty environment, with links in folder/borrowed to all packages except this project."""
    venv.create(folder, with_pip=False)
    borrowed = folder / "borrowed"
    borrowed.mkdir()
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "ragged" not in path.name:
            (borrowed / path.name).symlink_to(path)
    return folder / "bin" / "python"


def run_in(python: Path, command: list) -> str:
    return run(command, PYTHONPATH=str(python.parent.parent / "borrowed"))


def install(python: Path, *what: object) -> None:
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install"]
    run_in(python, [*pip, "--no-deps", "--no-index", "--no-build-isolation", *what])


def imports_well(python: Path) -> str:
    program = ROOT / "tests" / "programs" / "installed_package.py"
    return run_in(python, [python, program, ",".join(SETUPTOOLS["packages"]), ",".join(ROOT_FOLDERS)]).strip()


def test_wheel_installs_into_a_fresh_environment(built, tmp_path):
    python = fresh(tmp_path / "env")
    install(python, built["wheel"])
    assert Path(imports_well(python)).is_relative_to(tmp_path)
    version = run_in(python, [python.parent / "ragged-attention", "--version"]).strip()
    assert version in built["wheel"].name


def test_editable_install_sees_a_new_file_at_once(tree, tmp_path):
    copy = tmp_path / "tree"
    shutil.copytree(tree, copy, symlinks=True)
    python = fresh(tmp_path / "env")
    install(python, "--editable", copy)
    assert Path(imports_well(python)).is_relative_to(copy)
    (copy / "kernels_triton" / "an_operation.py").write_text("HERE = True\n")
    code = "from ragged_attention.kernels_triton.an_operation import HERE; print(HERE)"
    assert run_in(python, [python, "-c", code]).strip() == "True"


# ---- tools/release.py


releasing = scripts.load(ROOT / "tools" / "release.py")
TODAY = datetime.date(2031, 5, 7)
CHANGELOG = "# Changelog\n\n## Unreleased\n\n## 1.2.3 - 2031-05-07\n\n### Added\n\n- One.\n\n## 1.2.2 - 2030-01-01\n"


def test_the_newest_version_of_the_changelog_is_the_packages():
    """The changelog's newest version is the package's, also between releases, when its date may be in the past."""
    found = releasing.HEADING.search((ROOT / "CHANGELOG.md").read_text())
    assert found["version"] == releasing.version_of(ROOT)
    assert found["date"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A git repository whose current commit can be released."""
    root = tmp_path / "project"
    (root / "src" / "ragged_attention").mkdir(parents=True)
    (root / "src" / "ragged_attention" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    described = (ROOT / "pyproject.toml").read_text()
    urls = '[project.urls]\nRepository = "https://example.org/a"\n\n[project.scripts]'
    (root / "pyproject.toml").write_text(described.replace("[project.scripts]", urls))
    (root / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 1.2.3\n")
    (root / ".gitignore").write_text("dist/\n")
    (root / "README.md").write_text("[install](docs/start/install.md)\n")
    (root / "CHANGELOG.md").write_text(CHANGELOG)
    releasing.git(root, "init", "--quiet")
    for key, value in (("user.name", "Nobody"), ("user.email", "nobody@example.org"), ("core.hooksPath", "/dev/null")):
        releasing.git(root, "config", key, value)
    commit(root)
    return root


def commit(root: Path) -> None:
    releasing.git(root, "add", "--all")
    releasing.git(root, "commit", "--quiet", "--message", "All")


def test_a_commit_that_can_be_released(project):
    assert releasing.hindrances(project, TODAY) == []


@pytest.mark.parametrize(
    ("changelog", "message"),
    [
        (CHANGELOG.replace("1.2.3", "1.2.4"), "to be the package's, 1.2.3, got 1.2.4"),
        ("# Changelog\n\n## Unreleased\n\n## older\n", "to be the package's, 1.2.3, got none"),
        (CHANGELOG.replace("2031-05-07", "2031-05-06"), "to be of today, 2031-05-07, got 2031-05-06"),
        (CHANGELOG.replace(" - 2031-05-07", ""), "to be of today, 2031-05-07, got None"),
        (CHANGELOG.replace("## Unreleased\n", "## Unreleased\n\n- Two.\n"), "expected an empty section Unreleased"),
        (CHANGELOG.replace("## Unreleased\n", ""), "expected an empty section Unreleased"),
    ],
)
def test_a_changelog_that_is_not_ready(project, changelog, message):
    (project / "CHANGELOG.md").write_text(changelog)
    commit(project)
    assert any(message in found for found in releasing.hindrances(project, TODAY))


def test_a_release_needs_the_repositorys_address_and_a_current_citation(project):
    shutil.copy(ROOT / "pyproject.toml", project)
    (project / "CITATION.cff").write_text("version: 1.2.2\n")
    commit(project)
    assert releasing.hindrances(project, TODAY) == [
        "expected a Repository in [project.urls] of pyproject.toml, got {}",
        "expected the package's version in CITATION.cff, 1.2.3, got 1.2.2",
    ]


def test_an_unclean_tree_and_an_old_tag_are_hindrances(project, capsys):
    (project / "left.txt").touch()
    releasing.git(project, "tag", "v1.2.3")
    assert releasing.release(project, TODAY, tag=True) == 1
    assert re.fullmatch(
        r"expected a clean tree, got\n\?\? left.txt\nexpected a new version, but the tag v1.2.3 exists\n",
        capsys.readouterr().err,
    )


@pytest.mark.parametrize("tag", [False, True])
def test_a_release_tags_only_when_told_and_uploads_nothing(project, monkeypatch, capsys, tag):
    monkeypatch.setattr(releasing, "dist", lambda root: [root / "dist" / "a.tar.gz", root / "dist" / "a.whl"])
    assert releasing.release(project, TODAY, tag) == 0
    assert releasing.git(project, "tag", "--list").split() == (["v1.2.3"] if tag else [])
    printed = capsys.readouterr().out
    assert ("    git push origin v1.2.3\n" in printed) == tag
    assert re.search(r"twine upload \S+/dist/a.tar.gz \S+/dist/a.whl", printed)


def test_what_is_staged_is_what_git_knows_or_would_add(project, tmp_path):
    (project / "dist").mkdir()
    (project / "dist" / "built").touch()
    (project / "new.txt").touch()
    (project / "link").symlink_to("src")
    (project / "CHANGELOG.md").unlink()
    releasing.stage(project, tmp_path / "staged")
    staged = {path.name for path in (tmp_path / "staged").iterdir()}
    assert staged == {".gitignore", "CITATION.cff", "README.md", "pyproject.toml", "src", "new.txt", "link"}
    shown = (tmp_path / "staged" / "README.md").read_text()
    assert shown == "[install](https://example.org/a/blob/v1.2.3/docs/start/install.md)\n"
    assert (tmp_path / "staged" / "link").is_symlink()


def test_readme_on_an_index_leads_to_the_repository():
    """The README for a package index links to the repository. An index has no other file, and drops <source>."""
    readme = (ROOT / "README.md").read_text()
    shown = releasing.for_an_index(readme, "https://example.org/a", "v1")
    assert "[install](https://example.org/a/blob/v1/docs/start/install.md)" in shown
    raw = "https://example.org/a/raw/v1/docs/pictures"
    assert re.findall(r'src="([^"]+)"', shown) == [f"{raw}/speed-light.svg", f"{raw}/pages-light.svg"]
    assert f"![tests]({raw}/badges/tests.svg)" in shown
    targets = re.findall(r"\]\(([^)]+)\)", shown)
    assert len(targets) == len(re.findall(r"\]\(", readme))
    assert all("://" in target for target in targets)
    shown = releasing.for_an_index(readme, None, "v1")
    assert "](" not in shown
    assert "<picture>" not in shown
    assert shown.count("\n") > 80


def test_wheels_that_differ_are_refused(tmp_path):
    for name, text in (("a", "1"), ("b", "1"), ("c", "2")):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr("module.py", text)
    releasing.expect_same_contents(tmp_path / "a", tmp_path / "b")
    with pytest.raises(SystemExit, match=r"but they differ in \['module.py'\]"):
        releasing.expect_same_contents(tmp_path / "a", tmp_path / "c")


def test_a_command_that_fails_ends_the_script(capsys):
    with pytest.raises(SystemExit, match=r"exit status 3 of: \S+ -c import sys"):
        releasing.run(sys.executable, "-c", "import sys\nsys.exit(3)")
