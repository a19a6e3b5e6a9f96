"""Read the recipe's data sets: files, folders, builder scripts and hub names, concatenated or mixed."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rlhfless_ray.common.errors import UserError
from rlhfless_ray.common.folders import cache_folder
from rlhfless_ray.common.remote_files import fetched, is_remote
from rlhfless_ray.prompts.read_rows import FILE_TYPES, NamedRow, first_line, numbered, read_file

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

HUB_NAME = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")


def read_sources(
    sources: list[str], split: str, setting: str, *, probabilities: list[float] | None = None, max_rows: int | None = None, seed: int = 0
) -> list[NamedRow]:
    """Return the rows of all data sets, at most `max_rows` of each and in total.

    With `probabilities`, `datasets.interleave_datasets` draws rows until every data set was used up once, so rows can repeat.
    `setting`: the recipe's section, for error messages. Raises UserError for unreadable or empty data and for missing splits.
    """
    parts = [read_source(source, split, setting)[:max_rows] for source in sources]
    if len(parts) > 1:
        parts = [[(f"{name} of {source}", row) for name, row in rows] for source, rows in zip(sources, parts, strict=True)]
    if probabilities is not None:
        from datasets import Dataset, interleave_datasets

        numbers = [Dataset.from_dict({"of": [k] * len(rows), "row": range(len(rows))}) for k, rows in enumerate(parts)]
        mix = interleave_datasets(numbers, probabilities=probabilities, seed=seed % 2**63, stopping_strategy="all_exhausted")
        rows = [parts[pair["of"]][pair["row"]] for pair in mix]
    else:
        rows = [row for part in parts for row in part]
    return rows[:max_rows]


def rows_notes(section: str, rows: int, default: int, read: int) -> tuple[str, ...]:
    """Return a note for a number of rows that was set to limit a data set of `read` rows, which it does not."""
    if rows == default or rows >= read:
        return ()
    return (f"{section}.rows ({rows}) is for built-in tasks, so all {read} rows are used; {section}.max_rows limits a data set",)


def split_paths(paths: str) -> list[str]:
    """Return the data sets that a setting names, separated by commas. A file whose name has a comma is one."""
    return [paths] if Path(paths).exists() else [part.strip() for part in paths.split(",")]


def read_source(source: str, split: str, setting: str) -> list[NamedRow]:
    """Return every row of one data set. `source` may end in `@subdir`."""
    if not source.strip():  # an empty path would be the working folder
        raise UserError(f"{setting}.path: the name of a data set is empty; remove the surplus comma")
    if is_remote(source):
        return read_source(str(fetched(source, f"{setting}.path", cache_folder() / "remote")), split, setting)
    path, where = Path(source), f"{setting}.path {source}"
    name, at, subdir = source.rpartition("@")
    if at and not path.exists():
        path = Path(name)
    else:
        name, subdir = source, ""
    if path.is_file() and subdir:
        raise UserError(f"{where}: {path} is a file, which has no folder `{subdir}`")
    if path.is_file() and path.suffix.lower() == ".py":
        return _name_rows(_build_from_script(path, where), split, setting, where)
    if path.is_file() or path.suffix.lower() in FILE_TYPES:
        if split != "train":
            raise UserError(f"{setting}.split: {source} is one file, it has no split `{split}`; set it to train")
        return read_file(path, where)
    if path.is_dir():
        return _name_rows(_load_folder(path, subdir, where), split, setting, where)
    if path.is_absolute() or not HUB_NAME.fullmatch(name):
        raise UserError(f"{where}: no such file; give the path of a JSONL, JSON, CSV, parquet or Arrow file, or of a folder")
    return _name_rows(_load_from_hub(name, subdir, where), split, setting, where)


def _name_rows(data: Dataset | DatasetDict, split: str, setting: str, where: str) -> list[NamedRow]:
    import datasets

    if isinstance(data, datasets.DatasetDict):
        if split not in data:
            raise UserError(f"{setting}.split: {where} has no split `{split}`, only {', '.join(f'`{name}`' for name in data)}")
        data = data[split]
    elif split != "train":
        raise UserError(f"{setting}.split: {where} has no splits, so no `{split}` either; set it to train")
    if not len(data):
        raise UserError(f"{where}: the data set is empty; give one with at least one row")
    return numbered(data.with_format("arrow")[:])  # other formats decode images and sounds, which nothing here reads


def _load_folder(folder: Path, subdir: str, where: str) -> Dataset | DatasetDict:
    """Load a folder written by `save_to_disk`, or else with `load_dataset`."""
    import datasets

    if subdir and not (folder / subdir).is_dir():
        raise UserError(f"{where}: {folder} has no folder `{subdir}`")
    try:
        return datasets.load_from_disk(str(folder / subdir))
    except Exception:  # exceptions of many types mean that the folder was not saved by `save_to_disk`
        pass
    try:
        with tempfile.TemporaryDirectory(prefix="rlhfless-data-") as cache:
            return _copy_to_memory(datasets.load_dataset(str(folder), data_dir=subdir or None, cache_dir=cache))
    except Exception as error:
        raise UserError(
            f"{where}: a folder that `datasets` cannot load ({first_line(error)}); give a file, a folder of files, or one written by "
            "Dataset.save_to_disk"
        ) from None


def _load_from_hub(name: str, subdir: str, where: str) -> Dataset | DatasetDict:
    import datasets

    try:
        return datasets.load_dataset(name, data_dir=subdir or None)
    except Exception as error:
        raise UserError(
            f"{where}: there is no such file or folder, and the Hugging Face hub does not give a data set of that name "
            f"({first_line(error)}), nor has the cache {datasets.config.HF_DATASETS_CACHE}; give a path, or check name and network"
        ) from None


def _build_from_script(file: Path, where: str) -> Dataset | DatasetDict:
    """Run a Python file and build the data set of its `datasets` builder class."""
    import datasets

    module_name = f"rlhfless_data_{file.stem}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UserError(f"{where}: running the file failed: {type(error).__name__}: {first_line(error)}") from None
    builders: list[type[datasets.DatasetBuilder]] = [
        kind
        for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, datasets.DatasetBuilder) and kind.__module__ == module_name
    ]
    if len(builders) != 1:
        raise UserError(f"{where}: expected one `datasets` builder class in the file, found {len(builders)}")
    try:
        with tempfile.TemporaryDirectory(prefix="rlhfless-data-") as cache:
            builder = builders[0](cache_dir=cache, base_path=str(file.resolve().parent), hash="built")
            builder.download_and_prepare()
            return _copy_to_memory(builder.as_dataset())
    except Exception as error:
        raise UserError(f"{where}: its data set cannot be built: {type(error).__name__}: {first_line(error)}") from None


def _copy_to_memory(data: Dataset | DatasetDict) -> Dataset | DatasetDict:
    """Copy a data set, so that it outlives its files."""
    import datasets

    if isinstance(data, datasets.DatasetDict):
        return datasets.DatasetDict({name: _copy_to_memory(part) for name, part in data.items()})
    return datasets.Dataset.from_list(data.to_list(), features=data.features, split=data.split)
