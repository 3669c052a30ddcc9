"""Which units come next, and how far away each is, learned from the accesses so far.

[Note: three sources]
* Backward visits what forward visited, in reverse. What forward has visited and backward has not is
  kept as a stack, so backward is known from the first step on, whatever route forward took.
* Where backward turns round and what forward does is learned by `ContextModel`.
* How far away the next access is where neither is sure (the route of the next batch, a rare expert)
  is estimated by `Passes`, and for forwards without gradients from the intervals seen before.

[Note: a hint] A wrong guess costs a read, never a bit and never an error. What is guessed depends
on the order of accesses alone, never on time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

from mt_lightning.pager.contexts import ORDERS, ContextModel
from mt_lightning.pager.passes import Passes

FORWARD, BACKWARD, INFERENCE = range(3)
"""Kinds of access: forward with gradients, backward, forward without."""
_NUM_KINDS = 3
_MAX_STACK = 1 << 16
_MAX_AHEAD = 1 << 12
_MAX_ROUNDS = 16
"""Accesses that are looked ahead at most, and the same for each unit: what never comes again (a
unit that only validation runs) would be looked for in every round of a loop known to no end."""
LIKELY = -math.log(0.5)
"""What is in more doubt than this (less likely than a half) is not read ahead."""
SURE = -math.log(0.9)
"""What is in no more doubt than this counts as known when frames are given up."""
_LEAST = 1e-9
_RATE = 0.25
"""Weight of the latest interval."""


class Predictor:
    """Guesses the order in which units are used."""

    def __init__(self) -> None:
        self._contexts = ContextModel()
        self._now = 0
        self._kind = INFERENCE
        self._stack: list[int] = []
        self._on_stack: dict[int, list[int]] = {}
        self._strays: dict[int, bool] = {}
        """Backward accesses after which the top of the stack did not come, when last seen."""
        # What is expected, as far as it is likely: accesses from number `_now` on.
        self._ahead: deque[int] = deque()
        self._doubt: deque[float] = deque()
        """Of each: minus the logarithm of how likely it is, together with all before it."""
        self._settled = 0.0  # what of it is past
        self._sure_end = 0
        self._where: dict[int, deque[int]] = {}
        self._virtual = _Virtual(self)
        self._last: dict[int, tuple[int, int]] = {}  # of each unit: number and token
        self._interval: dict[int, float] = {}  # by token
        self._passes = Passes()

    # -- learning ---------------------------------------------------------------------------------

    def observe(self, unit: int, kind: int) -> None:
        """Take note that `unit` is used now; `kind` is FORWARD, BACKWARD or INFERENCE."""
        token = unit * _NUM_KINDS + kind
        self._measure(unit, token)
        before, self._kind = self._kind, kind
        known = before == BACKWARD and bool(self._stack)
        if known:
            came = kind == BACKWARD and self._stack[-1] == unit
            self._strays[self._contexts.tail[-1]] = not came
            known = came
        self._contexts.learn(token, judged=not known)
        if kind == FORWARD:
            if before == BACKWARD:
                self._forget_stack()  # what backward left out it will not visit any more
            if before != FORWARD:
                self._passes.begin(self._now)
            self._passes.visit(unit, self._now)
            self._push(unit)
        elif kind == BACKWARD:
            if before == FORWARD:
                self._passes.turn_round(self._now)
            self._pop(unit)
        self._now += 1
        self._sure_end = max(self._sure_end, self._now)
        if self._ahead and self._ahead[0] == token:
            self._ahead.popleft()
            self._settled = self._doubt.popleft()
            places = self._where[unit]
            places.popleft()
            if not places:
                del self._where[unit]
        else:
            self._start_anew()

    def end_of_step(self) -> None:
        """Take note that nothing of what forward visited will be visited by backward any more."""
        if self._stack:
            self._forget_stack()
            self._start_anew()

    def _measure(self, unit: int, token: int) -> None:
        if unit in self._last:
            number, last = self._last[unit]
            interval = self._now - number
            known = self._interval.get(last)
            self._interval[last] = interval if known is None else known + _RATE * (interval - known)
        self._last[unit] = self._now, token

    def _push(self, unit: int) -> None:
        if len(self._stack) >= _MAX_STACK:
            self._forget_stack()
        self._on_stack.setdefault(unit, []).append(len(self._stack))
        self._stack.append(unit)

    def _pop(self, unit: int) -> None:
        if unit not in self._on_stack:
            return
        while self._stack:
            top = self._stack.pop()
            places = self._on_stack[top]
            places.pop()
            if not places:
                del self._on_stack[top]
            if top == unit:
                return

    def _forget_stack(self) -> None:
        self._stack.clear()
        self._on_stack.clear()

    # -- guessing ---------------------------------------------------------------------------------

    def upcoming(self) -> Iterator[int]:
        """Yield the units expected next, nearest first, each once, as long as that is likely."""
        return (unit for unit, _ in self.expected())

    def expected(self, limit: float = LIKELY) -> Iterator[tuple[int, float]]:
        """Yield units as `upcoming` does, each with the doubt in it.

        Args:
            limit: The most doubt, minus the logarithm of how likely it is.
        """
        seen: set[int] = set()
        position = 0
        # A round that repeats is known to no end; behind its last unit it has nothing new.
        while len(seen) < len(self._last) and (
            position < len(self._ahead) or self._look_further(limit)
        ):
            unit = self._ahead[position] // _NUM_KINDS
            doubt = max(self._doubt[position] - self._settled, 0.0)
            if doubt > limit:
                return
            position += 1
            if unit not in seen:
                seen.add(unit)
                yield unit, doubt

    def next_use(self, unit: int) -> float:
        """Estimate how many accesses lie before the next one of `unit`; infinity if unknown."""
        while unit not in self._where and self._look_further(SURE):
            pass
        while self._sure_end - self._now < len(self._ahead) and self._is_sure():
            self._sure_end += 1
        places = self._where.get(unit)
        if places and places[0] < self._sure_end:
            return places[0] - self._now
        return max(self._estimate(unit), self._sure_end - self._now)

    def _is_sure(self) -> bool:
        return self._doubt[self._sure_end - self._now] - self._settled <= SURE

    def _estimate(self, unit: int) -> float:
        if unit in self._on_stack:
            left = len(self._stack) - self._on_stack[unit][-1] - 1
            if self._kind == BACKWARD:
                return left
            return self._passes.left_of_forward(self._now) + left
        if self._kind != INFERENCE:
            return self._passes.next_use(unit, len(self._stack) if self._kind == BACKWARD else None)
        number, token = self._last.get(unit, (0, -1))
        interval = self._interval.get(token)
        if interval is None:
            return math.inf
        left = number + interval - self._now
        return left if left >= 0 else left + interval * math.ceil(-left / interval)

    def _look_further(self, limit: float = LIKELY) -> bool:
        """Add one access to what is expected; False where all that is known is in more doubt."""
        most = min(_MAX_AHEAD, _MAX_ROUNDS * len(self._last))
        if len(self._ahead) >= most or self._virtual.doubt - self._settled > limit:
            return False
        token = self._virtual.step(self._settled + LIKELY)
        if token is None:
            return False
        self._where.setdefault(token // _NUM_KINDS, deque()).append(self._now + len(self._ahead))
        self._ahead.append(token)
        self._doubt.append(self._virtual.doubt)
        return True

    def _start_anew(self) -> None:
        self._ahead.clear()
        self._doubt.clear()
        self._where.clear()
        self._settled, self._sure_end = 0.0, self._now
        self._virtual = _Virtual(self)


class _Virtual:
    """The future, played from now on: the stack, and the last accesses, as they will be."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._contexts = contexts = predictor._contexts
        self._tail = list(contexts.tail)
        self._match, self._matched = contexts.match, contexts.matched
        self._stack = list(predictor._stack)
        self.doubt = 0.0

    def step(self, limit: float) -> int | None:
        """Return the next access, None where the doubt in it would exceed a limit."""
        if not self._tail:
            return None
        doubt = self.doubt
        last, following = self._tail[-1], False
        kind = last % _NUM_KINDS
        beyond = self._predictor._ahead
        guess = self._contexts.guess(self._tail, self._match, self._matched, beyond)
        if kind == BACKWARD and self._stack and not self._predictor._strays.get(last):
            token = self._stack[-1] * _NUM_KINDS + BACKWARD
            following = guess is not None and guess[2] and guess[0] == token
        elif guess is not None:
            token, likely, following = guess
            doubt -= math.log(max(likely, _LEAST))
            if kind == FORWARD and token % _NUM_KINDS == BACKWARD and self._stack:
                unit = token // _NUM_KINDS
                if unit not in self._stack:
                    token, following = self._stack[-1] * _NUM_KINDS + BACKWARD, False
        else:
            twin = self._twin(last, kind)
            if twin is None:
                return None
            token, likely = twin
            doubt -= math.log(max(likely, _LEAST))
        if doubt > limit:
            return None
        self.doubt = doubt
        self._take(token, following)
        return token

    def _twin(self, last: int, kind: int) -> tuple[int, float] | None:
        """Let forward without gradients go the way of forward with them, and the other way."""
        if kind == BACKWARD:
            return None
        other = INFERENCE if kind == FORWARD else FORWARD
        guess = self._contexts.guess([last - kind + other], -1, 0)
        if guess is None or guess[0] % _NUM_KINDS == BACKWARD:
            return None
        return guess[0] - guess[0] % _NUM_KINDS + kind, guess[1]

    def _take(self, token: int, following: bool) -> None:
        if self._match >= 0:
            self._match = self._match + 1 if following else -1
            self._matched += 1
        self._tail.append(token)
        del self._tail[: -ORDERS[-1]]
        unit, kind = divmod(token, _NUM_KINDS)
        if kind == FORWARD:
            if self._tail[-2] % _NUM_KINDS == BACKWARD:
                self._stack.clear()
            self._stack.append(unit)
        elif kind == BACKWARD and unit in self._stack:
            while self._stack.pop() != unit:
                pass
