"""Memory of each rank while a model in Hugging Face's format is loaded, one by one and whole.

    python benchmarks/loading_memory.py [--preset 1b] [--plans dp=4,shard=zero3+tp=4] [--parts-only]
    python benchmarks/loading_memory.py --options '{"layers": 4, "experts": 8, "renormalize": true}'

A folder with random weights in bf16 is made first, in a temporary place: a Llama, or with experts a Mixtral.
Each rank then builds the model and lays it out; a thread reads its own and its shared memory (RssAnon and
RssShmem) every few milliseconds. Pages of the mapped files are not counted: they are the page cache's, and
all ranks share them. Prints Markdown.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file

import shoal
from shoal.machine.bench import describe
from shoal.models import Transformer, TransformerConfig, build, llama_config, preset, stored_as_llama
from shoal.testing.ranks import RankPool
from shoal.units import format_bytes

_EVERY = 0.003  # seconds
_FILE_BYTES = 1 << 30


class Loaded(NamedTuple):
    """What a rank needed.

    Attributes:
        peak: The most bytes beyond those before.
        part: Bytes of its part of the parameters.
        largest: Bytes of the largest parameter, whole, in fp32.
        seconds: Seconds to load.
    """

    peak: int
    part: int
    largest: int
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--preset", default="1b", help="default 1b")
    parser.add_argument("--options", type=json.loads, default={}, help="changes to the preset, as JSON")
    parser.add_argument("--plans", default="dp=4,shard=zero3+tp=4", help="Plans, with + between them")
    parser.add_argument("--ranks", type=int, default=4, help="default 4")
    parser.add_argument("--parts-only", action="store_true", help="leave out loading it whole on each rank")
    options = parser.parse_args()
    print(describe(), end="\n\n")
    with tempfile.TemporaryDirectory() as folder:
        config = TransformerConfig(**(preset(options.preset).model_dump() | options.options))
        whole = write_model(config, Path(folder))
        print(f"`{options.preset}`, {format_bytes(whole)} of parameters in fp32; {options.ranks} ranks.\n")
        print("| plan | read | peak of a rank | its part | part and one tensor | peak over whole | s |")
        print("| --- | --- | ---: | ---: | ---: | ---: | ---: |", flush=True)
        for plan in options.plans.split("+"):
            for in_parts in (True,) if options.parts_only else (True, False):
                # New processes for each: memory that one has freed would hide what another takes.
                with RankPool("shoal") as pool:
                    found = pool.run(load, options.ranks, folder, plan, in_parts, timeout=900)
                most = max(found, key=lambda each: each.peak)
                print(
                    f"| `{plan}` | {'one by one' if in_parts else 'whole'} | {format_bytes(most.peak)} | "
                    f"{format_bytes(most.part)} | {format_bytes(most.part + most.largest)} | "
                    f"{most.peak / whole:.2f} | {max(each.seconds for each in found):.1f} |",
                    flush=True,
                )


def write_model(config: TransformerConfig, folder: Path) -> int:
    """Write a model with random weights in bf16; return the bytes of its parameters in fp32."""
    with torch.device("meta"):
        model = Transformer(config)
    (folder / "config.json").write_text(json.dumps(llama_config(config)), encoding="utf-8")
    shapes = {
        stored.name: stored.shape
        for name, parameter in model.named_parameters()
        for stored in stored_as_llama(name, tuple(parameter.shape))
    }
    placed: dict[str, str] = {}
    held: dict[str, torch.Tensor] = {}
    number = 0

    def flush() -> None:
        nonlocal held, number
        file = f"model-{number}.safetensors"
        save_file(held, folder / file, metadata={"format": "pt"})
        placed.update(dict.fromkeys(held, file))
        held, number = {}, number + 1

    for tensor, shape in shapes.items():
        held[tensor] = torch.full(shape, 0.01, dtype=torch.bfloat16)
        if sum(each.nbytes for each in held.values()) > _FILE_BYTES:
            flush()
    flush()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": placed}), encoding="utf-8")
    return sum(4 * parameter.numel() for parameter in model.parameters())


def load(folder: str, plan: str, in_parts: bool) -> Loaded:
    """Load the model on a rank of the default group."""
    with _watched() as peaks:
        began = time.perf_counter()
        model = build(f"hf:{folder}", device="meta" if in_parts else "cpu")
        largest = 4 * max(parameter.numel() for parameter in model.parameters())
        parallel = shoal.parallelize(model, plan)
        seconds = time.perf_counter() - began
    part = sum(4 * each.local.numel() for each in parallel.owned)
    return Loaded(peaks[-1], part, largest, seconds)


@contextlib.contextmanager
def _watched() -> Iterator[list[int]]:
    """Watch this process's memory; the list's last entry is the most beyond the first."""
    before, peaks, is_over = _own(), [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(_EVERY):
            peaks.append(max(peaks[-1], _own() - before))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peaks
    finally:
        is_over.set()
        thread.join()


def _own() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * sum(int(kilobytes) for kilobytes in re.findall(r"Rss(?:Anon|Shmem):\s+(\d+) kB", status))


if __name__ == "__main__":
    main()
