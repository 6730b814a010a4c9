"""Workers of data: wall time of steps whose text is tokenized meanwhile, beside torch's DataLoader.

    python benchmarks/data_workers.py [--write benchmarks/data_workers.md] [--rounds 5] [--mib 12] [--step 4]

Every contestant reads the same text with the same tokenizer, and makes the same number of batches: windows
of 256 tokens, 16 in a batch. Between two batches there is a step: one that takes no processor, as on a GPU,
or one that keeps a core busy. Each contestant has a process; a run begins with an empty cache and without
workers. The time to the first batch, in which workers start, is apart from the rest, which ends with the last
step. In a round each contestant has its turn, every other round in reverse.

    shoal, N workers        data.streaming, which shuffles and keeps tokens; N=0 uses a thread of the process;
                            before the first batch it tokenizes two windows, and one behind them begins
    DataLoader, N workers   an IterableDataset that tokenizes each N-th row and packs it, without shuffling

The floor is the time of the steps alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rounds import Spread
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from shoal.data import DataConfig, Loader, open_feed, open_tokenizer, prepare
from shoal.machine.bench import describe

SEQUENCE, BATCH = 256, 16
_ROW = 4000  # characters
_VOCABULARY = 8000
_WINDOW = 256 << 10  # bytes of text
WORKERS = 0, 2
STEPS = {"a step without a processor": "idle", "a step on one core": "busy"}


def make_data(folder: Path, mib: int) -> None:
    """Write rows of Python's standard library, and a tokenizer of byte pairs that is trained on some."""
    import tokenizers

    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    rows: list[str] = []
    size = 0
    while size < mib << 20:
        for file in files:
            text = file.read_text(encoding="utf-8", errors="replace")
            rows += [text[begin : begin + _ROW] for begin in range(0, len(text), _ROW)]
            size += len(text)
            if size >= mib << 20:
                break
    with (folder / "text.jsonl").open("w", encoding="utf-8") as target:
        target.writelines(json.dumps({"text": row}) + "\n" for row in rows)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=_VOCABULARY, special_tokens=["</s>"], show_progress=False
    )
    tokenizer.train_from_iterator(rows[:400], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def step_of(kind: str, seconds: float) -> Callable[[], None]:
    """Return a step that takes so long."""
    if kind == "idle":
        return partial(time.sleep, seconds)

    def busy() -> None:
        # The time of the thread on its core: a step that has to wait for a core takes longer.
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            torch.mm(matrix, matrix)

    torch.set_num_threads(1)
    matrix = torch.ones(128, 128)
    return busy


def with_shoal(folder: Path, workers: int) -> Iterator[Any]:
    """Yield batches of a stream."""
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        config = DataConfig(
            source=str(folder / "text.jsonl"),
            tokenizer=str(folder / "tokenizer.json"),
            streaming=True,
            window=str(_WINDOW),
            workers=workers,
            cache=Path(cache),
        )
        corpus = prepare(config)
        loader = Loader(corpus.samples("train", SEQUENCE), seed=0, batch_size=BATCH)
        before = set(threading.enumerate())
        feed = open_feed(loader, 0, 0, 1, BATCH)
        try:
            yield from feed
        finally:
            feed.close()
            corpus.store.close()
            for thread in set(threading.enumerate()) - before:
                thread.join()  # the window ahead is not to be made in the turn of another contestant


class Rows(IterableDataset):
    """Windows of tokens; each worker tokenizes rows of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        number, count = (0, 1) if info is None else (info.id, info.num_workers)
        tokenizer = open_tokenizer(str(self._folder / "tokenizer.json"))
        held: list[int] = []
        with (self._folder / "text.jsonl").open(encoding="utf-8") as source:
            for place, line in enumerate(source):
                if place % count != number:
                    continue
                held += tokenizer.encode(json.loads(line)["text"]).tolist()
                while len(held) > SEQUENCE:
                    yield torch.tensor(held[: SEQUENCE + 1])
                    held = held[SEQUENCE:]


def with_data_loader(folder: Path, workers: int) -> Iterator[Any]:
    """Yield batches of torch's DataLoader."""
    return iter(DataLoader(Rows(folder), batch_size=BATCH, num_workers=workers))


CONTESTANTS = {
    f"{name}, {workers} worker{'s' * (workers != 1)}": (make, workers)
    for name, make in (("shoal", with_shoal), ("DataLoader", with_data_loader))
    for workers in WORKERS
}


def run(contestant: str, folder: Path, kind: str, seconds: float, batches: int) -> tuple[float, float]:
    """Return the wall time to the first batch, and from there to the end, in this process."""
    make, workers = CONTESTANTS[contestant]
    step = step_of(kind, seconds)
    began = time.perf_counter()
    source = make(folder, workers)
    next(source)
    first = time.perf_counter()
    step()
    for _ in range(batches - 1):
        next(source)
        step()
    end = time.perf_counter()
    if hasattr(source, "close"):
        source.close()
    del source  # workers of a DataLoader end with it
    return first - began, end - first


def tokens_per_second(folder: Path) -> float:
    """Return the rate of the tokenizer in one thread."""
    tokenizer = open_tokenizer(str(folder / "tokenizer.json"))
    with (folder / "text.jsonl").open(encoding="utf-8") as source:
        rows = [json.loads(line)["text"] for line, _ in zip(source, range(200), strict=False)]
    began = time.perf_counter()
    count = sum(len(tokenizer.encode(row)) for row in rows)
    return count / (time.perf_counter() - began)


def page(options: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of the page."""
    machine = describe()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_data(folder, options.mib)
        rate = tokens_per_second(folder)
        needed = SEQUENCE * BATCH / rate
        # Of four bytes or less is a token of source code: no contestant comes to the end of the text.
        batches = int(0.8 * (options.mib << 20) / 4 / (SEQUENCE * BATCH))
        yield "# Workers of data\n"
        yield (
            f"Written by `benchmarks/data_workers.py --rounds {options.rounds} --mib {options.mib} "
            f"--step {options.step}`, which says what is counted: seconds for {batches} batches of {BATCH} "
            f"windows of {SEQUENCE} tokens, median and range of {options.rounds} interleaved rounds. A step "
            f"takes {options.step} ms; to tokenize its batch takes one core {needed * 1e3:.1f} ms. The floor "
            f"is {batches * options.step / 1e3:.2f} s.\n"
        )
        yield f"{machine}\n".replace("\n", "  \n")
        processes = {each: ProcessPoolExecutor(1, get_context("spawn")) for each in CONTESTANTS}
        for title, kind in STEPS.items():
            found: dict[str, list[tuple[float, float]]] = {each: [] for each in CONTESTANTS}
            for number in range(options.rounds):
                print(f"{title}: round {number + 1} of {options.rounds}", file=sys.stderr)
                for each in list(CONTESTANTS)[:: -1 if number % 2 else 1]:
                    turn = processes[each].submit(run, each, folder, kind, options.step / 1e3, batches)
                    found[each].append(turn.result())
            yield f"\n## With {title}\n"
            yield "| contestant | seconds to the first batch | the rest | times that of shoal, 0 workers |"
            yield "| --- | --- | --- | --- |"
            alone = [rest for _, rest in found["shoal, 0 workers"]]
            for each, seconds in found.items():
                first, rest = zip(*seconds, strict=True)
                ratios = [one / other for one, other in zip(rest, alone, strict=True)]
                yield f"| {each} | {cell(first)} | {cell(rest)} | {cell(ratios)} |"
        for process in processes.values():
            process.shutdown()


def cell(values: Sequence[float]) -> str:
    """Return a median with its range."""
    spread = Spread.of(values)
    return f"{spread.median:.2f} ({spread.low:.2f} to {spread.high:.2f})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument("--mib", type=int, default=12, help="MiB of text, default 12")
    parser.add_argument("--step", type=float, default=4.0, help="milliseconds of a step, default 4")
    parser.add_argument("--write", type=Path, help="file for the page")
    options = parser.parse_args(arguments)
    lines = list(page(options))
    print("\n".join(lines))
    if options.write is not None:
        options.write.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
