"""The documentation's pictures are the current output of docs/pictures/draw.py, small, and readable on any page."""

import dataclasses
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests import scripts

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"
SVG = "{http://www.w3.org/2000/svg}"
MOST_BYTES = 30_000


@pytest.fixture(scope="module")
def draw() -> Any:
    for name in ("torch", "triton", "ml_dtypes"):
        pytest.importorskip(name)
    return scripts.load(FOLDER / "draw.py")


NAMES = sorted(path.stem for path in FOLDER.glob("*.svg"))


def test_every_picture_has_a_script(draw: Any) -> None:
    assert sorted(draw.files()) == NAMES


def test_the_gallery_shows_every_picture(draw: Any) -> None:
    gallery = (FOLDER.parent / "gallery.md").read_text()
    assert sorted(re.findall(r"\]\(pictures/(\w+)\.svg\)", gallery)) == sorted(draw.PICTURES)


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_is_what_its_script_draws(draw: Any, name: str) -> None:
    text = (FOLDER / f"{name}.svg").read_text()
    assert text == draw.files()[name](), f"{name}.svg is not current: python docs/pictures/draw.py"


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_is_small_and_readable_anywhere(name: str) -> None:
    text = (FOLDER / f"{name}.svg").read_text()
    assert len(text.encode()) < MOST_BYTES
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg"
    assert [child.tag for child in root[:3]] == [f"{SVG}title", f"{SVG}desc", f"{SVG}style"]
    assert all(len(child.text or "") > 10 for child in root[:2])
    style = root[2].text or ""
    assert ("prefers-color-scheme: dark" in style) != name.endswith(("-light", "-dark"))
    assert "font-face" not in style
    # The style sheet sets all colours, and no other file is loaded.
    assert not re.search(r'(fill|stroke|href|src)="', text)
    known = set(re.findall(r"\.(\w+)[ ,]", style))
    used = {kind for element in root.iter() for kind in element.get("class", "").split()}
    assert used <= known
    width, height = (float(root.get(side, 0)) for side in ("width", "height"))
    for element in root.iter(f"{SVG}text"):
        x, text = float(element.get("x", -1)), element.text or ""
        needed = len(text) * (5.3 if "small" in (element.get("class") or "") else 6.4)  # pixels in common fonts
        start = x - needed * {"end": 1.0, "middle": 0.5}.get(element.get("text-anchor", ""), 0.0)
        assert start > -5, f"cut off: {text}"
        assert start + needed < width + 5, f"cut off: {text}"
        assert 0 <= float(element.get("y", -1)) <= height


@pytest.mark.parametrize(
    ("name", "layout", "token", "expected"),
    [
        ("fp8_v32", "token", 0, [(0, 512, "values"), (512, 528, "scales"), (528, 656, "rotary")]),
        ("fp8_v4", "page", 1, [
            (576, 1024, "values"), (1024, 1152, "rotary"), (1152 + 8, 1152 + 15, "scales"), (1167, 1168, "padding"),
        ]),
        ("fp8_v41", "token", 1, [(528, 1040, "values"), (1040, 1056, "scales")]),
        ("fp8_v41", "page", 1, [(512, 1024, "values"), (1024 + 16, 1056, "scales")]),
        ("fp4_v41", "token", 1, [(288, 544, "values"), (544, 576, "scales")]),
        ("fp4_v41", "page", 1, [(256, 512, "values"), (512 + 32, 576, "scales")]),
    ],
)  # fmt: skip
def test_bytes_of_a_latent_cache(draw: Any, name: str, layout: str, token: int, expected: list) -> None:
    """The pictured bytes of a latent cache follow the documentation of CacheFormat."""
    found = draw.runs_of(draw.roles(dataclasses.replace(draw.CACHE_FORMATS[name], layout=layout), 2))
    assert [(start, stop, kind) for start, stop, of, kind, _ in found if of == token] == expected


def test_bytes_of_vllms_pages(draw: Any) -> None:
    """The pictured bytes of vLLM's pages are those of the views in docs/cache_formats.md."""
    forms = {form.name: form for form in draw.SCALED_FORMATS}
    rows = draw.kv_page(draw.kv_parts(forms["int8_token_head"], 64), 2, by_row=True)
    assert [(kind, start, stop) for kind, start, stop, _ in rows[:4]] == [
        ("codes", 0, 64), ("scales", 64, 68), ("codes", 68, 132), ("scales", 132, 136),
    ]  # fmt: skip
    assert rows[-1][2] == 2 * 2 * (64 + 4)
    page = draw.kv_page(draw.kv_parts(forms["nvfp4"], 64), 2, by_row=False)
    assert [(kind, start, stop) for kind, start, stop, _ in page] == [
        ("codes", 0, 64), ("scales", 64, 72), ("codes", 72, 136), ("scales", 136, 144),
    ]  # fmt: skip


def test_one_count_of_parts_for_all_has_the_same_keys(draw: Any) -> None:
    visits = [(draw.schedule.Visit(0, stop, 64, False),) for stop in (128, 6400)]
    launch = draw.schedule.Launch(
        "split_kernel",
        (2, 1),
        tuple(draw.schedule.Program(seq, seq, (0, 0), visit) for seq, visit in enumerate(visits)),
    )
    fixed = draw.with_one_count(launch, 3, 64)
    spans = [program.span for program in fixed.programs]
    assert spans == [(0, 64), (64, 128), (0, 2176), (2176, 4352), (4352, 6400)]


def test_the_seesaws_products_are_those_of_two_blocks(draw: Any) -> None:
    words = [word for row in draw.steps() for word in row["products"].split(", ")]
    assert sum(draw.PRODUCT[word.split()[0]] for word in words) == 2 * 64 * 64 * 1088
