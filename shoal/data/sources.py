"""Finds the files of the sources that a configuration names.

Splits of datasets of the package `datasets`, as sources of rows.

A source `datasets:PATH#SPLIT` names a folder that `save_to_disk` wrote, a folder of files that `load_dataset`
knows, or a dataset that `load_dataset` has downloaded before. `datasets:PATH:CONFIGURATION#SPLIT` names one
of several configurations. Nothing is downloaded, and no code of a dataset runs: the package has none since
its version 4.
"""

from __future__ import annotations

import os
import stat
import sysconfig
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from shoal.data.remote import find_remote, is_url
from shoal.errors import DataError, MissingExtraError, nearest

PREFIX = "datasets:"
_DEFAULT_SPLIT = "train"
_SAVED = "dataset_dict.json", "state.json"
_STRINGS = "string", "large_string"
_BATCH = 1024


@final
class Table:
    """One split of a dataset.

    Args:
        dataset: The `datasets.Dataset`.
        path: Absolute path of its folder, or its name.
        split: Name of the split; "" for a dataset without splits.
    """

    def __init__(self, dataset: Any, path: Path, split: str) -> None:
        self._dataset = dataset
        self.path = path
        self.name = f"{path.name}#{split}"
        self.files = [Path(each["filename"]) for each in dataset.cache_files]

    def __len__(self) -> int:
        return len(self._dataset)

    @property
    def columns(self) -> list[str]:
        """Names of the columns."""
        return list(self._dataset.column_names)

    @property
    def texts(self) -> list[str]:
        """Names of the columns of texts."""
        features = self._dataset.features
        return [name for name in features if getattr(features[name], "dtype", None) in _STRINGS]

    def rows(self, columns: Collection[str], part: tuple[int, int] | None) -> Iterator[Mapping[str, Any]]:
        """Yield the values of each row in these columns; a class of a ClassLabel is its name.

        Args:
            columns: Names of the columns.
            part: The first row, and the row behind the last; None for all.
        """
        features = self._dataset.features
        classes = {name: features[name].names for name in columns if hasattr(features[name], "int2str")}
        dataset = self._dataset if part is None else self._dataset.select(range(*part))
        for batch in dataset.select_columns(list(columns)).with_format("arrow").iter(_BATCH):
            for row in batch.to_pylist():
                for name, names in classes.items():
                    if isinstance(row[name], int) and 0 <= row[name] < len(names):
                        row[name] = names[row[name]]
                yield row


def open_table(source: str) -> Table:
    """Open the split that a source names.

    Args:
        source: Text such as "datasets:PATH#SPLIT". Without a split it is "train", or the only one.

    Raises:
        DataError: There is no such dataset on this machine, or no such split.
        MissingExtraError: The package `datasets` is not installed.
    """
    path, configuration, split = _parts(source)
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError(
            f"the data source {source!r}", package="datasets", extra="datasets"
        ) from error
    with _naming(source), _without_network(datasets):
        if any((path / name).is_file() for name in _SAVED):
            found = datasets.load_from_disk(str(path), keep_in_memory=False)
        else:
            found = datasets.load_dataset(str(path), configuration or None, keep_in_memory=False)
    if isinstance(found, datasets.Dataset):
        splits = {str(found.split or ""): found}
    else:
        splits = {str(name): each for name, each in found.items()}
    if not split:
        split = next(iter(splits)) if len(splits) == 1 else _DEFAULT_SPLIT
    if split not in splits:
        raise DataError(
            f"the data source {source!r} has no split {split!r}{nearest(split, splits)}",
            possible=", ".join(filter(None, splits)) or "no split: this dataset has none",
            change="name one of these after '#', as in datasets:PATH#train",
        )
    if not len(splits[split]):
        raise DataError(
            f"the data source {source!r} is empty",
            possible="a split with rows",
            change="name another split after '#'",
        )
    return Table(splits[split], path, split)


def absolute_reference(source: str) -> str:
    """Return the source with the absolute path of its folder; a name in the cache stays as it is."""
    path, configuration, split = _parts(source)
    where = path.absolute() if path.exists() else path
    return f"{PREFIX}{where}{':' + configuration if configuration else ''}{'#' + split if split else ''}"


def _parts(source: str) -> tuple[Path, str, str]:
    """Return the path or the name, the configuration and the split."""
    name, _, split = source.removeprefix(PREFIX).partition("#")
    path = Path(name).expanduser()
    if path.exists() or ":" not in name:
        return path, "", split
    name, _, configuration = name.rpartition(":")
    return Path(name).expanduser(), configuration, split


@contextmanager
def _naming(source: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise DataError(
            f"the data source {source!r} cannot be read: {error}",
            possible="datasets:PATH#SPLIT with a folder that save_to_disk wrote, a folder of files that "
            "load_dataset knows, or the name of a dataset in this machine's cache; nothing is downloaded",
            change="correct the path, or run datasets.load_dataset once where there is a network",
        ) from error


@contextmanager
def _without_network(datasets: Any) -> Iterator[None]:
    """Keep the package from asking the network, and from drawing progress bars."""
    before, is_quiet = datasets.config.HF_HUB_OFFLINE, datasets.utils.are_progress_bars_disabled()
    datasets.config.HF_HUB_OFFLINE = True
    datasets.utils.disable_progress_bars()
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before
        if not is_quiet:
            datasets.utils.enable_progress_bars()


STANDARD_LIBRARY = "stdlib"
_NOT_STANDARD = frozenset({"site-packages", "dist-packages", "_bundled", "__pycache__"})
"""Folders below the standard library that are not part of it; `_bundled` is where ensurepip keeps pip."""


@dataclass(frozen=True)
class SourceFile:
    """One file of the corpus, as it was when it was found."""

    path: Path
    """Absolute path; of a remote file, its name there."""
    name: str
    """Path below the folder that was given, which does not change when the folder moves."""
    size: int
    """Size in bytes."""
    modified: int
    """Time of the last change, in nanoseconds since the epoch; of a remote file, a number that changes."""
    table: Table | None = field(default=None, compare=False, repr=False)
    """The split that this is, with the size and time of its files; None for a file."""
    part: tuple[int, int] | None = None
    """The part that is read, from one number to below another: of bytes in text, .jsonl and .tsv files, of
    row groups in .parquet files, of rows in a split, of ids in .npy and .bin files; None for all.
    """
    url: str = ""
    """Where a remote file is; "" for a file of this machine."""

    @property
    def place(self) -> str:
        """Path or URL, for messages."""
        return self.url or str(self.path)


def find_files(sources: Collection[str], suffixes: Collection[str]) -> list[SourceFile]:
    """Return the files that `sources` name, in an order that depends on their names only.

    Files of a folder are found at any depth, and sorted by their path below it. Empty files of a folder
    are left out, and so are files and folders whose name starts with a dot.

    Args:
        sources: Paths of files or folders; "stdlib" is Python's own standard library, "datasets:PATH" a
            dataset of the package `datasets`, and a URL such as s3://bucket/texts a remote file or folder.
        suffixes: Suffixes of the files of a folder that are read.

    Raises:
        DataError: A source is missing, unreadable, or holds nothing to read.
        MissingExtraError: A dataset or a remote file needs an optional package.
    """
    return [file for source in sources for file in _find_in(source, suffixes)]


def _find_in(source: str, suffixes: Collection[str]) -> list[SourceFile]:
    if source == STANDARD_LIBRARY:
        return _find_in_folder(Path(sysconfig.get_path("stdlib")), source, [".py"], _NOT_STANDARD)
    if source.startswith(PREFIX):
        table = open_table(source)
        found = [file.stat() for file in table.files]
        size, modified = sum(each.st_size for each in found), max(each.st_mtime_ns for each in found)
        return [SourceFile(table.path, table.name, size, modified, table)]
    if is_url(source):
        return [
            SourceFile(Path(found.name), found.name, found.size, found.version, url=found.url)
            for found in find_remote(source, suffixes)
        ]
    path = Path(os.path.expanduser(source)).absolute()
    try:
        status = path.stat()
    except FileNotFoundError as error:
        raise DataError(
            f"the data source {source!r} does not exist{_nearest_path(path, source)}",
            possible=f"a file, a folder, or {STANDARD_LIBRARY!r}",
            change="correct the path",
        ) from error
    except OSError as error:
        raise _unreadable(source, error) from error
    if stat.S_ISDIR(status.st_mode):
        return _find_in_folder(path, source, suffixes, frozenset())
    if not stat.S_ISREG(status.st_mode):
        raise DataError(
            f"the data source {source!r} is neither a file nor a folder",
            possible="a file or a folder; a pipe cannot be read again when training resumes",
            change="write the data into a file first",
        )
    if status.st_size == 0:
        raise DataError(
            f"the data source {source!r} is empty",
            possible="a file that holds text or tokens",
            change="give another file",
        )
    return [SourceFile(path, path.name, status.st_size, status.st_mtime_ns)]


def _find_in_folder(
    folder: Path, source: str, suffixes: Collection[str], left_out: Collection[str]
) -> list[SourceFile]:
    def stop(error: OSError) -> None:
        raise _unreadable(source, error) from error

    files = []
    for parent, folders, names in os.walk(folder, onerror=stop):
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(".")]
        for name in names:
            path = Path(parent, name)
            if name.startswith(".") or path.suffix not in suffixes or not path.is_file():
                continue
            status = path.stat()
            if status.st_size:
                below = path.relative_to(folder).as_posix()
                files.append(SourceFile(path, below, status.st_size, status.st_mtime_ns))
    if not files:
        raise DataError(
            f"the data source {source!r} holds no file with text in it",
            possible="a folder with files that are not empty and end in " + ", ".join(suffixes),
            change="give another folder, or name its suffixes in data.suffixes",
        )
    return sorted(files, key=lambda file: file.name)


def _unreadable(source: str, error: OSError) -> DataError:
    return DataError(
        f"the data source {source!r} cannot be read: {error.strerror}",
        possible="files and folders that this user may read",
        change="correct the permissions, or give another source",
    )


def _nearest_path(path: Path, source: str) -> str:
    beside = os.listdir(path.parent) if os.access(path.parent, os.R_OK | os.X_OK) else []
    return nearest(path.name, beside) or nearest(source, [STANDARD_LIBRARY])
