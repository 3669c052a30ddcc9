"""Records are differences of counters, with an injected clock."""

from __future__ import annotations

import time

import torch

from mt_lightning.callbacks.memory import MemorySampler, process_memory_bytes
from mt_lightning.callbacks.meter import StepMeter, count_tokens
from mt_lightning.pager.stats import Stats

BATCH = {"input_ids": torch.zeros(2, 5, dtype=torch.int64)}


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_step_is_the_sum_of_its_batches() -> None:
    stats, clock = Stats(bytes_read=100, stall_read_s=9.0), Clock()
    meter = StepMeter(lambda: stats, 3, clock)
    for global_step in (3, 4):
        clock.now_s += 10  # between batches: not counted
        meter.start_batch()
        clock.now_s += 2
        stats.bytes_read += 1000
        stats.bytes_written += 500
        stats.stall_read_s += 0.25
        stats.stall_update_s += 0.5
        stats.stall_memory_s += 0.25
        stats.update_s += 3
        stats.ram_used_bytes = 77
        record = meter.end_batch(BATCH, global_step)
        assert (record is None) == (global_step == 3)
    assert record is not None
    assert (record.step, record.wall_s, record.num_tokens) == (4, 4.0, 20)
    assert (record.read_bytes, record.written_bytes) == (2000, 1000)
    assert (record.stall_s, record.stall_share, record.update_s) == (2.0, 0.5, 6)
    assert (record.tokens_per_s, record.ram_used_bytes) == (5.0, 77)
    assert not record.spans_evaluation


def test_bytes_between_batches_belong_to_the_next_step() -> None:
    stats = Stats()
    meter = StepMeter(lambda: stats, 0, Clock())
    for step in (1, 2):
        meter.start_batch()
        record = meter.end_batch(None, step)
        assert record is not None
        assert record.written_bytes == (0 if step == 1 else 64)
        assert (record.num_tokens, record.stall_share, record.tokens_per_s) == (0, 0.0, 0.0)
        assert record.spans_evaluation == (step == 2)
        stats.bytes_written += 64
        meter.note_evaluation()


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
