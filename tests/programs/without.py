"""Run a script as if some packages were not installed: `python -m tests.programs.without numba,pytest SCRIPT ...`."""

import importlib.util
import runpy
import sys
from pathlib import Path
from typing import Any

find = importlib.util.find_spec
packages, script, *arguments = sys.argv[1:]


class Missing:
    """The first import finder, which raises the usual error for a package that is to appear missing."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in packages.split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def find_others(name: str, *package: Any) -> Any:
    return None if name.partition(".")[0] in packages.split(",") else find(name, *package)


if __name__ == "__main__":
    sys.meta_path.insert(0, Missing())  # type: ignore[arg-type]
    importlib.util.find_spec = find_others
    sys.path[0], sys.argv = str(Path(script).resolve().parent), [script, *arguments]
    runpy.run_path(script, run_name="__main__")
