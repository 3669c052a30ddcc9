"""Lightning callbacks that show what paging does: live, as a progress bar, and as a report."""

from __future__ import annotations

from mt_lightning.callbacks.access_recorder import AccessRecorder
from mt_lightning.callbacks.monitor import PagingMonitor
from mt_lightning.callbacks.progress import PagingProgressBar
from mt_lightning.callbacks.report import PagingReport
from mt_lightning.callbacks.trace import PagingTrace

__all__ = ["AccessRecorder", "PagingMonitor", "PagingProgressBar", "PagingReport", "PagingTrace"]
