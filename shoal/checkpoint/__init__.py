"""Saves, verifies, loads and deletes checkpoints, on any number of ranks.

Nouns: Piece (an interval of a flattened tensor, or of a Region of it, on one rank), Manifest (the contents of
a checkpoint, with the hash of every file), Coordinator (the ranks that save or load together), FileSystem
(the operations on the disk), Saver (saves one checkpoint after another), Staging (a copy in host memory),
Background (saves beside the training), Store (a run in an object store). The trainer saves and loads,
`shoal checkpoint` lists, verifies, compares and copies.
"""

from shoal.checkpoint.coordinator import (
    Coordinator,
    ProcessGroupCoordinator,
    SingleProcess,
    Spread,
    StoreCoordinator,
    all_ranks,
    attempt_together,
    coordinator_beside,
)
from shoal.checkpoint.directory import (
    check_sizes,
    checkpoints,
    free_path,
    latest,
    newest_sound,
    newest_verified,
    read_together,
    resolve,
    retain,
    staging_path,
    step_of,
    verify,
)
from shoal.checkpoint.files import REAL_FILES, FileSystem, RealFiles
from shoal.checkpoint.load import Difference, compare, load, load_verified
from shoal.checkpoint.manifest import FileRecord, Manifest, StoredPiece, TensorRecord, read_manifest
from shoal.checkpoint.region import Piece, Region
from shoal.checkpoint.save import Background, Ended, Saver, save
from shoal.checkpoint.shard import dtype_named, make_mapped_file
from shoal.checkpoint.staging import Staging
from shoal.checkpoint.store import Store, is_url

__all__ = [
    "REAL_FILES",
    "Background",
    "Coordinator",
    "Difference",
    "Ended",
    "FileRecord",
    "FileSystem",
    "Manifest",
    "Piece",
    "ProcessGroupCoordinator",
    "RealFiles",
    "Region",
    "Saver",
    "SingleProcess",
    "Spread",
    "Staging",
    "Store",
    "StoreCoordinator",
    "StoredPiece",
    "TensorRecord",
    "all_ranks",
    "attempt_together",
    "check_sizes",
    "checkpoints",
    "compare",
    "coordinator_beside",
    "dtype_named",
    "free_path",
    "is_url",
    "latest",
    "load",
    "load_verified",
    "make_mapped_file",
    "newest_sound",
    "newest_verified",
    "read_manifest",
    "read_together",
    "resolve",
    "retain",
    "save",
    "staging_path",
    "step_of",
    "verify",
]
