"""Peak memory of a script in a process of its own, measured from outside every 10 ms.

Anonymous memory is RssAnon + RssShmem: what the process cannot give back without swapping. File
memory (RssFile) is counted apart. Children are included. Phases of the script are told apart by the
marks that it writes; both sides read the same monotonic clock.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..forked.process import Process

ROOT = Path(__file__).parents[2]
INTERVAL_S = 0.01
MIB = 1 << 20
GIB = 1 << 30

_MARKS_VARIABLE = "MEASURE_MARKS_FILE"
_RESULT_VARIABLE = "MEASURE_RESULT_FILE"


# --- in the measured script ----------------------------------------------------------------------


def mark(name: str) -> None:
    """Say that a phase begins; outside of a measurement this does nothing."""
    path = os.environ.get(_MARKS_VARIABLE)
    if path:
        with open(path, "a") as file:
            file.write(json.dumps([name, asdict(_sample(os.getpid()))]) + "\n")


def report(**values: Any) -> None:
    """Hand values to the measuring process; outside of a measurement print them."""
    text = json.dumps(values)
    path = os.environ.get(_RESULT_VARIABLE)
    if path:
        Path(path).write_text(text)
    else:
        sys.stdout.write(text + "\n")


# --- in the measuring process --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Memory of a process and its descendants at one moment."""

    time_s: float
    anon_bytes: int
    file_bytes: int


@dataclass(kw_only=True)
class Measurement:
    """What a script used and said."""

    samples: list[Sample] = field(default_factory=list)
    marks: list[tuple[str, Sample]] = field(default_factory=list)
    """Names of phases, and the memory that the script saw itself use when they began."""
    result: dict[str, Any] = field(default_factory=dict)

    def between(self, start: str | None = None, end: str | None = None) -> list[Sample]:
        """Return the samples from the first mark `start` to the first mark `end`."""
        first = self._time_of(start, float("-inf"))
        last = self._time_of(end, float("inf"))
        found = [sample for sample in self.samples if first <= sample.time_s <= last]
        assert found, f"no sample between {start} and {end}; marks: {self.marks}"
        return found

    def peak_bytes(self, start: str | None = None, end: str | None = None) -> int:
        """Return the peak of anonymous memory between two marks."""
        return max(sample.anon_bytes for sample in self.between(start, end))

    def peak_total_bytes(self, start: str | None = None, end: str | None = None) -> int:
        """Return the peak of anonymous and file memory together between two marks."""
        return max(sample.anon_bytes + sample.file_bytes for sample in self.between(start, end))

    def bytes_at(self, name: str) -> int:
        """Return the anonymous memory at a mark."""
        return self._at(name).anon_bytes

    def file_growth_bytes(self, start: str, end: str) -> int:
        """Return by how much file memory exceeded, between two marks, what it was at the first."""
        samples = self.between(start, end)
        return max(sample.file_bytes for sample in samples) - self._at(start).file_bytes

    def summary(self) -> dict[str, Any]:
        """Return peak and final memory of every phase in MiB, and the result: ready for JSON."""
        names = [None, *[name for name, _ in self.marks], None]
        phases = {}
        for start, end in zip(names, names[1:], strict=False):
            samples = self.between(start, end) if self.has_samples(start, end) else []
            phases[str(start)] = {
                "peak_anon_mib": round(max((s.anon_bytes for s in samples), default=0) / MIB, 1),
                "peak_file_mib": round(max((s.file_bytes for s in samples), default=0) / MIB, 1),
            }
        return {"phases": phases, "result": self.result}

    def has_samples(self, start: str | None, end: str | None) -> bool:
        """Say whether a phase was long enough to be seen."""
        first = self._time_of(start, float("-inf"))
        last = self._time_of(end, float("inf"))
        return any(first <= sample.time_s <= last for sample in self.samples)

    def _time_of(self, name: str | None, default: float) -> float:
        return default if name is None else self._at(name).time_s

    def _at(self, name: str) -> Sample:
        found = [sample for each, sample in self.marks if each == name]
        assert found, f"the script never marked {name!r}; marks: {self.marks}"
        return found[0]


def run_measured(
    module: str,
    *arguments: str,
    timeout_s: float = 900.0,
    imported: bool = False,
) -> Measurement:
    """Run `python -m module arguments` in a process of its own and measure it.

    Args:
        module: Dotted name, importable from the root of the repository.
        arguments: Command line of the script.
        timeout_s: The script is killed after this time.
        imported: Fork the process from one that has imported everything: its anonymous memory is
            then what it would be after the imports, and it starts in no time.

    Raises:
        AssertionError: if the script fails; the message ends with what it wrote.
    """
    with tempfile.TemporaryDirectory() as directory:
        marks, result = Path(directory, "marks"), Path(directory, "result")
        output = Path(directory, "output")
        words = ["-m", module, *arguments]
        settings = {_MARKS_VARIABLE: str(marks), _RESULT_VARIABLE: str(result)}
        environment = {**os.environ, **settings}
        if imported:
            process = Process(words, output=output, environment=environment)
            samples = _sample_until_exit(process, timeout_s)
        else:
            with output.open("w") as stream:
                process = subprocess.Popen(
                    [sys.executable, *words],
                    cwd=ROOT,
                    env=environment,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                )
                samples = _sample_until_exit(process, timeout_s)
        if process.returncode != 0:
            tail = output.read_text()[-4000:]
            raise AssertionError(f"{' '.join(words)} exited with {process.returncode}:\n{tail}")
        lines = marks.read_text().splitlines() if marks.exists() else []
        return Measurement(
            samples=samples,
            marks=[(name, Sample(**fields)) for name, fields in map(json.loads, lines)],
            result=json.loads(result.read_text()) if result.exists() else {},
        )


def _sample_until_exit(process: subprocess.Popen | Process, timeout_s: float) -> list[Sample]:
    samples = []
    deadline = time.monotonic() + timeout_s
    next_time = time.monotonic()
    while process.poll() is None:
        if time.monotonic() > deadline:
            process.kill()
            process.wait()
            raise AssertionError(f"{process.args} ran for more than {timeout_s} s")
        samples.append(_sample(process.pid))
        next_time = max(next_time + INTERVAL_S, time.monotonic())
        time.sleep(max(0.0, next_time - time.monotonic()))
    return samples


def _sample(pid: int) -> Sample:
    anon = file = 0
    for each in _family(pid):
        fields = _status(each)
        anon += fields.get("RssAnon", 0) + fields.get("RssShmem", 0)
        file += fields.get("RssFile", 0)
    return Sample(time_s=time.monotonic(), anon_bytes=anon, file_bytes=file)


def _family(pid: int) -> list[int]:
    """Return a process and its descendants; those that end meanwhile are left out."""
    found, waiting = [], [pid]
    while waiting:
        current = waiting.pop()
        found.append(current)
        try:
            for task in os.listdir(f"/proc/{current}/task"):
                children = Path(f"/proc/{current}/task/{task}/children").read_text()
                waiting.extend(map(int, children.split()))
        except OSError:
            continue
    return found


def _status(pid: int) -> dict[str, int]:
    """Return the memory fields of a process in bytes; nothing when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines if line.startswith("Rss"))
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}
