"""What `pytest --pyargs ragged_attention.testing` needs to collect the suite."""

from ragged_attention.testing.collection import *  # noqa: F403
