"""The precedence of configuration sources, rule by rule, and the values that are refused."""

import contextlib
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ragged_attention as ra
from ragged_attention import config
from ragged_attention.errors import InvalidInput

ATTENTION, WRITE = "ragged_paged_attention", "write_kv_pages"
BOTH = pytest.mark.parametrize("choose", [ra.set_backend, ra.use_backend])


@pytest.fixture(autouse=True)
def nothing_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Start each test in an empty folder without configuration, and remove its configuration afterwards."""
    for variable in (config.BACKEND_VARIABLE, config.CONFIG_VARIABLE, config.VALIDATE_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    yield
    ra.set_backend()


def setenv(monkeypatch: pytest.MonkeyPatch, variable: str, value: str | None) -> None:
    if value is None:
        monkeypatch.delenv(variable)
    else:
        monkeypatch.setenv(variable, value)
    ra.reload_config()


def named_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> Path:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    setenv(monkeypatch, config.CONFIG_VARIABLE, str(path))
    return path


def test_without_a_request_the_platform_decides():
    assert config.requested(ATTENTION) is None


def test_environment_over_platform(monkeypatch):
    setenv(monkeypatch, config.BACKEND_VARIABLE, "triton, eager")
    assert config.requested(ATTENTION) == ("triton", "eager")


def test_named_file_over_environment(monkeypatch, tmp_path):
    setenv(monkeypatch, config.BACKEND_VARIABLE, "triton")
    named_file(monkeypatch, tmp_path, 'backend = "xla"')
    assert config.requested(ATTENTION) == ("xla",)


def test_pyproject_over_environment(monkeypatch, tmp_path):
    setenv(monkeypatch, config.BACKEND_VARIABLE, "triton")
    Path(tmp_path, "pyproject.toml").write_text('[tool.ragged_attention]\nbackend = ["eager", "xla"]')
    assert config.requested(ATTENTION) == ("eager", "xla")


def test_named_file_over_pyproject(monkeypatch, tmp_path):
    Path(tmp_path, "pyproject.toml").write_text('[tool.ragged_attention]\nbackend = "eager"')
    named_file(monkeypatch, tmp_path, 'backend = "xla"')
    assert config.requested(ATTENTION) == ("xla",)


def test_process_wide_over_file(monkeypatch, tmp_path):
    named_file(monkeypatch, tmp_path, 'backend = "xla"')
    ra.set_backend("cuda")
    assert config.requested(ATTENTION) == ("cuda",)


def test_a_later_set_backend_replaces_the_earlier():
    ra.set_backend("cuda")
    ra.set_backend("triton")
    assert config.requested(ATTENTION) == ("triton",)
    ra.set_backend()
    assert config.requested(ATTENTION) is None


def test_block_over_process_wide():
    ra.set_backend("cuda")
    with ra.use_backend("triton"):
        assert config.requested(ATTENTION) == ("triton",)
    assert config.requested(ATTENTION) == ("cuda",)


def test_inner_block_over_outer_block():
    with ra.use_backend("cuda"):
        with ra.use_backend("triton"):
            assert config.requested(ATTENTION) == ("triton",)
        assert config.requested(ATTENTION) == ("cuda",)
    assert config.requested(ATTENTION) is None


def test_call_over_innermost_block():
    with ra.use_backend("cuda"), ra.use_backend("triton"):
        assert config.requested(ATTENTION, "reference") == ("reference",)


def test_the_whole_order_at_once(monkeypatch, tmp_path):
    """When the sources are removed one by one, the next in the order takes effect."""
    setenv(monkeypatch, config.BACKEND_VARIABLE, "environment")
    named_file(monkeypatch, tmp_path, 'backend = "file"')
    ra.set_backend("process")
    with ra.use_backend("outer"):
        with ra.use_backend("inner"):
            assert config.requested(ATTENTION, "call") == ("call",)
            assert config.requested(ATTENTION) == ("inner",)
        assert config.requested(ATTENTION) == ("outer",)
    assert config.requested(ATTENTION) == ("process",)
    ra.set_backend()
    assert config.requested(ATTENTION) == ("file",)
    setenv(monkeypatch, config.CONFIG_VARIABLE, None)
    assert config.requested(ATTENTION) == ("environment",)
    setenv(monkeypatch, config.BACKEND_VARIABLE, None)
    assert config.requested(ATTENTION) is None


def test_auto_gives_the_choice_back_to_the_platform(monkeypatch):
    setenv(monkeypatch, config.BACKEND_VARIABLE, "triton")
    with ra.use_backend("cuda"):
        assert config.requested(ATTENTION, "auto") is None
        with ra.use_backend("auto"):
            assert config.requested(ATTENTION) is None


def test_requests_by_operation():
    with ra.use_backend({WRITE: "eager", "*": ["cuda", "triton"]}):
        assert config.requested(WRITE) == ("eager",)
        assert config.requested(ATTENTION) == ("cuda", "triton")


def test_a_source_that_does_not_name_the_operation_is_passed_over():
    with ra.use_backend("triton"), ra.use_backend({WRITE: "eager"}):
        assert config.requested(WRITE) == ("eager",)
        assert config.requested(ATTENTION) == ("triton",)


def test_requests_by_operation_in_a_file(monkeypatch, tmp_path):
    named_file(monkeypatch, tmp_path, f'[backend]\n{WRITE} = "eager"\n"*" = ["triton", "eager"]')
    assert config.requested(WRITE) == ("eager",)
    assert config.requested(ATTENTION) == ("triton", "eager")


def test_a_block_ends_when_its_body_raises():
    with pytest.raises(KeyError), ra.use_backend("triton"):
        raise KeyError
    assert config.requested(ATTENTION) is None


def test_a_block_used_again_leaves_a_set_backend_made_between():
    block = ra.use_backend("triton")
    with block:
        pass
    ra.set_backend("eager")
    with block:
        assert config.requested(ATTENTION) == ("triton",)
    assert config.requested(ATTENTION) == ("eager",)


def test_a_block_holds_for_its_own_thread():
    seen = []
    with ra.use_backend("triton"):
        thread = threading.Thread(target=lambda: seen.append(config.requested(ATTENTION)))
        thread.start()
        thread.join()
    assert seen == [None]


def test_options_follow_the_same_order(monkeypatch, tmp_path):
    named_file(monkeypatch, tmp_path, f"[options.{ATTENTION}]\nblock_kv = 1")
    assert config.requested_options(ATTENTION) == {"block_kv": 1}
    ra.set_backend(options={ATTENTION: {"block_kv": 2}})
    assert config.requested_options(ATTENTION) == {"block_kv": 2}
    with ra.use_backend(options={ATTENTION: {"block_kv": 3}}):
        with ra.use_backend(options={ATTENTION: {"block_kv": 4}}):
            assert config.requested_options(ATTENTION) == {"block_kv": 4}
            assert config.requested_options(ATTENTION, {"block_kv": 5}) == {"block_kv": 5}
        with ra.use_backend("triton"):  # sets no options
            assert config.requested_options(ATTENTION) == {"block_kv": 3}
    assert config.requested_options(WRITE) == {}


def test_validate_follows_the_same_order(monkeypatch, tmp_path):
    assert not config.validates_values()
    setenv(monkeypatch, config.VALIDATE_VARIABLE, "full")
    assert config.validates_values()
    named_file(monkeypatch, tmp_path, 'validate = "static"')
    assert not config.validates_values()
    ra.set_backend(validate="full")
    assert config.validates_values()
    with ra.use_backend(validate="static"):
        assert not config.validates_values()
        with ra.use_backend("triton"):  # sets no validation
            assert not config.validates_values()


def test_get_config_is_what_calls_follow(monkeypatch, tmp_path):
    setenv(monkeypatch, config.BACKEND_VARIABLE, "triton")
    named_file(monkeypatch, tmp_path, f'[backend]\n{WRITE} = "xla"\n[options.{ATTENTION}]\nblock_q = 16')
    now = ra.get_config()
    assert {name: now.names(name) for name in (ATTENTION, WRITE)} == {ATTENTION: ("triton",), WRITE: ("xla",)}
    assert now.options == {ATTENTION: {"block_q": 16}}
    assert now.validate == "static"
    with ra.use_backend("eager"):  # a request for all operations overrides weaker requests for single ones
        assert ra.get_config().names(WRITE) == config.requested(WRITE) == ("eager",)


def test_unknown_key_of_a_file_names_key_and_file(monkeypatch, tmp_path):
    path = named_file(monkeypatch, tmp_path, 'backends = "triton"')
    with pytest.raises(
        InvalidInput, match=rf"expected keys backend, options, validate, batch_invariant in {path}, got 'backends'"
    ):
        config.requested(ATTENTION)


def test_unknown_key_of_pyproject_names_key_and_file(tmp_path):
    path = Path(tmp_path, "pyproject.toml")
    path.write_text('[tool.ragged_attention]\ncolour = "red"')
    with pytest.raises(InvalidInput, match=rf"in {path}, got 'colour'"):
        config.requested(ATTENTION)


def test_unknown_operation_of_a_file_names_it_and_the_file(monkeypatch, tmp_path):
    path = named_file(monkeypatch, tmp_path, '[backend]\nwrite_pages = "eager"')
    with pytest.raises(InvalidInput, match=rf"{path}: expected keys of backend among .*write_kv_pages.* 'write_pages'"):
        config.requested(ATTENTION)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("backend = 3", TypeError, "settings.toml: expected backend to be a name or a list of names, got 3"),
        ("options = 3", TypeError, "settings.toml: expected options to be a mapping, got int"),
        (f"[options]\n{WRITE} = 3", TypeError, f"settings.toml: expected options of {WRITE} to be a mapping, got int"),
        ('validate = "some"', InvalidInput, "settings.toml: expected validate to be one of static, full, got 'some'"),
        ("backend = ", InvalidInput, "settings.toml to be TOML, got: "),
    ],
)
def test_a_file_with_a_wrong_value_is_named(monkeypatch, tmp_path, text, error, message):
    named_file(monkeypatch, tmp_path, text)
    with pytest.raises(error, match=message):
        config.requested(ATTENTION)


def test_a_named_file_must_exist(monkeypatch, tmp_path):
    setenv(monkeypatch, config.CONFIG_VARIABLE, str(tmp_path / "nowhere.toml"))
    with pytest.raises(InvalidInput, match=r"expected RAGGED_ATTENTION_CONFIG to name a file, got '.*nowhere.toml'"):
        config.requested(ATTENTION)


def test_another_projects_pyproject_is_no_concern_of_ours(tmp_path):
    Path(tmp_path, "pyproject.toml").write_text("[tool.other]\nbackend = 1")
    assert config.requested(ATTENTION) is None


def test_a_broken_pyproject_is_no_concern_of_ours(tmp_path):
    Path(tmp_path, "pyproject.toml").write_text("[tool")
    assert config.requested(ATTENTION) is None


@pytest.mark.parametrize("names", ["", "triton,", [], ["triton", ""]])
@BOTH
def test_an_empty_name_is_refused(choose, names):
    with pytest.raises(InvalidInput, match="expected backend to name at least one backend, got"):
        choose(names)


@pytest.mark.parametrize("names", [3, ["triton", 3], {WRITE: 3}])
@BOTH
def test_a_name_of_a_wrong_kind_is_refused(choose, names):
    with pytest.raises(TypeError, match="expected backend to be a name or a list of names, got"):
        choose(names)


def test_unknown_operations_are_refused():
    with pytest.raises(InvalidInput, match=r"expected keys of backend among .*, \*, got 'attention'"):
        ra.use_backend({"attention": "triton"})
    with pytest.raises(InvalidInput, match=r"expected keys of options among .*, got '\*'"):
        ra.use_backend(options={"*": {"block_kv": 64}})


def test_options_must_be_mappings():
    with pytest.raises(TypeError, match="expected options to be a mapping, got list"):
        config.requested_options(ATTENTION, [("block_kv", 64)])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected options of write_kv_pages to be a mapping, got int"):
        ra.use_backend(options={WRITE: 3})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="expected options to be a mapping, got list"):
        ra.set_backend(options=[])  # type: ignore[arg-type]


def test_an_unknown_validation_is_refused(monkeypatch):
    with pytest.raises(InvalidInput, match="expected validate to be one of static, full, got 'all'"):
        ra.use_backend(validate="all")
    setenv(monkeypatch, config.VALIDATE_VARIABLE, "all")
    with pytest.raises(InvalidInput, match="expected RAGGED_ATTENTION_VALIDATE to be one of static, full, got 'all'"):
        config.validates_values()


@BOTH
def test_a_refused_request_changes_nothing(choose):
    ra.set_backend("triton")
    with pytest.raises(InvalidInput):
        choose("eager", validate="all")
    assert config.requested(ATTENTION) == ("triton",)


def test_the_environment_and_the_file_are_read_once_and_again_on_request(monkeypatch, tmp_path):
    monkeypatch.setenv(config.BACKEND_VARIABLE, "triton")
    assert config.requested(ATTENTION) == ("triton",)
    before = config.state()
    monkeypatch.setenv(config.BACKEND_VARIABLE, "eager")
    path = tmp_path / "pyproject.toml"
    path.write_text('[tool.ragged_attention.backend]\nwrite_kv_pages = "xla"')
    for module in (os, Path):  # the file is not read again
        monkeypatch.setattr(module, "getcwd" if module is os else "read_bytes", lambda *given: pytest.fail("read"))
    assert (config.requested(ATTENTION), config.requested(WRITE)) == (("triton",), ("triton",))
    assert config.state() == before
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(config.BACKEND_VARIABLE, "eager")
    ra.reload_config()
    assert (config.requested(ATTENTION), config.requested(WRITE)) == (("eager",), ("xla",))
    assert config.state() != before


def test_equal_requests_are_one_state():
    """Equal requests have equal states, so that a new block for each call finds the plans that are cached by state."""
    plain = config.state()
    states = []
    for _ in range(2):
        with ra.use_backend(["cuda", "eager"], options={WRITE: {"block": 1}, ATTENTION: {"a": 1, "b": 2}}):
            states.append(config.state())
        with ra.use_backend("cuda,eager", options={ATTENTION: {"b": 2, "a": 1}, WRITE: {"block": np.int32(1)}}):
            states.append(config.state())
        assert config.state() == plain
    assert len(set(states)) == 1
    others: list[dict[str, Any]] = [{"block": True}, {"block": 1.0}, {"block": "1"}, {"block": 2}, {"blocks": 1}, {}]
    for options in others:
        with ra.use_backend(["cuda", "eager"], options={WRITE: options, ATTENTION: {"a": 1, "b": 2}}):
            assert config.state() not in states
    with ra.use_backend("cuda"), ra.use_backend("eager"):
        outer = config.state()
    with ra.use_backend("eager"), ra.use_backend("cuda"):
        assert config.state() != outer


def test_blocks_made_before_each_other_leave_nothing_behind():
    a, b = ra.use_backend("reference"), ra.use_backend("eager")
    with a:
        assert config.requested(ATTENTION) == ("reference",)
        with b:
            assert config.requested(ATTENTION) == ("eager",)
        assert config.requested(ATTENTION) == ("reference",)
    assert config.requested(ATTENTION) is None


def test_threads_that_enter_blocks_leave_nothing_behind_and_see_their_own():
    barrier, faults = threading.Barrier(8), []

    def work(name: str) -> None:
        barrier.wait()
        for _ in range(300):
            with ra.use_backend(name) as _, ra.use_backend(options={WRITE: {name: 1}}):
                if config.requested(ATTENTION) != (name,) or config.requested_options(WRITE) != {name: 1}:
                    faults.append(name)

    ra.set_backend("cuda")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(f"backend{index}",)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not faults
    assert config.requested(ATTENTION) == ("cuda",)
    assert config.requested_options(WRITE) == {}


def make_blocks() -> list[ra.use_backend]:
    first = ra.use_backend("cuda")
    return [first, ra.use_backend("triton"), ra.use_backend(backend="eager", validate="full")]


def test_constructing_a_block_changes_nothing():
    """A `use_backend` block that is only constructed changes nothing and warns of nothing.

    pytest turns warnings into errors.
    """
    ra.set_backend("xla")
    before = config.state()
    blocks = make_blocks()
    assert config.state() == before
    with contextlib.ExitStack() as stack:
        assert [stack.enter_context(block).names(WRITE) for block in blocks] == [("cuda",), ("triton",), ("eager",)]
        assert config.requested(ATTENTION) == ("eager",)
    del blocks
    make_blocks()
    assert config.state() == before


OLD_FORMS = (
    'ra.use_backend("triton")',
    'ra.use_backend(["triton"], options={}, validate=None)',
    'ra.use_backend(*["triton"])',
    'ra.use_backend(**{"backend": "triton"})',
    'if ra:\n    ra.use_backend("triton")\n',
    'for _ in range(40):\n    ra.use_backend("triton")\n',  # the interpreter specialises a repeated call
)


@pytest.mark.parametrize("mode", ["exec", "single"])  # "exec" as in a file, "single" as at a prompt or in a notebook
@pytest.mark.parametrize("text", OLD_FORMS)
def test_the_deprecated_statement_sets_the_backend_and_warns(capsys, text, mode):
    ra.set_backend("cuda")
    code = compile(text, "users_program", mode)
    with pytest.warns(DeprecationWarning, match=r"use_backend\(\.\.\.\) outside of .*: call set_backend\(") as warnings:
        exec(code, {"ra": ra})
    assert {warning.filename for warning in warnings} == {"users_program"}
    assert config.requested(ATTENTION) == ("triton",)


def test_the_deprecated_statement_without_arguments_ends_the_choice():
    ra.set_backend("cuda")
    with pytest.warns(DeprecationWarning, match="set_backend"):
        ra.use_backend()
    assert config.requested(ATTENTION) is None


def test_a_deprecated_statement_that_is_an_error_changes_nothing():
    with pytest.raises(DeprecationWarning, match="set_backend"):
        ra.use_backend("triton")
    assert config.requested(ATTENTION) is None


def test_a_block_may_be_entered_again_within_itself():
    block = ra.use_backend("eager")
    for _ in range(2):
        with block, block:
            assert config.requested(ATTENTION) == ("eager",)
            with ra.use_backend("cuda"), block:
                assert config.requested(ATTENTION) == ("eager",)
            assert config.requested(ATTENTION) == ("eager",)
        assert config.requested(ATTENTION) is None


def test_blocks_that_end_out_of_order_end_their_own():
    a, b = ra.use_backend("eager"), ra.use_backend("cuda")
    a.__enter__()
    b.__enter__()
    a.__exit__(None, None, None)
    assert config.requested(ATTENTION) == ("cuda",)
    b.__exit__(None, None, None)
    assert config.requested(ATTENTION) is None


def test_a_working_directory_that_is_gone_has_no_pyproject(monkeypatch, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    ra.reload_config()
    assert config.requested(ATTENTION) is None
    setenv(monkeypatch, config.CONFIG_VARIABLE, "settings.toml")
    with pytest.raises(InvalidInput, match=r"expected RAGGED_ATTENTION_CONFIG to name a file, got 'settings.toml'"):
        config.requested(ATTENTION)


def refuse(path: Path) -> bytes:
    raise PermissionError(13, "Permission denied")


def test_a_file_that_cannot_be_read_counts_only_if_it_is_named(monkeypatch, tmp_path):
    Path(tmp_path, "pyproject.toml").write_text('[tool.ragged_attention]\nbackend = "eager"')
    path = named_file(monkeypatch, tmp_path, 'backend = "eager"')
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(InvalidInput, match=f"expected {path} to be readable, got: .*Permission denied"):
        config.requested(ATTENTION)
    setenv(monkeypatch, config.CONFIG_VARIABLE, None)
    assert config.requested(ATTENTION) is None


def test_files_are_utf_8_whatever_the_locale_is(monkeypatch, tmp_path):
    monkeypatch.setattr("locale.getpreferredencoding", lambda *given: "latin-1")
    Path(tmp_path, "pyproject.toml").write_bytes(
        '[project]\nname = "über"\n[tool.ragged_attention]\nbackend = "eager"'.encode()
    )
    assert config.requested(ATTENTION) == ("eager",)
    Path(tmp_path, "pyproject.toml").write_bytes('[project]\nname = "über"'.encode("latin-1"))
    ra.reload_config()
    assert config.requested(ATTENTION) is None
    path = named_file(monkeypatch, tmp_path, "")
    path.write_bytes('# über\nbackend = "eager"'.encode("latin-1"))
    with pytest.raises(InvalidInput, match=f"expected {path} to be TOML, got: .*codec can't decode"):
        config.requested(ATTENTION)


@pytest.mark.parametrize("text", ["tool = 1", "[[tool]]", "[tool]\nragged = 1"])
def test_a_pyproject_with_other_ideas_of_tool_is_no_concern_of_ours(tmp_path, text):
    Path(tmp_path, "pyproject.toml").write_text(text)
    assert config.requested(ATTENTION) is None


def test_our_own_table_must_be_one(tmp_path):
    path = Path(tmp_path, "pyproject.toml")
    path.write_text("[tool]\nragged_attention = 1")
    with pytest.raises(InvalidInput, match=f"expected tool.ragged_attention in {path} to be a table, got 1"):
        config.requested(ATTENTION)


def test_options_are_plain_values_or_errors_that_name_them():
    given = {"a": np.int64(64), "b": np.float32(0.5), "c": np.bool_(True), "d": "x", "e": None, "f": False}
    found = config.expect_options(given)
    assert found == {"a": 64, "b": 0.5, "c": True, "d": "x", "e": None, "f": False}
    assert [type(value) for value in found.values()] == [int, float, bool, str, type(None), bool]
    for value in (np.inf, -np.inf, np.nan, np.float32("nan")):
        with pytest.raises(InvalidInput, match=f"expected option block_kv to be finite, got {float(value)}"):
            config.requested_options(WRITE, {"block_kv": value})
    for value, kind in (((1, 2), "tuple"), (np.ones(2), "ndarray"), (1j, "complex")):
        text = f"expected option block_kv to be a number, a string, a bool or None, got {kind}"
        with pytest.raises(TypeError, match=text):
            ra.use_backend(options={WRITE: {"block_kv": value}})
    with pytest.raises(TypeError, match="expected options to have strings for names, got 3"):
        config.expect_options({3: 1})
