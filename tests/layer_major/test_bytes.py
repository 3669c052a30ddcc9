"""Weights are read twice per step, whatever the number of micro-batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..bytes import gpt
from ..bytes.cases import gpt_case
from ..bytes.simulator import Simulator

NUM_STEPS = 3
DEPTH = 2


class WindowSimulator(Simulator):
    """Knows the bytes of windows; the first step is taken in the usual order."""

    def __init__(self, case, transient_bytes: int, between_bytes: int) -> None:
        self.transient_bytes = transient_bytes
        self.between_bytes = between_bytes
        super().__init__(case)

    def _places(self) -> tuple[set[int], dict[int, int]]:
        case = self.case
        self.case = dataclasses.replace(case, budget_bytes=case.budget_bytes - self.transient_bytes)
        try:
            return super()._places()
        finally:
            self.case = case

    def run(self, num_steps: int) -> Iterator[tuple[int, int]]:
        for step in range(num_steps):
            num_micros = self.case.micro_batches
            for micro in range(num_micros):
                last = micro == num_micros - 1
                if step == 0 or num_micros == 1:
                    self._forward()
                    self._backward(eager=last and not self.case.deferred)
                elif last:
                    self._window(num_micros, eager=not self.case.deferred)
                if last:
                    self._step()
                yield self.read_bytes, self.written_bytes
        for page in list(self._due):
            self._update(page)
        yield self.read_bytes, self.written_bytes

    def _reserve(self, num_bytes: int) -> None:
        self._make_room(num_bytes)
        self._free -= num_bytes

    def _window(self, num_micros: int, *, eager: bool) -> None:
        self._free_passed()
        self._reserve(self.transient_bytes)
        self._reserve(self.between_bytes)
        last = len(self.case.units) - 1
        for page in range(last + 1):
            self._enter(page, grads=False)
            for micro in range(num_micros):
                self._reserve(self._inputs[page])
                if page == last and micro == 0:
                    self._reserve(self.case.units[page].grad_bytes)
            self._pins[page] -= 1
        for page in list(self._due):
            self._update(page)
        if self._commit_owed:
            self._commit()
        for page in reversed(range(last)):
            if page + 1 != last:
                self._pins[page + 1] -= 1
            self._pass(page + 1, num_micros, eager=eager)
            self._enter(page, grads=True)
        self._pins[0] -= 1
        self._pass(0, num_micros, eager=eager, ends=True)

    def _pass(self, page: int, num_micros: int, *, eager: bool, ends: bool = False) -> None:
        self._complete(page)
        if not eager and page in self.spilled:
            self._spill(page)
        if ends:
            self._free += self.transient_bytes + self.between_bytes
        else:
            self._free += num_micros * self._inputs[page]
        if eager:
            self._update(page)
        if ends:
            self._passed = num_micros * self._inputs[page]


@pytest.mark.parametrize(
    "num_micros", [1, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (16, 64))]
)
def test_bytes_are_predicted(num_micros: int, tmp_path: Path) -> None:
    width, vocab, num_layers = 64, 300, 5
    sizes = {"depth": DEPTH, "deferred": False, "micro_batches": num_micros}
    case = gpt_case(budget="smallest", **sizes)
    hidden_bytes = gpt.NUM_TOKENS * width * 4
    transient_bytes = max(vocab * width, 4 * width * width) * 4 if num_micros > 1 else 0
    # Beside the smallest budget there is room for the inputs of all units, and for nothing else.
    between_bytes = 2 * num_micros * hidden_bytes * (num_micros > 1)
    input_bytes = num_micros * sum(case.input_bytes) * (num_micros > 1)
    room_bytes = transient_bytes + between_bytes + input_bytes
    case = dataclasses.replace(case, budget_bytes=case.smallest_bytes + room_bytes)
    moved = gpt.train(
        tmp_path,
        budget_bytes=case.budget_bytes,
        num_steps=NUM_STEPS,
        width=width,
        num_layers=num_layers,
        vocab=vocab,
        layer_major=True,
        **sizes,
    )
    simulator = WindowSimulator(case, transient_bytes, between_bytes)
    assert moved.bytes == list(simulator.run(NUM_STEPS))
    assert moved.stats["ram_peak_bytes"] <= case.budget_bytes
    # From the second step on: each page once forward, and once back but for the last.
    read = moved.bytes[3 * num_micros - 1][0] - moved.bytes[2 * num_micros - 1][0]
    state = sum(unit.state_bytes for unit in case.units)
    sweeps = (read - state) / sum(unit.weight_bytes for unit in case.units)
    assert sweeps < 2.0, sweeps
