"""Ragged paged attention and multi-head latent attention for every device, from torch and from jax.

The front ends `ragged_attention.torch` and `ragged_attention.jax` offer the operations, under the same names. This
module loads neither framework. It offers the selection of backends and the error classes.
"""

from ragged_attention.config import Config as Config
from ragged_attention.config import get_config as get_config
from ragged_attention.config import reload_config as reload_config
from ragged_attention.config import set_backend as set_backend
from ragged_attention.config import use_backend as use_backend
from ragged_attention.dispatch import backends as backends
from ragged_attention.errors import BackendMissing as BackendMissing
from ragged_attention.errors import InvalidInput as InvalidInput
from ragged_attention.errors import TooLarge as TooLarge
from ragged_attention.errors import Unsupported as Unsupported
from ragged_attention.explain import explain as explain

__version__ = "0.2.0"
