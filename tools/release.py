"""Build, check, try and tag a release.

    python tools/release.py dist           # build an sdist and a wheel in dist/, and check them
    python tools/release.py release        # check whether this commit can be released; this changes only dist/
    python tools/release.py release --tag  # check, and then tag the commit

The wheel is also installed and tried in fresh environments. `make dist` and `make release` first make the environment
that this script needs. Nothing is uploaded: at the end, `release` prints the commands for the upload.
"""

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADING = re.compile(r"^## (?P<version>\d+\.\d+\.\d+)(?: - (?P<date>\d{4}-\d{2}-\d{2}))?$", re.MULTILINE)
CITED = re.compile(r"^version: (\S+)$", re.MULTILINE)
UNRELEASED = re.compile(r"^## Unreleased$(.*?)(?=^## )", re.MULTILINE | re.DOTALL)

# A program for an environment without torch and jax. It checks that the package computes with its NumPy reference.
WITHOUT_EXTRAS = """
import numpy
import ragged_attention
from ragged_attention.reference.merge_attention_states import merge_attention_states
out, lse = merge_attention_states(numpy.ones((2, 1, 1, 16)), numpy.zeros((2, 1, 1)))
assert (out == 1).all() and numpy.allclose(lse, numpy.log(2))
"""
WITH_TORCH = """
import torch
from ragged_attention.torch import ragged_paged_attention
q, kv_pages = torch.randn(5, 8, 64), torch.randn(6, 16, 4, 64)
kv_lens, cu_q_lens = torch.tensor([4, 40]).int(), torch.tensor([0, 4, 5]).int()
batch = (q, kv_pages, kv_lens, torch.tensor([[5, 0, 0], [2, 0, 4]]).int(), cu_q_lens)
torch.testing.assert_close(ragged_paged_attention(*batch), ragged_paged_attention(*batch, backend="reference"))
"""


def run(*command: object, cwd: Path = ROOT) -> None:
    """Run a command and show its output. If the command fails, this program exits."""
    shown = " ".join(map(str, command)).partition("\n")[0]
    print(f"\n$ {shown}", flush=True)
    if code := subprocess.run(list(map(str, command)), cwd=cwd, env=environment()).returncode:
        raise SystemExit(f"exit status {code} of: {shown}")


def environment() -> dict[str, str]:
    """The environment variables without those that would make commands use this checkout or change their results."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("RAGGED_", "PYTHONPATH"))}


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout


def stage(root: Path, folder: Path) -> None:
    """Copy the files that git tracks or would add to `folder`. Ignored files, such as build outputs, are not copied.

    README.md is converted by `for_an_index`.
    """
    for name in git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")[:-1]:
        source, target = root / name, folder / name
        if source.is_symlink() or source.is_file():  # git also lists files that are deleted in the working tree
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    readme = folder / "README.md"
    readme.write_text(for_an_index(readme.read_text(), urls_of(folder).get("Repository"), f"v{version_of(root)}"))


def urls_of(root: Path) -> dict[str, str]:
    """The project's URLs by name, from pyproject.toml."""
    return tomllib.loads((root / "pyproject.toml").read_text())["project"].get("urls", {})


BADGE = re.compile(r"!\[([^\]]*)\]\((?!\w+://)([^)]+)\)\n?")
LINK = re.compile(r"\[([^\]]*)\]\((?!\w+://)([^)]+)\)")
PICTURE = re.compile(r'<picture>.*?(<img [^>]*src=")([^"]+)("[^>]*>).*?</picture>\n*', re.DOTALL)


def for_an_index(readme: str, repository: str | None, tag: str) -> str:
    """The README for a package index, where relative links do not work: links and pictures lead to the repository.

    If `[project.urls]` has no Repository, pictures are left out, and links become plain text.
    """
    if repository is None:
        return LINK.sub(r"\1", BADGE.sub("", PICTURE.sub("", readme)))
    readme = BADGE.sub(rf"![\1]({repository}/raw/{tag}/\2)\n", readme)
    readme = PICTURE.sub(rf"\1{repository}/raw/{tag}/\2\3\n\n", readme)
    return LINK.sub(rf"[\1]({repository}/blob/{tag}/\2)", readme)


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def expect_same_contents(first: Path, second: Path) -> None:
    one, other = contents(first), contents(second)
    if unequal := sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name)):
        raise SystemExit(f"expected the sdist to give the wheel that the tree gives, but they differ in {unequal}")


def try_install(wheel: Path, extra: str, code: str) -> None:
    """Install a wheel in a fresh environment outside this checkout. Run the doctor and `code` there."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        venv.create(place / "env", with_pip=True)
        binaries = place / "env" / "bin"
        pip = (binaries / "python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
        run(*pip, "--constraint", ROOT / "constraints.txt", f"{wheel}{extra}", cwd=place)
        run(binaries / "ragged-attention", "doctor", cwd=place)
        run(binaries / "python", "-W", "error", "-c", code, cwd=place)


def dist(root: Path) -> list[Path]:
    """Build an sdist and a wheel in dist/, check and try them, and return their paths."""
    output = root / "dist"
    shutil.rmtree(output, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        tree, direct = Path(folder, "tree"), Path(folder, "direct")
        stage(root, tree)
        run(sys.executable, "-m", "build", "--outdir", output, tree)
        run(sys.executable, "-m", "build", "--wheel", "--outdir", direct, tree)
        (sdist,), (wheel,) = output.glob("*.tar.gz"), output.glob("*.whl")
        expect_same_contents(next(direct.glob("*.whl")), wheel)
        run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel)
        # The settings in pyproject.toml make this tool compare the wheel with the tree.
        run(sys.executable, "-m", "check_wheel_contents", wheel, cwd=tree)
    try_install(wheel, "", WITHOUT_EXTRAS)
    try_install(wheel, "[torch]", WITH_TORCH)
    return [sdist, wheel]


def version_of(root: Path) -> str:
    """The package's version, read from the file that setuptools reads."""
    attribute = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["dynamic"]["version"]["attr"]
    package, _, name = attribute.rpartition(".")
    text = (root / "src" / package / "__init__.py").read_text()
    (version,) = re.findall(rf'^{name} = "(.+)"$', text, re.MULTILINE)
    return version


def hindrances(root: Path, today: datetime.date) -> list[str]:
    """The reasons why this commit cannot be released, except faults that only the build shows."""
    version, changelog = version_of(root), (root / "CHANGELOG.md").read_text()
    heading, unreleased = HEADING.search(changelog), UNRELEASED.search(changelog)
    reasons = []
    if changed := git(root, "status", "--porcelain"):
        reasons.append(f"expected a clean tree, got\n{changed.rstrip()}")
    if heading is None or heading["version"] != version:
        newest = heading["version"] if heading else "none"
        reasons.append(f"expected the newest version of CHANGELOG.md to be the package's, {version}, got {newest}")
    elif heading["date"] != today.isoformat():
        reasons.append(f"expected version {version} of CHANGELOG.md to be of today, {today}, got {heading['date']}")
    if unreleased is None or unreleased[1].strip():
        reasons.append("expected an empty section Unreleased in CHANGELOG.md, above the versions")
    if not (urls := urls_of(root)).get("Repository"):
        reasons.append(f"expected a Repository in [project.urls] of pyproject.toml, got {urls}")
    if (cited := CITED.findall((root / "CITATION.cff").read_text())) != [version]:
        reasons.append(f"expected the package's version in CITATION.cff, {version}, got {', '.join(cited) or 'none'}")
    if git(root, "tag", "--list", f"v{version}"):
        reasons.append(f"expected a new version, but the tag v{version} exists")
    return reasons


def release(root: Path, today: datetime.date, tag: bool) -> int:
    """Check and build, and tag if `tag` is set. Print the remaining steps. Return 1 if a check fails, otherwise 0."""
    if reasons := hindrances(root, today):
        print("\n".join(reasons), file=sys.stderr)
        return 1
    name, files = f"v{version_of(root)}", dist(root)
    upload = f"{Path(sys.executable).parent / 'twine'} upload {' '.join(map(str, files))}"
    if tag:
        git(root, "tag", "--annotate", name, "--message", f"ragged-attention {name.removeprefix('v')}")
        print(f"\nTagged {name}. To publish it:\n\n    git push origin {name}\n    {upload}")
    else:
        print(f"\nAll checks passed. With --tag, this command would tag {name}. Then `{upload}` would publish it.")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("dist", help="build, check and try an sdist and a wheel")
    releasing = commands.add_parser("release", help="check that this commit can be released, and build")
    releasing.add_argument("--tag", action="store_true", help="tag the commit if all checks pass")
    options = parser.parse_args(arguments)
    if options.command == "dist":
        dist(ROOT)
        return 0
    return release(ROOT, datetime.date.today(), options.tag)


if __name__ == "__main__":
    sys.exit(main())
