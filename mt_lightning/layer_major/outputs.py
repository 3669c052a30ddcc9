"""What `on_train_batch_end` gets for a batch whose step has not run yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from mt_lightning.errors import StepError


class NotYet(dict[str, Any]):
    """Empty outputs; whoever asks for one learns why there is none."""

    def __missing__(self, key: str) -> Any:
        """Raise StepError: nobody may take nothing for something."""
        raise StepError(
            f"outputs[{key!r}] is not known yet: with layer_major=True the steps of a window run "
            "when its last batch has come. Read it there, log it by self.log, or set "
            "layer_major=False."
        )


class OnDemand(dict[str, Any]):
    """Outputs that are there as soon as somebody looks; the step then runs at once.

    Args:
        run: Runs what was started and returns the outputs.
    """

    def __init__(self, run: Callable[[], dict[str, Any]]) -> None:
        super().__init__()
        self._run: Callable[[], dict[str, Any]] | None = run

    def _fill(self) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            super().update(run())

    def __getitem__(self, key: str) -> Any:
        self._fill()
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._fill()
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        self._fill()
        return super().__iter__()

    def __len__(self) -> int:
        self._fill()
        return super().__len__()

    def __eq__(self, other: object) -> bool:
        self._fill()
        return super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        self._fill()
        return super().__repr__()

    def get(self, key: str, default: Any = None) -> Any:
        """Return the output with that name."""
        self._fill()
        return super().get(key, default)

    def keys(self) -> Any:
        """Return the names."""
        self._fill()
        return super().keys()

    def values(self) -> Any:
        """Return the outputs."""
        self._fill()
        return super().values()

    def items(self) -> Any:
        """Return names and outputs."""
        self._fill()
        return super().items()

    def copy(self) -> dict[str, Any]:
        """Return a plain dict."""
        self._fill()
        return dict(super().items())
