"""Finding out where a model's weights are used, whoever uses them.

A module's parameters are used in its own forward, as a rule called by its parent's. But a forward may also
call the children of a block and not the block, read the weight of another module, or be a method that is not
`forward` at all. So what has to happen before a weight is used hangs on the module that owns it: it happens
when the module is called, and when one of its parameters is read as an attribute or listed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from shoal.errors import LayoutError

__all__ = ["refuse_copies", "watch", "watch_calls"]


class _Watched(dict[str, Any]):
    """A module's parameters by name, which tells before one of them is read."""

    def __init__(
        self, parameters: dict[str, Any], before: Callable[[], object], is_forward_open: Callable[[], bool]
    ) -> None:
        super().__init__(parameters)
        self._before = before
        self._is_forward_open = is_forward_open

    def __getitem__(self, name: str) -> Any:
        if not torch.compiler.is_compiling():
            self._before()
        return super().__getitem__(name)

    def items(self) -> Any:
        """The parameters with their names."""
        self._before_list()
        return super().items()

    def values(self) -> Any:
        """The parameters."""
        self._before_list()
        return super().values()

    def _before_list(self) -> None:
        # A loss may list them to add a penalty; whoever lists them at rest looks at names and sizes.
        if self._is_forward_open():
            self._before()


def watch(module: nn.Module, before: Callable[[], object], is_forward_open: Callable[[], bool]) -> None:
    """Has `before` called before any of a module's own parameters is used; its children's are theirs.

    Of parameters that were read earlier, and are kept elsewhere, as recurrent layers do, `watch_calls` tells.

    Args:
        module: Owns the parameters.
        before: Called when one of its parameters is read, or they are listed.
        is_forward_open: Whether a forward runs, or has run since the last backward: only then is listing them
            a use.
    """
    module._parameters = _Watched(module._parameters, before, is_forward_open)


def watch_calls(module: nn.Module, before: Callable[[], object]) -> None:
    """Has `before` called before each forward of a module."""

    def come(module: nn.Module, arguments: Any) -> None:
        before()

    module.register_forward_pre_hook(come)


def refuse_copies(module: nn.Module, stale: Callable[[], str | None]) -> None:
    """Refuses copies and `load_state_dict` of a module, and `state_dict` where its weights are stale.

    Args:
        module: With its children.
        stale: Why its weights are not the owners'; None where they are.
    """

    def refuse(memory: dict[int, Any]) -> NoReturn:
        raise LayoutError(
            "a model whose weights come from several ranks was to be copied, with old weights or none",
            possible="clones of named_parameters() for an average; full_state_dict() for a whole model",
            change="take one of these from what shoal.parallelize returned",
        )

    def before_state(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        reason = stale()
        if reason is not None:
            raise LayoutError(
                f"the state_dict() of the model itself was asked for, whose weights {reason}",
                possible="of what shoal.parallelize returned: state_dict() for this rank's part, or "
                "full_state_dict() for the whole model on rank 0; or module.state_dict() within gathered()",
                change="call one of these",
            )

    def before_load(*_: Any) -> None:
        raise LayoutError(
            "a state is loaded into the model itself, and would be lost: its weights come from their owners",
            possible="load_state_dict() or load_full_state_dict() of what shoal.parallelize returned",
            change="call one of these",
        )

    for each in module.modules():
        setattr(each, "__deepcopy__", refuse)  # noqa: B010, which types of modules do not know
        each.register_state_dict_pre_hook(before_state)
        each.register_load_state_dict_pre_hook(before_load)
