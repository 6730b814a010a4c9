"""Storages that are counted as memory: those on a device, and those in shared memory; not those in files."""

from __future__ import annotations

import mmap
import tempfile

import pytest
import torch

from shoal.record import LiveStorages, MappedFiles


@pytest.fixture
def maps(monkeypatch):
    """Sets what the system says that is mapped into this process."""

    def set_maps(*lines):
        text = "".join(f"{line}\n" for line in lines)
        monkeypatch.setattr("shoal.record.live_storages.Path.read_text", lambda path, **options: text)

    return set_maps


def test_memory_of_a_device_is_counted_wherever_its_address_lies(maps):
    """Addresses of a GPU's memory may lie where the system has mapped something; those of `meta` are 0."""
    maps("00000000-00001000 rw-s 00000000 08:01 1234 /home/a/file")
    on_device = torch.empty(100, device="meta")
    assert not MappedFiles().hold(on_device)
    with LiveStorages() as live:
        live.take_up(on_device)
        assert live.bytes() == 400


@pytest.mark.parametrize(
    ("name", "is_file"),
    [
        ("/home/a/file", True),
        ("/home/dev/a file", True),
        ("/dev/nvidia0", False),
        ("/dev/nvidia-uvm", False),
        ("/dev/nvidiactl", False),
        ("/dev/zero (deleted)", False),
        ("/dev/shm/a", False),
        ("/memfd:shoal (deleted)", False),
        ("/SYSV00000000 (deleted)", False),
    ],
)
def test_page_locked_and_shared_memory_is_counted_and_files_are_not(maps, name, is_file):
    tensor = torch.ones(1000)
    start = tensor.data_ptr() // 4096 * 4096
    maps(f"{start:x}-{start + 8192:x} rw-s 00000000 08:01 1234 {name}")
    assert MappedFiles().hold(tensor) is is_file


def test_a_mapped_file_is_found_in_what_the_system_says(tmp_path):
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        file.write(bytes(4096))
        file.flush()
        mapped = torch.frombuffer(mmap.mmap(file.fileno(), 4096), dtype=torch.uint8)
        assert MappedFiles().hold(mapped)
        assert not MappedFiles().hold(torch.ones(3))
