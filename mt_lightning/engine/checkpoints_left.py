"""Ends checkpoints whose function has raised, where torch leaves that to the garbage collector.

Up to torch 2.10 the contexts of such a checkpoint (ours, and its hooks of saved tensors) are left
when the traceback dies. By then others may stand above them, or the run may have begun anew.
"""

from __future__ import annotations

import inspect

from torch.utils.checkpoint import checkpoint

_CODE = inspect.unwrap(checkpoint).__code__


def end_checkpoints(error: BaseException) -> None:
    """End the checkpoints that an exception has come through, the innermost first.

    Args:
        error: What was raised; its traceback stays.
    """
    left, traceback = [], error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code is _CODE:
            left.append(traceback.tb_frame.f_locals.get("gen"))
        traceback = traceback.tb_next
    for generator in reversed(left):
        if generator is not None:
            generator.close()
