"""The plans for many devices: docs/scaling.md is the current, plausible output of `benchmarks/scaling.py`."""

from pathlib import Path

import pytest

from benchmarks import scaling

PAGE = Path(__file__).resolve().parent.parent / "docs" / "scaling.md"
FAST = scaling.Network("fast", 1e30, 0.0)


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_the_page_has_the_tables(name: str) -> None:
    text = PAGE.read_text()
    start = f"<!-- {name} -->\n"
    table = text[text.index(start) + len(start) : text.index(f"<!-- end of {name} -->")].strip()
    assert table == scaling.tables()[name], "docs/scaling.md is not current: python -m benchmarks.scaling"


@pytest.mark.parametrize("model", scaling.MODELS, ids=lambda model: model.name)
def test_a_plan_is_sound(model: scaling.Model) -> None:
    machine = scaling.Machine()
    for devices in scaling.DEVICES:
        ideal = scaling.decode_step(model, devices, FAST, machine)
        assert ideal.by_heads * ideal.by_positions == devices
        assert ideal.sending == pytest.approx(0.0, abs=1e-12)
        rates = [scaling.decode_step(model, devices, each, machine).tokens_a_second for each in scaling.NETWORKS]
        assert all(0 < rate < ideal.tokens_a_second for rate in rates)
        twice = scaling.decode_step(model, 2 * devices, FAST, machine)
        assert twice.tokens_a_second == pytest.approx(2 * ideal.tokens_a_second)


def test_one_device_sends_nothing() -> None:
    assert scaling.decode_bytes(4, 8, 128, 1) == scaling.decode_bytes(4, 8, 128, 1, own_heads=True) == 0
    assert scaling.training_bytes(64, 8, 256, 2, 1) == 0
    assert scaling.NETWORKS[0].exchange(0, 1) == 0


def test_any_network_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert scaling.main(["--bandwidth", "25", "--latency", "10"]) == 0
    assert "| network |" in capsys.readouterr().out
