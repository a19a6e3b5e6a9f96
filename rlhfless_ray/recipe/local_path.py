"""Paths of a recipe and of the command line: on this machine or a mounted file system, with `~` and variables expanded."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.remote_files import check_url, is_remote

SCHEME = re.compile(r"(?:^|(?<=,)\s*)([A-Za-z][\w+.-]+):(?:/|:)|([\w+.-]*)://")  # `pathlib` makes `s3:/` of `s3://`
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
SHELL = re.compile(r"\$[({][^)}]*[)}]?|`[^`]*`?")
INSTEAD = {
    "file": "write the path alone, without `file://`",
    "hf": "write the name of a model or data set on the Hugging Face hub as `org/name`, or give a local copy",
    "s3": "name a local folder; `run.mirror` copies the run folder to a bucket, and `policy.path` and data sets may be there",
    "gs": "name a local folder; `run.mirror` copies the run folder to a bucket, and `policy.path` and data sets may be there",
    "http": "download it, and name the local copy",
    "https": "download it, and name the local copy",
}


def expand(text: str) -> str:
    """Return a path with `~`, `~user`, `$NAME` and `${NAME}` expanded. Raises ValueError for unknown ones and other syntax of shells."""
    unset = next((name for pair in VARIABLE.findall(text) for name in pair if name and name not in os.environ), "")
    if unset:
        raise ValueError(f"the environment variable `{unset}` is not set; set it, or write the path out")
    if found := SHELL.search(VARIABLE.sub("", text)):
        raise ValueError(f"`{found[0]}` is syntax of a shell, which paths of recipes do not have; write the path out")
    expanded = os.path.expanduser(VARIABLE.sub(lambda found: os.environ[found[1] or found[2]], text))
    if expanded.startswith("~"):
        user = expanded[1:].partition("/")[0]
        raise ValueError(f"there is no user `{user}`; write the path out")
    return expanded


def local_path(text: str) -> str:
    """Return an expanded path. Raises ValueError for a URL, because files of other machines are not read or written."""
    if found := SCHEME.search(text):
        scheme = (found[1] or found[2] or "").lower()
        advice = INSTEAD.get(scheme, "name a local folder or file, or mount the remote one")
        raise ValueError(f"paths are local, and `{scheme}://` is not supported; {advice}")
    return expand(text)


def _address_or_path(text: str) -> str:
    return text if "://" in text else expand(text)


def input_path(text: str) -> str:
    """Return an expanded path, or the URL of a remote file or folder. Raises ValueError as `local_path` does."""
    return check_url(text) if is_remote(text) else local_path(text)


def input_paths(text: str) -> str:
    """Return paths or URLs separated by commas, each as by `input_path`."""
    return re.sub(r"[^,\s][^,]*", lambda part: input_path(part[0]), text)


def remote_folder(text: str) -> str:
    """Return the URL of a remote folder, or nothing. Raises ValueError for anything else."""
    if text and not is_remote(text):
        raise ValueError("not the URL of a remote folder, such as s3://bucket/runs or gs://bucket/runs")
    return check_url(text)


def given_path(path: str | Path, where: str) -> Path:
    """Return a path of the command line, expanded. Raises UserError, whose message begins with `where`, as `local_path` does."""
    try:
        return Path(local_path(str(path)))
    except ValueError as error:
        raise UserError(f"{where} {path}: {error}") from None


LocalPath = Annotated[str, AfterValidator(local_path)]
InputPath = Annotated[str, AfterValidator(input_path)]
InputPaths = Annotated[str, AfterValidator(input_paths)]
"""Several paths separated by commas."""
RemoteFolder = Annotated[str, AfterValidator(remote_folder)]
AddressOrPath = Annotated[str, AfterValidator(_address_or_path)]
