"""Files on s3://, gs://, hf:// and other file systems of fsspec: fetched into a cache, or written by `run.mirror`.

Credentials come from the environment, as each file system's library reads them. A URL with credentials in it is refused, because
recipes are written into run folders.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rlhfless_ray.common.errors import UserError, one_line

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

REMOTE = re.compile(r"([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
VERSION_KEYS = ("ETag", "etag", "md5Hash", "blob_id", "oid", "LastModified", "updated", "mtime")  # of a listing, by file system
NOT_REMOTE = ("file", "http", "https", "ray")  # local paths, downloads without a listing, and addresses of Ray


def is_remote(path: str) -> bool:
    """Whether a path is a URL of a file system that fsspec knows, with or without the package that it needs."""
    found = REMOTE.match(path)
    if found is None or found[1].lower() in NOT_REMOTE:
        return False
    from fsspec.registry import known_implementations, registry

    return found[1].lower() in {*known_implementations, *registry}


def check_url(url: str) -> str:
    """Return a URL. Raises ValueError if it has credentials in it."""
    parts = urlsplit(url)
    if parts.password or parts.query:  # a user name alone is part of an Azure URL
        raise ValueError("a URL with credentials would be written into run folders; set the environment variables of its file system")
    return url.rstrip("/")


def file_system(url: str, setting: str) -> tuple[AbstractFileSystem, str]:
    """Return the file system of a URL, and the path on it. Raises UserError, whose message begins with `setting`."""
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(url)
    except ImportError as error:  # fsspec names the package
        raise UserError(f"{setting} {url}: {one_line(error, 200)}") from None
    except Exception as error:  # of many types: no credentials, no such protocol
        raise refusal(setting, url, "cannot be opened", error) from None
    return system, str(path).rstrip("/")


def refusal(setting: str, url: str, what: str, error: Exception) -> UserError:
    """Return the error to raise for a remote path that failed."""
    kind = "" if isinstance(error, OSError) and str(error) else f"{type(error).__name__}: "
    return UserError(f"{setting} {url}: {what} ({kind}{one_line(error, 200)}); check its name, your rights there, and the network")


def fetched(url: str, setting: str, cache: Path, patterns: Sequence[str] = ("*",)) -> Path:
    """Return a local copy of a remote file or folder, fetched into `cache` unless this version of it is there already.

    `patterns`: names of the files to fetch. The version is their listing: names, sizes, and times or tags. Raises UserError if it cannot
    be read.
    """
    system, path = file_system(url, setting)
    try:
        system.invalidate_cache()
        listed = system.find(path, detail=True)
        found = {name: info for name, info in listed.items() if any(fnmatch(Path(name).name, pattern) for pattern in patterns)}
        if not found:
            raise FileNotFoundError("there is no such file or folder")
        listing = [(name, info.get("size"), _version(info)) for name, info in sorted(found.items())]
        key = hashlib.sha256(json.dumps([url, listing], default=str).encode()).hexdigest()[:16]
        target = cache / key / Path(path).name
        if target.exists():
            return target
        cache.mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(dir=cache, prefix=".fetching-"))
        try:
            for name in found:
                copy = making / Path(path).name / name[len(path) :].lstrip("/")
                copy.parent.mkdir(parents=True, exist_ok=True)
                system.get_file(name, str(copy))
            with suppress(OSError):  # another process was faster
                os.rename(making, cache / key)
        finally:
            shutil.rmtree(making, ignore_errors=True)
        return target
    except Exception as error:  # of many types, by file system
        raise refusal(setting, url, "cannot be read", error) from None


def _version(info: dict[str, object]) -> object:
    """Return what changes with a file's content in a listing, as far as the file system tells."""
    return next((info[key] for key in VERSION_KEYS if key in info), None)
