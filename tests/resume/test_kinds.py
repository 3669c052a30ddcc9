"""Kinds of loops, data and state that a resumed run must get right."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric, MinMaxMetric

from mt_lightning import ConfigError, MegaTrainStrategy

from .run import QUIET, StoppedError, Tokens


class Base(LightningModule):
    """Regression on tokens, told batch by batch; `stop` is the number of batches to take."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(9, 9), nn.Tanh(), nn.Dropout(0.1)) for _ in range(2)]
        )
        self.stop: int | None = None
        self.told: list[Any] = []

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens.float() / 100
        for layer in self.layers:
            x = layer(x)
        return x

    def take(self, batch: Tensor, batch_idx: int) -> None:
        if len(self.told) == self.stop:
            raise StoppedError
        self.told.append((self.current_epoch, batch_idx, batch[:, 0].tolist()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch = torch.cat(list(batch)) if isinstance(batch, (list, tuple)) else batch
        self.take(batch, batch_idx)
        return self(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def sized(**settings: Any) -> DataLoader:
    return DataLoader(Tokens(21, False), batch_size=2, shuffle=True, **settings)


def fit(
    directory: Path, make: Callable[[], Base], data: Callable[[], Any], stop: int | None, **kw: Any
) -> Base:
    seed_everything(0)
    module = make()
    module.stop = stop
    strategy = MegaTrainStrategy(
        offload_dir=directory, max_ram_gb=0.1, on_existing="resume", durability="step"
    )
    settings = {"max_steps": 17, "callbacks": [], **kw}
    if callable(settings["callbacks"]):
        settings["callbacks"] = settings["callbacks"]()
    trainer = Trainer(
        strategy=strategy,
        max_epochs=-1,
        **QUIET,
        **settings,
    )
    try:
        trainer.fit(module, data())
    except StoppedError:
        assert stop is not None
    module.callbacks = trainer.callbacks
    strategy._close()
    return module


def check(
    tmp_path: Path,
    stop: int,
    make: Callable[[], Base] = Base,
    data: Callable[[], Any] = sized,
    **settings: Any,
) -> tuple[Base, Base]:
    """Compare a run that stops after `stop` batches and goes on with one that does not stop."""
    expected = fit(tmp_path / "straight", make, data, None, **settings)
    fit(tmp_path / "run", make, data, stop, **settings)
    actual = fit(tmp_path / "run", make, data, None, **settings)
    first = len(expected.told) - len(actual.told)
    assert 0 < first <= stop
    assert actual.told == expected.told[first:]
    found = actual.state_dict()
    for name, value in expected.state_dict().items():
        assert torch.equal(found[name], value), name
    return expected, actual


# -- data -----------------------------------------------------------------------------------------


class Stream(IterableDataset):
    """No length, and noise from the global generator."""

    def __iter__(self) -> Any:
        for tokens in Tokens(22, False).tokens:
            tokens = tokens.clone()
            tokens[3] = torch.randint(100, ())
            yield tokens


class Stateful(DataLoader):
    """A loader that can be asked where it is."""

    start = 0

    def __iter__(self) -> Any:
        self.taken, self.start = self.start, 0
        return self._walk(super().__iter__())

    def _walk(self, batches: Any) -> Any:
        for index, batch in enumerate(batches):
            if index >= self.taken:
                self.taken = index + 1
                yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.start = state_dict["taken"]


DATA: dict[str, Callable[[], Any]] = {
    "own generator": lambda: sized(generator=torch.Generator().manual_seed(7)),
    "two loaders of different length": lambda: CombinedLoader(
        [sized(), DataLoader(Tokens(7, False), batch_size=2, shuffle=True)], "max_size_cycle"
    ),
    "stream": lambda: DataLoader(Stream(), batch_size=2),
    "stream with a worker": lambda: DataLoader(Stream(), batch_size=2, num_workers=1),
    "stateful": lambda: Stateful(Tokens(21, False), batch_size=2),
    "persistent workers": lambda: sized(num_workers=1, persistent_workers=True),
}


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


STOPS = [14, slow(6)]
"""In the second epoch, and in the first."""


@pytest.mark.parametrize(
    ("kind", "stop"),
    [
        (slow if stop != (6, 14)[i % 2] else pytest.param)(kind, stop)
        for i, kind in enumerate(DATA)
        for stop in (6, 14)
    ],
)
def test_the_same_samples_come_in_the_same_order(tmp_path: Path, kind: str, stop: int) -> None:
    check(tmp_path, stop, data=DATA[kind])


def test_persistent_workers_go_on_with_their_noise_in_the_first_epoch(tmp_path: Path) -> None:
    check(
        tmp_path,
        5,
        data=lambda: DataLoader(
            Tokens(21, True), batch_size=2, shuffle=True, num_workers=1, persistent_workers=True
        ),
    )


class Draws(Base):
    def on_train_start(self) -> None:
        torch.rand(3)

    def on_train_epoch_start(self) -> None:
        torch.rand(5)


@pytest.mark.parametrize("stop", STOPS)
def test_hooks_may_draw_before_the_first_batch(tmp_path: Path, stop: int) -> None:
    check(tmp_path, stop, Draws)


# -- loops ----------------------------------------------------------------------------------------


class Gan(Base):
    """Two optimizers that step in turn, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 1))

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.AdamW(self.layers.parameters(), lr=1e-2),
            torch.optim.AdamW(self.critic.parameters(), lr=1e-2),
        ]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        makes, judges = self.optimizers()
        self.told.append((self.current_epoch, batch_idx, batch[:, 0].tolist()))
        for optimizer, sign in ((makes, 1), (judges, -1)):
            optimizer.zero_grad()
            self.manual_backward(sign * self.critic(self(batch)).mean())
            optimizer.step()
            if sign == 1 and len(self.told) - 1 == self.stop:
                raise StoppedError


class Gathers(Base):
    """One optimizer steps every batch, the other every second one."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(layer.parameters(), lr=1e-2) for layer in self.layers]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.take(batch, batch_idx)
        often, seldom = self.optimizers()
        self.manual_backward(self(batch).square().mean())
        often.step()
        often.zero_grad()
        if batch_idx % 2:
            seldom.step()
            seldom.zero_grad()


@pytest.mark.parametrize(
    ("make", "stop"),
    [(Gan, 6), (Gathers, 5), (Gathers, 14), slow(Gan, 5), slow(Gan, 14), slow(Gathers, 6)],
)
def test_a_batch_counts_as_a_whole_or_not_at_all(
    tmp_path: Path, make: Callable[[], Base], stop: int
) -> None:
    check(tmp_path, stop, make, max_steps=34)


class StopsLate(Base):
    """Ends between the step and the end of its batch."""

    def lr_scheduler_step(self, *arguments: Any) -> None:
        super().lr_scheduler_step(*arguments)
        if self.stop is not None and self.global_step == self.stop:
            raise StoppedError

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        # Schedules are often written with numpy.
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: np.cos(step / 30))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def test_an_error_after_the_step_leaves_the_step_before(tmp_path: Path) -> None:
    check(tmp_path, 6, StopsLate)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("stop", [11, 14])
def test_leftovers_and_skipped_batches(tmp_path: Path, stop: int) -> None:
    class Skips(Base):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 3 else loss

    check(tmp_path, stop, Skips, accumulate_grad_batches=4, max_steps=5)


# -- state ----------------------------------------------------------------------------------------


class Remembers(Base):
    """State of every kind a module can have, changed where every start changes it too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("epochs", torch.zeros(1))
        self.register_buffer("seen", None)
        self.extra = 0

    def on_train_epoch_start(self) -> None:
        self.epochs += 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.extra += 1
        ids = batch[:, 0].float()
        self.seen = ids if self.seen is None else torch.cat([self.seen, ids])
        return loss + 0 * self.seen.sum()

    def get_extra_state(self) -> dict[str, int]:
        return {"extra": self.extra}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.extra = state["extra"]

    def state_dict(self, *arguments: Any, **settings: Any) -> Any:
        state = super().state_dict(*arguments, **settings)
        state.pop("_extra_state")
        return state


@pytest.mark.parametrize("stop", STOPS)
def test_buffers_and_extra_state_are_given_back(tmp_path: Path, stop: int) -> None:
    expected, actual = check(tmp_path, stop, Remembers)
    assert actual.extra == expected.extra
    assert torch.equal(actual.epochs, expected.epochs)
    assert torch.equal(actual.seen, expected.seen)


class Epochs(Callback):
    def __init__(self, odd: Any = None) -> None:
        self.count = 0
        self.odd = odd

    def on_train_epoch_start(self, *_: Any) -> None:
        self.count += 1

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 5 and self.odd is not None:
            self.odd = object()

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "odd": self.odd}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


@pytest.mark.parametrize("stop", STOPS)
def test_callbacks_are_given_back_behind_the_hooks_of_the_start(tmp_path: Path, stop: int) -> None:
    expected, actual = check(tmp_path, stop, callbacks=lambda: [Epochs()])
    (before,), (after,) = (
        [c for c in module.callbacks if isinstance(c, Epochs)] for module in (expected, actual)
    )
    assert after.count == before.count


def test_state_that_becomes_unreadable_costs_only_the_callback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        check(tmp_path, 8, callbacks=lambda: [Epochs(odd=np.float64(1))])
    assert "callback Epochs" in caplog.text
    assert "starts the callback anew" in caplog.text


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint")
def test_a_checkpoint_takes_the_place_of_the_commits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Saves(Base):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_step == 4 and self.stop is not None:
                self.trainer.save_checkpoint(tmp_path / "four.ckpt")

    fit(tmp_path / "run", Saves, sized, 9)
    seed_everything(0)
    module = Base()
    strategy = MegaTrainStrategy(offload_dir=tmp_path / "run", on_existing="resume")
    trainer = Trainer(
        strategy=strategy,
        max_steps=6,
        **QUIET,
    )
    with caplog.at_level(logging.WARNING):
        trainer.fit(module, sized(), ckpt_path=tmp_path / "four.ckpt")
    assert "up to step 9 are discarded" in caplog.text
    assert trainer.global_step == 6
    assert len(module.told) == 2


def test_the_limit_of_steps_survives_a_start_that_fails(tmp_path: Path) -> None:
    class Fails(Base):
        def on_train_start(self) -> None:
            if self.trainer.global_step:
                raise StoppedError

    fit(tmp_path / "run", Base, sized, None, max_steps=4)
    again = fit(tmp_path / "run", Fails, sized, 0, max_steps=4)
    assert again.trainer.max_steps == 4


class Adagrads(Base):
    """An optimizer that makes state before its first step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=1e-2)


def test_an_optimizer_with_state_from_the_start(tmp_path: Path) -> None:
    check(tmp_path, 6, Adagrads)


class Masked(Base):
    """A large buffer that never changes beside a small one that does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.rand(1 << 20), persistent=False)
        self.register_buffer("count", torch.zeros(1), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count += 1
        return super().training_step(batch, batch_idx) * self.mask[batch_idx] + 0 * self.count.sum()


def test_buffers_that_never_change_are_written_once(tmp_path: Path) -> None:
    expected, actual = check(tmp_path, 6, Masked)
    assert torch.equal(actual.count, expected.count)
    assert torch.equal(actual.mask, expected.mask)
    for record in (tmp_path / "run").glob("commit.*"):
        assert record.stat().st_size < 2 << 20
    sizes = [file.stat().st_size for file in (tmp_path / "run").glob("kept-*")]
    assert sum(size > 1 << 20 for size in sizes) == 1


class Extremes(Base):
    """A metric that keeps more than its states."""

    def __init__(self) -> None:
        super().__init__()
        self.extremes = MinMaxMetric(MeanMetric())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.extremes.update(loss.detach())
        self.extremes.compute()
        return loss


def test_metrics_that_wrap_metrics_are_given_back(tmp_path: Path) -> None:
    expected, actual = check(tmp_path, 6, Extremes)
    before, after = expected.extremes.compute(), actual.extremes.compute()
    assert all(torch.equal(after[name], value) for name, value in before.items())


# -- nothing is deleted that may be a run ---------------------------------------------------------


@pytest.mark.parametrize("what", ["a drive is missing", "records are damaged"])
def test_pages_without_a_commit_are_not_touched(tmp_path: Path, what: str) -> None:
    places = [tmp_path / "a", tmp_path / "b"]

    def run(directories: list[Path], stop: int | None) -> Base:
        seed_everything(0)
        module = Base()
        module.stop = stop
        strategy = MegaTrainStrategy(offload_dir=directories, on_existing="resume", max_ram_gb=0.1)
        trainer = Trainer(
            strategy=strategy,
            max_steps=9,
            **QUIET,
        )
        try:
            trainer.fit(module, sized())
        except StoppedError:
            assert stop is not None
        finally:
            if strategy.engine is not None:
                strategy._close()
        return module

    run(places, 5)
    records = {path: path.read_bytes() for path in tmp_path.glob("*/commit.*")}
    pages = {path: path.read_bytes() for path in tmp_path.glob("*/pages/*")}
    assert {path.parents[1] for path in pages} == set(places)
    if what == "records are damaged":
        for path in records:
            path.write_bytes(b"\0" * 100)
    given = places if what == "records are damaged" else places[1:]
    with pytest.raises(ConfigError, match=r"(?s)not mounted.*damaged.*overwrite"):
        run(given, None)
    assert {path: path.read_bytes() for path in tmp_path.glob("*/pages/*")} == pages
    for path, data in records.items():
        path.write_bytes(data)
    assert len(run(places, None).told) == 4


def test_weights_of_an_earlier_fit_are_not_thrown_away(tmp_path: Path) -> None:
    seed_everything(0)
    module = Base()
    strategy = MegaTrainStrategy(offload_dir=tmp_path, max_ram_gb=0.1)
    trainer = Trainer(strategy=strategy, max_steps=4, **QUIET)
    trainer.fit(module, sized())
    trainer.fit_loop.epoch_loop.max_steps = 9
    module.stop = len(module.told)
    with pytest.raises(StoppedError):
        trainer.fit(module, sized())
    strategy._close()
    with pytest.raises(ConfigError, match="trained by an earlier fit"):
        fit(tmp_path, Base, sized, None)


class Twice(Base):
    """Two steps of one optimizer in a batch, with the state after the first in hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.take(batch, batch_idx)
        optimizer = self.optimizers()
        for number in range(2):
            optimizer.zero_grad()
            self.manual_backward(self(batch).square().mean())
            optimizer.step()
            views = [s["exp_avg"] for s in optimizer.optimizer.state_dict()["state"].values()]
            if not number:
                self.views, self.copies = views, [view.clone() for view in views]

    def on_train_batch_end(self, *_: Any) -> None:
        assert all(torch.equal(a, b) for a, b in zip(self.views, self.copies, strict=True))


class PlainTwice(Twice):
    def on_train_batch_end(self, *_: Any) -> None:
        """Plain state is changed in place."""


@pytest.mark.parametrize("stop", [3, 12])
def test_a_slot_is_written_twice_before_a_commit(tmp_path: Path, stop: int) -> None:
    expected, _ = check(tmp_path, stop, Twice, max_steps=30)
    seed_everything(0)
    plain = PlainTwice()
    Trainer(
        max_steps=30,
        max_epochs=-1,
        **QUIET,
    ).fit(plain, sized())
    for name, value in plain.state_dict().items():
        assert torch.equal(expected.state_dict()[name], value), name
