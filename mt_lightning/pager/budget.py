"""The ceiling on host memory: bytes are reserved before they are allocated."""

from __future__ import annotations

from collections import Counter


class Reservation:
    """Bytes set aside for one purpose until freed."""

    def __init__(self, budget: Budget, nbytes: int, purpose: str) -> None:
        self._budget = budget
        self.nbytes = nbytes
        self.purpose = purpose

    def shrink(self, nbytes: int) -> None:
        """Give back what is more than `nbytes`."""
        assert nbytes <= self.nbytes
        self._budget._give_back(self, nbytes)

    def free(self) -> None:
        """Give the bytes back; a second call does nothing."""
        self._budget._give_back(self)


class Budget:
    """Counts reserved bytes against a limit.

    Only the thread that trains reserves and frees, so that what fits never depends on timing.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self.by_purpose: Counter[str] = Counter()

    @property
    def available_bytes(self) -> int:
        """Bytes that can still be reserved."""
        return self.limit_bytes - self.used_bytes

    def reserve(self, nbytes: int, purpose: str) -> Reservation:
        """Set bytes aside; the caller has made sure that they are available."""
        assert nbytes <= self.available_bytes, (purpose, nbytes, self.available_bytes)
        self.used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        self.by_purpose[purpose] += nbytes
        return Reservation(self, nbytes, purpose)

    def describe(self) -> str:
        """Return what is reserved, by purpose, for an error."""
        return ", ".join(
            f"{purpose} {nbytes / 2**20:.2f} MiB"
            for purpose, nbytes in self.by_purpose.items()
            if nbytes
        )

    def _give_back(self, reservation: Reservation, left_bytes: int = 0) -> None:
        self.used_bytes -= reservation.nbytes - left_bytes
        self.by_purpose[reservation.purpose] -= reservation.nbytes - left_bytes
        reservation.nbytes = left_bytes
