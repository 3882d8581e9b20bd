"""Where what is compiled is kept on disk, and whether it may be taken from there.

What is kept is code that this process will run. A file counts only where nobody but this user and root can have written
it; as ssh does, folders above the user's home are trusted.
"""

import contextlib
import hashlib
import os
import secrets
import stat
from pathlib import Path

DIGEST = hashlib.sha256().digest_size  # bytes in front of what `write` keeps


def cache_home() -> Path:
    """The folder of the user's caches. Raises `RuntimeError` where there is none."""
    # A relative one is to be ignored, says the XDG specification; it would name a folder of whoever wrote in this one.
    if (base := Path(os.environ.get("XDG_CACHE_HOME", ""))).is_absolute():
        return base
    if not (home := Path.home()).is_absolute():
        raise RuntimeError(f"expected the home directory to be an absolute path, got {home}")
    return home / ".cache"


def cache_folder() -> Path:
    """This project's own. Raises `RuntimeError` where there is none."""
    return cache_home() / "ragged_attention"


def why_untrusted(path: Path) -> str | None:
    """Why others could have written what is at a path, which need not exist; None if nobody could."""
    path = path.resolve()
    try:
        home = Path.home().resolve()
    except RuntimeError:
        home = None
    for place in (path, *path.parents):
        try:
            found = place.stat()
        except FileNotFoundError:
            continue
        if found.st_uid not in (0, os.geteuid()):
            return f"{place} belongs to another user"
        # In a folder with the sticky bit nobody renames or removes what is not theirs.
        if _others_write(found) and (place == path or not found.st_mode & stat.S_ISVTX):
            return f"others can write {place}"
        if place == home:
            break
    return None


def expect_trusted(path: Path) -> None:
    """Raise `OSError` unless nobody else could have written what is at a path."""
    if reason := why_untrusted(path):
        raise PermissionError(reason)


def _others_write(found: os.stat_result) -> bool:
    """Whether the mode of a file lets anybody write but its owner."""
    if found.st_mode & stat.S_IWOTH:
        return True
    return bool(found.st_mode & stat.S_IWGRP) and not _is_own(found.st_gid)


def _is_own(group: int) -> bool:
    """Whether a group is the user's private one, as many systems make it: of the user's name, and of nobody else."""
    import grp  # not on Windows, nor is the next one
    import pwd

    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return found.gr_name == user.pw_name and user.pw_gid == group and not set(found.gr_mem) - {user.pw_name}


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, for nobody else to write, whatever the umask says. Raises `OSError`."""
    for place in (*reversed(folder.parents), folder):
        if not place.is_dir():
            place.mkdir(mode=0o755, exist_ok=True)


def read(path: Path) -> bytes | None:
    """What `write` has kept at a path, None if that is absent, not whole, or perhaps not this user's."""
    try:
        kept = None if why_untrusted(path) else path.read_bytes()
    except OSError:
        return None
    if kept is None or hashlib.sha256(kept[DIGEST:]).digest() != kept[:DIGEST]:
        return None
    return kept[DIGEST:]


def write(path: Path, content: bytes) -> None:
    """Keep something at a path, in one step, whoever writes there too. Raises `OSError`."""
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
