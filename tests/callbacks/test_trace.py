"""The trace holds what every thread did, in a form that viewers open."""

from __future__ import annotations

import gzip
import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.profilers import PyTorchProfiler

import mt_lightning as mt
from mt_lightning.callbacks.chrome_trace import TraceRecorder
from mt_lightning.tiers import spans

Fit = Callable[..., Trainer]


def check_viewable(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Check that tracks are named and spans lie inside each other; return them by track."""
    names = {
        event["tid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    tracks: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    assert len(tracks) == len(names)
    for event in trace["traceEvents"]:
        assert event["ph"] in "MXC"
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            tracks[names[event["tid"]]].append(event)
    for track in tracks.values():
        ends: list[float] = []
        for event in sorted(track, key=lambda e: (e["ts"], -e["dur"])):
            while ends and ends[-1] <= event["ts"] + 1e-6:
                ends.pop()
            assert not ends or event["ts"] + event["dur"] <= ends[-1] + 1e-6, event
            ends.append(event["ts"] + event["dur"])
    return tracks


@pytest.mark.parametrize("order", ["usual", "layer-major"])
def test_steps_are_traced_on_every_thread(fit: Fit, tmp_path: Path, order: str) -> None:
    path = tmp_path / "traces" / "trace.json"
    strategy = mt.MegaTrainStrategy(
        max_ram_gb=0.5, durability="step", layer_major=order == "layer-major", recompute=True
    )
    fit(
        [mt.PagingTrace(path, steps=(3, 4))],
        strategy=strategy,
        max_steps=6,
        accumulate_grad_batches=2,
    )
    assert not spans.listening()
    trace = json.loads(path.read_text())
    tracks = check_viewable(trace)
    steps = [e["name"] for e in tracks["steps"] if e["cat"] == "step"]
    assert steps == ["step (3)", "step (4)"]
    training = {e["name"] for lane in tracks if lane.startswith("MainThread") for e in tracks[lane]}
    assert {"training step", "backward", "end of batch"} <= training
    for unit in ("layers.0", "layers.1", "layers.2"):
        assert {f"forward ({unit})", f"recompute ({unit})"} <= training
        assert f"bind ({unit})" in training
    # Unit by unit, the last one goes on to its backward while it is bound.
    for unit in ("layers.0", "layers.1", "layers.2")[: 3 if order == "usual" else 2]:
        assert {f"rebind ({unit})", f"backward of ({unit})"} <= training
    (worker,) = (track for name, track in tracks.items() if name.startswith("megatrain-update"))
    phases = {e["cat"] for e in worker}
    assert {"step optimizer", "a commit", "wait for sync", "write record"} <= phases
    drive = [e for name, track in tracks.items() if name.startswith("megatrain-io") for e in track]
    assert {"write", "sync"} <= {e["cat"] for e in drive}
    assert all(e["args"]["bytes"] > 0 for e in drive if e["cat"] == "write")
    counters = {e["name"] for e in trace["traceEvents"] if e["ph"] == "C"}
    assert counters == {"memory of paging (MiB)", "waiting", "read ahead (MiB)"}


def test_a_trace_may_be_compressed_and_the_run_shorter(fit: Fit, tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    fit([mt.PagingTrace(path, steps=(2, 50))], max_steps=3)
    tracks = check_viewable(json.loads(gzip.decompress(path.read_bytes())))
    assert [e["name"] for e in tracks["steps"] if e["cat"] == "step"] == ["step (2)", "step (3)"]


def test_what_was_not_traced_is_said(fit: Fit, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="mt_lightning"):
        fit([mt.PagingTrace("never.json", steps=(7, 9))], max_steps=2)
        fit([mt.PagingTrace("never.json")], max_steps=2, strategy="auto")
    assert "training ended before step 7" in caplog.text
    assert "PagingTrace: the strategy is not megatrain" in caplog.text
    assert not Path("never.json").exists()


@pytest.mark.parametrize("steps", [(0, 3), (5, 4), (1,), (1, 2, 3)])
def test_wrong_steps_are_refused(steps: tuple[int, ...]) -> None:
    with pytest.raises(mt.ConfigError, match="steps="):
        mt.PagingTrace("trace.json", steps=steps)


def test_spans_that_overlap_get_lanes_and_a_full_recorder_stops() -> None:
    recorder = TraceRecorder({}, max_events=400)
    random.seed(0)
    for _ in range(500):
        begin_ns = random.randrange(10_000)
        recorder.add("a", "x", "", begin_ns, begin_ns + random.randrange(1, 3_000))
    assert recorder.full
    tracks = check_viewable(recorder.to_json())
    assert sum(map(len, tracks.values())) == 400
    assert list(tracks)[:2] == ["a", "a (2)"]


def test_the_profiler_of_lightning_shows_our_spans(fit: Fit, tmp_path: Path) -> None:
    profiler = PyTorchProfiler(dirpath=tmp_path, filename="profile")
    fit([], profiler=profiler)
    (path,) = tmp_path.glob("*profile*.json")
    names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    assert {
        "MegaTrain::bind (layers.0)",
        "MegaTrain::forward (layers.0)",
        "MegaTrain::rebind (layers.2)",
        "MegaTrain::backward",
        "MegaTrain::step",
    } <= names
