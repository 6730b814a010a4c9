"""Splits of datasets of the package `datasets`, as sources of rows.

A source `datasets:PATH#SPLIT` names a folder that `save_to_disk` wrote, a folder of files that `load_dataset`
knows, or a dataset that `load_dataset` has downloaded before. `datasets:PATH:CONFIGURATION#SPLIT` names one
of several configurations. Nothing is downloaded, and no code of a dataset runs: the package has none since
its version 4.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

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
