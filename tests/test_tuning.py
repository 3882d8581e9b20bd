"""Tile sizes: explicit options, then the tuned file, then the heuristic; and the files that are shipped."""

import importlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest

from ragged_attention import dispatch, tuning
from ragged_attention.calls import Device
from ragged_attention.errors import InvalidInput
from ragged_attention.samples import Sample

MERGE = "merge_attention_states"
DEVICE = Device(framework="torch", platform="cuda", name="NVIDIA H200")
SHIPPED = ("triton", "pallas", "cuda")

MODULE = """
import dataclasses

from ragged_attention.errors import InvalidInput

@dataclasses.dataclass(frozen=True)
class Tile:
    block_q: int = 16
    block_kv: int = 32

    def __post_init__(self):
        if self.block_q % 16:
            raise InvalidInput(f"expected block_q to be a multiple of 16, got {self.block_q}")

def heuristic(call):
    return Tile()

def tuning_key(call):
    return f"dtype={call.outs.dtype}"
"""


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A room with one operation and a tuned file for one device and dtype."""
    folder = tmp_path / "a_tuned_room"
    tuned = folder / "tuned" / "nvidia_h200"
    tuned.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / f"{MERGE}.py").write_text(MODULE)
    entry = {"tile": {"block_q": 64, "block_kv": 128}, "us": 12.5, "date": "2026-01-31", "commit": "0" * 40}
    (tuned / f"{MERGE}.json").write_text(json.dumps({"dtype=bfloat16": entry}))
    monkeypatch.syspath_prepend(str(tmp_path))
    tuning.tuned_table.cache_clear()
    yield importlib.import_module(f"a_tuned_room.{MERGE}")
    tuning.tuned_table.cache_clear()
    for name in ("a_tuned_room", f"a_tuned_room.{MERGE}"):
        sys.modules.pop(name, None)


def tile(room, options=None, *, device: Device = DEVICE, dtype: str = "bfloat16"):
    found = tuning.tile_for(room, Sample(dtype=dtype).call(MERGE, device), options or {})
    return found.block_q, found.block_kv


def test_a_tuned_entry_beats_the_heuristic(room):
    assert tile(room) == (64, 128)


def test_explicit_options_beat_the_tuned_entry_field_by_field(room):
    assert tile(room, {"block_q": 16}) == (16, 128)
    assert tile(room, {"block_q": 16, "block_kv": 16}) == (16, 16)


def test_lookup_is_exact(room):
    assert tile(room, dtype="float16") == (16, 32)
    assert tile(room, {"block_kv": 64}, dtype="float16") == (16, 64)


@pytest.mark.parametrize("name", ["NVIDIA H100", "NVIDIA H200 NVL", ""])
def test_another_device_has_its_own_table_or_none(room, name):
    assert tile(room, device=Device(framework="torch", platform="cuda", name=name)) == (16, 32)


def test_unknown_options_list_the_known(room):
    with pytest.raises(InvalidInput, match="expected options among block_q, block_kv for this backend, got 'block_k'"):
        tile(room, {"block_k": 16})


def test_the_tile_checks_what_options_make_of_it(room):
    with pytest.raises(InvalidInput, match="expected block_q to be a multiple of 16, got 24"):
        tile(room, {"block_q": 24})


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H200", "nvidia_h200"),
        ("NVIDIA A100-SXM4-80GB", "nvidia_a100_sxm4_80gb"),
        ("TPU v6 lite", "tpu_v6_lite"),
    ],
)
def test_device_slug(name, slug):
    assert tuning.device_slug(name) == slug


def test_every_shipped_tuned_file_parses_and_can_be_found():
    """An entry is a tile of its module with a measurement, in a folder that a device's name can lead to."""
    for backend in SHIPPED:
        root = Path(next(iter(importlib.import_module(dispatch.ROOMS[backend]).__path__)))
        for path in sorted(root.glob("tuned/**/*.json")):
            assert path.parent.parent == root / "tuned", f"{path} is not tuned/<device>/<operation>.json"
            assert tuning.device_slug(path.parent.name) == path.parent.name
            module = dispatch.load(path.stem, backend)
            assert hasattr(module, "tuning_key"), f"{path} can never be looked up"
            for key, entry in json.loads(path.read_text()).items():
                module.Tile(**entry["tile"])
                assert set(entry) == {"tile", "us", "date", "commit"}, f"{path}, {key}"
