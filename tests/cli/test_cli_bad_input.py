"""What cannot work is refused, in words that help, and nothing is left behind."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from shoal.cli.main import main

MODELS = """
import torch
from torch import nn

def frozen(**shape):
    return nn.Linear(2, 2).requires_grad_(False)

def double(**shape):
    return nn.Linear(2, 2).double()

def number(**shape):
    return 3

def broken(**shape):
    raise RuntimeError("of the factory")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with what is wrong in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "models_of_mine", raising=False)
    for name in ("empty", "taken"):
        (tmp_path / name).mkdir()
    for name, content in {
        "models_of_mine.py": MODELS,
        "empty.txt": "",
        "short.txt": "hi",
        "taken/file.txt": "mine",
        "broken.toml": "steps 3",
        "key.toml": "bacth = 3",
        "section.toml": "[optimizer]\nlearning_rat = 1",
        "broken.jsonl": '{"text": "a"}\n{"text": ',
        "field.jsonl": '{"body": "a"}\n',
        "tokenizer.json": "{}",
        "table.parquet": "PAR1",
    }.items():
        (tmp_path / name).write_text(content)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield tmp_path
    for number, action in before.items():
        signal.signal(number, action)


@pytest.fixture
def refused(folder, tiny_run, capsys):
    """Runs a command that must refuse what it is given; its message, cut at "possible" and "change"."""

    def call(*words):
        if words[0] == "train":
            words = ("train", *tiny_run, *words[1:])
            if "--run" not in words and "--resume" not in words:
                words = (*words, "--run", "run")
            if "--nproc" not in words:
                words = (*words, "--nproc", "1")
        before = sorted(folder.rglob("*"))
        assert main(words) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "Traceback" not in captured.err
        lines = captured.err.splitlines()
        assert lines[0].startswith("shoal: ")
        assert lines[1].startswith("  possible: ")
        assert lines[2].startswith("  change: ")
        assert len(lines) == 3
        left = [path for path in folder.rglob("*") if path not in before and "__pycache__" not in path.parts]
        assert left == []
        return captured.err

    return call


def setting(text):
    return ("train", "--set", text)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        # keys and values
        (setting("bacth=3"), "did you mean 'batch'"),
        (("train", "key.toml"), "did you mean 'batch'"),
        (("train", "section.toml"), "did you mean 'optimizer.learning_rate'"),
        (setting("steps=many"), "steps cannot be 'many'"),
        (setting("steps"), "'steps' has no value"),
        (("train", "broken.toml"), "broken.toml is not TOML"),
        (("train", "absent.toml"), "absent.toml cannot be read"),
        (("train", "empty"), "empty cannot be read"),
        # data
        (setting("data.source=absent"), "'absent' does not exist"),
        (setting("data.source=empt.txt"), "did you mean 'empty.txt'"),
        (setting("data.source=empty"), "holds no file with text"),
        (setting("data.source=empty.txt"), "is empty"),
        (setting("data.source=short.txt"), "has 3 tokens"),
        (setting("data.source=broken.jsonl"), "line 2"),
        (setting("data.source=field.jsonl"), "fields that hold text: body"),
        (setting("data.tokenizer=byts"), "did you mean 'bytes'"),
        (setting("data.tokenizer=tokenizer.json"), "tokenizer.json"),
        (setting("sequence=100000"), "shorter sequence length"),
        # the Plan
        (("train", "--nproc", "3"), "batch of 4 does not divide over dp=3"),
        (("train", "--plan", "microbatch=3"), "microbatch=3 does not divide"),
        (("train", "--plan", "dp=2"), "for 2 ranks, and there are 1"),
        (("train", "--plan", "shard=zero4"), "shard=zero4 does not exist (did you mean 'zero"),
        (("train", "--plan", "shrd=zero1"), "did you mean 'shard'"),
        (("train", "--plan", "dp=x"), "dp=x cannot be read"),
        (("train", "--plan", "tp=0"), "tp=0 is not"),
        (("train", "--plan", "replicate=0,shard=zero1"), "replicate=0 is not"),
        (("train", "--plan", "replicate=2,shard=zero1"), "replicate=2 does not divide dp=1"),
        (("train", "--plan", "replicate=2"), "shard=none keeps a whole replica"),
        (("train", "--plan", "pp=64", "--nproc", "64"), "cannot be cut into 64 stages"),
        (("train", "--plan", "pp=2", "--nproc", "3"), "for 2 ranks, and there are 3"),
        (("train", "--plan", "pp=2,microbatch=3", "--nproc", "2"), "microbatch=3 does not divide"),
        (("train", "--plan", "pp=2,schedule=1f2b", "--nproc", "2"), "did you mean '1f1b'"),
        (("train", "--plan", "pp=2,virtual=2", "--nproc", "2"), "2 virtual stages on a rank"),
        (("train", "--plan", "pp=2,schedule=interleaved,microbatch=4", "--nproc", "2"), "microbatch is 1, 2"),
        (
            ("train", "--plan", "pp=2,schedule=interleaved", "--nproc", "2", "--set", "batch=3"),
            "3 micro-batches on 2 ranks: a batch of 3 gives this number",
        ),
        (("train", "--plan", "pp=2,split=2-1", "--nproc", "2"), "has 3 blocks, and the model has 2"),
        (("train", "--plan", "pp=2,split=2", "--nproc", "2"), "how many blocks each of 2 stages has"),
        (
            ("train", "--plan", "tp=3", "--nproc", "3"),
            "tp=3 does not divide the 2 parts of blocks.0.attention.query",
        ),
        (("train", "--plan", "cp=2", "--nproc", "2", "--set", "sequence=30"), "cannot be cut for cp=2"),
        (("train", "--plan", "tp=2", "--nproc", "2", "--set", "sequence=31"), "does not divide over tp=2"),
        (("train", "--plan", "dp=2,ep=2", "--nproc", "2"), "has no experts to divide over 2 ranks"),
        (("train", "--plan", "exchange=naive,shard=zero1"), "exchange=naive"),
        (("train", "--nproc", "0"), "--nproc 0"),
        (("train", "--nproc", "-2"), "--nproc -2"),
        # the model
        (setting("model=tyny"), "did you mean 'tiny'"),
        (setting("model_options.layrs=3"), "did you mean 'layers'"),
        (setting("model_options.heads=3"), "hidden=32 is not a multiple of heads=3"),
        (setting("model_options.rope_base=inf"), "'rope_base' cannot be inf"),
        (setting("model_options.vocab_size=100"), "vocabulary of 100"),
        (setting("sequence=64"), "longer than the context"),
        (setting("sequence=33"), "up to 32 tokens"),
        (setting("model=absent:make"), "no module 'absent'"),
        (setting("model=models_of_mine:frozn"), "did you mean 'frozen'"),
        (setting("model=models_of_mine:frozen"), "no parameter that requires a gradient"),
        (setting("model=models_of_mine:double"), "torch.float64"),
        (setting("model=models_of_mine:number"), "returned int"),
        (setting("model=models_of_mine:broken"), "raised RuntimeError: of the factory"),
        (setting("model=hf:absent"), "no Hugging Face configuration"),
        # the run
        (("train", "--run", "taken"), "taken exists already"),
        (("train", "--run", "empty.txt"), "empty.txt exists already"),
        (("train", "--run", "empty.txt/run"), "cannot be made"),
        (("train", "--resume", "taken"), "neither a run nor a checkpoint"),
        (("train", "--resume", "absent"), "neither a run nor a checkpoint"),
        (("train", "--resume", "auto", "--run", "taken"), "taken exists already"),
        (("sample", "absent"), "absent does not exist"),
        (("sample", "taken"), "taken is not a run"),
        (("report", "absent"), "absent does not exist"),
        (("report", "taken"), "taken is not a run"),
    ],
)
def test_what_cannot_work_is_refused(refused, words, told):
    assert told in refused(*words)


def test_cuda_without_a_gpu_is_refused(refused, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert "torch finds no GPU on this host" in refused("train", "--set", "device=cuda")


@pytest.mark.parametrize(
    ("module", "setting", "extra"),
    [
        ("tensorboard", "record.tensorboard=true", "tensorboard"),
        ("transformers", "model=hf:taken", "hf"),
        ("tokenizers", "data.tokenizer=tokenizer.json", "hf"),
        ("pyarrow", "data.source=table.parquet", "parquet"),
    ],
)
def test_an_extra_that_is_not_installed_is_named(refused, monkeypatch, module, setting, extra):
    for name in [name for name in sys.modules if name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)  # importing it raises ImportError
    assert f"pip install 'shoal[{extra}]'" in refused("train", "--set", setting)


@pytest.mark.parametrize("given", ["many", "1:many", "3:2", "0:2"])
def test_a_number_of_ranks_that_is_none_is_refused(refused, given):
    assert f"--nproc {given} is no number of ranks" in refused("train", "--nproc", given)


@pytest.mark.parametrize("given", ["2", "1:2"])
@pytest.mark.parametrize(
    "started",
    [
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        # A shell that `srun --pty bash` has started.
        dict.fromkeys(("SLURM_STEP_NUM_TASKS", "SLURM_JOB_ID"), "1")
        | dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID"), "0")
        | {"SLURM_STEP_NODELIST": "node1"},
    ],
)
def test_other_ranks_than_those_that_were_started_are_refused(refused, monkeypatch, started, given):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    told = refused("train", "--nproc", given)
    assert f"--nproc {given} was given to a rank that torchrun, accelerate or srun started, one of 1" in told


def test_a_launchers_environment_that_is_not_whole_is_refused(refused, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "no LOCAL_RANK" in refused("train")


@pytest.mark.parametrize("words", [("trian",), ("sample", "run", "--tokens", "x"), ()])
def test_words_that_are_not_of_the_command_line_are_refused(folder, capsys, words):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "usage: shoal" in captured.err


def test_help_and_version_start_without_torch():
    program = """
import contextlib, io, sys
from shoal.cli.main import main
for words in (["--version"], ["--help"], *([name, "--help"] for name in sys.argv[1:])):
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as out:
        main(words)
    assert out.getvalue(), words
sys.exit("torch" in sys.modules)
"""
    words = [sys.executable, "-c", program, "train", "sample", "report", "checkpoint", "cluster", "schedule"]
    subprocess.run(words, check=True)
