"""Tile sizes: explicit options, then the tuned file, then the heuristic; and the files that are shipped."""

import contextlib
import dataclasses
import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ragged_attention import dispatch, tuning
from ragged_attention.calls import CALLS, Device
from ragged_attention.errors import BackendMissing, InvalidInput
from ragged_attention.tools.samples import Sample, sample_of

ROOT = Path(__file__).resolve().parent.parent
MERGE = "merge_attention_states"
DEVICE = Device(framework="torch", platform="cuda", name="NVIDIA H200")
SHIPPED = ("triton", "pallas", "cuda")

MEASURED = {"us": 12.5, "date": "2026-01-31", "commit": "0" * 40}
TPUS = ("TPU v4", "TPU v5 lite", "TPU v5p", "TPU v6 lite", "TPU7x")

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
    entry = {"tile": {"block_q": 64, "block_kv": 128}, "case": {}, **MEASURED}
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


def unreachable(module: Any, operation: str, table: Mapping[str, Any]) -> list[str]:
    """The keys of a tuned file to which the call that was measured does not lead."""
    return [
        key
        for key, entry in table.items()
        if module.tuning_key(dataclasses.replace(sample_of(operation), **entry["case"]).call(operation, DEVICE)) != key
    ]


def test_every_shipped_tuned_file_parses_and_can_be_found():
    """An entry is a tile of its module with a measurement, in a folder that a device's name can lead to."""
    for backend in SHIPPED:
        root = Path(next(iter(importlib.import_module(dispatch.PACKAGES[backend]).__path__)))
        for path in sorted(root.glob("tuned/**/*.json")):
            assert path.parent.parent == root / "tuned", f"{path} is not tuned/<device>/<operation>.json"
            assert tuning.device_slug(path.parent.name) == path.parent.name
            module = dispatch.load(path.stem, backend)
            assert hasattr(module, "tuning_key"), f"{path} can never be looked up"
            table = json.loads(path.read_text())
            for key, entry in table.items():
                module.Tile(**entry["tile"])
                assert set(entry) == {"tile", "case", *MEASURED}, f"{path}, {key}"
            assert unreachable(module, path.stem, table) == [], path


def tunable(backend: str) -> list[str]:
    """The operations of a room that look into a tuned file."""
    found = []
    for operation in CALLS:
        with contextlib.suppress(BackendMissing):
            found += [operation] if hasattr(dispatch.load(operation, backend), "tuning_key") else []
    return found


def tpu(kind: str) -> Device:
    """The facts of a TPU that is not here."""
    sharding = pytest.importorskip("jax.sharding")
    device = sharding.AbstractDevice(device_kind=kind, num_cores=1, platform="tpu")
    with sharding.use_abstract_mesh(sharding.AbstractMesh((), (), abstract_device=device)):
        return importlib.import_module("ragged_attention.jax._launcher").device_facts("tpu")


@pytest.mark.parametrize("kind", TPUS)
@pytest.mark.parametrize("operation", tunable("pallas"))
def test_a_tuned_file_for_a_tpu_is_found_by_the_name_jax_has_for_it(operation, kind, monkeypatch):
    """From the device's name to the folder, from the call to the key, from the entry to the tile; and no further."""
    device = tpu(kind)
    module: Any = dispatch.load(operation, "pallas")
    call = sample_of(operation).call(operation, device)
    tile = dataclasses.replace(module.heuristic(call), vmem_limit_bytes=3 << 20)
    table = {module.tuning_key(call): {"tile": dataclasses.asdict(tile), "case": {}, **MEASURED}}
    files = {(dispatch.PACKAGES["pallas"], tuning.device_slug(kind), operation): table}
    monkeypatch.setattr(tuning, "tuned_table", lambda *place: files.get(place, {}))
    assert unreachable(module, operation, table) == []
    assert tuning.tile_for(module, call, {}) == tile
    assert tuning.tile_for(module, call, {"vmem_limit_bytes": 5 << 20}).vmem_limit_bytes == 5 << 20
    others = (tpu(other) for other in TPUS if other != kind)
    elsewhere = [tuning.tile_for(module, sample_of(operation).call(operation, other), {}) for other in others]
    assert all(other != tile for other in elsewhere)


@pytest.mark.parametrize("operation", tunable("pallas"))
def test_a_key_that_no_call_leads_to_is_noticed(operation):
    module: Any = dispatch.load(operation, "pallas")
    key = module.tuning_key(sample_of(operation).call(operation, DEVICE))
    table = {key: {"case": {}}, f"{key} ": {"case": {}}}
    assert unreachable(module, operation, table) == [f"{key} "]
    other = {"dtype": "float32", "num_tokens": 4096, "num_q_heads": 1, "num_kv_heads": 1, "top_k": 7}
    known = {each.name for each in dataclasses.fields(sample_of(operation))}
    elsewhere = {key: {"case": {name: value for name, value in other.items() if name in known}}}
    assert unreachable(module, operation, elsewhere) == [key]


def test_no_tuned_sizes_are_shipped_for_devices_that_nothing_was_run_on():
    never_run = "| `pallas` | TPU (any) | | never |" in (ROOT / "docs" / "status.md").read_text()
    assert never_run == (list(ROOT.glob("kernels_pallas/tuned/*/*.json")) == [])
