"""What paging did and where its time went; only ever grows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from mt_lightning.tiers import ledger
from mt_lightning.tiers.ledger import Ledger


@dataclass
class Stats:
    """Cumulative counters of one engine.

    Attributes:
        steps: Optimizer steps applied.
        skipped_steps: Steps dropped because of a non-finite gradient.
        commits: Commit records written.
        pins: Times a page was needed.
        faults: Pins that found the page absent or still on its way.
        reloads: Weight planes read from disk.
        evictions: Weight planes dropped from RAM.
        prefetches: Reads begun ahead of need.
        prefetches_used: Those whose page was needed while it was still in RAM.
        prefetches_wasted: Those whose page was dropped before it was needed.
        spills: Gradient planes written to disk.
        bytes_read: Payload bytes read from page files.
        bytes_written: Payload bytes written to page files.
        inputs_bytes: Bytes that units received and backward needed.
        inputs_spilled_bytes: Bytes of them written to disk; not part of `bytes_written`.
        inputs_read_bytes: Bytes of them read back; not part of `bytes_read`.
        inputs_offloaded_bytes: Bytes of them copied from the device to RAM.
        inputs_returned_bytes: Bytes of them copied back.
        compute_s: Time in code of the model: forward, backward, loss.
        recompute_s: Of it, units that ran again in backward.
        paging_s: Time the training thread spent on paging without waiting.
        stall_read_s: Time training waited for bytes of the drive.
        stall_write_s: Time training waited until the drive had taken bytes.
        stall_memory_s: Time training waited for memory.
        stall_device_s: Time training waited for bytes on their way to the device.
        stall_update_s: Time training waited for updates and commits.
        behind_read_s: Of the time waited for updates and memory, what the worker waited for reads.
        behind_write_s: The same for writes.
        update_s: Time the update worker was busy without waiting.
        update_read_s: Time it waited for reads.
        update_write_s: Time it waited for writes.
        drive_read_s: Time that at least one read was under way.
        drive_write_s: Time that at least one write was under way.
        graphs_kept: Executions of units that backward did not have to run again.
        graph_peak_bytes: Most bytes that graphs of units ever held.
        units_run: Units that ran in the last forward pass, where their graphs may be kept.
        units_kept: Those of them that backward did not have to run again.
        bytes_uploaded: Bytes of weights copied to the device.
        uploads_ahead: Copies of weights to the device begun ahead of need.
        bytes_downloaded: Bytes of gradients copied from the device.
        bytes_returned: Bytes of weights and optimizer state that were updated on the device, copied
            from it.
        vram_peak_bytes: Most bytes ever reserved on the device.
        ram_used_bytes: Bytes reserved now.
        ram_peak_bytes: Most bytes ever reserved.
    """

    steps: int = 0
    skipped_steps: int = 0
    commits: int = 0
    pins: int = 0
    faults: int = 0
    reloads: int = 0
    evictions: int = 0
    prefetches: int = 0
    prefetches_used: int = 0
    prefetches_wasted: int = 0
    spills: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    inputs_bytes: int = 0
    inputs_spilled_bytes: int = 0
    inputs_read_bytes: int = 0
    inputs_offloaded_bytes: int = 0
    inputs_returned_bytes: int = 0
    compute_s: float = 0.0
    recompute_s: float = 0.0
    paging_s: float = 0.0
    stall_read_s: float = 0.0
    stall_write_s: float = 0.0
    stall_memory_s: float = 0.0
    stall_device_s: float = 0.0
    stall_update_s: float = 0.0
    behind_read_s: float = 0.0
    behind_write_s: float = 0.0
    update_s: float = 0.0
    update_read_s: float = 0.0
    update_write_s: float = 0.0
    drive_read_s: float = 0.0
    drive_write_s: float = 0.0
    graphs_kept: int = 0
    graph_peak_bytes: int = 0
    units_run: int = 0
    units_kept: int = 0
    bytes_uploaded: int = 0
    uploads_ahead: int = 0
    bytes_downloaded: int = 0
    bytes_returned: int = 0
    vram_peak_bytes: int = 0
    ram_used_bytes: int = 0
    ram_peak_bytes: int = 0

    def snapshot(self) -> dict[str, float]:
        """Return all counters as a dict."""
        return asdict(self)

    def charge(self, training: Ledger, working: Ledger, drive_s: Callable[[str], float]) -> None:
        """Take over where time has gone until now.

        Args:
            training: The ledger of the training thread.
            working: That of the update worker.
            drive_s: Says for how long "read" and "write" have been under way.
        """
        mine, behind, its = training.totals(), training.behind, working.totals()
        self.recompute_s = mine.get(ledger.RECOMPUTE, 0.0)
        self.compute_s = mine.get(ledger.COMPUTE, 0.0) + self.recompute_s
        self.paging_s = mine.get(ledger.PAGING, 0.0)
        self.stall_read_s = mine.get(ledger.READ, 0.0)
        self.stall_write_s = mine.get(ledger.WRITE, 0.0)
        self.stall_memory_s = mine.get(ledger.MEMORY, 0.0)
        self.stall_device_s = mine.get(ledger.DEVICE, 0.0)
        self.stall_update_s = mine.get(ledger.UPDATE, 0.0)
        self.behind_read_s = behind.get(ledger.READ, 0.0)
        self.behind_write_s = behind.get(ledger.WRITE, 0.0)
        self.update_s = its.get(ledger.WORK, 0.0)
        self.update_read_s = its.get(ledger.READ, 0.0)
        self.update_write_s = its.get(ledger.WRITE, 0.0)
        self.drive_read_s, self.drive_write_s = drive_s("read"), drive_s("write")
