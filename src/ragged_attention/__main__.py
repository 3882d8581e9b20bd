"""`python -m ragged_attention`: the command line, for use if its script is not on the PATH."""

import sys

from ragged_attention.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
