"""Stores compiled code on disk, and checks that it may be loaded from there.

This process will run the stored code. So a file is used only if nobody except this user and root could have written
it. Like ssh, this module trusts the folders above the user's home.
"""

import contextlib
import hashlib
import os
import secrets
import stat
from pathlib import Path

DIGEST = hashlib.sha256().digest_size  # bytes that `write` puts before the content


def cache_home() -> Path:
    """The folder of the user's caches. Raises `RuntimeError` if it depends on a home directory that is unknown."""
    # The XDG specification says to ignore a relative path, which would depend on the working directory.
    if (base := Path(os.environ.get("XDG_CACHE_HOME", ""))).is_absolute():
        return base
    if not (home := Path.home()).is_absolute():
        raise RuntimeError(f"expected the home directory to be an absolute path, got {home}")
    return home / ".cache"


def cache_folder() -> Path:
    """This project's folder in `cache_home()`, which may raise `RuntimeError`."""
    return cache_home() / "ragged_attention"


def why_untrusted(path: Path) -> str | None:
    """The reason why another user could have written the file at `path`, or None. The file need not exist."""
    path = path.resolve()
    try:
        home = Path.home().resolve()
    except RuntimeError:
        home = None
    for place in (path, *path.parents):
        try:
            status = place.stat()
        except FileNotFoundError:
            continue
        if status.st_uid not in (0, os.geteuid()):
            return f"{place} belongs to another user"
        # In a folder with the sticky bit, nobody can rename or remove other users' files.
        if _others_write(status) and (place == path or not status.st_mode & stat.S_ISVTX):
            return f"others can write {place}"
        if place == home:
            break
    return None


def expect_trusted(path: Path) -> None:
    """Raise `OSError` if another user could have written the file at a path."""
    if reason := why_untrusted(path):
        raise PermissionError(reason)


def _others_write(status: os.stat_result) -> bool:
    """Whether the mode of a file lets anybody except its owner write it."""
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_own(status.st_gid)


def _is_own(group: int) -> bool:
    """Whether a group is the user's private one: it has the user's name and no other members."""
    import grp  # Windows has neither of these two modules
    import pwd

    try:
        user, entry = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return entry.gr_name == user.pw_name and user.pw_gid == group and not set(entry.gr_mem) - {user.pw_name}


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, writable by this user only, for any umask. Raises `OSError`."""
    for place in (*reversed(folder.parents), folder):
        if not place.is_dir():
            place.mkdir(mode=0o755, exist_ok=True)


def read(path: Path) -> bytes | None:
    """The content that `write` stored at a path; None if it is absent, damaged, or perhaps written by another user."""
    try:
        stored = None if why_untrusted(path) else path.read_bytes()
    except OSError:
        return None
    if stored is None or hashlib.sha256(stored[DIGEST:]).digest() != stored[:DIGEST]:
        return None
    return stored[DIGEST:]


def write(path: Path, content: bytes) -> None:
    """Store content at a path atomically, even if other processes write there at the same time. Raises `OSError`."""
    make_folder(path.parent)
    expect_trusted(path.parent)
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "wb") as file:
            file.write(hashlib.sha256(content).digest() + content)
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
