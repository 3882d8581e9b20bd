"""The commands' output, their exit codes, and how they report a user's mistakes."""

import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

import ragged_attention
from ragged_attention import config, dispatch
from ragged_attention.calls import CALLS, Device
from ragged_attention.errors import BackendMissing, InvalidInput, Unsupported, how_to_install
from ragged_attention.tools import arguments as command_arguments
from ragged_attention.tools import cli, warmup
from ragged_attention.tools.gpus import GPUS, VERIFIED
from ragged_attention.tools.samples import KV_FORMATS, device_of
from tests.processes import printed

ATTENTION = "ragged_paged_attention"


@pytest.fixture(autouse=True)
def wide_and_unconfigured(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "400")
    for variable in (config.BACKEND_VARIABLE, config.CONFIG_VARIABLE, config.VALIDATE_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    yield
    ragged_attention.set_backend()


@pytest.fixture
def run_cli(capsys):
    """A function that runs a command in this process. It returns the exit code, standard output and standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(arguments)
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


def rows(text: str) -> list[list[str]]:
    """The cells of all table rows in some output."""
    return [[cell.strip() for cell in line.strip("│┃").split("│")] for line in text.splitlines() if "│" in line]


def test_explain_marks_what_runs(run_cli):
    pytest.importorskip("torch")
    code, out, err = run_cli("explain", ATTENTION, "--framework", "torch", "--device", "cpu")
    assert (code, err) == (0, "")
    assert ["*", "numba", "chosen"] in rows(out)
    assert {row[1] for row in rows(out)} == set(dispatch.backends())
    assert "runs with Tile(" in out


def test_explain_of_a_device_that_is_not_here(run_cli):
    pytest.importorskip("triton")
    code, out, _ = run_cli("explain", ATTENTION, "--framework", "jax", "--device", "sm_90")
    assert code == 0
    assert f"{ATTENTION} from jax on sm_90" in out
    assert ["*", "triton", "chosen"] in rows(out)
    assert re.search(r"runs with Tile\(.*block_kv=\d+", out)


@pytest.mark.parametrize("operation", CALLS)
def test_explain_knows_every_operation(run_cli, operation):
    code, out, _ = run_cli("explain", operation, "--framework", "torch", "--backend", "reference")
    assert code == 0
    assert ["*", "reference", "chosen"] in rows(out)
    assert "asked for: reference" in out


def test_explain_says_so_if_there_is_nothing_to_tune(run_cli):
    code, out, _ = run_cli("explain", "write_kv_pages", "--backend", "reference")
    assert code == 0
    assert "runs with no tunables" in out


def test_explain_takes_every_feature(run_cli):
    features = {
        "dtype": "float16", "cache-dtype": "int8", "heads": "28/4", "head-dim": "80", "page-size": "24",
        "num-tokens": "7", "max-num-seqs": "3", "max-len": "100", "sliding-window": "9", "soft-cap": "30",
    }  # fmt: skip
    options = [word for name, value in features.items() for word in (f"--{name}", value)]
    options += ["--split-pages", "--sinks", "--return-lse"]
    code, out, _ = run_cli("explain", ATTENTION, "--backend", "reference", *options)
    assert code == 0
    assert ["*", "reference", "chosen"] in rows(out)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("operation", [ATTENTION, "write_kv_pages"])
def test_explain_takes_every_format_of_rows_with_scales(run_cli, operation, kv_format):
    code, out, err = run_cli("explain", operation, "--backend", "pallas,reference", "--kv-format", kv_format)
    assert (code, err) == (0, "")
    assert ["*", "reference", "chosen"] in rows(out)


@pytest.mark.parametrize("operation", ["mla_decode", "sparse_mla_prefill", "write_mla_cache"])
@pytest.mark.parametrize(
    "features",
    [
        {"cache-format": "fp8_v4", "heads": "16/1"},
        {"cache-format": "fp4_v41", "heads": "12/1", "topk": "640"},
        {"cache-format": "plain", "dtype": "float16", "heads": "7/1", "d-qk": "96", "d-v": "64", "topk": "3"},
    ],
)
def test_explain_takes_every_feature_of_latents(run_cli, operation, features):
    sizes = {"page-size": "24", "num-tokens": "6", "max-num-seqs": "3", "max-len": "100"}
    options = [word for name, value in (features | sizes).items() for word in (f"--{name}", value)]
    code, out, _ = run_cli("explain", operation, "--backend", "reference", "--sinks", *options)
    assert code == 0
    assert ["*", "reference", "chosen"] in rows(out)


def test_a_dense_call_has_no_topk(run_cli):
    pytest.importorskip("torch")
    code, out, _ = run_cli("explain", "mla_decode", "--topk", "0", "--framework", "torch", "--device", "cpu")
    assert code == 0
    assert ["*", "numba", "chosen"] in rows(out)


def test_explain_follows_the_configuration(run_cli, monkeypatch):
    monkeypatch.setenv(config.BACKEND_VARIABLE, "pallas,reference")
    ragged_attention.reload_config()
    code, out, _ = run_cli("explain", "write_kv_pages", "--framework", "torch")
    assert code == 0
    assert rows(out)[0][1] == "pallas"
    assert ["*", "reference", "chosen"] in rows(out)


def test_explain_says_so_when_nobody_takes_the_call(run_cli):
    pytest.importorskip("torch")
    code, out, _ = run_cli("explain", ATTENTION, "--framework", "torch", "--device", "cpu", "--backend", "pallas")
    assert code == 1
    assert "no backend asked for takes this call" in out


@pytest.mark.parametrize(
    ("arguments", "error_message"),
    [
        (["attention"], f"expected operation to be one of {', '.join(CALLS)}, got 'attention'"),
        ([ATTENTION, "--backend", "tritom"], "expected backend to be one of auto, triton, .*, got 'tritom'"),
        (
            [ATTENTION, "--heads", "30/8"],
            "expected q.shape.1. to be a multiple of num_kv_heads = kv_pages.shape.2. / 2 = 8, got 30",
        ),
        ([ATTENTION, "--heads", "many"], "argument --heads: expected heads such as 32/8, got 'many'"),
        ([ATTENTION, "--heads", "0"], "expected heads such as 32/8, got '0'"),
        ([ATTENTION, "--heads", "8/0"], "expected heads such as 32/8, got '8/0'"),
        ([ATTENTION, "--head-dim", "20"], "expected q.shape.2. to be a multiple of 8 from 16 to 512, got 20"),
        ([ATTENTION, "--page-size", "0"], "argument --page-size: expected a whole number >= 1, got '0'"),
        ([ATTENTION, "--num-tokens", "-3"], "argument --num-tokens: expected a whole number >= 1, got '-3'"),
        ([ATTENTION, "--max-len", "long"], "argument --max-len: expected a whole number >= 1, got 'long'"),
        (
            [ATTENTION, "--cache-dtype", "fp9"],
            r"--cache-dtype: expected a dtype, one of bfloat16 \(bf16\), .*got 'fp9'",
        ),
        (["ragged_paged_atention"], "got 'ragged_paged_atention'; did you mean ragged_paged_attention\\?"),
        ([ATTENTION, "--dtype", "float64"], "expected q.dtype to be float32 or float16 or bfloat16, got float64"),
        (["norm_rope_write", "--kv-format", "mxfp8"], "expected no kv_format of norm_rope_write, which has no scale"),
        ([ATTENTION, "--kv-format", "int2"], "expected kv_format to be one of int8_token_head, .*, mxfp4, got 'int2'"),
        (
            [ATTENTION, "--kv-format", "mxfp8", "--cache-dtype", "int8"],
            "expected cache_dtype or kv_format, got 'int8' and 'mxfp8'",
        ),
        ([ATTENTION, "--sliding-window", "0"], "expected sliding_window >= 1, got 0"),
        ([ATTENTION, "--topk", "9"], "expected options of ragged_paged_attention to be among dtype, .*, got topk"),
        (["mla_decode", "--head-dim", "9"], "expected options of mla_decode to be among dtype, .*, got head_dim"),
        (["mla_decode", "--d-qk", "20"], "expected q.shape.3. to be a multiple of 16 from 16 to 1024, got 20"),
        (
            ["mla_decode", "--cache-format", "fp4"],
            "expected cache_format to be one of plain, fp8_v32, fp8_v4, fp8_v41, fp4_v41, got 'fp4'",
        ),
        (
            [ATTENTION, "--device", "sm_1"],
            "expected device to be a torch device of this machine or one that need not be here, got 'sm_1'; did you",
        ),
        ([ATTENTION, "--framework", "numpy"], "argument --framework: invalid choice: 'numpy'"),
        ([], "the following arguments are required: OPERATION"),
    ],
)
def test_a_users_mistake_is_one_line_and_code_2(run_cli, arguments, error_message):
    pytest.importorskip("torch")
    code, out, err = run_cli("explain", *arguments)
    assert (code, out) == (2, "")
    assert re.search(error_message, err)
    assert "Traceback" not in err


def test_a_wrong_device_of_jax_is_refused(run_cli):
    pytest.importorskip("jax")
    code, _, err = run_cli("explain", ATTENTION, "--framework", "jax", "--device", "abacus")
    assert code == 2
    assert re.search(
        r"expected device to be \w+, jax's device of this machine, or one .* here, got 'abacus' .*a100, ", err
    )


def test_a_faulty_config_file_is_one_line_and_code_2(run_cli, monkeypatch, tmp_path):
    (tmp_path / "settings.toml").write_text("colour = 1")
    monkeypatch.setenv(config.CONFIG_VARIABLE, "settings.toml")
    ragged_attention.reload_config()
    code, _, err = run_cli("explain", ATTENTION, "--framework", "torch")
    assert code == 2
    assert "settings.toml, got 'colour'" in err


@pytest.mark.parametrize("arguments", [[], ["dance"], ["doctor", "--quick"]])
def test_unknown_commands_and_arguments_are_code_2(run_cli, arguments):
    code, out, err = run_cli(*arguments)
    assert (code, out) == (2, "")
    if arguments:
        assert len(err.splitlines()) == 1
        assert f"unrecognized arguments: {arguments[1]}" in err if len(arguments) > 1 else "expected a command" in err
    else:
        assert "usage: ragged-attention" in err


def test_help_lists_the_commands(run_cli):
    code, out, _ = run_cli("--help")
    assert code == 0
    assert all(
        command in out for command in ("demo", "doctor", "explain", "bench", "conformance", "build-cuda", "warmup")
    )


def test_explain_without_a_framework_says_what_to_install(run_cli, monkeypatch):
    find = importlib.util.find_spec
    absent = {"torch", "jax"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name in absent else find(name, *more))
    for arguments, what, extra in (
        ([], "neither torch nor jax is installed", "torch"),
        (["--framework", "jax"], "jax is not installed", "jax"),
    ):
        code, out, err = run_cli("explain", ATTENTION, *arguments)
        assert (code, out) == (2, "")
        assert err == f"ragged-attention: {what}: {how_to_install(extra)}\n"


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "ragged_attention", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{ragged_attention.__version__}\n")


def test_version(run_cli):
    assert run_cli("--version") == (0, f"{ragged_attention.__version__}\n", "")


def test_help_loads_no_framework():
    printed("-m", "tests.programs.help_loads_no_framework")


@pytest.mark.parametrize(
    ("raised", "code", "error_message"),
    [
        (InvalidInput("expected steps >= 1, got 0"), 2, "ragged-attention: expected steps >= 1, got 0"),
        (Unsupported("no backend [of those] takes it"), 2, "ragged-attention: no backend [of those] takes it"),
        (BackendMissing("torch is not installed"), 2, "ragged-attention: torch is not installed"),
        (ImportError("libfast.so"), 1, "ragged-attention: ImportError: libfast.so"),
        (KeyboardInterrupt(), 130, "ragged-attention: interrupted"),
        (SystemExit(3), 3, ""),
        (SystemExit("no"), 1, ""),
        (SystemExit(), 0, ""),
    ],
)
def test_what_a_command_raises_becomes_a_line_and_a_code(run_cli, monkeypatch, raised, code, error_message):
    def main(arguments):
        raise raised

    monkeypatch.setitem(sys.modules, "a_demo", types.SimpleNamespace(main=main))  # type: ignore[arg-type]
    monkeypatch.setitem(cli.OTHER_COMMANDS, "demo", ("a_demo", ""))
    assert run_cli("demo") == (code, "", f"{error_message}\n" if error_message else "")


def test_commands_elsewhere_get_their_arguments(run_cli, monkeypatch):
    seen = []
    monkeypatch.setitem(sys.modules, "a_demo", types.SimpleNamespace(main=seen.append))  # type: ignore[arg-type]
    monkeypatch.setitem(cli.OTHER_COMMANDS, "demo", ("a_demo", ""))
    assert run_cli("demo", "--device", "cpu")[0] == 0
    assert seen == [["--device", "cpu"]]


@pytest.mark.parametrize("command", ["demo", "conformance"])
def test_commands_elsewhere_have_help_of_their_own(run_cli, command):
    pytest.importorskip("hypothesis")
    code, out, _ = run_cli(command, "--help")
    assert code == 0
    assert "--backend" in out
    assert f"ragged-attention {command}" in out


def test_bench_outside_a_checkout_says_where_it_works(run_cli, monkeypatch):
    monkeypatch.setitem(cli.OTHER_COMMANDS, "bench", ("benchmarks_that_are_not_here.run", ""))
    code, _, err = run_cli("bench")
    assert code == 2
    assert "run it in a checkout of the repository" in err


def test_doctor_tells_of_everything(run_cli):
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    code, out, _ = run_cli("doctor")
    assert code == 0
    said = {row[0]: row[1:] for row in rows(out)}
    assert said["ragged_attention"][0].startswith(ragged_attention.__version__)
    assert {"python", "numpy", "torch", "triton", "jax", "jax_triton", "Pallas for TPU"} <= set(said)
    assert {"CUDA toolchain", "CUTLASS", "CUDA kernels"} <= set(said)
    assert {row[0] for row in rows(out)} >= {*dispatch.backends(), "RAGGED_ATTENTION_BACKEND", *CALLS}
    assert said["reference"] == ["all operations", "present"]
    assert said["triton"][0] == "all but quantize_kv, dequantize_kv, dequantize_mla_cache, page_indices_to_slots"
    assert said["cuda"][0] == "sparse_mla_prefill, mla_decode, make_decode_schedule"


def test_doctor_says_where_pallas_kernels_run_and_on_what():
    pytest.importorskip("jax")
    from ragged_attention.tools import doctor

    assert doctor.pallas(BackendMissing("not installed")) == "needs jax, not installed"
    here = Device(framework="jax", platform="cpu", unavailable=(("pallas", "runs on TPUs"),))
    assert doctor.tpu_facts(here) == "runs on TPUs"
    there = Device(framework="jax", platform="tpu", name="TPU v9", num_multiprocessors=2)
    there = dataclasses.replace(there, shared_memory=128 << 20, scalar_memory=1 << 20)
    assert doctor.tpu_facts(there) == "TPU v9, cores: 2, 128 MiB of VMEM and 1024 KiB of SMEM per core"
    assert doctor.tpu_facts(dataclasses.replace(there, name="")).startswith("an interpreted TPU, cores: 2, ")


def test_doctor_shows_why_an_import_fails(run_cli, monkeypatch, tmp_path):
    (tmp_path / "triton.py").write_text("raise OSError('libtriton.so: wrong ELF class')")
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    from ragged_attention.tools import doctor

    found = doctor.imported("triton")
    assert isinstance(found, OSError)
    assert doctor.is_broken(found)
    assert doctor.one_line(found) == "OSError: libtriton.so: wrong ELF class"


def test_doctor_tells_absent_from_broken():
    from ragged_attention.tools import doctor

    found = doctor.imported("a_framework_nobody_has")
    assert isinstance(found, BackendMissing)
    assert not doctor.is_broken(found)
    assert doctor.one_line(found) == "not installed"


def test_doctor_shows_a_faulty_config_instead_of_failing(run_cli, monkeypatch):
    monkeypatch.setenv(config.BACKEND_VARIABLE, "tritom")
    ragged_attention.reload_config()
    code, out, _ = run_cli("doctor")
    assert code == 0
    assert "expected backend to be one of auto, triton" in out
    assert ["backend", "*: tritom"] in rows(out)


def test_no_colour_where_there_is_no_terminal(run_cli):
    _, out, err = run_cli("explain", "write_kv_pages", "--framework", "torch", "--backend", "reference")
    assert "\x1b" not in out + err


def test_kernels_are_compiled_ahead(run_cli):
    pytest.importorskip("numba")
    code, out, err = run_cli("warmup", "merge_attention_states", "page_indices_to_slots")
    assert code == 0
    assert err == "[0/2] merge_attention_states\n[1/2] page_indices_to_slots\n"
    assert re.fullmatch(r"((already )?compiled: [\w, ]+\n)+", out)
    code, out, _ = run_cli("warmup", "merge_attention_states", "page_indices_to_slots")
    assert (code, out) == (0, "already compiled: merge_attention_states, page_indices_to_slots\n")
    code, _, err = run_cli("warmup", "attend")
    assert code == 2
    assert "expected OPERATION to be one of ragged_paged_attention, " in err
    code, _, err = run_cli("warmup", "make_decode_schedule")
    assert code == 2
    assert "does not offer make_decode_schedule" in err


def test_each_gpu_may_be_named(run_cli):
    pytest.importorskip("triton")
    pytest.importorskip("torch")
    for name, (arch, full_name, _) in GPUS.items():
        code, out, err = run_cli("explain", "merge_attention_states", "--device", name)
        assert (code, err) == (0, "")
        assert f"merge_attention_states from torch on {full_name} ({arch})" in " ".join(out.split())
        assert ["*", "triton", "chosen"] in rows(out)


def test_each_gpu_has_its_multiprocessors():
    pytest.importorskip("torch")
    counts = {
        name: device_of("torch", name).num_multiprocessors for name in ("rtx4090", "l4", "b300", "sm_89", "sm_90")
    }
    assert counts == {"rtx4090": 128, "l4": 58, "b300": 148, "sm_89": 128, "sm_90": 132}


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("h200", ""),
        ("sm_90", ""),
        ("h100", "NVIDIA H100 is not yet verified on hardware. "),
        ("mi300x", "AMD Instinct MI300X is not yet verified on hardware. "),
        ("gfx950", "gfx950 is not yet verified on hardware. "),
        ("tpu", "TPUs are not yet verified on hardware. "),
    ],
)
def test_explain_says_whether_a_device_is_verified(run_cli, name, first):
    pytest.importorskip("torch")
    arguments = ("explain", "merge_attention_states", "--framework", "torch", "--backend", "eager")
    _, out, _ = run_cli(*arguments, "--device", name)
    assert out.splitlines()[-1] == f"{first}What has run on which hardware: docs/status.md"
    assert "What has run" not in run_cli(*arguments, "--device", "cpu")[1]


def test_verified_devices_are_those_of_the_records():
    records = Path(__file__).parents[1] / "benchmarks" / "results"
    devices = set()
    for path in records.glob("*.jsonl"):
        items = map(json.loads, path.read_text().splitlines())
        devices |= {item["device"] for item in items if item["kind"] == "item" and item["result"] == "passed"}
    assert devices == set(VERIFIED)


@pytest.mark.parametrize(("name", "arch"), [("t4", "sm_75"), ("V100", "sm_70")])
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_gpu_that_is_too_old_is_refused(run_cli, framework, name, arch):
    pytest.importorskip(framework)
    code, _, err = run_cli("explain", ATTENTION, "--framework", framework, "--device", name)
    assert code == 2
    assert f"expected a GPU of sm_80 or newer, got '{name}', which is {arch}: the kernels do not support sm_75" in err


@pytest.mark.parametrize("word", ["rtx-4090", "4090"])
def test_a_suggestion_stands_before_the_list_of_devices(run_cli, word):
    pytest.importorskip("torch")
    _, _, err = run_cli("explain", ATTENTION, "--framework", "torch", "--device", word)
    assert f"got '{word}'; did you mean rtx4090? (such devices are a100, " in err


def test_both_commands_take_both_names_of_a_window(run_cli):
    pytest.importorskip("triton")
    pytest.importorskip("torch")
    for command in (("explain", ATTENTION, "--backend", "reference"), ("view", "--q-lens", "1", "--kv-lens", "900")):
        said = [run_cli(*command, name, "100") for name in ("--sliding-window", "--window")]
        assert said[0] == said[1]
        assert said[0][0] == 0
    code, _, err = run_cli("explain", ATTENTION, "--window", "0")
    assert (code, err) == (2, "ragged-attention: expected sliding_window >= 1, got 0\n")


def test_explain_of_a_gpu_needs_triton(run_cli, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(dispatch, "missing_need", lambda backend: "triton" if backend == "triton" else None)
    dispatch.load.cache_clear()
    code, out, err = run_cli("explain", ATTENTION, "--framework", "torch", "--device", "sm_90")
    assert (code, out) == (2, "")
    reason = f"triton is not installed: {how_to_install('triton')}"
    assert err == f"ragged-attention: what runs on sm_90 depends on triton, which cannot answer here: {reason}\n"
    code, out, _ = run_cli("explain", ATTENTION, "--framework", "torch", "--device", "sm_90", "--backend", "eager")
    assert code == 0
    assert ["*", "eager", "chosen"] in rows(out)
    code, out, _ = run_cli("explain", ATTENTION, "--framework", "torch", "--device", "cpu", "--backend", "triton,eager")
    assert code == 0
    assert ["", "triton", reason] in rows(out)
    dispatch.load.cache_clear()


@pytest.mark.parametrize("name", [name for names in command_arguments.DTYPES.values() for name in names])
def test_a_short_name_is_that_of_one_dtype(name):
    (full,) = [each for each, names in command_arguments.DTYPES.items() if name in names]
    assert (
        command_arguments.dtype(name) == command_arguments.dtype(name.upper()) == command_arguments.dtype(full) == full
    )


def test_help_fits_a_narrow_terminal(run_cli, monkeypatch):
    pytest.importorskip("hypothesis")
    monkeypatch.setenv("COLUMNS", "60")
    for command in ("", "doctor", "explain", "view", "demo", "conformance", "warmup", "build-cuda"):
        code, out, err = run_cli(*command.split(), "--help")
        assert (code, err) == (0, "")
        assert max(map(len, out.splitlines())) <= 60, command
        assert out.startswith(f"usage: ragged-attention {command}".strip())


def test_a_reader_that_goes_away_is_no_error():
    command = f"{sys.executable} -m ragged_attention explain --help | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("usage: ragged-attention explain OPERATION [options]\n", "")


@pytest.mark.parametrize("seconds", [0, 20])
def test_ctrl_c_ends_a_warmup_even_if_it_is_ignored(monkeypatch, run_cli, seconds):
    """Ctrl-C ends a warmup even if Python ignores the exception, as in a finaliser or in a callback from C."""

    class Finaliser:
        def __del__(self):
            raise KeyboardInterrupt

    def compile_ahead(*, for_jax):
        del for_jax
        Finaliser()
        for _ in range(100 * seconds):
            time.sleep(0.01)
        return True

    kernels = [types.SimpleNamespace(name=name, compile_ahead=compile_ahead) for name in ("first", "second")]
    monkeypatch.setattr(warmup, "_kernels", lambda operations: kernels)
    began = time.monotonic()
    assert run_cli("warmup") == (130, "", "[0/2] first\nragged-attention: interrupted\n")
    assert time.monotonic() - began < 10


def test_bench_refuses_an_unknown_backend(run_cli):
    pytest.importorskip("torch")
    code, out, err = run_cli("bench", "--backend", "tritom")
    assert (code, out) == (2, "")
    assert re.match(r"ragged-attention bench: expected --backend to be among triton, .*, got 'tritom'; ", err)
