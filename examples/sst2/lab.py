"""DistilBERT on SST-2 with two ranks: DDP, then ZeRO-3, and what gradients cost beside what a model predicts.

    python examples/sst2/lab.py --data SST-2 --model distilbert-base-uncased

Without --data (a folder with train and dev, as .tsv or .parquet) and --model (a Hugging Face folder) small
ones are made from text on this machine. `--set KEY=VALUE` changes the configuration, as in `shoal train`.
"""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path

import stand_in
import torch

from shoal.cli.main import main as shoal
from shoal.data import DataConfig
from shoal.data import prepare as read
from shoal.errors import ShoalError
from shoal.predict.cost import AlphaBeta, fit_alpha_beta
from shoal.spec.run import Run
from shoal.spec.timeline import NamedCollective, Timeline, named_collectives

HERE = Path(__file__).resolve().parent
PLANS = {"ddp": "dp=2", "zero3": "dp=2,shard=zero3"}
WITH_WEIGHTS = HERE / "sst2.toml", ("1MiB", "8MiB", "64MiB")
WITHOUT = HERE / "small.toml", ("256KiB", "1MiB", "4MiB")
BUCKET_STEPS = 30


def main() -> None:
    """Run the lab."""
    arguments = parse()
    settings = prepare(arguments)
    has_weights = arguments.model is not None and any(arguments.model.glob("*.safetensors"))
    config, sizes = WITH_WEIGHTS if has_weights else WITHOUT
    for name, plan in PLANS.items():
        train(config, arguments.out / name, plan, settings)
        run("report", arguments.out / name, "--collectives")

    cost = measure_all_reduce()
    rows = []
    short = [*settings, f"steps={BUCKET_STEPS}", "optimizer.warmup=1"]
    for size in sizes:
        folder = arguments.out / f"bucket-{size}"
        train(config, folder, f"dp=2,bucket={size}", short)
        rows.append(row(size, gradients_of(Timeline.read(Run.open(folder).timeline)), cost))
    alpha, beta = f"{cost.alpha * 1e6:.0f} us a call (alpha)", f"{cost.beta * 1e9:.3f} ns a byte (beta)"
    print(f"\nall_reduce alone: {alpha} and {beta}")
    print("gradients of a step, in ms: predicted from these, measured in training, and exposed of it")
    print(f"{'bucket':>8}{'buckets':>9}{'MB':>7}{'predicted':>11}{'measured':>10}{'exposed':>9}")
    print("\n".join(rows))


def parse() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder with train and dev, .tsv or .parquet")
    parser.add_argument("--model", type=Path, help="folder with config.json, weights and tokenizer.json")
    parser.add_argument("--out", type=Path, default=Path("runs/sst2"), help="folder for the runs")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    return parser.parse_args()


def prepare(arguments: argparse.Namespace) -> list[str]:
    """Return the settings of a run; make what was not given."""
    made = arguments.out / "made"
    data, model = arguments.data or made, arguments.model or made
    if made in (data, model):
        made.mkdir(parents=True, exist_ok=True)
    if data == made:
        print("no --data: lines of Python's standard library stand in, comments (1) and code (0)")
        stand_in.make_data(made)
    train_files, dev_files = find(data, "train"), find(data, "dev", "validation")
    if len(dev_files) > 1:
        sys.exit(
            f"{data} has several files for validation, and one is wanted: {', '.join(map(str, dev_files))}"
        )
    if model == made:
        print("no --model: a small DistilBERT with new values stands in, and a tokenizer made from the texts")
        stand_in.make_model(made, sentences_of(train_files, made))
    return [
        f"model=hf:{model}",
        f"data.tokenizer={model}",
        f"data.source={json.dumps([str(file) for file in train_files])}"
        if len(train_files) > 1
        else f"data.source={train_files[0]}",
        f"data.validation={dev_files[0]}",
        *arguments.settings,
    ]


def find(folder: Path, *names: str) -> list[Path]:
    """Return the files of a split, there or in data/: train.tsv, or train-00000-of-00001.parquet."""
    places = [(place, name) for place in (folder, folder / "data") for name in names]
    for suffix in ("tsv", "parquet"):
        for place, name in places:
            if found := sorted(place.glob(f"{name}*.{suffix}")):
                return found
    wanted = " or ".join(f"{name}*.tsv, {name}*.parquet" for name in names)
    there = ", ".join(sorted(file.name for file in folder.iterdir())[:9]) if folder.is_dir() else ""
    sys.exit(f"{folder} has no {wanted}" + (f"; it has {there}" if there else " because it is no folder"))


def sentences_of(files: list[Path], cache: Path) -> list[str]:
    """Return the sentences of these files."""
    sources = tuple(map(str, files))
    try:
        corpus = read(DataConfig(source=sources, field="sentence", tokenizer="bytes", cache=cache))
    except ShoalError as error:
        sys.exit(str(error))
    return bytes(corpus.tokens).decode("utf-8", errors="replace").split("\0")  # a byte 0 ends each


def train(config: Path, folder: Path, plan: str, settings: list[str]) -> None:
    """Train with two ranks under a Plan."""
    words = [word for each in settings for word in ("--set", each)]
    run("train", config, "--plan", plan, "--run", folder, *words)


def run(*words: object) -> None:
    """Run a command of shoal, after a line that shows it."""
    command = [str(word) for word in words]
    print("\n$ shoal", shlex.join(command), flush=True)
    if code := shoal(command):
        sys.exit(code)


def measure_all_reduce() -> AlphaBeta:
    """Return the seconds of a call and of a byte of all-reduce between two ranks that do nothing else."""
    backend = "nccl" if torch.cuda.device_count() > 1 else "shoal"
    command = ["-m", "shoal", "bench", "--backend", backend, "--sizes", "16KiB:64MiB:x4", "--json"]
    printed = subprocess.run([sys.executable, *command], check=True, capture_output=True, text=True).stdout
    rows = json.loads(printed)["rows"]
    sizes, seconds = [each["bytes"] for each in rows], [each["median"] for each in rows]
    return fit_alpha_beta([1] * len(rows), sizes, seconds, known=[0] * len(rows))


def gradients_of(timeline: Timeline) -> list[NamedCollective]:
    """Return the all-reduces of gradients: one for each bucket."""
    return [
        each
        for each in named_collectives(timeline)
        if each.purpose == "data" and each.name.startswith("all_reduce")
    ]


def row(size: str, buckets: list[NamedCollective], cost: AlphaBeta) -> str:
    """Return the line of a bucket size: milliseconds of a step, predicted and measured."""
    nbytes = sum(each.bytes for each in buckets)
    predicted = cost.alpha * sum(each.count for each in buckets) + cost.beta * nbytes
    measured = sum(each.seconds for each in buckets)
    exposed = sum(each.exposed_seconds for each in buckets)
    return (
        f"{size:>8}{len(buckets):>9}{nbytes / 1e6:>7.2f}"
        f"{predicted * 1e3:>11.2f}{measured * 1e3:>10.2f}{exposed * 1e3:>9.2f}"
    )


if __name__ == "__main__":
    main()
