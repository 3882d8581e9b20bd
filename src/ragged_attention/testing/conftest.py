"""The pytest configuration with which `pytest --pyargs ragged_attention.testing` collects the suite."""

from ragged_attention.testing.collection import *  # noqa: F403
