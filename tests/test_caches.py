"""The caches on disk: their location, the files that are trusted, and calls that work whatever state a cache is in."""

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ragged_attention.host import caches
from tests.processes import printed, run_python

posix = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no POSIX owners and modes of files")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home folder of a user without caches."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (tmp_path / "home").mkdir(mode=0o755)
    return tmp_path / "home"


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make another user the owner of a path. Without root's rights, pretend that this process runs as another user."""
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)


# ---- the location


def test_the_folder_is_the_user_s(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert caches.cache_folder() == home / ".cache" / "ragged_attention"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "there"))
    assert caches.cache_folder() == tmp_path / "there" / "ragged_attention"


@pytest.mark.parametrize("relative", ["", "caches", "./caches", "../caches"])
def test_a_relative_folder_is_no_folder(home: Path, monkeypatch: pytest.MonkeyPatch, relative: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", relative)
    assert caches.cache_folder() == home / ".cache" / "ragged_attention"
    monkeypatch.setenv("HOME", relative or ".")
    with pytest.raises(RuntimeError, match="expected the home directory to be an absolute path"):
        caches.cache_folder()


# ---- trusted owners and modes


@posix
def test_what_only_this_user_can_have_written_is_trusted(home: Path) -> None:
    file = caches.cache_folder() / "file"
    assert caches.why_untrusted(file) is None  # the file does not exist yet
    caches.write(file, b"")
    assert caches.why_untrusted(file) is None


@posix
@pytest.mark.parametrize("mode", [0o757, 0o1777])
def test_a_folder_that_others_can_write_is_not(home: Path, mode: int) -> None:
    file = caches.cache_folder() / "file"
    caches.write(file, b"")
    file.parent.chmod(mode)
    assert caches.why_untrusted(file.parent) == f"others can write {file.parent}"
    if not mode & 0o1000:  # in a sticky folder such as /tmp, others cannot replace this user's files
        assert caches.why_untrusted(file) == f"others can write {file.parent}"
        assert caches.read(file) is None
    file.parent.chmod(0o755)
    file.chmod(0o646)
    assert caches.why_untrusted(file) == f"others can write {file}"
    assert caches.read(file) is None


@posix
@pytest.mark.parametrize("above", [0, 1, 2])
def test_nor_is_another_user_s(home: Path, monkeypatch: pytest.MonkeyPatch, above: int) -> None:
    file = caches.cache_folder() / "file"
    caches.write(file, b"content")
    place = [file, *file.parents][above]
    give_away(place, monkeypatch)
    assert "belongs to another user" in (caches.why_untrusted(file) or "")
    assert caches.read(file) is None


@posix
def test_nothing_is_written_where_others_can(home: Path) -> None:
    folder = caches.cache_folder()
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match=f"others can write {folder}"):
        caches.write(folder / "numba" / "file", b"")
    assert not list((folder / "numba").iterdir())


@posix
def test_folders_above_the_home_are_the_system_s(home: Path) -> None:
    home.parent.chmod(0o777)
    assert caches.why_untrusted(caches.cache_folder()) is None
    home.chmod(0o777)
    assert caches.why_untrusted(caches.cache_folder()) == f"others can write {home}"


@posix
def test_a_link_counts_as_what_it_names(home: Path, tmp_path: Path) -> None:
    (open_to_all := tmp_path / "open").mkdir()
    open_to_all.chmod(0o777)
    (home / ".cache").symlink_to(open_to_all)
    assert caches.why_untrusted(caches.cache_folder()) == f"others can write {open_to_all}"


@posix
def test_a_group_is_others_unless_it_is_the_user_s_own(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.chmod(0o775)
    own = caches._is_own(home.stat().st_gid)
    for is_own, reason in ((True, None), (False, f"others can write {home}")):
        monkeypatch.setattr(caches, "_is_own", lambda group, is_own=is_own: is_own)
        assert caches.why_untrusted(home) == reason
    monkeypatch.undo()
    import grp
    import pwd

    user = pwd.getpwuid(os.geteuid())
    assert own == (grp.getgrgid(user.pw_gid).gr_name == user.pw_name and not grp.getgrgid(user.pw_gid).gr_mem)
    members = grp.struct_group((user.pw_name, "x", user.pw_gid, ["somebody"]))
    monkeypatch.setattr(grp, "getgrgid", lambda group: members)
    assert not caches._is_own(user.pw_gid)


@posix
def test_no_umask_lets_others_write(home: Path) -> None:
    before = os.umask(0)
    try:
        caches.write(caches.cache_folder() / "numba" / "file", b"content")
    finally:
        os.umask(before)
    assert caches.read(caches.cache_folder() / "numba" / "file") == b"content"


# ---- atomic writes

DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda kept: b"",
    "cut short": lambda kept: kept[: len(kept) // 2],
    "without its end": lambda kept: kept[:-1],
    "zeros at the end": lambda kept: kept[: len(kept) // 2] + bytes(len(kept) - len(kept) // 2),
    "another byte": lambda kept: kept[:-9] + bytes([kept[-9] ^ 1]) + kept[-8:],
    "longer": lambda kept: kept + b"more",
    "something else": lambda kept: b"garbage",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_what_is_not_whole_is_not_there(home: Path, damage: Callable[[bytes], bytes]) -> None:
    file = caches.cache_folder() / "file"
    caches.write(file, b"content" * 100)
    assert caches.read(file) == b"content" * 100
    file.write_bytes(damage(file.read_bytes()))
    assert caches.read(file) is None
    caches.write(file, b"content" * 100)
    assert caches.read(file) == b"content" * 100


def test_a_full_disk_leaves_nothing_behind(home: Path) -> None:
    resource = pytest.importorskip("resource")
    file, before = caches.cache_folder() / "file", resource.getrlimit(resource.RLIMIT_FSIZE)
    caches.write(file, b"old")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="too large") as raised:
            caches.write(file, b"new" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert raised.value.errno == errno.EFBIG
    assert [path.name for path in file.parent.iterdir()] == ["file"]
    assert caches.read(file) == b"old"


def test_a_reader_sees_one_writer_s_content_or_the_other_s(home: Path) -> None:
    file, contents, ended = caches.cache_folder() / "file", [bytes([part]) * 300_000 for part in (1, 2)], []

    def write(content: bytes) -> None:
        for _ in range(20):
            caches.write(file, content)
        ended.append(content)

    caches.write(file, contents[0])
    writers = [threading.Thread(target=write, args=(content,)) for content in contents]
    for writer in writers:
        writer.start()
    while len(ended) < 2:
        assert caches.read(file) in contents
    for writer in writers:
        writer.join()


# ---- compiled kernels


def double(number: int) -> int:
    return 2 * number


class Kept:
    """A call of the kernel `double`, which is compiled or loaded from the disk as in a new process."""

    def __init__(self, compiling: Any) -> None:
        self.compiling = compiling

    def __call__(self) -> bool:
        """Whether the kernel was loaded from the disk."""
        self.compiling._made.clear()
        (function,) = self.compiling.machine_code("double", {double: "int64(int64)"})
        assert function.ctypes(21) == 42
        return function.cache_hits == 1

    @property
    def file(self) -> Path:
        (file,) = self.compiling._cache_folder().rglob("test_caches.double-*")
        return file


@pytest.fixture
def kept(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    pytest.importorskip("numba")
    from ragged_attention.portable.numba import _compiling

    for name, value in {"_made": {}, "_said": set(), "PATIENCE": 0.0}.items():
        monkeypatch.setattr(_compiling, name, value)
    yield Kept(_compiling)
    _compiling._digest.cache_clear()


COMPILING = "ragged_attention: compiling double for this CPU, once, which takes some seconds; "


def test_a_kernel_is_compiled_once_and_only_then_a_line_says_so(
    kept: Kept, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not kept()
    assert capsys.readouterr().err == f"{COMPILING}the code will be cached in {home}/.cache/ragged_attention/numba\n"
    assert kept()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("damage", ["cut short", "another byte"])
def test_a_damaged_kernel_is_compiled_and_kept_again(kept: Kept, damage: str) -> None:
    kept()
    kept.file.write_bytes(DAMAGES[damage](kept.file.read_bytes()))
    assert not kept()
    assert kept()


def test_what_is_whole_but_no_kernel_is_compiled_again(kept: Kept) -> None:
    kept()
    for content in (b"", b"garbage", b"\x80\x04K\x01."):
        caches.write(kept.file, content)
        assert not kept()
        assert kept()


@posix
def test_a_warm_cache_that_cannot_be_written_is_read(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    kept()

    def read_only(path: Any, flags: int, *rest: Any, real: Any = os.open, **more: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", read_only)
    monkeypatch.setattr(os, "access", lambda *given, **more: False)
    assert kept()


def test_what_cannot_be_kept_is_compiled_in_every_process(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert not kept()
    assert not kept()
    compiling, reason = capsys.readouterr().err.splitlines()  # each warning is printed once
    assert compiling.startswith(f"{COMPILING}the code cannot be cached: ")
    assert reason.startswith("ragged_attention: compiled code is not cached: ")
    assert f"{tmp_path}/file" in reason


@posix
def test_a_kernel_that_others_may_have_written_is_not_run(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept()
    folder = kept.file.parent
    folder.chmod(0o777)
    capsys.readouterr()
    assert not kept()
    assert f"not cached: others can write {folder}\n" in capsys.readouterr().err


def test_a_full_disk_does_not_fail_a_call(kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        assert not kept()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "compiled code is not cached: [Errno 27]" in capsys.readouterr().err
    assert not kept()
    assert kept()


@pytest.mark.parametrize("of", ["numba", "llvmlite"])
def test_kernels_of_several_versions_are_kept_side_by_side(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    versions = sys.modules[of].__version__, "0.0.1"
    for version in versions:
        monkeypatch.setattr(sys.modules[of], "__version__", version)
        kept.compiling._digest.cache_clear()
        assert not kept()
    for version in versions:
        monkeypatch.setattr(sys.modules[of], "__version__", version)
        kept.compiling._digest.cache_clear()
        assert kept()


def test_code_of_other_settings_is_another(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not kept()
    monkeypatch.setattr(sys.modules["numba.core.config"], "SLP_VECTORIZE", "another")
    assert not kept()
    monkeypatch.undo()


def test_kernels_that_two_processes_have_kept_do_not_share_functions(home: Path) -> None:
    """Two cached kernels share no function with each other or with code that the loading process compiles."""
    pytest.importorskip("numba")

    def hits(*kernels: str) -> list[str]:
        return printed("-m", "tests.programs.two_kernels", *kernels).split()

    assert hits("first") == hits("second") == ["0"]
    assert hits("first", "second") == hits("second", "first") == ["1", "1"]
    assert hits("first", "shifted") == ["1"]


def switched(**environment: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("torch")
    pytest.importorskip("numba")
    return run_python("-m", "tests.programs.merge_without_numba", **environment)


def test_where_numba_compiles_nothing_another_backend_is_the_choice(tmp_path: Path) -> None:
    done = switched(NUMBA_DISABLE_JIT="1", XDG_CACHE_HOME=str(tmp_path))
    reason = "NUMBA_DISABLE_JIT has Numba compile nothing"
    assert done.stdout == (
        f"96.0 ('Unsupported', ['  numba: {reason}'])\nthe kernel merge_attention_states is not compiled: {reason}\n"
    ), done.stderr


def test_code_that_is_not_optimised_is_not_kept(tmp_path: Path) -> None:
    """Unoptimised code is not cached, because it holds addresses of its process."""
    done = switched(NUMBA_OPT="0", XDG_CACHE_HOME=str(tmp_path))
    assert done.stdout.startswith("96.0 96.0\n"), done.stderr
    assert "compiled code is not cached: its code holds addresses of this process" in done.stderr
