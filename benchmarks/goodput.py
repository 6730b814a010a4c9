"""Goodput of 16,384 ranks with published rates of failures, played by chance, beside published goodput.

    python benchmarks/goodput.py [--runs 100] [--svg benchmarks/goodput.svg] > benchmarks/goodput.md

The machine is that of Llama 3's training of 54 days. What its authors did not publish is assumed, and named
in the page that this prints, as Markdown. All chance is drawn from fixed seeds, so that the page repeats.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import NormalDist

from shoal.predict.cost.outlook import goodput
from shoal.predict.simulate import Courses, FailureModel, failure_courses
from shoal.spec.cluster import Cluster

DAY = 86_400.0
DAYS = 54
BETWEEN = DAYS * DAY / 419
"""Seconds between unexpected interruptions: 419 in 54 days (arXiv:2407.21783, section 3.3.4)."""
STEP = 6 * 405e9 * 16 * 128 * 8192 / (16_384 * 400e12)
"""Seconds: 128 replicas, 16 sequences of 8,192 tokens each, 400 TFLOP/s a device (the paper's table 4)."""
SAVE = 12 * 405e9 / 2e12
"""Seconds: weights and Adam's moments in fp32, at the storage's 2 TB/s (section 3.3.1); training waits."""
LLAMA = FailureModel(
    nodes=2048,
    replicas=128,
    between=BETWEEN,
    step=STEP,
    save=SAVE,
    detection=15.0,
    restart=585.0,
    hardware=0.78,
    repair=DAY / 2,
    repair_tail="heavy",
    spares=16,
)
BYTEROBUST = dataclasses.replace(LLAMA, nodes=1200, replicas=75, between=BETWEEN * 16_384 / 9600)
"""9,600 devices (arXiv:2509.16293) that fail as often, one by one, as those of Llama 3."""
QUICK = {"copies": 1, "shrinks": True, "restart": 45.0}
MINUTES = (1, 2, 5, 10, 15, 20, 30)
SPARES = (0, 1, 2, 3, 4, 6, 8, 12, 16)


def main() -> None:
    """Play the runs and print the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=100, help="runs of 54 days for each figure")
    parser.add_argument("--svg", type=Path, help="file for a picture")
    options = parser.parse_args()

    def play(model: FailureModel, **changes: object) -> Courses:
        changed = dataclasses.replace(model, **changes)  # type: ignore[arg-type]
        return failure_courses(changed, DAYS * DAY, runs=options.runs)

    print(HEAD.format(runs=options.runs, between=BETWEEN / 3600, step=STEP, save=SAVE))
    print(measures(play))
    print(recoveries(play))
    print(intervals(play))
    if options.svg is not None:
        options.svg.write_text(picture(play), "utf-8")


Play = Callable[..., Courses]

HEAD = """# Goodput of 16,384 ranks that fail

Written by `benchmarks/goodput.py --runs {runs} --svg benchmarks/goodput.svg`: simulated, not measured. Each
figure is the mean of {runs} runs of 54 days, played event by event (`shoal.predict.simulate.failures`).

**Published.** Llama 3 405B on 16,384 H100: 466 interruptions in 54 days, 419 of them unexpected, about 78 %
of these for hardware; an effective training time above 90 % (arXiv:2407.21783, section 3.3.4). ByteRobust: an
effective training time of 97 % in a job of three months on 9,600 devices (arXiv:2509.16293).

**From these.** A failure every {between:.2f} h; a step of {step:.2f} s; a checkpoint stops training for
{save:.2f} s. One that is written beside the training stops it for less. Planned interruptions are left out.

**Assumed,** since it is not published: a failure is noticed in 15 s, and steps go on 585 s later; a node with
a fault is away for 12 h in the mean, with a heavy tail (Pareto, shape 1.5) or exponentially; 16 nodes are
spare. Copies in the memory of peers are taken to cost nothing. "In one minute" is 15 s and 45 s.

![Goodput by time to recover and by spare nodes](goodput.svg)
"""


def measures(play: Play) -> str:
    """Return a table of what each measure gains."""
    rows: list[tuple[str, dict[str, object]]] = [
        ("checkpoints; no spare nodes: the run waits for repairs", {"spares": 0}),
        ("no spare nodes; goes on with fewer replicas", {"spares": 0, "shrinks": True}),
        ("4 spare nodes", {"spares": 4}),
        ("4 spare nodes; goes on with fewer replicas", {"spares": 4, "shrinks": True}),
        ("16 spare nodes", {}),
        ("16 spare nodes, copies in peers' memory each step", {"copies": 1}),
        ("the same, recovery in one minute, fewer replicas if need be", QUICK),
        ("no spare nodes, copies, recovery in one minute, fewer replicas", {**QUICK, "spares": 0}),
    ]
    lines = [
        "## What each measure gains\n",
        "| | goodput, heavy tail | 90 % of runs | goodput, exponential "
        "| saving | recovery | repeated | waiting | slower |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, changes in rows:
        heavy = play(LLAMA, **changes)
        usual = play(LLAMA, **changes, repair_tail="exponential")
        lost = heavy.lost
        shares = (
            lost["saving"],
            lost["detection"] + lost["recovery"],
            *(lost[each] for each in ("repeated", "waiting", "slower")),
        )
        cells = [
            percent(heavy.goodput),
            f"{percent(heavy.low)} to {percent(heavy.high)}",
            percent(usual.goodput),
        ]
        lines.append(f"| {name} | {' | '.join([*cells, *map(percent, shares)])} |")
    lines.append(
        "\nShares of the time; recovery has the detection in it. A run that goes on without a spare node\n"
        "loses a whole replica, which is 16 nodes."
    )
    return "\n".join(lines) + "\n"


def recoveries(play: Play) -> str:
    """Return a table of goodput by the time from a failure to the next step."""
    lines = [
        "## How quick recovery must be\n",
        f"| minutes from a failure to the next step | {' | '.join(map(str, MINUTES))} |",
        f"| --- |{' ---: |' * len(MINUTES)}",
    ]
    for name, model, changes in CURVES:
        found = [play(model, **changes, restart=60 * each - 15.0).goodput for each in MINUTES]
        lines.append(f"| {name} | {' | '.join(map(percent, found))} |")
    llama, byte = (limit(model, share) / 60 for model, share in ((LLAMA, 0.9), (BYTEROBUST, 0.97)))
    lines.append(
        f"\nBy the closed form, without waiting for nodes, 90 % on 16,384 devices allow {llama:.0f} minutes, "
        f"and 97 % on\n9,600 devices {byte:.1f} minutes. That is as much as the published figures can say: "
        "neither paper gives the\ntime of a recovery and of a save for its job, and ByteRobust's own rate of "
        "failures is not used here."
    )
    return "\n".join(lines) + "\n"


CURVES: Sequence[tuple[str, FailureModel, dict[str, object]]] = (
    ("16,384 devices, checkpoints", LLAMA, {}),
    ("16,384 devices, copies in peers' memory", LLAMA, {"copies": 1}),
    ("9,600 devices, checkpoints", BYTEROBUST, {}),
    ("9,600 devices, copies in peers' memory", BYTEROBUST, {"copies": 1}),
)


def intervals(play: Play) -> str:
    """Return a table of goodput by the interval between checkpoints, beside the closed form."""
    young = LLAMA.steps_between_saves
    lines = [
        "## How often to save\n",
        "| steps between saves | of Young's | played | standard error | Daly's formula | off by errors |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    worst = 0.0
    shares = (0.25, 0.5, 1.0, 2.0, 4.0)
    for share in shares:
        steps = round(share * young)
        found = play(LLAMA, interval=steps, hardware=0.0, detection=0.0, restart=600.0)
        expected = closed(LLAMA, 600.0, steps)
        off = (found.goodput - expected) / found.error
        worst = max(worst, abs(off))
        lines.append(
            f"| {steps} | {share:g} | {percent(found.goodput)} | {percent(found.error)} "
            f"| {percent(expected)} | {off:+.1f} |"
        )
    usual = NormalDist().inv_cdf(1 - 0.025 / len(shares))
    lines.append(
        f"\nThe largest difference is {worst:.1f} standard errors; below {usual:.1f} it may be chance."
    )
    return "\n".join(lines) + "\n"


def closed(model: FailureModel, restart: float, steps: int) -> float:
    """Return the goodput by Daly's formula, with so many steps between checkpoints."""
    trained = steps * model.step
    section = trained + model.save
    return trained / (model.between * math.exp(restart / model.between) * math.expm1(section / model.between))


def limit(model: FailureModel, share: float) -> float:
    """Return the seconds from a failure to the next step at which goodput is a share, by Daly's formula."""
    preset = Cluster.parse("dgx-h100:16384")
    cluster = preset.replace(failures=3600 / model.between / preset.devices)
    low, high = 0.0, 86_400.0
    for _ in range(60):
        middle = (low + high) / 2
        is_enough = goodput(cluster, model.step, model.save, middle).share >= share
        low, high = (middle, high) if is_enough else (low, middle)
    return low


def percent(share: float) -> str:
    """Return a share in percent."""
    return f"{100 * share:.2f} %"


def picture(play: Play) -> str:
    """Return two drawings: goodput by the time to recover, and by spare nodes."""
    colors = ("#0072b2", "#56b4e9", "#c45500", "#e69f00")
    left = [
        (name, color, [(each, play(model, **changes, restart=60 * each - 15.0).goodput) for each in MINUTES])
        for (name, model, changes), color in zip(CURVES, colors, strict=True)
    ]
    right = [
        (
            f"{'fewer replicas' if shrinks else 'waits for repairs'}, {tail} repairs",
            color,
            [(each, play(LLAMA, spares=each, shrinks=shrinks, repair_tail=tail).goodput) for each in SPARES],
        )
        for (shrinks, tail), color in zip(
            ((False, "heavy"), (False, "exponential"), (True, "heavy"), (True, "exponential")),
            colors,
            strict=True,
        )
    ]
    marks = ((0.9, "Llama 3: above 90 %"), (0.97, "ByteRobust: 97 %"))
    drawn = panel(0, left, 0.8, "minutes from a failure to the next step", marks)
    drawn += panel(460, right, 0.0, "spare nodes beside 2,048", ())
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 920 380" '
        'font-family="sans-serif" font-size="12">\n'
        f'<rect width="920" height="380" fill="white"/>\n{drawn}</svg>\n'
    )


def panel(
    begin: int,
    curves: Sequence[tuple[str, str, Sequence[tuple[float, float]]]],
    least: float,
    label: str,
    marks: Sequence[tuple[float, str]],
) -> str:
    """Return one drawing of goodput against something, from some place on."""
    most = max(x for _, _, points in curves for x, _ in points)
    wide, tall, top = 380, 230, 20

    def at(x: float, y: float) -> tuple[float, float]:
        return begin + 60 + wide * x / most, top + tall * (1 - (y - least) / (1 - least))

    parts = []
    for tick in range(6):
        share = least + (1 - least) * tick / 5
        x, y = at(0, share)
        parts.append(f'<line x1="{x:.0f}" y1="{y:.1f}" x2="{x + wide:.0f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 6:.0f}" y="{y + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    for tick in range(0, int(most) + 1, 5 if most > 16 else 4):
        x, y = at(tick, least)
        parts.append(f'<text x="{x:.1f}" y="{y + 17:.1f}" text-anchor="middle">{tick}</text>')
    parts.append(
        f'<text x="{begin + 60 + wide / 2:.0f}" y="{top + tall + 36}" text-anchor="middle">{label}</text>'
    )
    for share, name in marks:
        x, y = at(most, share)
        parts.append(
            f'<line x1="{x - wide:.0f}" y1="{y:.1f}" x2="{x:.0f}" y2="{y:.1f}" stroke="#555" '
            'stroke-dasharray="5 3"/>'
            f'<text x="{x:.0f}" y="{y - 4:.1f}" text-anchor="end" fill="#555">{name}</text>'
        )
    for number, (name, color, points) in enumerate(curves):
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in points))
        y = top + tall + 58 + 17 * number
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<rect x="{begin + 60}" y="{y - 9}" width="16" height="9" fill="{color}"/>')
        parts.append(f'<text x="{begin + 82}" y="{y}">{name}, goodput</text>')
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
