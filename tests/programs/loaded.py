"""Print which of the named modules are loaded after MODULE is imported and, if given, its FUNCTION is called.

Usage: loaded.py MODULE[:FUNCTION] NAME...
"""

import importlib
import sys

module, _, function = sys.argv[1].partition(":")
imported = importlib.import_module(module)
if function:
    getattr(imported, function)()
print(*sorted(sys.modules.keys() & sys.argv[2:]))
