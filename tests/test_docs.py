"""The documents: their code runs, the commands and files that they name exist, and generated parts are current."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from benchmarks.device import publish
from ragged_attention import config, dispatch
from ragged_attention.calls import CALLS, Device
from ragged_attention.tools import cli
from ragged_attention.tools.samples import sample_of
from tests import scripts

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(ROOT.glob("*/README.md")),
]
MAKEFILE = (ROOT / "Makefile").read_text()
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(language: str) -> list:
    """Every fenced block in a language, as a test parameter whose id has the block's file and number."""
    return [
        pytest.param(block, id=f"{path.relative_to(ROOT)}-{number}")
        for path in DOCUMENTS
        for number, (found, block) in enumerate(FENCE.findall(path.read_text()))
        if found == language
    ]


def run_python(code: str, folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAGGED_", "TRITON_"))}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=folder, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("code", blocks("python"))
def test_python_blocks_run(code, tmp_path):
    pytest.importorskip("torch")
    run_python(code, tmp_path)


def test_the_readmes_first_block_prints_what_it_says(tmp_path):
    pytest.importorskip("torch")
    (code,) = (text for language, text in FENCE.findall((ROOT / "README.md").read_text()) if language == "python")
    assert len(code.strip().splitlines()) <= 9  # eight lines of code and an empty line
    out = run_python(code, tmp_path)
    (promised,) = re.findall(r"# (torch.Size.*)$", code, re.MULTILINE)
    assert out.splitlines()[0] == promised
    assert "* numba      chosen" in out


def test_the_readmes_call_from_jax_runs(tmp_path):
    for needed in ("torch", "jax"):
        pytest.importorskip(needed)
    text = (ROOT / "README.md").read_text()
    (code,) = (block for language, block in FENCE.findall(text) if language == "python")
    imported, call = re.findall(r"`(from ragged_attention\.jax import \w+)`, then `(jax\.jit\(.+)`", text)[0]
    arrays = "batch = [jax.numpy.asarray(array.numpy()) for array in batch]"
    out = run_python("\n".join((code, "import jax", imported, arrays, f"print({call}.shape)")), tmp_path)
    assert out.splitlines()[-1] == "(5, 8, 64)"


@pytest.mark.parametrize("text", blocks("toml"))
def test_toml_blocks_are_config_files(text, tmp_path, monkeypatch):
    path = tmp_path / "settings.toml"
    path.write_text(text)
    monkeypatch.setenv(config.CONFIG_VARIABLE, str(path))
    config.reload_config()
    assert tomllib.loads(text).keys() <= {"backend", "options", "validate", "batch_invariant"}
    assert config.requested("write_kv_pages") == ("eager",)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(path):
    text = path.read_text()
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text):
        if "://" not in target:
            assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_exist(path):
    """Every quoted `make x` names a target, `ragged-attention x` a command and `python -m x` one of our modules."""
    text = path.read_text()
    quoted = "\n".join([*re.findall(r"`([^`\n]+)`", text), *re.findall(r"^    (.+)$", text, re.MULTILINE)])
    targets = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[0].split()
    for target in re.findall(r"^make ([\w-]+)", quoted, re.MULTILINE):
        assert target in targets
    for command in re.findall(r"^ragged-attention ([\w-]+)", quoted, re.MULTILINE):
        assert command in (*cli.OTHER_COMMANDS, "doctor", "explain")
    for module in re.findall(r"^python -m (benchmarks[\w.]*)", quoted, re.MULTILINE):
        found = ROOT / module.replace(".", "/")
        assert found.with_suffix(".py").is_file() or (found / "__main__.py").is_file(), module


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_extras_exist(path):
    """Every extra that a document installs exists.

    tests/test_docs_site.py checks that docs/start/install.md has all of them.
    """
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    quoted = re.findall(r"pip install '\.\[([\w,-]+)\]'", path.read_text())
    assert {extra for group in quoted for extra in group.split(",")} <= set(extras)


def test_nothing_says_that_the_package_is_on_an_index():
    """No document and no message installs the package from an index, which does not have it.

    `errors.how_to_install` and docs/start/install.md have the right commands.
    """
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("git lists the files, and this is not a git checkout")
    wrong = re.compile(r"install(?:\s+-\S+)*\s+['\"`]?ragged[-_]attention|ragged[-_]attention\[")
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.suffix in (".py", ".md", ".ipynb", ".toml", ".cfg", ".txt", "") and path.is_file():
            found = wrong.search(path.read_text(errors="replace"))
            assert found is None, f"{name}: {found and found[0]}"


def test_the_readme_fits_a_screen_and_says_what_has_been_run():
    readme = (ROOT / "README.md").read_text()
    before, begin, rest = readme.partition(publish.BEGIN)
    devices, _, after = rest.partition(publish.END)
    assert len(f"{before}{after}".splitlines()) <= 100
    assert begin
    first_screen = before.partition("## Install")[0]
    assert "docs/pictures/speed-light.svg" in first_screen
    for other in ("FlashInfer", "FlashMLA", "vLLM's kernels", "tokamax", "ejKernel"):
        assert f"| {other} " in first_screen
    for word in ("**Status:**", "**Stability:**"):
        assert word in first_screen
    assert (publish.NOTHING in devices) != any(ROOT.glob("benchmarks/results/*.jsonl"))
    assert "(docs/start/install.md)" in readme
    for command in ("make demo", "make test"):
        assert re.search(rf"^    {command} ", readme, re.MULTILINE)
    for page in ("support", "status", "evidence", "cpu_measured", "operations/index", "commands", "gallery"):
        assert f"(docs/{page}.md)" in readme, page


def test_the_table_of_results_has_them_all():
    """Each row of docs/concepts.md names as many results as the records have when all of them are requested."""
    section = (ROOT / "docs" / "concepts.md").read_text().partition("## What an operation returns")[2]
    rows = dict(re.findall(r"^\| (`.*) \| (.*) \|$", section.partition("\n## ")[0], re.MULTILINE))
    counts = {name: text for names, text in rows.items() for name in re.findall(r"`(\w+)`", names)}
    attentions = {name for name, record in CALLS.items() if record.ATTENDS}
    assert attentions | {"merge_attention_states", "norm_rope_write", "latent_norm_rope_write"} == set(counts)
    for name, text in counts.items():
        requests = {flag: True for flag in ("return_lse", "return_max_logits") if flag in CALLS[name].KINDS}
        call = sample_of(name).call(name, Device(framework="torch", platform="cpu"), **requests)
        results = len(call.results()) - (1 if CALLS[name].WRITES else 0)
        assert results == len(re.findall(r"\b(out|lse|max_logits|q)\b", text)), name


def test_every_command_has_a_line():
    text = (ROOT / "docs" / "commands.md").read_text()
    for command in (*cli.OTHER_COMMANDS, "doctor", "explain"):
        assert re.search(rf"^\| `ragged-attention {command}\b.*` \|", text, re.MULTILINE), command


@pytest.mark.parametrize(
    "line", re.findall(r"^    ragged-attention (.*)$", (ROOT / "docs" / "commands.md").read_text(), re.MULTILINE)
)
def test_commands_for_other_devices_run(line, tmp_path, monkeypatch, capsys):
    for needed in ("torch", "jax", "triton"):
        pytest.importorskip(needed)
    monkeypatch.chdir(tmp_path)
    assert cli.main(line.split()) == 0, capsys.readouterr().err


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_exist(path):
    """Every quoted path of this repository exists. Paths with <placeholders> are not checked."""
    tops = r"(?:src|reference|kernels_\w+|tests|benchmarks|docs|examples|portable)/"
    for quoted in re.findall(rf"`({tops}[\w./]*)`", path.read_text()):
        bases = (ROOT, ROOT / "src/ragged_attention", path.parent)
        assert any((base / quoted).exists() for base in bases), quoted


def test_every_target_is_described_and_has_a_rule():
    targets = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[0].split()
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    for target in targets:
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target
        assert f"`make {target}`" in contributing, target


def test_continuous_integration_runs_the_readmes_commands():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    for command in ("make demo", "make test", "make check", "make compile-matrix", "make cuda-compile"):
        assert f"step {command}" in script.read_text()


@pytest.fixture(scope="module")
def support_table():
    for needed in ("torch", "jax", "triton"):
        pytest.importorskip(needed)
    return scripts.load(ROOT / "docs" / "support_table.py")


def test_the_support_tables_are_current(support_table):
    for path, text in support_table.pages().items():
        assert path.read_text() == text, f"run `make docs`: {path.name}"


@pytest.mark.parametrize(("marks", "form"), [("MARKS", "\n| `{}` |"), ("SUMMARY", "[`{}`](operations/")])
def test_the_support_tables_name_every_operation(support_table, marks, form):
    begin, end = getattr(support_table, marks)
    table = support_table.PAGE.read_text().partition(begin)[2].partition(end)[0]
    for operation in CALLS:
        assert form.format(operation) in table


def test_the_short_table_has_what_is_picked_for_some_call(support_table):
    found = {
        ("a", "first"): [["x", "portable"], ["x"]],
        ("a", "second"): [["x"], ["portable"]],
        ("b", "only"): [[], ["portable"]],
        ("c", "only"): [["x"], ["x", "portable"]],
        ("d", "only"): [[], ["portable"]],
    }
    assert support_table.short_table(found).splitlines()[2:] == [
        "| [`a`](operations/a.md) | x | x or portable |",
        "| [`b`](operations/b.md), [`d`](operations/d.md) | none | portable |",
        "| [`c`](operations/c.md) | x | x |",
    ]


def test_every_environment_variable_is_described():
    text = (ROOT / "docs" / "configuration.md").read_text()
    ours = {value for name, value in vars(config).items() if name.endswith("_VARIABLE")}
    assert set(re.findall(r"RAGGED_ATTENTION_[A-Z_]+", text)) == ours


def test_every_backend_and_platform_order_is_described():
    text = (ROOT / "docs" / "backends.md").read_text()
    for backend in dispatch.PACKAGES:
        assert f"| `{backend}` |" in text
    for platform, order in dispatch.ORDER.items():
        names = ", ".join(f"`{name}`" for name in order)
        where = f"(`{platform}`)" if platform != "*" else "all others"
        assert re.search(rf"^\| [^|]*{re.escape(where)}[^|]* \| {names} \|$", text, re.MULTILINE), platform


def test_status_tells_of_every_operation():
    text = (ROOT / "docs" / "status.md").read_text()
    for operation in CALLS:
        assert f"| `{operation}` |" in text


PARTS = {
    "jaxlib",
    "jax-cuda13-plugin",
    "llvmlite",
    "ml_dtypes",
    "scipy",
    "huggingface_hub",
    "tokenizers",
    "safetensors",
}


def test_pinned_versions_are_supported_ones():
    """Every pinned package is one that pyproject requires, or is in PARTS, the packages that those require."""
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    pyproject = (ROOT / "pyproject.toml").read_text()
    for name in pins.keys() - PARTS:
        assert re.search(rf'"{name}[><=~]', pyproject), name
    assert pins["jax"] == pins["jaxlib"] == pins["jax-cuda13-plugin"]
