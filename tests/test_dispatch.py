"""The choice of an implementation, the reasons against the other ones, and backends of other packages."""

import dataclasses
import inspect
import sys
from pathlib import Path

import numpy as np
import pytest

import ragged_attention as ra
from ragged_attention import config, dispatch
from ragged_attention.calls import CALLS, Device
from ragged_attention.errors import BackendMissing, InvalidInput, Unsupported
from ragged_attention.explain import explanation
from ragged_attention.operations import Operations
from ragged_attention.tools import doctor
from ragged_attention.tools.samples import Sample, device_of, sample_of
from tests.processes import loaded, printed

ATTENTION, MERGE = "ragged_paged_attention", "merge_attention_states"
CPU = Device(framework="torch", platform="cpu")

MODULE = """
import dataclasses

@dataclasses.dataclass(frozen=True)
class Tile:
    block: int = 7

def heuristic(call):
    return Tile()

def why_not(call):
    return {refusal!r}

def run(call, tile, launch):
    return call.outs[0] * 0 + tile.block, call.lses[0] * 0
"""


@pytest.fixture(autouse=True)
def nothing_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv(config.BACKEND_VARIABLE, raising=False)
    monkeypatch.delenv(config.CONFIG_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    forget()
    yield
    ra.set_backend()
    monkeypatch.undo()
    forget()


def forget() -> None:
    dispatch.third_party_packages.cache_clear()
    dispatch._announced.cache_clear()
    dispatch.load.cache_clear()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A function that installs a package which registers a backend."""
    site = tmp_path / "site"
    site.mkdir()
    packages: list[str] = []
    monkeypatch.syspath_prepend(str(site))

    def put(name: str, refusal: str | None = None, *, package: str = "", module: str | None = None) -> None:
        folder = site / f"{name}_attention"
        folder.mkdir()
        (folder / "__init__.py").write_text(package)
        (folder / f"{MERGE}.py").write_text(MODULE.format(refusal=refusal) if module is None else module)
        announce(name, f"{name}_attention")

    def announce(name: str, package: str) -> None:
        info = site / f"{name}_attention-1.0.dist-info"
        info.mkdir()
        packages.append(package)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-attention\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{dispatch.ENTRY_POINTS}]\n{name} = {package}\n")
        forget()

    put.announce = announce  # type: ignore[attr-defined]
    yield put
    for module in [module for module in sys.modules if module.partition(".")[0] in packages]:
        del sys.modules[module]


def sample(operation: str = MERGE, device: Device = CPU, **changes):
    return Sample(**changes).call(operation, device)


def merge_inputs() -> tuple[np.ndarray, np.ndarray]:
    return np.ones((2, 3, 4, 16), np.float32), np.zeros((2, 3, 4), np.float32)


@pytest.mark.parametrize(
    ("framework", "platform", "order"),
    [
        ("torch", "cuda", ("cuda", "triton", "eager")),
        ("jax", "cuda", ("cuda", "triton", "xla")),
        ("torch", "rocm", ("triton", "eager")),
        ("jax", "tpu", ("pallas", "xla")),
        ("torch", "cpu", ("numba", "eager")),
        ("torch", "mps", ("eager",)),
        ("torch", "xpu", ("eager",)),
        ("jax", "cpu", ("numba", "xla")),
    ],
)
def test_platform_order(framework, platform, order):
    device = Device(framework=framework, platform=platform)
    assert dispatch.candidates(ATTENTION, device) == order
    assert dispatch.candidates(ATTENTION, device, "auto") == order


def test_a_list_is_asked_in_order_and_may_end_in_auto():
    device = Device(framework="torch", platform="rocm")
    assert dispatch.candidates(ATTENTION, device, ["reference", "cuda"]) == ("reference", "cuda")
    assert dispatch.candidates(ATTENTION, device, ["cuda", "auto"]) == ("cuda", "triton", "eager")
    assert dispatch.candidates(ATTENTION, device, "portable") == ("eager",)


def test_an_unknown_backend_lists_the_known_ones():
    known = ", ".join(("auto", *dispatch.backends(), "portable"))
    for name in ("tritom", ["triton", "tritom"]):
        with pytest.raises(InvalidInput, match=f"expected backend to be one of {known}, got 'tritom'"):
            dispatch.choose(sample(), backend=name)


def test_load_refuses_an_unknown_backend_too():
    with pytest.raises(BackendMissing, match="unknown backend 'tritom'; known are triton, pallas"):
        dispatch.load(ATTENTION, "tritom")


def test_reference_only_when_named():
    assert dispatch.choose(sample(), backend="reference").backend == "reference"
    for framework, platform in (("torch", "cuda"), ("jax", "tpu"), ("torch", "cpu")):
        assert "reference" not in dispatch.candidates(ATTENTION, Device(framework=framework, platform=platform))


def test_the_first_that_takes_the_call_is_chosen(install):
    install("busy", "block_q = 3 is odd")
    install("ready")
    choice = dispatch.choose(sample(), backend=["busy", "ready", "reference"])
    assert (choice.backend, choice.tile.block) == ("ready", 7)


def test_a_named_backend_is_never_replaced(install):
    install("busy", "block_q = 3 is odd")
    assert dispatch.choose(sample(), backend="auto").backend == "numba"
    with pytest.raises(Unsupported, match=r"\n  busy: block_q = 3 is odd"):
        dispatch.choose(sample(), backend="busy")
    with ra.use_backend("busy"), pytest.raises(Unsupported, match=r"\n  busy: block_q = 3 is odd"):
        dispatch.choose(sample())


SHY = f"""
{MODULE.format(refusal=None)}
def why_not_by_default(call):
    return "not yet measured"
"""


def test_a_backend_may_run_only_where_it_is_asked_for_by_name(install, monkeypatch):
    install("shy", module=SHY)
    monkeypatch.setitem(dispatch.ORDER, "cpu", ("shy", "portable"))  # type: ignore[arg-type]
    assert dispatch.choose(sample()).backend == "eager"
    assert dispatch.choose(sample(), backend="auto").backend == "eager"
    for request in ("shy", ["shy", "auto"]):
        assert dispatch.choose(sample(), backend=request).backend == "shy"
    with ra.use_backend({MERGE: "shy"}):
        assert dispatch.choose(sample()).backend == "shy"
        assert dispatch.choose(sample(), backend="auto").backend == "eager"
    with pytest.raises(Unsupported, match=r'nearest that does: backend="eager"$'):
        dispatch.choose(sample(), backend="xla")
    assert explanation(sample()).splitlines()[1:3] == [
        "  shy        not yet measured",
        "* eager      chosen",
    ]
    assert "* shy        chosen" in explanation(sample(), backend="shy")
    assert "  shy        could run, not asked for" in explanation(sample(), backend="eager")
    assert dispatch.verdicts(sample(), ["shy"]) == {"shy": None}
    assert dispatch.verdicts(sample(), ["shy"], by_default=["shy"]) == {"shy": "not yet measured"}


@pytest.mark.parametrize("operation", ["ragged_paged_attention", "mla_decode"])
def test_a_backend_that_the_front_end_cannot_launch_is_refused_with_the_reason(operation):
    pytest.importorskip("jax")
    device = dataclasses.replace(
        device_of("jax", "tpu"), unavailable=(("pallas", "no TPU is here"), ("xla", "nor XLA"))
    )
    call = sample_of(operation).call(operation, device)
    assert dispatch.verdicts(call, ["pallas", "xla", "reference"]) == {
        "pallas": "no TPU is here", "xla": "nor XLA", "reference": None,
    }  # fmt: skip
    assert hash(device) == hash(dataclasses.replace(device))


def test_unsupported_lists_every_candidate_and_the_nearest_that_would_do(install):
    install("busy", "block_q = 3 is odd")
    install("choosy", "head_dim = 24 is none of 64, 128")
    with pytest.raises(Unsupported) as caught:
        dispatch.choose(sample(), backend=["busy", "choosy"])
    assert str(caught.value).splitlines() == [
        "no backend asked for takes this merge_attention_states call from torch on cpu:",
        "  busy: block_q = 3 is odd",
        "  choosy: head_dim = 24 is none of 64, 128",
        'nearest that does: backend="numba"',
    ]
    assert not isinstance(caught.value, BackendMissing)


def test_what_is_not_offered_is_missing(install):
    install("ready")
    with pytest.raises(BackendMissing, match=r"\n  ready: does not offer ragged_paged_attention"):
        dispatch.choose(sample(ATTENTION), backend="ready")


def test_a_toolchain_that_is_not_installed_is_missing(monkeypatch):
    monkeypatch.setitem(dispatch.NEEDS, "triton", "a_toolchain_nobody_has")
    with pytest.raises(BackendMissing, match=r"\n  triton: a_toolchain_nobody_has is not installed"):
        dispatch.choose(sample(), backend="triton")


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        ({"module": "raise OSError('libfast.so: no such file')"}, OSError),
        ({"package": "import a_toolchain_nobody_has"}, ModuleNotFoundError),
        ({"module": "import a_toolchain_nobody_has"}, ModuleNotFoundError),
        ({"module": "from ragged_attention import a_name_that_is_not_there"}, ImportError),
    ],
)
def test_a_backend_whose_import_fails_shows_that_very_exception(install, broken, error):
    install("faulty", **broken)
    with pytest.raises(error, match=r"libfast.so: no such file|a_toolchain_nobody_has|a_name_that_is_not_there"):
        dispatch.choose(sample(), backend="faulty")
    with pytest.raises(error):
        dispatch.choose(sample(), backend=["faulty", "reference"])
    with pytest.raises(error):
        explanation(sample(), backend="faulty")
    shown = explanation(sample(), backend=["reference", "faulty"])
    assert dispatch.choose(sample(), backend=["reference", "faulty"]).backend == "reference"
    assert "* reference  chosen" in shown
    shown = explanation(sample())  # a faulty backend does no harm unless it is requested
    assert f"faulty     its import fails: {error.__name__}: " in shown


@pytest.mark.parametrize("broken", [{"package": "import sys; sys.exit(3)"}, {"module": "raise SystemExit(3)"}])
def test_a_backend_that_ends_the_program_when_imported_is_a_failing_import(install, broken):
    install("quitter", **broken)
    with pytest.raises(ImportError, match=r"quitter_attention.* ended the program when .* imported: SystemExit\(3\)"):
        dispatch.choose(sample(), backend="quitter")
    assert "quitter    its import fails: ImportError: quitter_attention" in explanation(sample())
    shown = {row[0]: row[2] for row in doctor.backends()}
    assert "ended the program when it was imported" in shown["quitter"]
    assert list(doctor.reports())


@pytest.mark.parametrize("name", ["auto", "portable", "triton"])
def test_a_backend_announced_under_a_name_that_is_taken_is_shown_as_such(install, name):
    install(name)
    assert dispatch.backends() == tuple(dispatch.PACKAGES)
    text = f"cannot be reached: {name}_attention is announced under a name that has another meaning here; rename it"
    assert explanation(sample()).splitlines()[-1] == f"  {name:10} {text}"
    assert (name, "", text) in list(doctor.backends())
    assert dispatch.choose(sample(), backend="auto").backend == "numba"


def test_a_package_announced_but_gone(install):
    install.announce("ghost", "ghost_attention")
    with pytest.raises(BackendMissing, match=r"\n  ghost: its package ghost_attention cannot be found"):
        dispatch.choose(sample(), backend="ghost")


def test_a_backend_of_another_package_runs_from_torch(install):
    torch = pytest.importorskip("torch")
    from ragged_attention.torch import merge_attention_states

    install("ready")
    assert "ready" in ra.backends()
    outs, lses = (torch.from_numpy(array) for array in merge_inputs())
    out, _ = merge_attention_states(outs, lses, backend="ready", options={"block": 9})
    assert out.shape == (3, 4, 16)
    assert bool((out == 9).all())
    with ra.use_backend({MERGE: "ready"}):
        assert bool((merge_attention_states(outs, lses)[0] == 7).all())
        assert "* ready      chosen" in ra.explain(MERGE, outs, lses)


def test_a_backend_of_another_package_runs_from_jax(install):
    jax = pytest.importorskip("jax")
    from ragged_attention.jax import merge_attention_states

    install("ready")
    outs, lses = merge_inputs()
    out, _ = jax.jit(lambda *arrays: merge_attention_states(*arrays, backend="ready"))(outs, lses)
    assert out.shape == (3, 4, 16)
    assert (np.asarray(out) == 7).all()
    with ra.use_backend({MERGE: "ready"}):
        assert "* ready      chosen" in ra.explain(MERGE, outs, lses)


def test_explain_marks_the_chosen_and_gives_reasons(install):
    install("busy", "block_q = 3 is odd")
    lines = explanation(sample(), backend=["busy", "auto", "reference"]).splitlines()
    assert lines[:4] == [
        "merge_attention_states from torch on cpu",
        "  busy       block_q = 3 is odd",
        "* numba      chosen",
        "  eager      could run",
    ]
    assert {line[2:].split()[0] for line in lines[1:]} == set(dispatch.backends())


def test_explain_takes_a_name_or_a_front_end_function():
    torch = pytest.importorskip("torch")
    from ragged_attention.torch import merge_attention_states

    arrays = tuple(torch.from_numpy(array) for array in merge_inputs())
    assert ra.explain(merge_attention_states, *arrays) == ra.explain(MERGE, *arrays)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=rf"expected operation to be one of {ATTENTION}, .*, got 'attention'"):
        ra.explain("attention", *arrays)
    with pytest.raises(TypeError, match="expected a torch, jax or NumPy array among the arguments, got none"):
        ra.explain(MERGE)


def test_explain_builds_the_record_and_so_refuses_invalid_calls():
    torch = pytest.importorskip("torch")
    with pytest.raises(InvalidInput, match=r"expected lses.shape to be"):
        ra.explain(MERGE, torch.ones(2, 3, 4, 16), torch.ones(2, 3, 5))


def test_options_of_another_backend_are_refused():
    with pytest.raises(InvalidInput, match="expected options among none for this backend, got 'block'"):
        dispatch.choose(sample(), backend="reference", options={"block": 1})


def test_every_operation_is_offered_by_definition_and_fallback():
    for operation in CALLS:
        for backend in ("reference", "eager", "xla"):
            pytest.importorskip({"eager": "torch", "xla": "jax"}.get(backend, "numpy"))
            module = dispatch.load(operation, backend)
            assert callable(module.run)


def test_a_module_may_offer_run_alone(install):
    install("bare", module="def run(call, tile, launch):\n    return tile")
    choice = dispatch.choose(sample(), backend="bare")
    assert dispatch.refusal("bare", sample()) is None
    changed = dataclasses.replace(sample(), out_dtype="float32")
    assert dispatch.refusal("bare", changed) == "does not honour out_dtype"
    assert choice.run(sample(), None) == choice.tile == choice.module.Tile()  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="expected options among none for this backend, got 'block'"):
        dispatch.choose(sample(), backend="bare", options={"block": 1})


def test_a_package_may_answer_for_modules_that_have_no_why_not(install, tmp_path):
    package = tmp_path / "site" / "careful_attention"
    install("careful", module="run = None")
    (package / "__init__.py").write_text("def why_not(call):\n    return 'the package says no'")
    (package / f"{ATTENTION}.py").write_text("run = None\ndef why_not(call):\n    return 'the module says no'")
    assert dispatch.refusal("careful", sample()) == "the package says no"
    assert dispatch.refusal("careful", sample(ATTENTION)) == "the module says no"


@pytest.mark.parametrize("operation", CALLS)
def test_every_module_of_the_eager_backend_refuses_jax_arrays(operation):
    pytest.importorskip("torch")
    call = sample_of(operation).call(operation, Device(framework="jax", platform="cpu"))
    assert dispatch.load(operation, "eager").why_not(call) == "expected torch tensors, got a jax call"


def test_only_a_promise_makes_an_attention_batch_invariant(install, tmp_path):
    refusals = {}
    for name, text in {"bare": "", "promising": "BATCH_INVARIANT = True"}.items():
        install(name)
        (tmp_path / "site" / f"{name}_attention" / f"{ATTENTION}.py").write_text(f"run = None\n{text}")
        with ra.use_backend(batch_invariant=True):
            refusals[name] = dispatch.refusal(name, sample(ATTENTION))
    assert refusals == {
        "bare": "does not promise the same bits in every batch (batch_invariant)", "promising": None,
    }  # fmt: skip


@pytest.mark.parametrize("framework", ["torch", "jax"])
# The arguments of `make_decode_schedule` differ from those of its record.
@pytest.mark.parametrize("operation", [name for name in CALLS if name != "make_decode_schedule"])
def test_front_ends_take_the_arguments_of_the_record(framework, operation):
    """The arguments' names, order and defaults are those of the record, followed by `backend` and `options`."""
    pytest.importorskip(framework)
    front_end = __import__(f"ragged_attention.{framework}", fromlist=[operation])
    given = dict(inspect.signature(getattr(front_end, operation)).parameters)
    if operation == "varlen_attention":  # not in the record: lse is always computed, for the gradient
        assert given.pop("return_lse").default is False
    record = CALLS[operation]
    if record.TAKES_OUT:
        assert given.pop("out").default is None
    wanted = {name: record.DEFAULTS.get(name, inspect.Parameter.empty) for name in record.KINDS}
    assert {name: given[name].default for name in given} == wanted | {"backend": None, "options": None}
    assert list(given) == [*wanted, "backend", "options"]


@pytest.mark.parametrize("operation", CALLS)
def test_public_functions_describe_each_argument(operation):
    function = getattr(Operations, operation)
    described = inspect.getdoc(function) or ""
    assert [name for name in inspect.signature(function).parameters if name != "self" and name not in described] == []


def test_jax_refuses_what_only_torch_takes():
    """In jax there is no argument `device` and no argument `out` for the memory of results."""
    jax = pytest.importorskip("ragged_attention.jax")
    lses = np.zeros((1, 2, 3), "float32")
    with pytest.raises(TypeError, match="an unexpected keyword argument 'out'"):
        jax.merge_attention_states(lses[..., None], lses, out=lses)
    with pytest.raises(TypeError, match="an unexpected keyword argument 'device'"):
        jax.make_decode_schedule(None, 1, 1, 1, topk=4, device="cpu")


def test_importing_the_package_loads_no_framework():
    assert loaded("ragged_attention", "torch", "jax", "triton", "rich", "hypothesis", "pytest") == []


def test_importing_the_package_is_quick():
    assert float(printed("-m", "tests.programs.quick_import")) < 0.2


def test_devices_that_are_not_here_can_be_asked_about():
    assert device_of("torch", "sm_90").platform == "cuda"
    assert device_of("jax", "gfx942").platform == "rocm"
    assert device_of("jax", "tpu").platform == "tpu"
    assert dispatch.candidates(ATTENTION, device_of("jax", "tpu")) == ("pallas", "xla")
    with pytest.raises(InvalidInput, match="expected framework to be one of torch, jax, got 'numpy'"):
        device_of("numpy")
    with pytest.raises(InvalidInput, match="expected operation to be one of"):
        Sample().call("attention", CPU)
