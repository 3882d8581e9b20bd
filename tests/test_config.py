"""The precedence of configuration, rule by rule, and what it refuses."""

import threading
from pathlib import Path

import pytest

import ragged_attention as ra
from ragged_attention import config
from ragged_attention.errors import InvalidInput

ATTENTION, WRITE = "ragged_paged_attention", "write_kv_pages"


@pytest.fixture(autouse=True)
def nothing_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Each test starts in an empty folder without wishes, and leaves none."""
    for variable in (config.BACKEND_VARIABLE, config.CONFIG_VARIABLE, config.VALIDATE_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    yield
    ra.use_backend()


def named_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> Path:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    monkeypatch.setenv(config.CONFIG_VARIABLE, str(path))
    return path


def test_without_any_wish_the_platform_decides():
    assert config.requested(ATTENTION) is None


def test_environment_over_platform(monkeypatch):
    monkeypatch.setenv(config.BACKEND_VARIABLE, "triton, eager")
    assert config.requested(ATTENTION) == ("triton", "eager")


def test_named_file_over_environment(monkeypatch, tmp_path):
    monkeypatch.setenv(config.BACKEND_VARIABLE, "triton")
    named_file(monkeypatch, tmp_path, 'backend = "xla"')
    assert config.requested(ATTENTION) == ("xla",)


def test_pyproject_over_environment(monkeypatch, tmp_path):
    monkeypatch.setenv(config.BACKEND_VARIABLE, "triton")
    Path(tmp_path, "pyproject.toml").write_text('[tool.ragged_attention]\nbackend = ["eager", "xla"]')
    assert config.requested(ATTENTION) == ("eager", "xla")


def test_named_file_over_pyproject(monkeypatch, tmp_path):
    Path(tmp_path, "pyproject.toml").write_text('[tool.ragged_attention]\nbackend = "eager"')
    named_file(monkeypatch, tmp_path, 'backend = "xla"')
    assert config.requested(ATTENTION) == ("xla",)


def test_plain_call_over_file(monkeypatch, tmp_path):
    named_file(monkeypatch, tmp_path, 'backend = "xla"')
    ra.use_backend("cuda")
    assert config.requested(ATTENTION) == ("cuda",)


def test_a_later_plain_call_replaces_the_earlier():
    ra.use_backend("cuda")
    ra.use_backend("triton")
    assert config.requested(ATTENTION) == ("triton",)
    ra.use_backend()
    assert config.requested(ATTENTION) is None


def test_block_over_plain_call():
    ra.use_backend("cuda")
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
    """Each source in turn is taken away, and the next one shows."""
    monkeypatch.setenv(config.BACKEND_VARIABLE, "environment")
    named_file(monkeypatch, tmp_path, 'backend = "file"')
    ra.use_backend("process")
    with ra.use_backend("outer"):
        with ra.use_backend("inner"):
            assert config.requested(ATTENTION, "call") == ("call",)
            assert config.requested(ATTENTION) == ("inner",)
        assert config.requested(ATTENTION) == ("outer",)
    assert config.requested(ATTENTION) == ("process",)
    ra.use_backend()
    assert config.requested(ATTENTION) == ("file",)
    monkeypatch.delenv(config.CONFIG_VARIABLE)
    assert config.requested(ATTENTION) == ("environment",)
    monkeypatch.delenv(config.BACKEND_VARIABLE)
    assert config.requested(ATTENTION) is None


def test_auto_gives_the_choice_back_to_the_platform(monkeypatch):
    monkeypatch.setenv(config.BACKEND_VARIABLE, "triton")
    with ra.use_backend("cuda"):
        assert config.requested(ATTENTION, "auto") is None
        with ra.use_backend("auto"):
            assert config.requested(ATTENTION) is None


def test_wishes_by_operation():
    with ra.use_backend({WRITE: "eager", "*": ["cuda", "triton"]}):
        assert config.requested(WRITE) == ("eager",)
        assert config.requested(ATTENTION) == ("cuda", "triton")


def test_a_source_that_does_not_name_the_operation_is_passed_over():
    with ra.use_backend("triton"), ra.use_backend({WRITE: "eager"}):
        assert config.requested(WRITE) == ("eager",)
        assert config.requested(ATTENTION) == ("triton",)


def test_wishes_by_operation_in_a_file(monkeypatch, tmp_path):
    named_file(monkeypatch, tmp_path, f'[backend]\n{WRITE} = "eager"\n"*" = ["triton", "eager"]')
    assert config.requested(WRITE) == ("eager",)
    assert config.requested(ATTENTION) == ("triton", "eager")


def test_a_block_ends_when_its_body_raises():
    with pytest.raises(KeyError), ra.use_backend("triton"):
        raise KeyError
    assert config.requested(ATTENTION) is None


def test_a_block_used_again_leaves_a_plain_call_made_between():
    block = ra.use_backend("triton")
    with block:
        pass
    ra.use_backend("eager")
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
    ra.use_backend(options={ATTENTION: {"block_kv": 2}})
    assert config.requested_options(ATTENTION) == {"block_kv": 2}
    with ra.use_backend(options={ATTENTION: {"block_kv": 3}}):
        with ra.use_backend(options={ATTENTION: {"block_kv": 4}}):
            assert config.requested_options(ATTENTION) == {"block_kv": 4}
            assert config.requested_options(ATTENTION, {"block_kv": 5}) == {"block_kv": 5}
        with ra.use_backend("triton"):  # says nothing of options
            assert config.requested_options(ATTENTION) == {"block_kv": 3}
    assert config.requested_options(WRITE) == {}


def test_validate_follows_the_same_order(monkeypatch, tmp_path):
    assert not config.validates_values()
    monkeypatch.setenv(config.VALIDATE_VARIABLE, "full")
    assert config.validates_values()
    named_file(monkeypatch, tmp_path, 'validate = "static"')
    assert not config.validates_values()
    ra.use_backend(validate="full")
    assert config.validates_values()
    with ra.use_backend(validate="static"):
        assert not config.validates_values()
        with ra.use_backend("triton"):  # says nothing of validation
            assert not config.validates_values()


def test_get_config_is_what_calls_follow(monkeypatch, tmp_path):
    monkeypatch.setenv(config.BACKEND_VARIABLE, "triton")
    named_file(monkeypatch, tmp_path, f'[backend]\n{WRITE} = "xla"\n[options.{ATTENTION}]\nblock_q = 16')
    now = ra.get_config()
    assert {name: now.names(name) for name in (ATTENTION, WRITE)} == {ATTENTION: ("triton",), WRITE: ("xla",)}
    assert now.options == {ATTENTION: {"block_q": 16}}
    assert now.validate == "static"
    with ra.use_backend("eager"):  # a wish for all hides weaker ones by operation
        assert ra.get_config().names(WRITE) == config.requested(WRITE) == ("eager",)


def test_unknown_key_of_a_file_names_key_and_file(monkeypatch, tmp_path):
    path = named_file(monkeypatch, tmp_path, 'backends = "triton"')
    with pytest.raises(
        InvalidInput, match=rf"expected keys backend, flash_mla_convention, options, validate in {path}, got 'backends'"
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
    monkeypatch.setenv(config.CONFIG_VARIABLE, str(tmp_path / "nowhere.toml"))
    with pytest.raises(InvalidInput, match=r"expected RAGGED_ATTENTION_CONFIG to name a file, got '.*nowhere.toml'"):
        config.requested(ATTENTION)


def test_another_projects_pyproject_is_no_concern_of_ours(tmp_path):
    Path(tmp_path, "pyproject.toml").write_text("[tool.other]\nbackend = 1")
    assert config.requested(ATTENTION) is None


def test_a_broken_pyproject_is_no_concern_of_ours(tmp_path):
    Path(tmp_path, "pyproject.toml").write_text("[tool")
    assert config.requested(ATTENTION) is None


@pytest.mark.parametrize("wish", ["", "triton,", [], ["triton", ""]])
def test_an_empty_name_is_refused(wish):
    with pytest.raises(InvalidInput, match="expected backend to name at least one backend, got"):
        ra.use_backend(wish)


@pytest.mark.parametrize("wish", [3, ["triton", 3], {WRITE: 3}])
def test_a_name_of_a_wrong_kind_is_refused(wish):
    with pytest.raises(TypeError, match="expected backend to be a name or a list of names, got"):
        ra.use_backend(wish)


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


def test_an_unknown_validation_is_refused(monkeypatch):
    with pytest.raises(InvalidInput, match="expected validate to be one of static, full, got 'all'"):
        ra.use_backend(validate="all")
    monkeypatch.setenv(config.VALIDATE_VARIABLE, "all")
    with pytest.raises(InvalidInput, match="expected RAGGED_ATTENTION_VALIDATE to be one of static, full, got 'all'"):
        config.validates_values()


def test_flash_mlas_convention_by_the_strongest_source_that_says(monkeypatch, tmp_path):
    assert config.flash_mla_convention() == ra.get_config().flash_mla_convention == "base2"
    named_file(monkeypatch, tmp_path, 'flash_mla_convention = "natural"')
    assert config.flash_mla_convention() == ra.get_config().flash_mla_convention == "natural"
    ra.use_backend(flash_mla_convention="base2")
    assert config.flash_mla_convention() == "base2"
    with ra.use_backend(flash_mla_convention="natural"), ra.use_backend("eager"):
        assert config.flash_mla_convention() == "natural"


def test_an_unknown_convention_is_refused(monkeypatch, tmp_path):
    message = "expected flash_mla_convention to be one of base2, natural, got 'e'"
    with pytest.raises(InvalidInput, match=message):
        ra.use_backend(flash_mla_convention="e")
    path = named_file(monkeypatch, tmp_path, 'flash_mla_convention = "e"')
    with pytest.raises(InvalidInput, match=f"{path}: {message}"):
        config.flash_mla_convention()


def test_a_refused_wish_changes_nothing():
    ra.use_backend("triton")
    with pytest.raises(InvalidInput):
        ra.use_backend("eager", validate="all")
    assert config.requested(ATTENTION) == ("triton",)
