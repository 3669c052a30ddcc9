"""An optimizer's `state` that is brought from disk when somebody looks at it."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

_State = dict[torch.Tensor, dict[str, Any]]


class LazyState(defaultdict):
    """The `state` of a parked optimizer whose state is coded on disk.

    Expanding it takes time and room on disk, and most runs end without anybody asking for it.

    Args:
        give: Returns the state; called once.
    """

    def __init__(self, give: Callable[[], _State]) -> None:
        super().__init__(dict)
        self._give: Callable[[], _State] | None = give

    def _fill(self) -> None:
        give, self._give = self._give, None
        if give is not None:
            try:
                self.update(give())
            except BaseException:
                self._give = give
                raise

    @override
    def __getitem__(self, key: Any) -> Any:
        self._fill()
        return super().__getitem__(key)

    @override
    def __contains__(self, key: object) -> bool:
        self._fill()
        return super().__contains__(key)

    @override
    def __iter__(self) -> Any:
        self._fill()
        return super().__iter__()

    @override
    def __len__(self) -> int:
        self._fill()
        return super().__len__()

    @override
    def keys(self) -> Any:
        """Return the parameters."""
        self._fill()
        return super().keys()

    @override
    def values(self) -> Any:
        """Return the states."""
        self._fill()
        return super().values()

    @override
    def items(self) -> Any:
        """Return pairs of parameter and state."""
        self._fill()
        return super().items()

    @override
    def get(self, key: Any, default: Any = None) -> Any:
        """Return the state of `key`, or `default`."""
        self._fill()
        return super().get(key, default)

    @override
    def copy(self) -> defaultdict:
        """Return an ordinary copy."""
        return self.__copy__()

    @override
    def __copy__(self) -> defaultdict:
        self._fill()
        return defaultdict(dict, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> defaultdict:
        return copy.deepcopy(self.__copy__(), memo)

    @override
    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self.items()))
