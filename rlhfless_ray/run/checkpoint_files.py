"""The checksums of a checkpoint's files, and what they find.

`checksums.json` lists every other file of its folder with an xxh3 checksum, and has one of its own. Ranks of a supervised stage write one
each, `checksums-00000-of-00002.json`. A power loss can keep a file's name without its content, and a file may be edited or truncated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.json_types import JsonObject
from rlhfless_ray.weights.model_folder import read_content
from rlhfless_ray.weights.tensor_file import Content, Files, checksum, write_file

DRIVER, CHECKSUMS = "driver.json", "checksums.json"
LISTED = "checksums"  # key of DRIVER: the name of the file with the checksums. Older checkpoints have none
OLDER_SUMS = "xxh3"  # key of DRIVER in checkpoints before: checksums of the learner's files
FILES, OWN = "files", "own"  # keys of CHECKSUMS


class DamagedCheckpoint(UserError):
    """A checkpoint cannot be used. `what`: the file, and what is wrong with it."""

    def __init__(self, path: Path, what: str, cure: str = "continue from the checkpoint before with --resume=previous") -> None:
        super().__init__(f"--resume: {path} {what}; {cure}")
        self.path, self.what = path, what

    def __reduce__(self) -> tuple[object, ...]:  # Exception's own would pass the message alone
        return type(self), (self.path, self.what)


def write_checksums(folder: Path, sums: Mapping[str, str], name: str = CHECKSUMS) -> None:
    """Write {file name: checksum} of a folder's files into it."""
    write_file(folder / name, json.dumps({FILES: dict(sums), OWN: _own(sums)}, indent=1).encode())


def read_checksums(file: Path) -> dict[str, str]:
    """Return {file name: checksum}. Raises DamagedCheckpoint."""
    try:
        tree = json.loads(bytes(_read(file)))
        sums = {str(name): str(value) for name, value in tree[FILES].items()}
        if tree[OWN] == _own(sums):
            return sums
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    raise DamagedCheckpoint(file, "is torn or was changed")


def read_checked(folder: Path, sums: Mapping[str, str]) -> Files:
    """Return {file name: content} of the files that `sums` lists. Raises DamagedCheckpoint for one that is not as it was written."""
    files = {}
    for name, expected in sums.items():
        files[name] = _read(folder / name)
        if checksum(files[name]) != expected:
            raise DamagedCheckpoint(
                folder / name, "differs from the file that was written (did the machine lose power, the disk fail, or somebody edit it?)"
            )
    return files


def check_files(folder: Path) -> bool:
    """Compare the files of a checkpoint of any kind with their checksums. Returns whether it has any. Raises DamagedCheckpoint."""
    listed = sorted(folder.glob("checksums*.json"))
    for file in listed:
        read_checked(folder, read_checksums(file))
    return bool(listed)


def driver_state(folder: Path) -> JsonObject:
    """Read the driver's state from a checkpoint, without what it says of checksums. Raises DamagedCheckpoint."""
    file = folder / DRIVER
    sums = read_checksums(folder / CHECKSUMS) if (folder / CHECKSUMS).is_file() else None
    content = read_checked(folder, {DRIVER: sums[DRIVER]})[DRIVER] if sums and DRIVER in sums else _read(file)
    try:
        state = dict(json.loads(bytes(content)))
    except (ValueError, TypeError):
        raise DamagedCheckpoint(file, "is not whole") from None
    if state.pop(LISTED, None) and not sums:
        raise DamagedCheckpoint(folder / CHECKSUMS, "is missing")
    return state


def read_checkpoint(folder: Path) -> tuple[Files, JsonObject, bool]:
    """Return a checkpoint's files, the driver's state, and whether checksums cover all of it. Raises DamagedCheckpoint.

    Checkpoints of earlier versions have checksums of the learner's files at most.
    """
    state = driver_state(folder)
    older = state.pop(OLDER_SUMS, {})
    if (folder / CHECKSUMS).is_file():
        return read_checked(folder, read_checksums(folder / CHECKSUMS)), state, True
    names = {path.name for path in folder.iterdir() if path.is_file()}
    files = {name: _read(folder / name) for name in sorted(names - older.keys())}
    return files | read_checked(folder, older), state, False


def _own(sums: Mapping[str, str]) -> str:
    return checksum(json.dumps(dict(sums), sort_keys=True).encode())


def _read(file: Path) -> Content:
    try:
        return read_content(file)
    except FileNotFoundError:
        raise DamagedCheckpoint(file, "is missing") from None
    except OSError as error:
        raise DamagedCheckpoint(file, f"cannot be read ({error.strerror or error})") from None
