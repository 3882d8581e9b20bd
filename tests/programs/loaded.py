"""Print which of some modules are loaded after a module is imported and, for MODULE:FUNCTION, its function is called.

Usage: loaded.py MODULE[:FUNCTION] NAME...
"""

import importlib
import sys

module, _, function = sys.argv[1].partition(":")
imported = importlib.import_module(module)
if function:
    getattr(imported, function)()
print(*sorted(sys.modules.keys() & sys.argv[2:]))
