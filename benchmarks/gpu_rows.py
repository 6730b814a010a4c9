"""The rows of the acceptance run, the most valuable first, each with its budget in seconds.

Names are words with hyphens, which `--only` takes without quotes.
"""

from __future__ import annotations

from gpu_outcome import Row

__all__ = ["ROWS"]

_TESTED = (
    "tests/record/test_record_cuda.py",
    "tests/parallel/test_parallel_fused_attention.py",
    "tests/models/test_models_dropout.py",
    "tests/train/test_train_waiting.py",
)

_SHARED = "Layouts on a shared GPU"
_MORE = (
    ("350m", None, 1024, 2, "blocks"),
    ("1b", None, 2048, 1, "blocks"),
    ("1b", None, 2048, 8, "blocks", "recompute=full"),
    ("1b", None, 8192, 2, "blocks"),
    ("llama2-7b", 8, 2048, 2, "blocks"),
    ("llama2-70b", 2, 2048, 2, "blocks"),
)
"""Shapes for predictions, beside those with a target: model, layers, length, samples, compile, plan."""


def _check(kind: str, name: str, seconds: float, subject: str = "Checks") -> Row:
    return Row(name.replace("_", "-"), subject, seconds, f"gpu_checks_{kind}:check_{name}")


def _step(
    model: str,
    layers: int | None,
    length: int,
    samples: int,
    compile: str,
    plan: str = "",
    *,
    seconds: float,
    least_rate: float = 0.0,
    needs: tuple[str, ...] = (),
) -> Row:
    shape = {"model": model, "layers": layers, "length": length, "samples": samples}
    arguments = {**shape, "compile": compile, "plan": plan, "least_rate": least_rate}
    name = "-".join(filter(None, (_shape(model, layers, length, samples), compile, plan)))
    return Row(name, "Steps", seconds, "gpu_steps:step", arguments, needs)


def _beside(
    model: str,
    layers: int | None,
    length: int,
    samples: int,
    *,
    seconds: float,
    least_rate: float = 0.0,
    most_ms: float = 0.0,
) -> Row:
    shape = {"model": model, "layers": layers, "length": length, "samples": samples}
    name = f"{_shape(model, layers, length, samples)}-and-plain-torch"
    arguments = {**shape, "least_rate": least_rate, "most_ms": most_ms}
    return Row(name, "Steps", seconds, "gpu_steps:beside_plain_torch", arguments)


def _recompute(compile: str, *, seconds: float) -> Row:
    arguments = {"model": "350m", "length": 2048, "samples": 8, "compile": compile}
    name = f"350m-2048x8-recompute-{compile}"
    return Row(name, "Steps", seconds, "gpu_steps:recompute_in_order", arguments)


def _shape(model: str, layers: int | None, length: int, samples: int) -> str:
    return f"{model}{'' if layers is None else f'-of-{layers}-layers'}-{length}x{samples}"


ROWS = (
    Row("machine", "Machine", 30, "gpu_machine:facts"),
    *(
        _check(kind, name, seconds)
        for kind, name, seconds in (
            ("memory", "refused_lock", 25),
            ("models", "losses", 40),
            ("models", "norm_and_clip", 20),
            ("memory", "pinned_size", 20),
            ("groups", "holds", 20),
            ("attention", "attention", 45),
            ("models", "grouped_products", 30),
            ("memory", "live_storages", 20),
            ("models", "full_recompute_is_compiled", 60),
            ("models", "recompute_draws_the_same", 30),
        )
    ),
    Row("tests", "Trainings", 90, "gpu_training:tests", {"files": _TESTED}, needs=("pytest", "hypothesis")),
    Row("save-and-resume-eager", "Trainings", 60, "gpu_training:save_and_resume", {"compile": "none"}),
    Row("save-and-resume-compiled", "Trainings", 90, "gpu_training:save_and_resume", {"compile": "blocks"}),
    Row("shoal-train", "Trainings", 75, "gpu_training:command"),
    *(
        _check("groups", name, seconds, _SHARED)
        for name, seconds in (
            ("nccl_with_one_rank", 30),
            ("collectives_in_the_gpus_memory", 45),
            ("buckets_in_the_gpus_memory", 40),
            ("collectives_by_way_of_the_host", 45),
        )
    ),
    *(
        Row(f"check-{plan.replace(',', '-')}", _SHARED, 40, "gpu_training:check_plan", {"plan": plan})
        for plan in ("dp=2,shard=zero1", "dp=2,shard=zero3", "tp=2,tensor=async", "cp=2", "pp=2")
    ),
    Row("probe", "Steps", 75, "gpu_training:probe"),
    _beside("1b", None, 2048, 8, seconds=150, least_rate=72_000),
    _step("1b", None, 2048, 8, "none", seconds=45),
    _beside("125m", None, 1024, 1, seconds=110, most_ms=24.0),
    _step("llama3-8b", 4, 4096, 2, "blocks", seconds=90, least_rate=60_000),
    _step("125m", None, 1024, 16, "blocks", seconds=60),
    _recompute("none", seconds=60),
    _recompute("blocks", seconds=120),
    *(
        Row(f"parts-of-{model}-{compile}", "Parts of a step", 75, "gpu_steps:parts_of_a_step", arguments)
        for model, length, samples in (("125m", 1024, 1), ("1b", 2048, 8))
        for compile in ("none", "blocks")
        for arguments in [{"model": model, "length": length, "samples": samples, "compile": compile}]
    ),
    *(
        _check(kind, name, seconds, "More checks")
        for kind, name, seconds in (
            ("models", "dropout_shares_a_graph", 60),
            ("models", "gradients_are_moved_together", 20),
            ("models", "experts_do_not_wait", 30),
            ("models", "threshold_codec", 20),
            ("memory", "locking_beside_training", 40),
            ("memory", "load_rate", 40),
            ("memory", "deterministic_empty", 20),
            ("memory", "thread_device", 30),
            ("memory", "trace_apart", 45),
            ("memory", "free_memory", 45),
            ("groups", "buckets_by_way_of_the_host", 40),
            ("groups", "expandable_segments", 40),
        )
    ),
    *(
        _check("elastic", name, seconds, "A rank that is lost over NCCL")
        for name, seconds in (
            ("a_watchdog_is_heard_before_it_aborts", 90),
            ("a_process_ends_while_a_kernel_runs", 60),
            ("a_planned_change_leaves_nothing_on_the_device", 45),
        )
    ),
    Row("dropout-recompute=full-compiled", "More trainings", 90, "gpu_training:dropout_compiled"),
    Row("experts-in-bf16", "More trainings", 45, "gpu_training:experts"),
    Row("offload-to-the-host", "More trainings", 60, "gpu_training:offload"),
    _step("llama3-8b", 4, 4096, 2, "blocks", "precision=fp8", seconds=120, needs=("torchao",)),
    *(_step(*shape, seconds=60) for shape in _MORE),
    Row(
        "24-Plans-of-4-ranks",
        _SHARED,
        240,
        "gpu_training:check_plans",
        {"ranks": 4, "sample": 24},
    ),
)
