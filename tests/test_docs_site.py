"""The documentation's site has every page and operation, its links lead to files, and its generated pages are current.

`make docs-site` builds the site and searches it for dead links.
"""

import json
import re
import tomllib
from pathlib import Path

import pytest

from ragged_attention.calls import CALLS
from tests import scripts

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


site, operation_pages, site_search = (
    scripts.load(ROOT / "docs" / f"{name}.py") for name in ("build_site", "operation_pages", "site_search")
)


def test_every_page_is_in_the_navigation_once(tmp_path):
    listed = site.navigation()
    assert len(listed) == len(set(listed))
    ours = {site.place(path) for path in (ROOT / "docs").rglob("*") if path.suffix in (".md", ".ipynb")}
    assert ours <= set(listed), "zensical.toml does not list all pages of docs/"
    assert set(listed) <= set(site.stage(tmp_path)), "zensical.toml lists a page that does not exist"


def test_staged_links_lead_to_staged_files(tmp_path):
    staged = site.stage(tmp_path)
    assert Path("repository/reference/README.md") in staged
    assert Path("repository/examples/serve_jax.py.md") in staged  # listings of code are pages too
    for path in staged:
        if path.suffix == ".md" and not path.stem.endswith(".py"):
            for target, _ in site.LINK.findall((tmp_path / path).read_text()):
                assert "://" in target or (tmp_path / path.parent / target).is_file(), f"{path}: {target}"


def test_every_operation_has_a_page_with_an_example():
    pages = {path.stem: path.read_text() for path in operation_pages.PAGES.glob("*.md")}
    assert pages.keys() - {"index"} == CALLS.keys()
    choice = (ROOT / "docs" / "start" / "which_operation.md").read_text()
    for operation in CALLS:
        (example,) = FENCE.findall(pages[operation])  # tests/test_docs.py runs the example
        assert f"{operation}(" in example
        assert f"]({operation}.md)" in pages["index"]
        assert f"](../operations/{operation}.md)" in choice


def test_code_of_the_first_pages_fits_its_column():
    """Code in the first pages fits into 100 columns.

    On a screen of at least 1220 pixels it then fits between both menus without horizontal scrolling.
    """
    pages = [path for folder in ("start", "operations") for path in (ROOT / "docs" / folder).glob("*.md")]
    for path in [*pages, ROOT / "docs" / "index.md", ROOT / "docs" / "guides" / "serve.md"]:
        for code in FENCE.findall(path.read_text()):
            assert not [line for line in code.splitlines() if len(line) > 100], path.name


@pytest.mark.parametrize("front_end", ["torch", "jax"])
def test_public_functions_are_the_operations(front_end):
    assert operation_pages.functions().keys() == CALLS.keys() == operation_pages.offered(front_end)


def test_the_pages_of_operations_are_current():
    for path, text in operation_pages.pages().items():
        assert path.read_text() == text, f"run `make docs`: {path.name}"


def test_a_docstring_becomes_markdown():
    docstring = """One line.

    Args:
        a, b: [P, G]; p * G < n, see `mla_decode`,
            and on.
        c: more, for `own`. Of two
            kinds:

            - one with n * 1 and
              a `b`
            - another

            A last word, where j =
            - 1 is no item.
        d, e: the end.

    Returns:
        A formula:

            x = a * b

    Raises:
        TypeError: never.

    After someone.
    """
    assert operation_pages.described(docstring, "own", {"own", "mla_decode"}) == (
        "One line.\n\n## Arguments\n\n"
        "- **`a`, `b`**: [P, G]; p \\* G &lt; n, see [`mla_decode`](mla_decode.md), and on.\n"
        "- **`c`**: more, for `own`. Of two kinds:\n\n"
        "    - one with n \\* 1 and a `b`\n    - another\n\n"
        "    A last word, where j = - 1 is no item.\n\n"
        "- **`d`, `e`**: the end.\n\n"
        "## Returns\n\nA formula:\n\n    x = a * b\n\n## Errors\n\n- **`TypeError`**: never.\n\n"
        "## Remarks\n\nAfter someone.\n"
    )


def test_a_page_without_its_marks_is_refused():
    with pytest.raises(ValueError, match="expected a page with the lines"):
        operation_pages.with_written("# A page\n", "text")


def test_links_in_code_stay_and_others_move():
    text = "[a](../reference/README.md#laws)\n```py\nx[0](../y)\n```\n    z[0](../y)\n[b](https://example.org/x.md)\n"
    moved, found = site.with_links(ROOT / "docs" / "concepts.md", text)
    assert moved == text.replace("../reference", "repository/reference")
    assert found == [ROOT / "reference" / "README.md"]
    with pytest.raises(SystemExit, match=r"docs/concepts.md: expected a link to a file of the repository, got gone.md"):
        site.with_links(ROOT / "docs" / "concepts.md", "[c](gone.md)")


def test_a_picture_in_two_colours_follows_the_sites_switch():
    pair = (ROOT / "README.md").read_text().partition("<picture>")[2].partition("</picture>")[0]
    moved, found = site.with_links(ROOT / "README.md", f"<picture>{pair}</picture>\n")
    assert re.fullmatch(
        r"!\[(.*)\]\(\.\./pictures/speed-light.svg#only-light\) !\[\1\]\(\.\./pictures/speed-dark.svg#only-dark\)\n",
        moved,
    )
    assert [path.name for path in found] == ["speed-light.svg", "speed-dark.svg"]


def test_links_in_html_move_to_built_pages():
    moved, found = site.with_links(
        ROOT / "README.md", '<a href="docs/concepts.md#pages"><img src="docs/site.css"></a>\n'
    )
    assert moved == '<a href="../concepts.html#pages"><img src="../site.css"></a>\n'
    assert [path.name for path in found] == ["concepts.md", "site.css"]


def test_commands_get_fences_and_other_blocks_stay():
    before, after = "Text.\n\n", "\n\n    x = a + b\n\n- an item\n\n    make test\n"
    code = "pip install '.[torch]'\n{}ragged-attention doctor"
    assert site.fenced(f"{before}    {code.format(' ' * 4)}{after}") == f"{before}```sh\n{code.format('')}\n```{after}"
    fence = "```text\nsee\n\n    make demo\n```\n"
    assert site.fenced(fence) == fence


def test_listings_and_the_changelog_are_not_searched(tmp_path):
    site.stage(tmp_path)
    for name, searched in (("CHANGELOG.md", False), ("examples/serve_jax.py.md", False), ("reference/README.md", True)):
        assert (tmp_path / "repository" / name).read_text().startswith("---\nsearch:\n  exclude: true\n") != searched


def test_the_index_has_headings_alone_of_pages_of_tables():
    pages = {"items": [
        {"location": "status.html", "text": "<p>First.</p> <p>Second.</p>"},
        {"location": "status.html#on-cpus", "text": "<table>"},
        {"location": "operations/mla_decode.html#signature", "text": "def"},
        {"location": "concepts.html#schedules", "text": "<p>Why</p> <p>How</p>"},
    ]}  # fmt: skip
    assert [(item["location"], item["text"]) for item in site.trimmed(pages)["items"]] == [
        ("status.html", "<p>First."),
        ("status.html#on-cpus", ""),
        ("concepts.html#schedules", "<p>Why</p> <p>How</p>"),
    ]
    assert {Path(page).with_suffix("") for page in site.SEARCHED_BY_HEADINGS} <= {
        path.with_suffix("") if path.name != "README.md" else path.with_name("index") for path in site.navigation()
    }


def test_pages_link_to_the_repository_that_pyproject_names():
    config = site.CONFIG.read_text()
    with_link, without = (
        tomllib.loads(site.configured(config, urls))["project"]
        for urls in ({"Homepage": "https://example.com", "Repository": "https://example.org/a"}, {})
    )
    assert with_link.pop("repo_url") == "https://example.org/a"
    assert with_link == without
    # These paths are relative to the configuration file, which is in build/.
    assert (without["docs_dir"], without["site_dir"]) == ("site-source", "site")
    assert (site.USED_CONFIG.parent / without["theme"]["custom_dir"]).resolve() == ROOT / "docs" / "theme"


SECTIONS = [
    ("late", "Other", "<p>one two three four five six seven eight nine ten eleven a paged <b>cache</b></p>", ["A"]),
    ("apart", "Other", "<p>A cache of one page; it is paged.</p>", ["A"]),
    ("near", "Other", "<p>A paged-cache</p>", ["A"]),
    ("place", "Other", "<p>It is paged.</p>", ["Caches", "A"]),
    ("title", "Caches", "<p>paged</p>", ["A"]),
    ("neither", "Caches", "<p>a row</p>", ["A"]),
]


def test_the_search_ranks_titles_then_places_then_words_that_are_near():
    items = [dict(zip(("location", "title", "text", "path"), section, strict=True)) for section in SECTIONS]
    index = site_search.Index({"config": {"separator": "[\\s\\-]+"}, "items": items})
    assert index.find("paged cache") == ["title", "place", "near", "late", "apart"]
    assert index.find("PAGED") == ["title", "near", "place", "apart", "late"]
    assert index.find("paged nothing") == []


def test_a_search_that_misses_its_page_is_a_fault(tmp_path, monkeypatch):
    items = [{"location": f"{name}.html#a", "title": name, "text": "a word", "path": []} for name in "defg"]
    (tmp_path / "search.json").write_text(json.dumps({"config": {"separator": " "}, "items": items}))
    monkeypatch.setattr(site_search.shutil, "which", lambda name: None)  # no node, which runs the site's own script
    assert list(site_search.faults(tmp_path, {"word": ("c", "f")})) == []
    assert list(site_search.faults(tmp_path, {"word": ("g",)})) == [
        "search for 'word': expected one of g, got d.html#a, e.html#a, f.html#a"
    ]


def test_thirty_searches_lead_to_pages():
    pages = {path.with_suffix("").as_posix() for path in site.navigation()}
    assert len(site_search.SEARCHES) >= 30
    assert {page for expected in site_search.SEARCHES.values() for page in expected} <= pages


def test_a_picture_in_one_file_is_divided_by_colours_for_the_sites_switch(tmp_path):
    """A picture for both colour schemes becomes two files, as docs/pictures/draw.py would write for each scheme."""
    moved, _ = site.with_links(ROOT / "docs" / "masks.md", "![a\nb](pictures/masks.svg) [c](pictures/masks.svg)\n")
    pair = " ".join(f"![a\nb](pictures/masks-{scheme}.svg#only-{scheme})" for scheme in ("light", "dark"))
    assert moved.startswith(pair)
    site.stage(tmp_path)
    pictures = tmp_path / "pictures"
    for scheme in ("light", "dark"):
        written = pictures / f"pages-{scheme}.svg"
        assert written.read_text() == (ROOT / "docs" / "pictures" / written.name).read_text()
        assert "prefers-color-scheme" not in (pictures / f"masks-{scheme}.svg").read_text()


def test_faults_of_a_built_site_are_found(tmp_path):
    (tmp_path / "good.html").write_text('<p id="here"><a href="#here">x</a> <a href="https://example.org">y</a>')
    assert list(site.faults(tmp_path)) == []
    (tmp_path / "bad.html").write_text(
        '<a href="gone.html">x</a> <a href="good.html#there">y</a> <script src="https://example.org/z.js"></script>'
    )
    assert list(site.faults(tmp_path)) == [
        "bad.html: loads https://example.org/z.js from elsewhere",
        "bad.html: leads to gone.html, which is not there",
        "bad.html: leads to good.html#there, which has no such place",
    ]


def test_versions_are_listed_the_newest_first(tmp_path):
    for name in ("0.9.0", "0.10.0", "dev"):
        (tmp_path / name).mkdir()
    site.list_versions(tmp_path)
    listed = json.loads((tmp_path / "versions.json").read_text())
    assert [(entry["version"], entry["aliases"]) for entry in listed] == [
        ("0.10.0", ["latest"]),
        ("0.9.0", []),
        ("dev", []),
    ]
    assert "url=0.10.0/" in (tmp_path / "index.html").read_text()


def test_the_table_of_devices_names_every_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "start" / "install.md").read_text()
    named = re.findall(r"pip install '\.\[([\w,-]+)\]'", page)
    assert {extra for group in named for extra in group.split(",")} == set(extras)
