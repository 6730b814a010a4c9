"""Writes the parts of the pages that are told elsewhere: `python docs/generate.py`.

What stands between `<!-- generated: NAME -->` and `<!-- end -->` comes from the code: an example or a part of
one, the keys of the configuration, the settings of a Plan, the fields of a Cluster, the names of the library,
the layers, the steps and bytes of collectives and their options, what a rank sends, what pipeline schedules
cost, the cost model and what it says of Plans, what becomes of the zoo. A test holds the pages to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import io
import json
import re
import shlex
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

from choosing import CHOOSING
from cost_tables import device_rows, goodput_rows, link_rows, slowest_rows
from drawn.schedules import played
from kinds import counted, kind_rows, reason_rows
from named import attributes, field_rows, name_rows
from pydantic import BaseModel
from sent import SENT, bytes_sent

from shoal import errors
from shoal.analyze.diagnosis import POLICY, Policy
from shoal.cli.main import main
from shoal.collectives import Options
from shoal.layers import LAYERS, TORCH_FREE
from shoal.models import preset, preset_names
from shoal.predict.cost import LEVELS
from shoal.predict.cost.collectives import algorithms as collectives
from shoal.spec.cluster import Calibrated, Cluster, Device, Host, Level, Part, Power, Prices
from shoal.spec.plan import CHOICES, Plan
from shoal.spec.plan.schedules import NAMES
from shoal.testing import conformance
from shoal.testing.zoo import ENTRIES
from shoal.train import TrainConfig
from shoal.units import format_bytes, format_count

__all__ = ["MODELLED", "ROOT", "pages", "render"]

ROOT = Path(__file__).resolve().parent.parent
_GENERATED = re.compile(r"(<!-- generated: (?P<name>.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
MODELLED = (
    *("device_kinds", "device_kinds: Groups that are alike", "collectives.network"),
    *("time.compute", "time.compute: Matrix products", "time.compute: Attention"),
    *("time.compute: Passes over memory", "time.compute: The host"),
    *("time.block", "time.block: Tensor parallelism", "time.block: Late ranks"),
    *("time.buckets", "time.data_parallel", "time.jitter", "time.offload"),
    *("time.step", "time.step: Ranks that share cores"),
    *("memory.memory", "memory.memory: States", "memory.memory: Micro-batches in flight"),
    *("memory.activations", "memory.rank: Moments of a step"),
    *("outlook.long_run", "outlook.long_run: Goodput"),
)
"""Modules of shoal.predict.cost, or parts of their docstrings, whose formulas are on a page."""

_LANGUAGES = {".py": "python", ".toml": "toml"}
_DESCRIBED = (Calibrated, Cluster, Device, Host, Level, Part, Power, Prices)
"""What the file of a Cluster has tables of."""


def pages() -> list[Path]:
    """Every page that may have generated parts."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def render(page: str) -> str:
    """The text of a page with its generated parts made anew."""
    return _GENERATED.sub(lambda match: f"{match[1]}{_part(match['name'])}\n{match[3]}", page)


def _part(name: str) -> str:
    tables = {
        "algorithms in shared memory": lambda: _algorithms("shared-memory"),
        "algorithms over the network": lambda: _algorithms("network"),
        "configuration": _configuration,
        "errors": _errors,
        "constants of devices": lambda: _table(*device_rows(attributes(Device))),
        "constants of links": lambda: _table(*link_rows(attributes(Level))),
        **{f"fields of {each.__name__}": partial(_fields, each) for each in _DESCRIBED},
        "status of the GPU run": _gpu_status,
        "goodput of many": lambda: _table(*goodput_rows()),
        "kinds and reasons": lambda: _table(*reason_rows()),
        "kinds counted": counted,
        "kinds under Plans": lambda: _table(*kind_rows()),
        "layers": _layers,
        "options of a group": _options,
        "plan": _plan,
        "policy of verdicts": _policy,
        "lost hosts": _lost_hosts,
        "presets": _presets,
        "runs of the tests": _test_runs,
        "listeners beside strangers": _doors,
        "schedules compared": _schedules,
        "signals": _signals,
        "slowest of many": lambda: _table(*slowest_rows()),
        "the zoo": _zoo,
        "what a rank sends": _sent,
        **{f"model of shoal.predict.cost.{name}": partial(_model, name) for name in MODELLED},
        **{f"choosing: {name}": partial(_chosen, rows) for name, rows in CHOOSING.items()},
    }
    if name.startswith("shoal "):
        return _printed(name)
    if name.startswith("api: "):
        return _table(*name_rows(name.removeprefix("api: ").split()))
    return tables[name]() if name in tables else _file(name)


def _printed(command: str) -> str:
    """What a command prints."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        main(shlex.split(command)[1:])
    return "```\n" + "\n".join(line.rstrip() for line in output.getvalue().splitlines()) + "\n```"


def _gpu_status() -> str:
    """What the acceptance run has shown on which GPU: the line below the title of its page."""
    text = (ROOT / "benchmarks" / "gpu.md").read_text(encoding="utf-8")
    return f"[The acceptance run](#the-acceptance-run) of one GPU: {text.split(chr(10) * 2)[1]}"


def _file(name: str) -> str:
    """An example, or after a colon a part of it, which begins with a line `# part: NAME`."""
    file, _, part = name.partition(": ")
    text = (ROOT / file).read_text(encoding="utf-8")
    if part:
        text = text.partition(f"# part: {part}\n")[2].partition("\n# part: ")[0].strip() + "\n"
    return f"```{_LANGUAGES[Path(file).suffix]}\n{text}```"


def _errors() -> str:
    """The tree, as shoal.errors draws it."""
    tree = (inspect.getdoc(errors) or "").partition("\n\n")[2]
    return f"```\n{tree}\n```"


def _fields(described: type) -> str:
    return _table(*field_rows(described))


def _policy() -> str:
    meanings = attributes(Policy)
    rows = [
        [f"`{field.name}`", f"{getattr(POLICY, field.name):g}", meanings[field.name]]
        for field in dataclasses.fields(Policy)
    ]
    return _table(["threshold", "value", "what it is"], rows)


def _configuration() -> str:
    rows = [
        [f"`{key}`", "not set" if default is None else f"`{json.dumps(default)}`", meaning]
        for key, default, meaning in _keys(TrainConfig())
    ]
    return _table(["key", "default", "what it is"], rows)


def _keys(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    defaults = section.model_dump(mode="json")
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _keys(value, f"{prefix}{name}.")
            continue
        assert field.description is not None
        choices = [f"`{choice}`" for choice in get_args(field.annotation) if isinstance(choice, str)]
        one_of = f" One of {', '.join(choices)}." if choices else ""
        yield prefix + name, defaults[name], " ".join(field.description.split()) + one_of


def _plan() -> str:
    meanings = attributes(Plan)
    rows = []
    for field in dataclasses.fields(Plan):
        default = format_bytes(field.default) if field.name == "bucket" else field.default
        values = ", ".join(f"`{value}`" for value in CHOICES.get(field.name, ())) or "1 or more"
        if field.name == "split":
            values = "`cost`, `count`, or numbers such as `6-7-7-4`"
        elif field.name == "shares":
            values = "`equal`, or numbers such as `3x24-2x8`"
        elif field.name == "offload":
            values = "`none`, or parts with places, such as `optimizer:file`"
        elif field.name == "order":
            values = "any order of `pp`, `dp`, `cp`, `tp`, such as `dp-pp-cp-tp`"
        rows.append(
            [
                f"`{field.name}`",
                f"`{default}`"
                if default is not None
                else {"virtual": "the fewest", "activations": "pp x virtual"}.get(field.name, "the whole"),
                "a size such as `4MiB`" if field.name == "bucket" else values,
                meanings[field.name],
            ]
        )
    return _table(["setting", "default", "values", "what it is"], rows)


def _layers() -> str:
    return _table(
        ["packages", "imports torch"],
        [
            [", ".join(f"`{name}`" for name in line), "never" if TORCH_FREE.issuperset(line) else "may"]
            for line in LAYERS
            if line != ("__main__",)
        ],
    )


def _presets() -> str:
    rows = []
    for name in preset_names():
        shape = preset(name)
        rows.append(
            [
                f"`{name}`",
                format_count(shape.parameter_count()),
                str(shape.layers),
                str(shape.hidden),
                f"{shape.heads} / {shape.kv_heads}",
                str(shape.seq),
                str(shape.vocab_size),
            ]
        )
    head = ["preset", "parameters", "layers", "hidden", "query / key-value heads", "context", "vocabulary"]
    return _table(head, rows)


def _sent() -> str:
    """By strategy, and for a block of Llama 3 8B that 8 ranks share."""
    shape, ranks, tokens = preset("llama3-8b"), 8, 8192
    rows = []
    for strategy, formulas in SENT.items():
        values = [bytes_sent(formula, shape, ranks=ranks, tokens=tokens, width=2) for formula in formulas]
        rows.append([f"`{strategy}`", *(f"`{formula}`" for formula in formulas), *map(format_bytes, values)])
    return _table(["", "forward", "backward", "example: forward", "backward"], rows)


def _test_runs() -> str:
    """The lines that `make test-repeat` keeps, the newest first."""
    lines = (ROOT / "docs" / "reference" / "test-runs.jsonl").read_text(encoding="utf-8").splitlines()
    rows = []
    for line in map(json.loads, reversed(lines)):
        found = f"{line['passed']:,} passed, {line['skipped']} skipped"
        if line["failed"]:
            found = "; ".join([found, *(f"failed: `{each}`" for each in line["failed"])])
        where = f"{line['machine']}, Python {line['python']}, torch {line['torch']}"
        minutes = f"{line['seconds'] / 60:.1f}"
        rows.append([line["date"], f"`{line['commit']}`", where, str(line["busy"]), minutes, found])
    return _table(["date, UTC", "commit", "machine", "busy processes beside it", "minutes", "result"], rows)


def _signals() -> str:
    """What became of a training that got a signal: the lines that tests/stops.py keeps."""
    file = ROOT / "docs" / "reference" / "signals.jsonl"
    found: dict[tuple[str, str, str], dict[str, str]] = {}
    for line in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        saved = f"step {line['saved']} of {line['made']}" if line["made"] else "no step made"
        text = f"{line['code']}, {saved}, {line['seconds']:.1f} s" + ("" if line["right"] else " **wrong**")
        found.setdefault((line["launcher"], line["phase"], line["target"]), {})[line["signal"]] = text
    names = ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"]
    rows = [[f"`{launcher}`", *place, *map(cells.get, names)] for (launcher, *place), cells in found.items()]
    return _table(["launcher", "phase", "sent to", *names], [[each or "" for each in row] for row in rows])


def _lost_hosts() -> str:
    """What became of hosts of which one was lost or misled: the lines that tests/lost_hosts.py keeps."""
    file = ROOT / "docs" / "reference" / "lost-hosts.jsonl"
    rows = []
    for line in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        said = line["said"].removeprefix("shoal: ").replace("`", "")
        first = f"{line['by']}, after {line['after']:.1f} s: `{said}`" if said else "nothing"
        codes = ", ".join("-" if code is None else str(code) for code in line["codes"])
        became = f"{line['steps']} steps in {line['seconds']:.0f} s; {codes}"
        rows.append([line["does"], first, became + " **wrong**" * (not line["right"])])
    return _table(["what happens", "said first", "what became of it"], rows)


def _doors() -> str:
    """The lines that tests/doors.py keeps, the newest of each listener and kind of strangers."""
    lines = (ROOT / "docs" / "reference" / "doors.jsonl").read_text(encoding="utf-8").splitlines()
    newest = {(line["listener"], line["strangers"]): line for line in map(json.loads, lines)}
    rows = []
    for line in newest.values():
        took = ["{} to {}".format(*line[name]) for name in ("threads", "mib", "descriptors")]
        held = f"{line['number']:,} {line['strangers']}, {line['seconds']:g} s"
        slowest = f"{line['slowest']:.2f}"
        served = [f"{line['served']:,}", str(line["failed"]), slowest]
        rows.append([line["listener"], held, *took, *served, f"`{line['commit']}`, {line['machine']}"])
    head = ["listener", "strangers", "threads", "memory, MiB", "descriptors", "served", "not", "slowest, s"]
    return _table([*head, "commit, machine"], rows)


def _zoo() -> str:
    """What becomes of every entry; a test trains them all, and holds this to it."""
    return _table(*conformance.table(conformance.all_cases(ENTRIES), ENTRIES))


def _schedules() -> str:
    """Bubble over the ideal and peak of activations of each, by `play`, for a few sizes."""
    sizes = [(4, 8), (4, 32), (8, 64)]
    rows = []
    for name in NAMES:
        found = [played(name, ranks, microbatches) for ranks, microbatches in sizes]
        rows.append(
            [
                f"`{name}`",
                str(found[0].schedule.virtual),
                *(f"{each.bubble_over_ideal:.1%}" for each in found),
                *(f"{max(each.peaks) / each.schedule.virtual:g}" for each in found),
            ]
        )
    told = [f"p={ranks}, m={microbatches}" for ranks, microbatches in sizes]
    return _table(["", "v", *(f"bubble, {size}" for size in told), *(f"held, {size}" for size in told)], rows)


def _algorithms(level: str) -> str:
    """The table of a level, as shoal.predict.cost.collectives.algorithms tells it above its code."""
    tables = re.findall(r"^\|(?:.|\n\|)*", inspect.getdoc(collectives) or "", re.MULTILINE)
    return tables[LEVELS.index(level)]


def _model(name: str) -> str:
    """What a module of the cost model says above its code: under a title, or before the first one."""
    module, _, title = name.partition(": ")
    told = inspect.getdoc(importlib.import_module(f"shoal.predict.cost.{module}")) or ""
    before, *parts = re.split(r"^(.+)\n-+\n\n", told, flags=re.MULTILINE)
    return (dict(zip(parts[::2], parts[1::2], strict=True))[title] if title else before).strip()


def _chosen(rows: Callable[[], tuple[list[str], list[list[str]]]]) -> str:
    return _table(*rows())


def _options() -> str:
    meanings = attributes(Options)
    defaults = {"algorithms": "none", "table": "`shoal/collectives/table.toml`"}
    rows = []
    for field in dataclasses.fields(Options):
        default = defaults.get(field.name, f"`{field.default}`")
        rows.append([f"`{field.name}`", f"`SHOAL_{field.name.upper()}`", default, meanings[field.name]])
    return _table(["option", "variable", "default", "what it is"], rows)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", r"\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    for path in pages():
        before = path.read_text(encoding="utf-8")
        after = render(before)
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
