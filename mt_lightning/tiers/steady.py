"""A store and a commit log that are patient with their drive and say when it stalls."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from mt_lightning.tiers.commit import CommitLog, CommitRecord
from mt_lightning.tiers.ledger import DEVICE
from mt_lightning.tiers.link import DeviceFrame, Download, Link, Upload
from mt_lightning.tiers.patience import Patience
from mt_lightning.tiers.spans import Span
from mt_lightning.tiers.store import Store
from mt_lightning.tiers.watch import Watch, Watched
from mt_lightning.tiers.wrapped import WrappedStore

T = TypeVar("T")

_IN_PIECES = frozenset({"read", "write"})


class SteadyStore(WrappedStore):
    """Runs every operation of a store under patience and a watch."""

    def __init__(self, inner: Store, patience: Patience, watch: Watch) -> None:
        super().__init__(inner)
        self._patience = patience
        self._watch = watch
        patience.relieve = self.trim

    def _run(self, op: str, name: str, nbytes: int, call: Callable[[], T], offset: int = 0) -> T:
        what = f"{op} of {nbytes} bytes at offset {offset}" if op in _IN_PIECES else op

        def watched() -> T:
            with self._watch.over(f"{what} of {name}" if what is op else f"{what}, {name},"):
                return call()

        return self._patience.run(what, nbytes, watched, again=op != "sync")


class SteadyLog(CommitLog):
    """Writes commit records under patience and a watch; each attempt writes all of a record."""

    def __init__(
        self, directories: Sequence[str | os.PathLike[str]], patience: Patience, watch: Watch
    ) -> None:
        super().__init__(directories)
        self._patience = patience
        self._watch = watch

    def write(self, record: CommitRecord) -> None:
        """See `CommitLog.write`."""
        what = f"the commit record of step {record.step}"

        def watched() -> None:
            with self._watch.over(f"writing {what}"):
                super(SteadyLog, self).write(record)

        self._patience.run(what, record.nbytes, watched)


class WatchedLink(Link):
    """Says when the device takes too long."""

    def __init__(self, inner: Link, watch: Watch) -> None:
        self.inner = inner
        self.unified = inner.unified
        self.device = inner.device
        self.staging_bytes = inner.staging_bytes
        self.shared = inner.shared
        self._watch = watch

    def free_bytes(self) -> int | None:
        """See `Link.free_bytes`."""
        return self.inner.free_bytes()

    def frame(self, nbytes: int) -> DeviceFrame:
        """See `Link.frame`."""
        return self.inner.frame(nbytes)

    def mark(self, frame: DeviceFrame) -> None:
        """See `Link.mark`."""
        self.inner.mark(frame)

    def retire(self, frame: DeviceFrame) -> None:
        """See `Link.retire`."""
        self.inner.retire(frame)

    def upload(
        self, host: torch.Tensor, frame: DeviceFrame, after: Callable[[], object] | None = None
    ) -> Upload:
        """See `Link.upload`."""
        return self.inner.upload(host, frame, after)

    def taken(self, upload: Upload) -> None:
        """See `Link.taken`."""
        with self._over(upload):
            self.inner.taken(upload)

    def wait(self, upload: Upload) -> torch.Tensor:
        """See `Link.wait`."""
        with (
            self._over(upload),
            Span("wait for device", account=DEVICE, nbytes=upload.frame.nbytes),
        ):
            return self.inner.wait(upload)

    def download(self, tensor: torch.Tensor, into: torch.Tensor, *, add: bool = False) -> Download:
        """See `Link.download`."""
        return self.inner.download(tensor, into, add=add)

    def done(self, download: Download) -> torch.Tensor:
        """See `Link.done`."""
        with self._watch.over("a copy from the device"), Span("download", account=DEVICE):
            return self.inner.done(download)

    def close(self) -> None:
        """See `Link.close`."""
        self.inner.close()

    def _over(self, upload: Upload) -> Watched:
        return self._watch.over(f"a copy of {upload.frame.nbytes} bytes to the device")
