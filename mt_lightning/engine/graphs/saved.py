"""What autograd saves of one unit: values that are kept, and weights that only have an address.

[Note: an address instead of a view]
Autograd saves weights as views of the frame they are bound to. Kept as they are, they would hold
the frame until backward. So a view is replaced by its place in the page, and made again from the
frame that the page is bound to in backward.
"""

from __future__ import annotations

from typing import Any

import torch

from mt_lightning.errors import StepError
from mt_lightning.pages.table import Page


class Saved:
    """One tensor in the order in which it was saved.

    Attributes:
        holder: What torch's checkpoint made of it, once the graph has been dropped.
    """

    __slots__ = ("__weakref__", "holder")

    def __init__(self) -> None:
        self.holder: Any = None

    def forget(self) -> torch.Tensor:
        """Let go of the memory; return a tensor of the same shape, dtype and device."""
        raise NotImplementedError


class Value(Saved):
    """A tensor that the unit computed or received.

    Args:
        tensor: The tensor.
        lease: Dies with the last value of the graph.
    """

    __slots__ = ("_lease", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor, lease: object) -> None:
        super().__init__()
        # As it is, a result would hold the node that saves it: a cycle.
        self._tensor: torch.Tensor | None = tensor.detach()
        self._version = tensor._version
        self._lease: object = lease

    def get(self, unit: str) -> torch.Tensor:
        """Return the tensor.

        Raises:
            StepError: It was changed in place since it was saved.
        """
        tensor = self._tensor
        assert tensor is not None
        if tensor._version != self._version:
            raise changed(
                f"a tensor of shape {list(tensor.shape)} that {unit} saved for backward has been "
                "modified by an inplace operation",
                self._version,
                tensor._version,
            )
        return tensor

    def forget(self) -> torch.Tensor:
        """Let go of the tensor."""
        tensor, self._tensor, self._lease = self._tensor, None, None
        assert tensor is not None
        return tensor


class Weight(Saved):
    """The place of a view of a bound weight.

    Args:
        tensor: The view.
        page: The page it belongs to.
        param: The parameter that begins at or before it.
        lease: Dies with the last weight of the graph.
    """

    __slots__ = (
        "_conj", "_device", "_dtype", "_lease", "_neg", "_offset", "_page_version", "_param",
        "_shape", "_stride", "_version", "page",
    )  # fmt: skip

    def __init__(
        self, tensor: torch.Tensor, page: Page, param: torch.Tensor, lease: object
    ) -> None:
        super().__init__()
        self.page = page
        self._offset = tensor.storage_offset()
        self._shape, self._stride = tensor.shape, tensor.stride()
        self._dtype, self._device = tensor.dtype, tensor.device
        self._conj, self._neg = tensor.is_conj(), tensor.is_neg()
        self._param, self._version, self._page_version = param, param._version, page.version
        self._lease: object = lease

    def get(self, unit: str, plane: torch.Tensor) -> torch.Tensor:
        """Return the view, made from the page's bytes.

        Args:
            unit: Name of the unit, for the error.
            plane: The page's weight plane (uint8), bound now.

        Raises:
            StepError: The weight was changed since it was saved.
        """
        before, now = self._version + self._page_version, self._param._version + self.page.version
        if now != before:
            raise changed(
                f"a weight of {unit} that was saved for backward has been modified since, by an "
                "optimizer step or by an inplace operation",
                before,
                now,
            )
        empty = torch.empty(0, dtype=self._dtype, device=self._device)
        view = empty.set_(plane.untyped_storage(), self._offset, self._shape, self._stride)  # pyright: ignore[reportCallIssue, reportArgumentType]
        view = view.conj() if self._conj else view
        return torch._neg_view(view) if self._neg else view  # pyright: ignore[reportPrivateImportUsage]

    def forget(self) -> torch.Tensor:
        """Let go of the page."""
        self._lease = None
        return torch.empty((), dtype=self._dtype, device=self._device).expand(self._shape)


def changed(what: str, before: int, now: int) -> StepError:
    """Say what plain PyTorch says."""
    return StepError(
        f"one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: {what} (at version {now}, expected version {before}). Run the forward again "
        "before backward, or change a copy."
    )


def num_bytes(tensor: torch.Tensor, seen: set[int]) -> int:
    """Return the bytes of a tensor's storages that are not in `seen`, and add them to it."""
    if tensor.layout is not torch.strided:
        if tensor.layout is torch.sparse_coo:
            parts = (tensor._indices(), tensor._values())
        elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            parts = (tensor.crow_indices(), tensor.col_indices(), tensor.values())
        elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            parts = (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
        else:
            return tensor.numel() * tensor.element_size()
        return sum(num_bytes(part, seen) for part in parts)
    storage = tensor.untyped_storage()
    key = storage._cdata
    if key in seen:
        return 0
    seen.add(key)
    return storage.nbytes()
