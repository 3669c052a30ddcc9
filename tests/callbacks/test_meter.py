"""Records are differences of counters, with an injected clock."""

from __future__ import annotations

import time

import torch

from mt_lightning.callbacks.memory import MemorySampler, process_memory_bytes
from mt_lightning.callbacks.meter import PARTS, StepMeter, count_tokens
from mt_lightning.pager.stats import Stats

BATCH = {"input_ids": torch.zeros(2, 5, dtype=torch.int64)}


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_step_is_all_the_time_since_the_one_before() -> None:
    stats, clock = Stats(bytes_read=100, stall_read_s=9.0), Clock()
    meter = StepMeter(lambda: stats, 3, clock)
    clock.now_s += 100  # before the first batch: not counted
    for global_step in (3, 4):
        meter.start_batch()
        clock.now_s += 2
        stats.bytes_read += 1000
        stats.bytes_written += 500
        stats.compute_s += 1
        stats.stall_read_s += 0.25
        stats.stall_update_s += 0.25
        stats.stall_memory_s += 0.125
        stats.stall_write_s += 0.125
        stats.paging_s += 0.125
        stats.update_s += 3
        stats.ram_used_bytes = 77
        record = meter.end_batch(BATCH, global_step)
        assert (record is None) == (global_step == 3)
        clock.now_s += 10
    assert record is not None
    assert (record.step, record.wall_s, record.between_s, record.num_tokens) == (4, 14, 10, 20)
    assert (record.read_bytes, record.written_bytes) == (2000, 1000)
    assert (record.stall_s, record.stall_share, record.update_s) == (1.5, 1.5 / 14, 6)
    assert (record.compute_s, record.paging_s, record.host_s) == (2, 0.25, 10.25)
    assert record.wall_s == sum(getattr(record, part) for part in PARTS)
    assert (record.tokens_per_s, record.ram_used_bytes) == (20 / 14, 77)
    assert not record.spans_evaluation


def test_validation_takes_no_time_of_a_step_and_marks_its_bytes() -> None:
    stats, clock = Stats(), Clock()
    meter = StepMeter(lambda: stats, 0, clock)
    meter.start_evaluation()  # the sanity check, before all steps
    meter.end_evaluation()
    clock.now_s += 50
    for step in (1, 2):
        meter.start_batch()
        clock.now_s += 1
        record = meter.end_batch(None, step)
        assert record is not None
        assert (record.wall_s, record.between_s) == ((1, 0) if step == 1 else (1.75, 0.75))
        assert record.written_bytes == (0 if step == 1 else 64)
        assert record.stall_read_s == 0
        assert (record.num_tokens, record.stall_share, record.tokens_per_s) == (0, 0.0, 0.0)
        assert record.spans_evaluation
        stats.bytes_written += 64
        clock.now_s += 0.25
        meter.start_evaluation()
        clock.now_s += 30
        stats.stall_read_s += 20
        meter.end_evaluation()
        clock.now_s += 0.5


def test_tokens_are_input_ids() -> None:
    assert count_tokens(BATCH) == 10
    assert count_tokens({"labels": BATCH["input_ids"]}) == 0
    assert count_tokens(BATCH["input_ids"]) == 0


def test_the_sampler_sees_a_peak_that_is_gone() -> None:
    sampler = MemorySampler(interval_s=0.001)
    before = process_memory_bytes()
    sampler.start()
    held = torch.ones(16_000_000)
    time.sleep(0.1)
    del held
    sampler.stop()
    sampler.stop()
    assert sampler.peak_bytes - before > 60_000_000
    sampler.start()  # anew
    sampler.stop()
    assert sampler.peak_bytes - before < 60_000_000
