"""The state of training as the pieces of a checkpoint, and back.

model/NAME                 a trained parameter, fp32
fixed/NAME                 a parameter that is not trained, or a buffer
optimizer/KEY/NAME         a state of the optimizer for each element of a parameter, shaped as the parameter
optimizer-tensor/KEY/NAME  a state of another shape, such as a count of steps
optimizer-number/KEY/NAME  a state that is a number of Python
rank/R/rotary.NAME         the state of a dynamic rotary embedding of transformers

For a resume on equal ranks under the same Plan:

rank/R/buffer/NAME         a buffer that differs between ranks
rank/R/random.KIND         the states of random generators
rank/R/exchange/STAGE/BUCKET/NAME  what a compressed exchange left out of earlier steps

State is found in the optimizer, not known beforehand: any optimizer's state is kept.

Each rank's exchanges left out other parts of other gradients. Under another Plan this is lost: at most what
compression left out of the last steps, which training makes up for as it does for a step with other samples.
What local updates left out is with their state of each parameter, which any Plan takes; only factors of
powersgd are here, as STAGE `local`.

A dynamic rotary embedding keeps frequencies for the longest sequence that it has seen since one of the
original length: a buffer that is not persistent, and two numbers beside it, which no `state_dict` holds. A
checkpoint holds them as one tensor: the length, the scaling of attention, the frequencies.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from shoal.checkpoint import Piece, Region, TensorRecord, dtype_named
from shoal.errors import CheckpointError
from shoal.parallel import (
    Axis,
    Composed,
    Frozen,
    OffloadedOptimizer,
    Owned,
    Parallel,
    local_part,
    parts_of,
)
from shoal.parallel.data.strategy import Exchanging
from shoal.parallel.exchange.merge_schedule import is_key_of
from shoal.parallel.exchange.worker_exchange import exchange_of

_ELEMENTS, _TENSOR, _NUMBER = "optimizer", "optimizer-tensor", "optimizer-number"
_EXCHANGE = "exchange/"
_OF_LOCAL_UPDATES = f"{_EXCHANGE}local/"
_ROTARY = "rotary."
_LENGTH, _FREQUENCIES = "max_seq_len_cached", "inv_freq"


def pieces_to_save(parallel: Parallel, optimizer: torch.optim.Optimizer | None) -> list[Piece]:
    """Return the pieces that this rank writes; together the ranks write each element once.

    Replicas hold equal values; each of them writes a part of about equal size.

    Raises:
        CheckpointError: The optimizer has state that a checkpoint cannot hold.
    """
    pieces = _model_pieces(_share(parallel.owned))
    if optimizer is not None:
        pieces += optimizer_pieces(parallel, optimizer)
    pieces += _fixed(parallel.buffers_to_save())
    return pieces + [_frozen_piece(frozen) for frozen in parallel.frozen if frozen.is_first_copy]


def pieces_of_replica(parallel: Parallel, optimizer: torch.optim.Optimizer) -> list[Piece]:
    """Return the pieces of all state, where this rank holds all of it: a replica that nothing is cut from.

    Raises:
        CheckpointError: The optimizer has state that a checkpoint cannot hold.
    """
    pieces = _model_pieces(parallel.owned) + _optimizer_pieces(parallel, optimizer, list)
    pieces += _fixed(parallel.saved_buffers())
    return pieces + [_frozen_piece(frozen) for frozen in parallel.frozen]


def optimizer_pieces(parallel: Parallel, optimizer: torch.optim.Optimizer) -> list[Piece]:
    """Return the pieces of an optimizer's state that this rank writes.

    Raises:
        CheckpointError: The optimizer has state that a checkpoint cannot hold.
    """
    return _optimizer_pieces(parallel, optimizer, _share)


def _model_pieces(places: Sequence[Owned]) -> list[Piece]:
    return [
        _part(owned, f"model/{owned.name}", owned.parameter) for owned in places if owned.start < owned.stop
    ]


def _optimizer_pieces(
    parallel: Parallel, optimizer: torch.optim.Optimizer, share: Callable[[Sequence[Owned]], list[Owned]]
) -> list[Piece]:
    return [
        piece
        for part, places in parts_of(optimizer, parallel.owned)
        for owned in share(places)
        if owned.start < owned.stop
        for piece in _pieces_of_state(owned, part.state.get(owned.parameter, {}))
    ]


@dataclass(slots=True)
class ToLoad:
    """The pieces that this rank reads.

    Attributes:
        in_use: Pieces in the memory where training keeps them.
        fresh: Pieces in new memory.
        after: Functions to call after the pieces were read. Until then the optimizer's state is as before.
    """

    in_use: list[Piece] = field(default_factory=list)
    fresh: list[Piece] = field(default_factory=list)
    after: list[Callable[[], object]] = field(default_factory=list)

    def add_part(self, owned: Owned, path: str, tensor: torch.Tensor, *, is_in_use: bool) -> None:
        """Add a tensor that is laid out like this rank's part of a parameter."""
        held = local_part(tensor).detach()
        read = held.contiguous()
        is_copy = read is not held  # such as channels_last
        (self.in_use if is_in_use and not is_copy else self.fresh).append(_part(owned, path, read))
        if is_copy:
            self.after.append(partial(held.copy_, read))

    def finish(self) -> None:
        """Do the remaining work; call it when the pieces were read."""
        for action in self.after:
            action()


def pieces_to_load(parallel: Parallel, *, is_in_use: bool = True) -> ToLoad:
    """Return the pieces of the model that this rank reads.

    Args:
        parallel: The model.
        is_in_use: Whether its parameters have values, which stay if a checkpoint turns out to be corrupt.
    """
    wanted = ToLoad()
    for owned in parallel.owned:
        if owned.start < owned.stop:
            wanted.add_part(owned, f"model/{owned.name}", owned.parameter, is_in_use=is_in_use)
    wanted.in_use += _fixed(parallel.saved_buffers())
    (wanted.in_use if is_in_use else wanted.fresh).extend(map(_frozen_piece, parallel.frozen))
    return wanted


def optimizer_to_load(
    parallel: Parallel, optimizer: torch.optim.Optimizer, saved: Mapping[str, TensorRecord]
) -> ToLoad:
    """Make a state like the saved one, whose values are then to be read; `finish` gives it to the optimizer.

    Args:
        parallel: The model.
        optimizer: The optimizer; `finish` drops its present state.
        saved: The tensors of the checkpoint.
    """
    by_name: dict[str, list[tuple[str, str, TensorRecord]]] = {}
    for path, record in saved.items():
        kind, _, rest = path.partition("/")
        key, _, name = rest.partition("/")
        if kind in (_ELEMENTS, _TENSOR, _NUMBER):
            by_name.setdefault(name, []).append((kind, key, record))
    wanted = ToLoad()
    for part, places in parts_of(optimizer, parallel.owned):
        _add_state(wanted, part, places, by_name)
    if isinstance(optimizer, Composed):
        wanted.after.append(optimizer.show)
    return wanted


def _add_state(
    wanted: ToLoad,
    optimizer: torch.optim.Optimizer,
    places: Sequence[Owned],
    by_name: Mapping[str, Sequence[tuple[str, str, TensorRecord]]],
) -> None:
    """Add the state of parameters that lie at `places`."""
    on_device = {
        parameter: bool(group.get("fused") or group.get("capturable"))
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    states: dict[torch.Tensor, dict[str, Any]] = {}
    for owned in places:
        if owned.start == owned.stop or owned.parameter not in on_device:
            continue
        for kind, key, record in by_name.get(owned.name, ()):
            if not is_key_of(optimizer, key):
                continue
            state, dtype = states.setdefault(owned.parameter, {}), dtype_named(record.dtype)
            path = f"{kind}/{key}/{owned.name}"
            if kind == _ELEMENTS:
                is_kept = isinstance(optimizer, OffloadedOptimizer)
                state[key] = _place_of(optimizer, owned, key, dtype)
                wanted.add_part(owned, path, state[key], is_in_use=is_kept)
                continue
            # As in torch's `load_state_dict`, counts of steps stay on the CPU unless a kernel reads them.
            is_count = kind == _NUMBER or (key == "step" and not on_device[owned.parameter])
            device = torch.device("cpu") if is_count else owned.parameter.device
            state[key] = torch.zeros(record.shape, dtype=dtype, device=device)
            wanted.fresh.append(Piece.whole(path, state[key]))
            if kind == _NUMBER:
                wanted.after.append(partial(_as_number, state, key))
    wanted.after.append(partial(_replace, optimizer, states))


def _place_of(optimizer: torch.optim.Optimizer, owned: Owned, key: str, dtype: torch.dtype) -> torch.Tensor:
    """Return the memory for a state that is kept for each element."""
    if isinstance(optimizer, OffloadedOptimizer):
        return optimizer.place_of(owned.parameter, key, dtype)
    return torch.zeros_like(owned.parameter, dtype=dtype, requires_grad=False)


def _replace(optimizer: torch.optim.Optimizer, states: Mapping[torch.Tensor, dict[str, Any]]) -> None:
    optimizer.state.clear()
    optimizer.state.update(states)


def _as_number(state: dict[str, Any], key: str) -> None:
    state[key] = state[key].item()


def fixed_pieces(model: nn.Module) -> list[Piece]:
    """Return the pieces of a model on one device that are saved but not trained."""
    frozen = [
        Piece.whole(f"fixed/{name}", parameter.detach())
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    ]
    return frozen + _fixed(_saved_buffers(model))


def digests_of(buffers: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """Return a hash of each buffer, by which ranks compare theirs."""
    return {name: _digest(buffer) for name, buffer in buffers.items()}


def differing_buffers(
    mine: Mapping[str, torch.Tensor], rank: int, digests: Sequence[Mapping[str, bytes]]
) -> dict[str, torch.Tensor]:
    """Return this rank's buffers that have other values on another rank, such as BatchNorm's statistics.

    Args:
        mine: This rank's buffers.
        rank: This rank.
        digests: Those of each rank's buffers.
    """
    own = digests[rank]
    return {
        name: buffer
        for name, buffer in mine.items()
        if any(other.get(name, own[name]) != own[name] for other in digests)
    }


def kept_by_exchanges(parallel: Parallel, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """Return what the next exchanges on this rank depend on, by name."""
    return {
        f"{prefix}{name}": tensor
        for prefix, exchange in _exchanges(parallel, optimizer)
        for name, tensor in exchange.kept().items()
        if not (prefix.startswith(_OF_LOCAL_UPDATES) and name.startswith("error"))
    }


def empty_like_saved(
    saved: Mapping[str, TensorRecord], rank: int, parallel: Parallel
) -> dict[str, torch.Tensor]:
    """Return tensors to read what a rank's exchanges kept into, by name."""
    prefix = f"rank/{rank}/"
    return {
        path.removeprefix(prefix): torch.zeros(
            record.shape, dtype=dtype_named(record.dtype), device=parallel.device
        )
        for path, record in saved.items()
        if path.startswith(prefix + _EXCHANGE)
    }


def restore_exchanges(
    parallel: Parallel, optimizer: torch.optim.Optimizer | None, kept: Mapping[str, torch.Tensor]
) -> None:
    """Make exchanges go on with what `kept_by_exchanges` returned; nothing is left out without an entry."""
    for prefix, exchange in _exchanges(parallel, optimizer):
        exchange.restore(
            {name.removeprefix(prefix): tensor for name, tensor in kept.items() if name.startswith(prefix)}
        )


def rotary_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state of each dynamic rotary embedding of a model, by its name in a checkpoint."""
    return {name: _state_of_rotary(module, kind) for name, module, kind in _embeddings(model)}


def restore_rotary_state(model: nn.Module, states: Mapping[str, torch.Tensor]) -> None:
    """Restore states from `rotary_state`; embeddings that have none there begin anew."""
    for name, module, kind in _embeddings(model):
        if name in states:
            length, scaling, *frequencies = states[name].tolist()
            setattr(module, f"{kind}{_LENGTH}", int(length))
            module.attention_scaling = scaling
            before = getattr(module, f"{kind}{_FREQUENCIES}")
            # A new tensor: the buffer may be the one that keeps the original frequencies.
            module.register_buffer(f"{kind}{_FREQUENCIES}", before.new_tensor(frequencies), persistent=False)


def _digest(buffer: torch.Tensor) -> bytes:
    held = buffer.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.blake2b(held.numpy().tobytes(), digest_size=16).digest()


def _pieces_of_state(owned: Owned, state: Mapping[str, Any]) -> Iterator[Piece]:
    """Yield the pieces that are saved once per parameter: the owner of its first element writes them."""
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and local_part(value).shape == owned.local.shape:
            yield _part(owned, f"{_ELEMENTS}/{key}/{owned.name}", value)
        elif isinstance(value, torch.Tensor):
            if value.dim() and not _is_whole(owned):
                raise CheckpointError(
                    f"the optimizer keeps {key!r} of shape {list(value.shape)} for a part of {owned.name}, "
                    "which does not describe the other parts: use a Plan with shard=none, or "
                    "optimizer.whole=true (shoal.parallel.WholeParameters)"
                )
            if owned.is_first:
                yield Piece.whole(f"{_TENSOR}/{key}/{owned.name}", local_part(value).detach().contiguous())
        elif isinstance(value, (bool, int, float)):
            dtype = {bool: torch.bool, int: torch.int64, float: torch.float64}[type(value)]
            if owned.is_first:
                yield Piece.whole(f"{_NUMBER}/{key}/{owned.name}", torch.tensor(value, dtype=dtype))
        elif value is not None:
            raise CheckpointError(
                f"the optimizer keeps a {type(value).__name__} as {key!r} of {owned.name}, and a checkpoint "
                "holds only tensors and numbers"
            )


def _part(owned: Owned, path: str, tensor: torch.Tensor) -> Piece:
    held = local_part(tensor).detach()
    return Piece(path, owned.shape, owned.start, owned.stop, held.contiguous(), _region(owned))


def _is_whole(owned: Owned) -> bool:
    return owned.cut is None and owned.stop - owned.start == math.prod(owned.shape)


def _saved_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of a model that belong to its state, by name."""
    passing = {
        f"{prefix}.{name}".removeprefix(".")
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    return {name: buffer.detach() for name, buffer in model.named_buffers() if name not in passing}


def _fixed(tensors: Mapping[str, torch.Tensor]) -> list[Piece]:
    return [Piece.whole(f"fixed/{name}", tensor) for name, tensor in tensors.items()]


def _frozen_piece(frozen: Frozen) -> Piece:
    flat, start = frozen.local.contiguous().view(-1), frozen.start
    stop, region = start + flat.numel(), _region(frozen)
    return Piece(f"fixed/{frozen.name}", frozen.shape, start, stop, flat, region, is_constant=True)


def _region(part: Owned | Frozen) -> Region | None:
    if part.cut is None:
        return None
    return Region.whole(part.shape).narrow(part.cut.dim, part.cut.offset, part.cut.length)


def _share(owned: Sequence[Owned]) -> list[Owned]:
    """Assign parameters that ranks share: the largest first, each to the sharer with the least."""
    held: dict[Axis, list[int]] = {}
    mine = []
    for candidate in sorted(owned, key=lambda item: item.start - item.stop):
        if candidate.family.tied_ranks is not None and candidate.family.tied_ranks.index > 0:
            continue
        sharers = candidate.family.replicate
        sizes = held.setdefault(sharers, [0] * sharers.size)
        least = sizes.index(min(sizes))
        sizes[least] += candidate.stop - candidate.start
        if least == sharers.index:
            mine.append(candidate)
    return mine


def _exchanges(
    parallel: Parallel, optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[str, Exchanging]]:
    for stage, strategy in enumerate(parallel.strategies):
        for bucket, exchange in strategy.exchanges().items():
            yield f"{_EXCHANGE}{stage}/{bucket}/", exchange
    for name, summed in exchange_of(optimizer, parallel).exchanges().items():
        yield f"{_OF_LOCAL_UPDATES}{name}/", summed


def _embeddings(model: nn.Module) -> Iterator[tuple[str, Any, str]]:
    """Yield the name, the module and the prefix of its attributes of each dynamic embedding."""
    for name, module in model.named_modules():
        kinds: Any = getattr(module, "rope_type", None)
        by_layers = kinds.items() if isinstance(kinds, dict) else [("", kinds)]
        for layers, kind in by_layers:
            prefix = f"{layers}_" if layers else ""
            if isinstance(kind, str) and "dynamic" in kind and hasattr(module, f"{prefix}{_FREQUENCIES}"):
                yield f"{_ROTARY}{name}.{prefix}{_FREQUENCIES}", module, prefix


def _state_of_rotary(module: Any, kind: str) -> torch.Tensor:
    length = getattr(module, f"{kind}{_LENGTH}", module.max_seq_len_cached)
    numbers = torch.tensor([float(length), float(module.attention_scaling)], dtype=torch.float64)
    return torch.cat([numbers, getattr(module, f"{kind}{_FREQUENCIES}").detach().double().cpu().flatten()])
