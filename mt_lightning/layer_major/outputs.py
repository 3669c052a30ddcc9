"""What `on_train_batch_end` gets for a batch whose step has not run yet."""

from __future__ import annotations

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
