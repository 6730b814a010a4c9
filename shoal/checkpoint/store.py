"""Copies of a run's checkpoints in an object store, through fsspec.

    URL/run.json                  what the run is
    URL/checkpoints/step-N/...    its checkpoints, with the names that they have on disk

An object appears whole or not at all, and there is no rename. So the manifest of a checkpoint is written last
and deleted first: a checkpoint is complete if its manifest is there. One process writes to a URL at a time.
A URL is for one run: the time at which a run was created tells it from others.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Self, final

from shoal.checkpoint.directory import age_of, checkpoints, staging_path
from shoal.checkpoint.files import REAL_FILES, remove_tree, write_file
from shoal.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from shoal.checkpoint.save import commit
from shoal.errors import CheckpointError, ConfigError, CorruptCheckpointError, MissingExtraError, RunError
from shoal.limits import DESCRIPTION, MANIFEST, json_of, open_regular, read_regular
from shoal.spec.run.writer import claimed

_DESCRIPTION = "run.json"
_CHUNK_BYTES = 8 << 20


def is_url(text: str) -> bool:
    """Return whether a text names an object store, such as s3://bucket/runs/one, and not a path."""
    return "://" in text


@final
class _Description:
    """The run.json of a run.

    Args:
        content: Its bytes; None if there is no such file.
    """

    def __init__(self, content: bytes | None) -> None:
        self.content = content
        values = None
        if content is not None:
            with contextlib.suppress(ValueError):
                values = json_of(content)
        values = values if isinstance(values, dict) else {}
        name, created = values.get("name"), values.get("created")
        self._name = name if isinstance(name, str) else ""
        self._created = created if isinstance(created, str) else ""

    @classmethod
    def in_run(cls, directory: Path) -> Self:
        """Return the description of a run on disk."""
        with contextlib.suppress(OSError, ValueError):
            return cls(read_regular(directory / _DESCRIPTION, DESCRIPTION))
        return cls(None)

    def is_of_another_run_than(self, other: Self) -> bool:
        """Return whether both say when their run was created, and it is not the same time."""
        return "" not in (self._created, other._created) and self._created != other._created

    def __str__(self) -> str:
        """Return the run's name and time, to follow "another run"; empty if they are not known."""
        return f", {self._name!r} of {self._created}" if self._name and self._created else ""


@final
class Store:
    """A run in an object store.

    Args:
        url: Where it is: a URL of any file system that fsspec knows, such as s3://bucket/runs/one.

    Raises:
        ConfigError: fsspec does not know such a URL.
        MissingExtraError: The package for this kind of store is not installed.
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs  # slow to import

        self.url = url.rstrip("/")
        try:
            # Only the file system of this machine has folders, which have to be made.
            options = {"auto_mkdir": True} if self.url.startswith("file://") else {}
            self._files, self._root = url_to_fs(self.url, **options)
        except ImportError as error:
            kind = self.url.partition("://")[0]
            package = "s3fs" if kind == "s3" else str(error)
            raise MissingExtraError(
                f"an object store of the kind {kind}", package=package, extra="store"
            ) from error
        except ValueError as error:
            raise ConfigError(
                f"{url} is no object store that is known: {error}",
                possible="a URL such as s3://bucket/runs/one, gs://bucket/one or file:///folder",
                change="correct the URL",
            ) from error

    def steps(self) -> list[str]:
        """Return the names of the complete checkpoints, newest first.

        Raises:
            CheckpointError: The store cannot be read.
        """
        with self._reported("cannot be listed"):
            names = [name for name in self._folders() if self._files.exists(self._path(name, MANIFEST_NAME))]
        return sorted(names, key=lambda name: age_of(name) or (), reverse=True)

    def require_free_for(self, run: Path | None) -> None:
        """Check that the store has no checkpoints of another run.

        Args:
            run: The run's directory; None for a run that is not made yet.

        Raises:
            RunError: It has.
            CheckpointError: The store cannot be read.
        """
        there = self._described()
        is_another = run is None or there.is_of_another_run_than(_Description.in_run(run))
        if is_another and (names := self.steps()):
            raise RunError(
                f"{self.url} holds {names[0]} of another run{there}, which would be replaced",
                possible="a store for each run",
                change="give another checkpoint.store; to go on with the run that is there: shoal checkpoint "
                f"copy {self.url} DIR, then shoal train --resume DIR",
            )

    def put(self, checkpoint: Path, keep: int | None = None) -> None:
        """Copy a checkpoint into the store, and the description of its run if it belongs to one.

        Its bytes are compared with its manifest on the way.

        Args:
            checkpoint: A complete checkpoint on disk.
            keep: Number of newest checkpoints that stay in the store, beside this one; None for all.

        Raises:
            RunError: The store holds another run.
            CorruptCheckpointError: It is not what was written; then it is not complete in the store.
            CheckpointError: It cannot be read, or the store cannot be written.
        """
        manifest, content = read_manifest(checkpoint), read_regular(checkpoint / MANIFEST_NAME, MANIFEST)
        with self._reported(f"cannot take {checkpoint.name}"):
            self.require_free_for(checkpoint.parent.parent)
            complete = self.steps()
            self._remove([name for name in self._folders() if name not in complete])
            if checkpoint.name in complete:
                # While another one of that name is replaced, it must not be taken for complete.
                self._files.rm_file(self._path(checkpoint.name, MANIFEST_NAME))
            for name, record in manifest.files.items():
                digest = hashlib.sha256()
                place = self._path(checkpoint.name, name)
                with open_regular(checkpoint / name) as source, self._files.open(place, "wb") as target:
                    while block := source.read(_CHUNK_BYTES):
                        digest.update(block)
                        target.write(block)
                if digest.hexdigest() != record.sha256:
                    raise CorruptCheckpointError(
                        f"{checkpoint / name} was changed after it was written: its sha256 differs"
                    )
            description = checkpoint.parent.parent / _DESCRIPTION
            if description.is_file():
                self._files.pipe_file(f"{self._root}/{_DESCRIPTION}", description.read_bytes())
            self._files.pipe_file(self._path(checkpoint.name, MANIFEST_NAME), content)
            if keep is not None:
                self._remove([name for name in self.steps()[keep:] if name != checkpoint.name])

    def get(self, directory: Path) -> Path:
        """Copy the newest checkpoint into a run's directory, which is made if it is not there.

        Args:
            directory: The directory of the run: its run.json, if there is none, comes from the store too.

        Returns:
            The checkpoint on disk. One that is there already with the same manifest is not copied again.

        Raises:
            RunError: The directory holds another run.
            CorruptCheckpointError: What the store has is not what was written.
            CheckpointError: The store has no checkpoint or cannot be read, or the disk cannot be written.
        """
        names = self.steps()
        if not names:
            raise CheckpointError(f"{self.url} holds no complete checkpoint")
        with self._reported("cannot be copied"):
            name, target = names[0], directory / "checkpoints"
            content = bytes(self._files.cat_file(self._path(name, MANIFEST_NAME)))
            described = self._described()
            if described.is_of_another_run_than(_Description.in_run(directory)):
                raise RunError(
                    f"{directory} holds another run than {self.url}{described}",
                    possible="a directory that does not exist yet, or that of the same run",
                    change="give another directory",
                )
            found = self._found_in(target, content) or self._copy(name, content, target)
            if described.content is not None and not (directory / _DESCRIPTION).exists():
                staging = directory / f"{_DESCRIPTION}.{uuid.uuid4().hex}.tmp"
                write_file(staging, iter([memoryview(described.content)]), REAL_FILES)
                REAL_FILES.rename(staging, directory / _DESCRIPTION)
        return found

    def _described(self) -> _Description:
        """Return the description of the run in the store."""
        with self._reported("cannot be read"):
            try:
                return _Description(bytes(self._files.cat_file(f"{self._root}/{_DESCRIPTION}")))
            except FileNotFoundError:
                return _Description(None)

    @staticmethod
    def _found_in(directory: Path, content: bytes) -> Path | None:
        """Return the checkpoint that has a manifest already, if there is one."""
        for path in checkpoints(directory):
            with contextlib.suppress(OSError, ValueError):  # a damaged one is another one
                if read_regular(path / MANIFEST_NAME, MANIFEST) == content:
                    return path
        return None

    def _copy(self, name: str, content: bytes, target: Path) -> Path:
        """Copy a checkpoint's files and then its manifest, as a save would write them."""
        try:
            manifest = Manifest.from_json(content)
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{self.url}/checkpoints/{name}/{MANIFEST_NAME} {error}") from error
        with claimed(target) as writer:
            staging = staging_path(target, manifest.step, writer.number)
            writer.begun.add(staging.name)
            try:
                self._copy_to(staging, name, manifest)
                return commit(staging, content, manifest.step, writer)
            except BaseException:
                if staging.exists():
                    remove_tree(staging, REAL_FILES)
                raise
            finally:
                writer.begun.discard(staging.name)

    def _copy_to(self, staging: Path, name: str, manifest: Manifest) -> None:
        REAL_FILES.make_directory(staging)
        for file, record in manifest.files.items():
            with self._files.open(self._path(name, file), "rb") as source:
                size, sha256 = write_file(staging / file, _blocks(source), REAL_FILES)
            if (size, sha256) != (record.size, record.sha256):
                raise CorruptCheckpointError(
                    f"{self.url}/checkpoints/{name}/{file} is not what was written: its size or sha256 "
                    "differs"
                )

    def _folders(self) -> list[str]:
        """Return the names of all checkpoints, also of those that are not complete."""
        self._files.invalidate_cache()
        try:
            found = self._files.ls(f"{self._root}/checkpoints", detail=False)
        except FileNotFoundError:
            return []
        names = [each.rstrip("/").rpartition("/")[2] for each in found]
        return [name for name in names if age_of(name) is not None]

    def _remove(self, names: list[str]) -> None:
        for name in names:
            manifest = self._path(name, MANIFEST_NAME)
            if self._files.exists(manifest):
                self._files.rm_file(manifest)
            self._files.rm(self._path(name), recursive=True)

    def _path(self, *names: str) -> str:
        return "/".join((self._root, "checkpoints", *names))

    @contextlib.contextmanager
    def _reported(self, what: str) -> Iterator[None]:
        """Turn what a store's client raises into one error that names the store."""
        try:
            yield
        except (CheckpointError, RunError):
            raise
        except Exception as error:  # clients of stores raise errors of many packages
            raise CheckpointError(f"{self.url} {what}: {type(error).__name__}: {error}") from error


def _blocks(source: io.BufferedIOBase) -> Iterator[memoryview]:
    while block := source.read(_CHUNK_BYTES):
        yield memoryview(block)
