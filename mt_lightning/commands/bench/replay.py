"""Play traces against frames: which accesses find their unit in RAM, and what is read for it.

One unit has one page, all pages have one size, and reads take no time: what is compared is which
page is given up, and what is read ahead, by the very policies that train.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from mt_lightning.commands.bench.traces import Trace
from mt_lightning.pager.predictor import Predictor
from mt_lightning.pager.read_ahead import ReadAhead
from mt_lightning.pager.replacement import choose, choose_ahead, nothing_known

_WARM_SHARE = 0.25
"""Of the steps; what happens in them is not counted."""


@dataclass
class Outcome:
    """What happened after the warm-up.

    Attributes:
        accesses: Accesses.
        hits: Those that found their page in RAM.
        reads: Pages read, ahead or not.
        used: Pages read ahead and used.
        wasted: Pages read ahead and given up unused.
    """

    accesses: int = 0
    hits: int = 0
    reads: int = 0
    used: int = 0
    wasted: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits over accesses."""
        return self.hits / self.accesses

    @property
    def precision(self) -> float:
        """Pages read ahead and used, over all that were read ahead and used or given up."""
        return self.used / max(self.used + self.wasted, 1)


@dataclass
class _Frame:
    index: int
    ahead: bool = False
    idle: bool = True
    dirty: bool = False
    nbytes: int = 1


class _Frames:
    """RAM of a number of frames, least recently used first."""

    def __init__(self, num_frames: int) -> None:
        self.num_frames = num_frames
        self.judge: Callable[[int, bool], None] = lambda page, used: None
        self.held: OrderedDict[int, _Frame] = OrderedDict()
        self.outcome = Outcome()

    def use(self, unit: int, next_use: Callable[[int], float | None]) -> None:
        """Let an access find its page, or read it."""
        for frame in self.held.values():
            frame.idle = True
        outcome = self.outcome
        outcome.accesses += 1
        frame = self.held.get(unit)
        if frame is not None:
            outcome.hits += 1
            if frame.ahead:
                outcome.used += 1
                frame.ahead = False
                self.judge(unit, True)
        else:
            if len(self.held) >= self.num_frames:
                victim = choose(self.held.values(), next_use)
                assert victim is not None
                self.drop(victim)
            frame = self.read(unit)
        self.held.move_to_end(unit)
        frame.idle = False

    def read(self, unit: int, *, ahead: bool = False) -> _Frame:
        """Read a page into a free frame."""
        self.outcome.reads += 1
        frame = self.held[unit] = _Frame(unit, ahead)
        return frame

    def drop(self, frame: _Frame) -> None:
        """Give a frame up."""
        if frame.ahead:
            self.outcome.wasted += 1
            self.judge(frame.index, False)
        del self.held[frame.index]


def play_lru(trace: Trace, num_frames: int) -> Outcome:
    """Give up the least recently used page; read nothing ahead."""
    return _play(trace, num_frames, lambda frames, unit, _: frames.use(unit, nothing_known))


def play_oracle(trace: Trace, num_frames: int) -> Outcome:
    """Give up the page that is needed last, which is known; read nothing ahead (Belady 1966)."""
    units = [unit for step in trace.steps for unit, _ in step]
    following: list[float] = [math.inf] * len(units)
    seen: dict[int, int] = {}
    for number in range(len(units) - 1, -1, -1):
        following[number] = seen.get(units[number], math.inf)
        seen[units[number]] = number
    numbers = iter(range(len(units)))
    when: dict[int, float] = {}

    def access(frames: _Frames, unit: int, kind: int) -> None:
        frames.use(unit, lambda other: when[other])
        when[unit] = following[next(numbers)]

    return _play(trace, num_frames, access)


def play_predicted(trace: Trace, num_frames: int) -> Outcome:
    """Give up the page that is expected to be needed last; read nothing ahead."""
    predictor = Predictor()

    def access(frames: _Frames, unit: int, kind: int) -> None:
        predictor.observe(unit, kind)
        frames.use(unit, predictor.next_use)

    return _play(trace, num_frames, access, predictor)


def play_ahead(trace: Trace, num_frames: int, depth: int) -> Outcome:
    """Give up as `play_predicted` does, and read what is expected among the next `depth` units."""
    count = 1 + max(unit for step in trace.steps for unit, _ in step)
    ahead = ReadAhead([[unit] for unit in range(count)], [1] * count, (), num_frames, depth)

    def access(frames: _Frames, unit: int, kind: int) -> None:
        frames.judge = ahead.judge
        ahead.observe(unit, kind)
        frames.use(unit, ahead.next_use)
        held = frames.held
        for page in ahead.upcoming():
            if page not in held:
                ahead.lets(page, 0)
                lacking = len(held) + 1 - num_frames
                patient = any(frame.ahead for frame in held.values())
                victims = choose_ahead(
                    held.values(), ahead.next_use, page, lacking, patient=patient
                )
                if victims is None:
                    break
                for victim in victims:
                    frames.drop(victim)
                frames.read(page, ahead=True)
            held.move_to_end(page)

    return _play(trace, num_frames, access, ahead.predictor)


def _play(
    trace: Trace,
    num_frames: int,
    access: Callable[[_Frames, int, int], None],
    predictor: Predictor | None = None,
) -> Outcome:
    frames = _Frames(num_frames)
    num_warm = max(1, int(_WARM_SHARE * len(trace.steps)))
    for number, step in enumerate(trace.steps):
        if number == num_warm:
            frames.outcome = Outcome()
        for unit, kind in step:
            access(frames, unit, kind)
        if predictor is not None:
            predictor.end_of_step()
    return frames.outcome
