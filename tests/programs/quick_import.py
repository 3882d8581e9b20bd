"""Print the processor time that `import ragged_attention` takes, without that of NumPy, in seconds."""

import time

import numpy  # noqa: F401

start = time.process_time()
import ragged_attention  # noqa: E402, F401

print(time.process_time() - start)
