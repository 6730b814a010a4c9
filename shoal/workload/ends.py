"""The first and the last piece of a transformer: the embedding of its inputs, and its head and loss.

Tokens are looked up, patches of an image are multiplied. The end is a norm, the head's product and the loss.
BERT's layers end in a norm; its end is a product and a norm before the head, and a product for the sentence.
"""

from __future__ import annotations

from shoal.workload.kept import kept_by_norm
from shoal.workload.model_shape import ModelShape
from shoal.workload.operation import Keep, Operation, Part, Pass, Product, Saved
from shoal.workload.passes import loss_pass, norm_pass
from shoal.workload.workload import Block, Parameters

_FP32 = 4
_OF_ANGLES = 12  # operators that make the angles: positions, powers, their product, cosine, sine, joins
_SENTENCES = 2  # kinds of tokens, and answers to whether two sentences follow


def embedding_of(shape: ModelShape) -> Block:
    """Return piece 0: the embedding."""
    hidden = shape.hidden
    stream = float(shape.seq * hidden)
    positions = 0 if shape.rotary else shape.seq * hidden
    kernels = (1 if shape.fused_passes else 1 + _OF_ANGLES) if shape.rotary else 2
    operations: list[Operation] = []
    saved: list[Saved] = []
    if shape.patch:
        operations.append(Product("patches", shape.seq - 1, shape.patch, hidden, Part.COLUMNS))
        operations.append(Pass("positions", stream, 6, 2, Part.STREAM, kernels=kernels))
        parameters = Parameters(whole=positions + hidden, divided=(shape.patch + 1) * hidden)
        tables = positions
    else:
        backward = None if shape.fused_passes else 1
        operations.append(
            Pass("embedding", stream, 4, 8, Part.STREAM, kernels=kernels, backward_kernels=backward)
        )
        parameters = Parameters(whole=positions, divided=shape.vocab * hidden)
        tables = shape.vocab * hidden + positions
    if shape.objective == "masked":
        operations.append(Pass("norm", stream, 4, 8, Part.STREAM))
        saved += [Saved("sum", stream, Part.STREAM, Keep.ALWAYS), *_norm(shape)]
        parameters = Parameters(parameters.whole + (_SENTENCES + 2) * hidden, parameters.divided)
        tables += _SENTENCES * hidden
    if shape.dropout and not shape.rotary:
        operations.append(Pass("dropout", stream, 5, 5, Part.STREAM))
        saved.append(Saved("mask", stream, Part.STREAM, Keep.ALWAYS, 1))
    if shape.rotary and shape.is_own:
        angles = 2.0 * shape.seq * shape.width  # cosine and sine, for all samples and all layers
        saved.append(Saved("angles", angles, Part.POSITIONS, Keep.ALWAYS, _FP32))
    return Block("embedding", tuple(operations), parameters, tuple(saved), joins=1, tables=tables)


def end_of(shape: ModelShape) -> Block:
    """Return the last piece: the end."""
    rows, hidden = shape.tokens_of_loss, shape.hidden
    stream, logits = float(shape.seq * hidden), float(rows * shape.vocab)
    norm = hidden * (2 if shape.biases else 1)
    table = 0 if shape.tied else shape.vocab * hidden
    before: tuple[Operation, ...] = (norm_pass(shape, stream),)
    whole = norm
    if shape.objective == "masked":
        before = (
            Product("pooler", 1, hidden, hidden),
            Product("sentences", 1, hidden, _SENTENCES),
            Product("transform", rows, hidden, hidden),
            Pass("gelu and norm", float(rows * hidden), 8, 14, Part.STREAM, kernels=2),
        )
        whole += 2 * (hidden + 1) * hidden + _SENTENCES * (hidden + 1)
    bias = shape.vocab if shape.objective != "next-token" else 0
    saved = [
        *([Saved("input", stream, Part.STREAM, Keep.ALWAYS)] if shape.one_kernel_norm else []),
        *_norm(shape),
        Saved("logits", logits, Part.COLUMNS, Keep.ALWAYS, _FP32),
    ]
    return Block(
        "end",
        (
            *before,
            Product("head", rows, hidden, shape.vocab, Part.COLUMNS),
            loss_pass(shape, logits),
        ),
        Parameters(whole=whole, divided=table + bias),
        tuple(saved),
        joins=1,
    )


def _norm(shape: ModelShape) -> tuple[Saved, ...]:
    output = Saved("norm", float(shape.seq * shape.hidden), Part.STREAM, Keep.ALWAYS)
    return (*kept_by_norm(shape, Keep.ALWAYS), output)
