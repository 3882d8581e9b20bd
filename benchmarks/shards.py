"""Division of a list of names into shards, so that several runs can share the work."""

import zlib


def in_shard(name: str, shard: str) -> bool:
    """Whether `name` belongs to the shard "WHICH/COUNT". WHICH is a number, or a text that stands for its hash."""
    which, _, count = shard.rpartition("/")
    wanted = int(which) if which.isdecimal() else zlib.crc32(which.encode())
    return zlib.crc32(name.encode()) % int(count) == wanted % int(count)
