"""Spans of all threads, and gauges beside them, as a trace that Perfetto and Chrome open.

[Note: lanes] A viewer draws the spans of a track inside each other, so they must not overlap in any
other way. Those of one thread do where code changes places in mid-span, as micro-batches do that
run unit by unit. Such a span goes to a second lane of its thread.
"""

from __future__ import annotations

import gzip
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SAMPLE_NS = 500_000
_MAX_EVENTS = 1 << 20
_PROCESS = 1

Gauge = Callable[[], Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Event:
    """A span; times are those of `time.perf_counter_ns`."""

    thread: str
    phase: str
    what: str
    begin_ns: int
    end_ns: int
    nbytes: int

    @property
    def name(self) -> str:
        """What a viewer writes on it."""
        return f"{self.phase} ({self.what})" if self.what else self.phase


class TraceRecorder:
    """Keeps the spans of all threads, and the gauges as they were at most every half millisecond.

    Args:
        gauges: For each group, what to call for its values; on any thread.
        max_events: Recording ends there.
    """

    def __init__(self, gauges: Mapping[str, Gauge], max_events: int = _MAX_EVENTS) -> None:
        self.events: list[Event] = []
        self.samples: list[tuple[int, str, dict[str, float]]] = []
        self._gauges = gauges
        self._max_events = max_events
        self._sampled_ns = 0
        self._lock = threading.Lock()

    @property
    def full(self) -> bool:
        """Whether later spans are left out."""
        return len(self.events) >= self._max_events

    def heard(self, phase: str, what: str, begin_ns: int, end_ns: int, nbytes: int) -> None:
        """Keep a span of the calling thread."""
        self.add(threading.current_thread().name, phase, what, begin_ns, end_ns, nbytes)
        if end_ns - self._sampled_ns >= _SAMPLE_NS and self._lock.acquire(blocking=False):
            try:
                self._sample()
            finally:
                self._lock.release()

    def add(
        self, thread: str, phase: str, what: str, begin_ns: int, end_ns: int, nbytes: int = 0
    ) -> None:
        """Keep a span of a thread, or of a track that is none."""
        if not self.full:
            self.events.append(Event(thread, phase, what, begin_ns, end_ns, nbytes))

    def _sample(self) -> None:
        self._sampled_ns = now_ns = time.perf_counter_ns()
        if not self.full:
            for group, gauge in self._gauges.items():
                self.samples.append((now_ns, group, dict(gauge())))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as JSON; compressed where the name ends with `.gz`."""
        text = json.dumps(self.to_json(), separators=(",", ":")).encode()
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text, 6) if path.suffix == ".gz" else text)

    def to_json(self) -> dict[str, Any]:
        """Return the trace in the Trace Event Format; its times are microseconds."""
        events = sorted(self.events, key=lambda e: (e.begin_ns, -e.end_ns))
        start_ns = events[0].begin_ns if events else 0
        out: list[dict[str, Any]] = [_meta("process_name", 0, name=f"megatrain {os.getpid()}")]
        threads = list(dict.fromkeys(e.thread for e in events))
        track = 0
        for thread in sorted(threads, key=_order):
            for number, lane in enumerate(_lanes(e for e in events if e.thread == thread)):
                track += 1
                name = thread if not number else f"{thread} ({number + 1})"
                out.append(_meta("thread_name", track, name=name))
                out.append(_meta("thread_sort_index", track, sort_index=track))
                out.extend(_complete(event, track, start_ns) for event in lane)
        for at_ns, group, values in self.samples:
            at_us = (at_ns - start_ns) / 1e3
            out.append({"ph": "C", "pid": _PROCESS, "name": group, "ts": at_us, "args": values})
        return {"traceEvents": out, "displayTimeUnit": "ms"}


def _lanes(events: Iterable[Event]) -> list[list[Event]]:
    """Sort spans, which come by their begin, into lanes in which they lie inside each other."""
    lanes: list[list[Event]] = []
    open_ends: list[list[int]] = []
    for event in events:
        for ends in open_ends:
            while ends and ends[-1] <= event.begin_ns:
                ends.pop()
        nests = [not ends or event.end_ns <= ends[-1] for ends in open_ends]
        if True not in nests:
            nests.append(True)
            lanes.append([])
            open_ends.append([])
        number = nests.index(True)
        lanes[number].append(event)
        open_ends[number].append(event.end_ns)
    return lanes


def _complete(event: Event, track: int, start_ns: int) -> dict[str, Any]:
    out: dict[str, Any] = {
        "ph": "X",
        "pid": _PROCESS,
        "tid": track,
        "cat": event.phase,
        "name": event.name,
        "ts": (event.begin_ns - start_ns) / 1e3,
        "dur": (event.end_ns - event.begin_ns) / 1e3,
    }
    if event.nbytes:
        out["args"] = {"bytes": event.nbytes}
    return out


def _meta(kind: str, track: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": _PROCESS, "tid": track, "name": kind, "args": args}


def _order(thread: str) -> tuple[int, str]:
    """Show steps first, then the training thread, the update worker, and those that do I/O."""
    first = ("steps", "MainThread", "megatrain-update", "megatrain-io")
    return next((i for i, each in enumerate(first) if thread.startswith(each)), len(first)), thread
