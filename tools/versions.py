"""Run tests with the oldest, later and the newest supported versions of dependencies, each in its own environment.

    python tools/versions.py                  # make all environments, and run the tests in each
    python tools/versions.py newest --save    # only one environment; save its outcome

pyproject.toml allows the versions between the oldest and the newest of `ENVIRONMENTS`. `--save` writes the outcomes of
the tests to the table in docs/start/install.md. Each environment is a folder in .venv-versions. It takes about 6 GB,
because torch brings its CUDA libraries.

The tests cover both front ends, `torch.compile`, gradients, the transformers integration, and all named batches on all
backends that a CPU runs. Like `make test`, they run only a representative part of the cases.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv-versions"
PAGE = ROOT / "docs" / "start" / "install.md"
BEGIN, END = "<!-- versions: written by tools/versions.py -->", "<!-- versions end -->"
OUTCOMES = ROOT / "benchmarks" / "results" / "versions.json"
TESTS = (
    "test_agreement.py",
    "test_gradients_jax.py",
    "test_gradients_torch.py",
    "test_integration_transformers.py",
    "test_jax_front_end.py",
    "test_kernels_numba.py",
    "test_mla_jax_front_end.py",
    "test_mla_torch_front_end.py",
    "test_torch_compile.py",
    "test_torch_front_end.py",
    "test_torch_out.py",
)
# Packages that the tests need, and absl-py, which jax-triton needs.
TOOLS = ("absl-py", "hypothesis", "ml_dtypes", "pytest", "pytest-xdist", "rich")


@dataclass(frozen=True)
class Environment:
    """A version of Python, and the versions of the packages that are installed for it."""

    python: str
    packages: Mapping[str, str]
    # Packages that are installed last and without their dependencies. Torch for CUDA requires the Triton version that
    # it was built for, and jax's CUDA plugin requires the CUDA libraries.
    separate: Mapping[str, str]


ENVIRONMENTS = {
    "oldest": Environment(
        "3.11",
        {"torch": "2.9.0", "jax": "0.10.2", "numpy": "2.0.2", "numba": "0.63.0", "transformers": "5.23.0"},
        {"triton": "3.6.0", "jax-triton": "0.3.1", "jax-cuda13-plugin": "0.10.2"},
    ),
    "later": Environment(
        "3.12",
        {"torch": "2.11.0", "jax": "0.11.2", "numpy": "2.5.2", "numba": "0.68.1", "transformers": "5.23.0"},
        {"triton": "3.6.0", "jax-triton": "0.3.1", "jax-cuda13-plugin": "0.11.2"},
    ),
    "newest": Environment(
        "3.13",
        {"torch": "2.15.0", "jax": "0.12.0.1", "numpy": "2.5.5", "numba": "0.68.1", "transformers": "5.24.0"},
        {"triton": "3.9.0", "jax-triton": "0.4.1", "jax-cuda13-plugin": "0.12.0.1"},
    ),
}
COLUMNS = ("Python", "torch", "Triton", "jax", "NumPy", "Numba", "transformers")


def python_of(version: str) -> str:
    """The path of a Python interpreter of this version, from pyenv, PATH or uv."""
    pythons = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    if pythons:
        return str(pythons[-1])
    if on_path := shutil.which(f"python{version}"):
        return on_path
    if uv := shutil.which("uv"):
        run(uv, "python", "install", version)
        return subprocess.run(
            [uv, "python", "find", version], capture_output=True, text=True, check=True
        ).stdout.strip()
    raise SystemExit(f"expected Python {version} under ~/.pyenv, on PATH or from uv, found none")


def run(*command: object) -> None:
    print("\n$", *command, flush=True)
    subprocess.run(list(map(str, command)), cwd=ROOT, check=True)


def pinned(packages: Mapping[str, str]) -> list[str]:
    return [f"{name}=={version}" for name, version in packages.items()]


def made(name: str) -> Path:
    """The path of an environment's Python. The environment is made if it is missing or differs from `ENVIRONMENTS`."""
    wanted, folder = ENVIRONMENTS[name], FOLDER / name
    python, stamp = folder / "bin" / "python", folder / "made"
    described = json.dumps([wanted.python, wanted.packages, wanted.separate])
    if not stamp.exists() or stamp.read_text() != described:
        run(python_of(wanted.python), "-m", "venv", "--clear", folder)
        install = python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"
        run(*install, *pinned(wanted.packages), *TOOLS)
        run(*install, "--no-deps", *pinned(wanted.separate))
        stamp.write_text(described)
    return python


def outcome_of(name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Run the tests in an environment. Returns its versions and the numbers of tests by outcome."""
    python, report = made(name), FOLDER / f"{name}.json"
    report.unlink(missing_ok=True)
    tests = [str(ROOT / "tests" / test) for test in TESTS]
    command = [python, "-m", "pytest", "-n", "2", "--dist", "worksteal", "--tier", "covering", f"--record={report}"]
    print("\n$", *command, flush=True)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    ended = subprocess.run([*map(str, command), *tests, *arguments], cwd=ROOT, env=environ, check=False)
    if ended.returncode not in (0, 1):
        raise SystemExit(f"expected tests to run in {name}, got exit status {ended.returncode}")
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "versions": {"python": ENVIRONMENTS[name].python, **ENVIRONMENTS[name].packages, **ENVIRONMENTS[name].separate},
        "tests": json.loads(report.read_text())["tests"],
    }


def table(outcomes: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [["", *COLUMNS, "passed", "failed", "on"], ["---"] * (len(COLUMNS) + 4)]
    for name in (name for name in ENVIRONMENTS if name in outcomes):
        versions, tests = outcomes[name]["versions"], outcomes[name]["tests"]
        rows.append([name, *(versions[column.lower()] for column in COLUMNS)])
        rows[-1] += [f"{tests.get('passed', 0):,}", str(tests.get("failed", 0)), outcomes[name]["date"]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def written(page: str, outcomes: Mapping[str, Mapping[str, Any]]) -> str:
    """The page with a new table of these outcomes."""
    return re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n\n{table(outcomes)}\n\n{END}", page, flags=re.DOTALL)


def known() -> dict[str, Any]:
    return json.loads(OUTCOMES.read_text()) if OUTCOMES.exists() else {}


def main(argv: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools/versions.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"environments: {', '.join(ENVIRONMENTS)} (default: all)"
    )
    parser.add_argument("--save", action="store_true", help=f"write the outcomes to {PAGE.relative_to(ROOT)}")
    options, arguments = parser.parse_known_args(argv)
    if unknown := set(options.names) - set(ENVIRONMENTS):
        parser.error(f"expected names of {', '.join(ENVIRONMENTS)}, got {', '.join(sorted(unknown))}")
    outcomes = {name: outcome_of(name, arguments) for name in options.names or ENVIRONMENTS}
    print(f"\n{table(outcomes)}")
    if options.save:
        outcomes = known() | outcomes
        OUTCOMES.write_text(json.dumps(outcomes, indent=1, sort_keys=True) + "\n")
        PAGE.write_text(written(PAGE.read_text(), outcomes))
    return int(any(outcome["tests"].get("failed") for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
