"""What a backend does not take yet, which it has to refuse by name."""

import pytest

from ragged_attention.testing.drawing import Check
from ragged_attention.testing.runner import Absent, Declined, Runner

LACKING: dict[str, str] = {}  # by backend, an argument that operations do not honour yet


def run(check: Check, runner: Runner, examples: int) -> None:
    """Run a check. A backend that does not take what the check needs has to decline it for that reason."""
    try:
        check.run(runner, examples)
    except Absent as lack:
        pytest.skip(str(lack))
    except Declined as refusal:
        lacking = LACKING.get(runner.backend)
        if lacking is None or f"{runner.backend}: does not honour {lacking}" not in str(refusal):
            raise
