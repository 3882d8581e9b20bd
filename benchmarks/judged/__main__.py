"""Test kernels of other projects with our suite and print the reports."""

import argparse
import sys
from collections.abc import Sequence

from benchmarks.judged import of_cpus, of_ejkernel, of_flashinfer, of_jax, of_torch, of_triton
from ragged_attention.testing import environment, judge


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if all recipes that ran passed, and 1 otherwise."""
    modules = (of_torch, of_jax, of_cpus, of_triton, of_flashinfer, of_ejkernel)
    recipes = {name: recipe for module in modules for name, recipe in module.RECIPES.items()}
    parser = argparse.ArgumentParser(prog="benchmarks.judged", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"recipes to run: {', '.join(recipes)} (default: all)")
    parser.add_argument("--examples", type=int, help="the number of drawn batches per check")
    parser.add_argument("--only", default="", help="only checks whose name contains this")
    parser.add_argument(
        "--non-finite", action="store_true", help="also test NaN and infinities in places that no query may see"
    )
    options = parser.parse_args(argv)
    if unknown := {*options.names} - {*recipes}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    environment.prepare()
    passed = True
    for name in options.names or recipes:
        recipe = recipes[name]
        if not recipe.is_installed:
            print(f"{name}: {recipe.package} is not installed\n")
            continue
        limits = {"examples": options.examples, "only": options.only, **recipe.limits}
        if not options.non_finite:
            limits["declines"] = (*limits["declines"], "non-finite values")
        report = judge(recipe.kernel, recipe.operation, **limits)
        print(f"{name}, {recipe.version}\n{report}\n", flush=True)
        passed = passed and report.passed
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
