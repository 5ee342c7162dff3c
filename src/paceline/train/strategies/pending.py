"""Parameters whose new values are on their way: whoever reads one waits for it.

Between `optimizer.step()` and the next forward pass a user may read parameters in any way: a moving average,
a norm that is logged, a copy of the model. While an update is on its way its parameters are of the class
`Pending`, which sees every function of torch that is given one; from the forward pass on, before which
modules wait for what they use, they are plain parameters again and cost nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from paceline.train.strategies.awaited import KNOWN

#: where such a parameter keeps what brings it here
_ARRIVE = "_paceline_arrive"
_GRAD: Any = vars(Tensor.__base__)["grad"]
#: what does not look at values; optimizers' `zero_grad` is made of it
_LOOKS = KNOWN | {_GRAD.__get__, _GRAD.__set__}


class Pending(nn.Parameter):
    """A parameter that is not what it will be in a moment."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _LOOKS:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        for value in tree_iter((args, kwargs)):
            arrive(value)
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        arrive(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        arrive(self)
        return self.__reduce_ex__(protocol)


def await_with(parameter: nn.Parameter, bring: Callable[[], None]) -> None:
    """From now on, whoever reads the parameter calls `bring` first, which waits for the value and says
    `here`.
    """
    if type(parameter) is nn.Parameter:
        parameter.__class__ = Pending
        setattr(parameter, _ARRIVE, bring)


def here(parameter: nn.Parameter) -> None:
    """The value has come, or never will."""
    if type(parameter) is Pending:
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
        delattr(parameter, _ARRIVE)


def arrive(value: Any) -> None:
    """Waits for a value, if it is one that has to be waited for."""
    if type(value) is Pending:
        getattr(value, _ARRIVE)()
