"""Search the site without a browser, and check that the search finds the right pages.

    python docs/site_search.py "speculative decoding"    # in build/site, after `make docs-site`

On the site, a script of Zensical searches in the reader's browser. `Index.find` ranks sections like that script. If
node is installed, `make docs-site` compares the results of `Index.find` with those of the script, which `by_script`
runs.

The ranking has no weights that could be set. A section matches if it has every word of the query, or a longer word that
begins with it, in its title, its text or its path in the navigation. Sections with a word in the title come first, then
sections with a word in the path. Among sections of equal rank, the first group of matching words decides: more
different words come first, then words that are closer together, then words that are nearer to the beginning.
"""

import argparse
import bisect
import functools
import itertools
import json
import re
import shutil
import subprocess
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

SITE = Path(__file__).resolve().parent.parent / "build" / "site"
WEIGHTS = {"title": 3, "path": 2, "text": 1}
BEST = 3
# For each query, pages of which at least one must be among the best results. A page may be named by its folder.
SEARCHES: dict[str, tuple[str, ...]] = {
    "absorbed MLA": ("concepts", "operations/ragged_mla_attention"),
    "ALiBi": ("concepts", "operations/ragged_paged_attention"),
    "AMD": ("backends", "amd"),
    "attention sinks gpt-oss": ("concepts", "operations/ragged_paged_attention"),
    "batch invariant": ("configuration",),
    "block sparse": ("sparse_attention",),
    "block table": ("concepts",),
    "chunked prefill": ("concepts", "operations/ragged_paged_attention"),
    "conformance of my kernel": ("guides/judge_a_kernel", "guides/write_a_backend"),
    "context parallel": ("guides/scale_out",),
    "continuous batching": ("guides/serve",),
    "CUDA graphs": ("guides/serve", "backends"),
    "custom mask": ("masks",),
    "DeepSeek V3.2": ("sparse_attention",),
    "deterministic": ("configuration", "guides/train"),
    "FlashInfer BatchPrefill": ("flashinfer",),
    "fp8 KV cache": ("concepts", "cache_formats"),
    "GQA": ("concepts",),
    "install CPU": ("start/install",),
    "int8 KV cache": ("concepts", "cache_formats"),
    "log-sum-exp": ("concepts", "operations/merge_attention_states"),
    "multi-GPU": ("guides/scale_out",),
    "NVFP4": ("cache_formats",),
    "paged KV cache": ("concepts", "operations/ragged_paged_attention"),
    "prefix caching": ("guides/prefix_sharing",),
    "sequence packing": ("guides/train", "operations/varlen_attention"),
    "sliding window": ("masks", "concepts"),
    "soft cap Gemma": ("concepts",),
    "speculative decoding": ("guides/tree_speculation",),
    "top-k indexer": ("operations/indexer_topk", "sparse_attention"),
    "torch.compile": ("backends",),
    "TPU": ("backends", "tpu_kernels"),
    "transformers": ("transformers",),
    "tree attention": ("guides/tree_speculation",),
    "vLLM plugin": ("vllm",),
}
SCRIPT = """
const fs = require("fs"), path = require("path"), vm = require("vm");
const site = process.argv[1], folder = path.join(site, "assets/javascripts/workers");
const name = fs.readdirSync(folder).find(name => /^search\\..*\\.js$/.test(name));
const answers = [], self = {postMessage: answer => answers.push(answer)};
vm.runInContext(fs.readFileSync(path.join(folder, name), "utf8"), vm.createContext({self, Intl}));
const index = JSON.parse(fs.readFileSync(path.join(site, "search.json"), "utf8"));
async function ask(data) {
  answers.length = 0;
  self.onmessage({data});
  while (!answers.length) await new Promise(resolve => setTimeout(resolve, 1));
  if (answers[0].type === 4) throw new Error("the search failed");
  return answers[0].data;
}
(async () => {
  await ask({type: 0, data: index});
  const found = {};
  for (const input of JSON.parse(fs.readFileSync(0, "utf8")))
    found[input] = (await ask({type: 2, data: {input}})).items.map(item => index.items[item.id].location);
  console.log(JSON.stringify(found));
})();
"""


def normal(word: str) -> str:
    return unicodedata.normalize("NFKD", word).lower()


class Index:
    """The words of an index such as search.json, with their positions in each (section, field)."""

    def __init__(self, index: Mapping[str, Any]) -> None:
        self.separator = re.compile(index["config"]["separator"])
        self.places: dict[str, dict[tuple[int, str], list[int]]] = {}
        self.locations = [section["location"] for section in index["items"]]
        for number, section in enumerate(index["items"]):
            for field in WEIGHTS:
                value = section[field]
                for position, word in enumerate(self.words([value] if isinstance(value, str) else value)):
                    self.places.setdefault(normal(word), {}).setdefault((number, field), []).append(position)
        self.sorted = sorted(self.places)

    def words(self, texts: Iterable[str]) -> Iterator[str]:
        """Yield the words of texts in order, without HTML tags. Words do not extend over tags."""
        for text in texts:
            for part in re.split(r"<[^>]*>", text):
                yield from filter(None, self.separator.split(part))

    def beginning_with(self, word: str) -> list[str]:
        first = bisect.bisect_left(self.sorted, word)
        last = bisect.bisect_right(self.sorted, word + "\U0010ffff")
        return self.sorted[first:last]

    def find(self, query: str) -> list[str]:
        """The locations of all sections that match the query, the best first."""
        words = [normal(word) for word in self.words([query])]
        matches: dict[str, int] = {}  # word of the index -> number of the query's word with which it begins
        for number, word in sorted(enumerate(words), key=lambda pair: len(pair[1])):
            matches.update(dict.fromkeys(self.beginning_with(word), number))
        marks: dict[tuple[int, str], list[tuple[int, int]]] = {}
        for longer, number in matches.items():
            for place, positions in self.places[longer].items():
                marks.setdefault(place, []).extend((position, number) for position in positions)
        having = [
            {section for longer in self.beginning_with(word) for section, _ in self.places[longer]} for word in words
        ]
        sections = sorted(set.intersection(*having)) if having else []
        return [self.locations[section] for section in sorted(sections, key=lambda section: _rank(section, marks))]


def _rank(section: int, marks: Mapping[tuple[int, str], list[tuple[int, int]]]) -> list[tuple[int, ...]]:
    """The sort key of a matching section: its ranks in the fields, the field with the largest weight first."""
    keys: list[tuple[int, ...]] = []
    for field in sorted(WEIGHTS, key=lambda field: -WEIGHTS[field]):
        if (section, field) in marks:
            group = first_group(sorted(marks[section, field]))
            span = group[-1] - group[0] + 1 if len(group) > 1 else 10
            keys.append((-WEIGHTS[field], -len(group), span, group[0]))
    return [*keys, (1,)]  # if the ranks are equal so far, the section with more fields comes first


def first_group(marks: Sequence[tuple[int, int]]) -> list[int]:
    """The positions of the first group of marks in a text. A mark is a matching word: (position, number of the word).

    The words of a group are all different, and each is at most 10 positions after the preceding word.
    """
    group = [marks[0]]
    for (before, word), (position, next_word) in itertools.pairwise(marks):
        if position - before > 10 or word == next_word:
            break
        same = [number for number, mark in enumerate(group) if mark[1] == next_word]
        if same:
            if before - group[same[0]][0] > position - before:
                group = group[: same[0] + 1]
            break
        group.append((position, next_word))
    return [position for position, _ in group]


@functools.cache
def index_of(site: Path) -> Index:
    return Index(json.loads((site / "search.json").read_text()))


def by_script(site: Path, queries: Sequence[str]) -> dict[str, list[str]]:
    """The first ten locations that the site's own script finds for each query. Node runs the script."""
    command = ["node", "-e", SCRIPT, str(site)]
    done = subprocess.run(command, input=json.dumps(queries), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def faults(site: Path, searches: Mapping[str, tuple[str, ...]] = SEARCHES) -> Iterator[str]:
    """The searches whose best results have none of their pages, and the differences from the site's own script."""
    index = index_of(site)
    results = {query: index.find(query)[:10] for query in searches}
    for query, pages in searches.items():
        best = results[query][:BEST]
        if not any(location.partition("#")[0] == f"{page}.html" for page in pages for location in best):
            yield f"search for {query!r}: expected one of {', '.join(pages)}, got {', '.join(best) or 'nothing'}"
    if shutil.which("node"):
        for query, locations in by_script(site, list(searches)).items():
            if locations != results[query]:
                yield f"search for {query!r}: docs/site_search.py finds {results[query]}, the site's script {locations}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("query")
    print("\n".join(index_of(SITE).find(parser.parse_args().query)[:10]))


if __name__ == "__main__":
    main()
