"""Build the documentation site in build/site and check all its links.

    python docs/build_site.py
    python docs/build_site.py --version 0.2.0    # in build/versions/0.2.0, next to the existing versions

The pages of docs/ link to files elsewhere in the repository. Those files become pages under repository/: a Markdown
file stays Markdown, and code becomes a listing. The site loads nothing from other hosts, so it can be read from disk.

The site's search finds pages, but not listings or the changelog. Of pages with measurements it indexes only the
introductions and headings. docs/site_search.py lists searches with the pages that they must find.

If the URLs in pyproject.toml include the repository, every page links to it.
"""

import argparse
import functools
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
DOCS, SOURCE, SITE, VERSIONS = (ROOT / name for name in ("docs", "build/site-source", "build/site", "build/versions"))
CONFIG = ROOT / "zensical.toml"
USED_CONFIG = ROOT / "build" / "zensical.toml"
AS_IT_IS = {".svg", ".png", ".css"}
LISTINGS = {".py": "py", ".toml": "toml", ".cu": "cuda", ".h": "cpp", ".cc": "cpp", ".json": "json", ".cff": "yaml"}
FENCE = re.compile(r"`{3,}")
LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")
HTML_LINK = re.compile(r'\b(src|srcset|href)="([^"\s#]+)(#[^"\s]*)?"')
LIST_ITEM = re.compile(r"\s*([-*+]|\d+\.)\s")
COMMAND = re.compile(r"    (pip|python3?|make|git|cp|torchrun|vllm|ragged-attention|\.venv/bin/\S+|[A-Z_]+=\S+) ")
NOT_SEARCHED = {Path("repository/CHANGELOG.md")}
# Pages with generated tables and findings. If all their numbers were indexed, explanations would rank too low.
SEARCHED_BY_HEADINGS = {
    f"{name}.html"
    for name in (
        "amd", "compile_matrix", "cpu_measured", "cuda_compile", "cuda_kernels", "flash_mla", "judged", "kernels",
        "predictions", "ptx_kernels", "repository/benchmarks/index", "repository/CONTRIBUTING", "status", "support",
        "tpu_compile", "tpu_kernels", "transformers_models",
    )
}  # fmt: skip
PAIR = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)">\s*'
    r'<img alt="([^"]+)" src="([^"]+)">\s*</picture>'
)

PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)\s#]+\.svg)\)")
DARK = re.compile(r"@media \(prefers-color-scheme: dark\) \{(.*)\}\n(?=</style>)", re.DOTALL)
SCHEMES = {"light": "", "dark": r"\1\n"}  # the replacement for the rule that DARK matches


def place(path: Path) -> Path:
    """The path of a repository file in the folder of the site's sources, relative to this folder."""
    path = path.relative_to(DOCS) if path.is_relative_to(DOCS) else Path("repository") / path.relative_to(ROOT)
    if path.suffix in AS_IT_IS | {".md"}:
        return path
    return path.with_suffix(".md") if path.suffix == ".ipynb" else path.with_name(f"{path.name}.md")


def linked(path: Path, target: str) -> Path:
    """The file to which a link in a page leads. A link to a folder leads to the README in it."""
    file = (path.parent / target).resolve()
    file = file / "README.md" if file.is_dir() else file
    if not file.is_file() or not file.is_relative_to(ROOT):
        raise SystemExit(f"{path.relative_to(ROOT)}: expected a link to a file of the repository, got {target}")
    return file


def page(path: Path) -> str:
    """A file as Markdown. Its links are still those of the repository."""
    if path.suffix == ".ipynb":
        return notebook(path)
    text = path.read_text()
    if path.suffix == ".md":
        return text
    if path.suffix not in LISTINGS:
        raise SystemExit(
            f"expected Markdown, a notebook, a picture, a style sheet or {', '.join(LISTINGS)}, got {path}"
        )
    return f"# {path.relative_to(ROOT)}\n\n``````{LISTINGS[path.suffix]}\n{text.rstrip()}\n``````\n"


def notebook(path: Path) -> str:
    """A notebook's cells as Markdown, with code and output as fenced blocks."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"]).rstrip()
        parts.append(source if cell["cell_type"] == "markdown" else f"``````py\n{source}\n``````")
        for output in cell.get("outputs", ()):
            printed = "".join(output.get("text", output.get("data", {}).get("text/plain", ()))).rstrip()
            parts += [f"``````text\n{printed}\n``````"] if printed else []
    return "\n\n".join(parts) + "\n"


def navigation() -> list[Path]:
    """The pages in the navigation, in order."""
    waiting, pages = [tomllib.loads(CONFIG.read_text())["project"]["nav"]], []
    while waiting:
        entry = waiting.pop(0)
        if isinstance(entry, str):
            pages.append(Path(entry))
        else:
            waiting[:0] = entry.values() if isinstance(entry, dict) else entry
    return pages


def stage(source: Path) -> list[Path]:
    """Write the site's sources to the folder `source`. Returns their paths relative to it."""
    waiting = [path for path in sorted(DOCS.rglob("*")) if path.suffix in AS_IT_IS | {".md", ".ipynb"}]
    waiting += [ROOT / path.relative_to("repository") for path in navigation() if path.parts[0] == "repository"]
    placed: dict[Path, Path] = {}
    while waiting:
        path = waiting.pop()
        if path in placed:
            continue
        placed[path] = place(path)
        destination = source / placed[path]
        destination.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in AS_IT_IS:
            shutil.copyfile(path, destination)
            for scheme in SCHEMES if follows_the_system(path) else ():
                variant(destination, scheme).write_text(DARK.sub(SCHEMES[scheme], path.read_text()))
            continue
        text, links = with_links(path, page(path))
        is_listing = path.suffix not in (".md", ".ipynb")
        head = "---\nsearch:\n  exclude: true\n---\n\n" if is_listing or placed[path] in NOT_SEARCHED else ""
        destination.write_text(head + fenced(text))
        waiting += links
    return sorted(placed.values())


def with_links(path: Path, text: str) -> tuple[str, list[Path]]:
    """A page whose links lead to pages of the site, and the linked files.

    A picture with a light and a dark version follows the site's colour switch. `<picture>` would only follow the colour
    scheme of the reader's system.
    """
    links: list[Path] = []
    text = PAIR.sub(r"![\2](\3#only-light) ![\2](\1#only-dark)", text)
    in_schemes: set[str] = set()

    def in_both(picture: re.Match) -> str:
        if not follows_the_system(linked(path, unquote(picture[2]))):
            return picture[0]
        in_schemes.add(picture[2])
        return " ".join(f"![{picture[1]}]({picture[2]}#only-{scheme})" for scheme in SCHEMES)

    text = PICTURE.sub(in_both, text)

    def target(link: str) -> str:
        if urlsplit(link).scheme:
            return link
        links.append(linked(path, unquote(link)))
        return os.path.relpath(place(links[-1]), place(path).parent)

    def moved(link: re.Match) -> str:
        to, anchor = target(link[1]), link[2] or ""
        if link[1] in in_schemes:
            to = variant(Path(to), anchor.removeprefix("#only-"))
        return f"]({to}{anchor})"

    def moved_html(link: re.Match) -> str:
        # The generator changes .md to .html in Markdown links, but not in HTML.
        path = re.sub(r"\.md$", ".html", re.sub(r"\bREADME\.md$", "index.html", target(link[2])))
        return f'{link[1]}="{path}{link[3] or ""}"'

    lines = [line if is_code else HTML_LINK.sub(moved_html, LINK.sub(moved, line)) for line, is_code in lines_of(text)]
    return "".join(lines), links


def follows_the_system(path: Path) -> bool:
    """Whether a picture has light and dark colours, and a rule that selects them by the reader's system."""
    return path.suffix == ".svg" and bool(DARK.search(path.read_text()))


def variant(path: Path, scheme: str) -> Path:
    """The path of the version of a picture in one colour scheme."""
    return path.with_name(f"{path.stem}-{scheme}.svg")


def lines_of(text: str) -> Iterator[tuple[str, bool]]:
    """Yield each line of a page, and whether it is code."""
    fence = ""
    for line in text.splitlines(keepends=True):
        is_code = bool(fence) or line.startswith("    ")
        fence = open_fence(fence, line)
        yield line, is_code


def open_fence(fence: str, line: str) -> str:
    """The fence of the code block that is open after a line, or "". `fence` is the one that was open before it."""
    ticks = FENCE.match(line)
    if ticks is None:
        return fence
    return "" if fence == ticks[0] else fence or ticks[0]


def fenced(text: str) -> str:
    """A page with fences around indented commands, so that they are shown as shell code."""
    parts: list[str] = []
    fence, is_list = "", False
    for part in re.split(r"(\n{2,})", text):
        lines = part.splitlines()
        if not fence and not is_list and COMMAND.match(part) and all(line.startswith("    ") for line in lines):
            parts += ["```sh\n", *(f"{line[4:]}\n" for line in lines), "```"]
            continue
        fence = functools.reduce(open_fence, lines, fence)
        if part.strip() and not part.startswith(" "):
            is_list = bool(LIST_ITEM.match(part))
        parts.append(part)
    return "".join(parts)


class Page(HTMLParser):
    """The links of a built page, the resources that it loads, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.anchors.update(value for name in ("id", "name") if (value := attributes.get(name)))
        if tag == "a" and (link := attributes.get("href")):
            self.links.append(link)
        elif tag in ("link", "script", "img", "iframe", "source") and (
            link := attributes.get("href") or attributes.get("src")
        ):
            self.loaded.append(link)


def faults(site: Path) -> Iterator[str]:
    """The broken links of a built site, and the resources that it would load from other hosts."""
    pages = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    for path, content in pages.items():
        where = path.relative_to(site)
        yield from (f"{where}: loads {link} from elsewhere" for link in content.loaded if urlsplit(link).netloc)
        # 404.html is served for missing addresses at any depth, so its links are absolute and not checked here.
        for link in () if where.name == "404.html" else content.links + content.loaded:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                yield f"{where}: leads to {link}, which is not there"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{where}: leads to {link}, which has no such place"


def configured(config: str, urls: Mapping[str, str]) -> str:
    """The configuration with paths relative to build/, and with the repository's URL if pyproject.toml has it."""
    relocated = config.replace('"build/', '"').replace('"docs/', '"../docs/')
    repository = next((url for name, url in urls.items() if name.lower() in ("repository", "source")), "")
    if not repository:
        return relocated
    return relocated.replace("[project]\n", f"[project]\nrepo_url = {json.dumps(repository)}\n", 1)


def trimmed(index: dict[str, Any]) -> dict[str, Any]:
    """The search index without signatures, and without the text below headings on the pages SEARCHED_BY_HEADINGS."""
    sections = []
    for section in index["items"]:
        page, _, heading = section["location"].partition("#")
        if heading.startswith("signature") and page.startswith("operations/"):
            continue
        if page in SEARCHED_BY_HEADINGS:
            section["text"] = "" if heading else section["text"].partition("</p>")[0]
        sections.append(section)
    return {**index, "items": sections}


def built(site: Path) -> list[str]:
    """Build the site and return its faults. With `--strict`, the generator's own warnings are errors."""
    for folder in (SOURCE, SITE):
        shutil.rmtree(folder, ignore_errors=True)
    stage(SOURCE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    USED_CONFIG.write_text(configured(CONFIG.read_text(), project.get("urls", {})))
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "--config-file", str(USED_CONFIG)]
    if code := subprocess.run(command, cwd=ROOT).returncode:
        raise SystemExit(code)  # the generator has printed the errors
    search = SITE / "search.json"
    search.write_text(json.dumps(trimmed(json.loads(search.read_text()))))
    if site != SITE:
        shutil.rmtree(site, ignore_errors=True)
        shutil.copytree(SITE, site)
    return [*faults(site), *importlib.import_module("site_search").faults(site)]


def list_versions(folder: Path) -> None:
    """Write the data of the version selector, newest version first, and a page that redirects to the newest version."""
    versions = [path.name for path in folder.iterdir() if path.is_dir()]
    versions.sort(key=lambda name: [int(part) if part.isdecimal() else -1 for part in name.split(".")], reverse=True)
    listed = [{"version": name, "title": name, "aliases": ["latest"] * (name == versions[0])} for name in versions]
    (folder / "versions.json").write_text(json.dumps(listed, indent=1) + "\n")
    (folder / "index.html").write_text(f'<meta http-equiv="refresh" content="0; url={versions[0]}/index.html">\n')


def main() -> int:
    parser = argparse.ArgumentParser(prog="make docs-site", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--version", help="build this version in build/versions, with a version selector")
    version = parser.parse_args().version
    site = VERSIONS / version if version else SITE
    faults = built(site)
    for fault in faults:
        print(fault, file=sys.stderr)
    if version and not faults:
        list_versions(VERSIONS)
    print(f"{site.relative_to(ROOT)}/index.html: {len(list(site.rglob('*.html')))} pages, {len(faults)} faults")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
