"""Print the path of the installed package, after a check of its subpackages and a call.

Usage: installed_package.py PACKAGES FOLDERS, both comma-separated lists. The packages must be importable. The FOLDERS
must not be importable by their own names, because they may only be installed as subpackages.
"""

import importlib
import importlib.util
import sys

import numpy as np

import ragged_attention
from ragged_attention.reference.merge_attention_states import merge_attention_states

packages, folders = (names.split(",") for names in sys.argv[1:])
for name in packages:
    if name.rpartition(".")[2] in ("reference", "kernels_triton", "kernels_pallas", "kernels_cuda"):
        importlib.import_module(name)
    assert importlib.util.find_spec(name), name
for folder in folders:
    assert importlib.util.find_spec(folder) is None, folder
out, lse = merge_attention_states(np.ones((2, 1, 1, 16)), np.zeros((2, 1, 1)))
assert (out == 1).all()
assert np.allclose(lse, np.log(2))
print(ragged_attention.__file__)
