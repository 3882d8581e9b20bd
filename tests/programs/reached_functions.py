"""Print the number of kernels in the compile matrix, and the kernels whose digest covers a wrong set of functions."""

from typing import Any

from triton.runtime import jit

from benchmarks.compiled import compile_matrix, sources

called: dict[str, set[Any]] = {}


class Finder(jit.DependenciesFinder):
    def _update_hash(self, func: Any) -> None:
        called.setdefault(self.name, set()).add(func)
        super()._update_hash(func)


def reached(function: Any, found: set[Any]) -> set[Any]:
    function.cache_key  # noqa: B018  makes Triton find the functions that this one calls
    for other in called.get(function._fn_name, set()):
        if other not in found and not other.__module__.startswith("triton."):
            found.add(other)
            reached(other, found)
    return found


jit.DependenciesFinder = Finder
kernels = {
    launch.kernel
    for case in compile_matrix.covering("sm_90")
    for index in range(len(compile_matrix.calls_for(case, "sm_90")))
    for launch in compile_matrix.launches_for(case, "sm_90", index)
}
print(len(kernels))
for kernel in kernels:
    if (ours := set(sources.functions_of(kernel))) != (theirs := reached(kernel, {kernel})):
        print(kernel.__name__, ours ^ theirs)
