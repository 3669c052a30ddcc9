"""All loops of one trainer, several fits, and what happens to the module between them."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mt_lightning as mt
from tests.faults.nets import (
    Evaluated,
    Net,
    after,
    assert_same,
    assert_usable,
    committed_step,
    fit,
    loader,
    make_trainer,
    parameters_of,
)


def all_loops(root: Path, strategy: Any) -> list[Any]:
    module = Evaluated()
    trainer = make_trainer(root, strategy)
    found: list[Any] = [trainer.validate(module, loader(2), verbose=False)]
    trainer.fit(module, loader(), loader(2))
    found += [
        trainer.validate(module, loader(2), verbose=False),
        trainer.test(module, loader(2), verbose=False),
        [output.tolist() for output in trainer.predict(module, loader(2)) or []],
    ]
    assert_usable(module, after(4, root))
    return found


def test_fit_validate_test_predict(tmp_path: Path) -> None:
    assert all_loops(tmp_path, mt.MegaTrainStrategy(tmp_path / "pages")) == all_loops(
        tmp_path, "auto"
    )
    assert committed_step(tmp_path / "pages") == 4


@pytest.mark.parametrize("loop", ["validate", "test", "predict"])
def test_a_loop_without_a_fit(tmp_path: Path, loop: str) -> None:
    module = Evaluated()
    start = parameters_of(module)
    trainer = make_trainer(tmp_path, mt.MegaTrainStrategy(tmp_path / "pages"))
    getattr(trainer, loop)(module, loader(2))
    assert_usable(module, start)


@pytest.mark.parametrize("loop", ["validate", "predict"])
def test_a_loop_with_a_checkpoint(tmp_path: Path, loop: str) -> None:
    path = tmp_path / "some.ckpt"
    fit(Net(), tmp_path).save_checkpoint(path)
    module = Evaluated()
    trainer = make_trainer(tmp_path, mt.MegaTrainStrategy(tmp_path / "pages"))
    getattr(trainer, loop)(module, loader(2), ckpt_path=path)
    assert_usable(module, after(4, tmp_path))


class ResetsAtEnd(Net):
    """Writes to a parameter that stays in memory, after the last step."""

    def on_train_end(self) -> None:
        with torch.no_grad():
            self.scale.fill_(2.0)


def test_writing_to_a_parameter_that_stays_in_memory(tmp_path: Path) -> None:
    module, plain = ResetsAtEnd(), ResetsAtEnd()
    fit(module, tmp_path, "megatrain")
    fit(plain, tmp_path)
    assert_usable(module, parameters_of(plain))


def use(module: Net, optimizer: str) -> None:
    makers = {
        "adamw": lambda: torch.optim.AdamW(module.parameters(), lr=1e-2),
        "sgd": lambda: torch.optim.SGD(module.parameters(), lr=1e-2, momentum=0.9),
        "adafactor": lambda: torch.optim.Adafactor(module.parameters(), lr=1e-2),
        "half": lambda: torch.optim.SGD(module.layers[1].parameters(), lr=1e-2),
    }
    module.configure_optimizers = makers[optimizer]  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("second", "same_trainer"),
    [
        pytest.param(second, same, marks=[pytest.mark.slow] * ((i + same) % 2))
        for i, second in enumerate(("sgd", "adafactor", "half", "adamw"))
        for same in (True, False)
    ],
)
def test_fit_twice_with_another_optimizer(tmp_path: Path, second: str, same_trainer: bool) -> None:
    modules = []
    for kind in ("paged", "plain"):
        strategies = [
            mt.MegaTrainStrategy(tmp_path / str(i)) if kind == "paged" else "auto" for i in (1, 2)
        ]
        module = Net()
        trainer = make_trainer(tmp_path, strategies[0])
        trainer.fit(module, loader())
        use(module, second)
        if same_trainer:
            trainer.fit_loop.epoch_loop.max_steps = 7
        else:
            trainer = make_trainer(tmp_path, strategies[1])
        trainer.fit(module, loader())
        modules.append(module)
    assert_usable(modules[0], parameters_of(modules[1]))


def test_one_trainer_and_another_module(tmp_path: Path) -> None:
    first, second = Net(), Net()
    trainer = make_trainer(tmp_path, mt.MegaTrainStrategy(tmp_path / "pages"))
    trainer.fit(first, loader())
    trainer.fit_loop.epoch_loop.max_steps = 8
    with pytest.raises(mt.ConfigError, match="on_existing='overwrite'"):
        trainer.fit(second, loader())
    assert_usable(first, after(4, tmp_path))
    assert_usable(second, after(0, tmp_path))


def test_one_trainer_and_another_module_in_a_directory_of_its_own(tmp_path: Path) -> None:
    first, second = Net(), Net()
    trainer = make_trainer(tmp_path, "megatrain")
    trainer.fit(first, loader())
    trainer.fit_loop.epoch_loop.max_steps = 8
    trainer.fit(second, loader())
    assert_usable(first, after(4, tmp_path))
    assert_usable(second, after(4, tmp_path))
    assert len(list((tmp_path / "megatrain").iterdir())) == 1


def test_two_strategies_at_work_at_once(tmp_path: Path) -> None:
    modules = [Net(), Net()]
    trainers = [make_trainer(tmp_path, "megatrain") for _ in modules]
    for module, trainer in zip(modules, trainers, strict=True):
        trainer.fit(module, loader())
    for module in modules:
        assert_usable(module, after(4, tmp_path))
    assert len(list((tmp_path / "megatrain").iterdir())) == 2


def grown(module: Net) -> None:
    module.layers.append(copy.deepcopy(module.layers[0]))


def frozen(module: Net) -> None:
    module.layers[0].requires_grad_(False)


def replaced(module: Net) -> None:
    torch.manual_seed(3)
    module.layers[1].out = nn.Linear(64, 32)


def scaled(module: Net) -> None:
    with torch.no_grad():
        for param in module.parameters():
            param.mul_(0.9)


def loaded(module: Net) -> None:
    module.load_state_dict(Net().state_dict())


def doubled(module: Net) -> None:
    module.double()
    module.float()


@pytest.mark.parametrize("change", [grown, frozen, replaced, scaled, loaded, doubled])
def test_the_module_is_changed_between_two_fits(tmp_path: Path, change: Any) -> None:
    module, plain = Net(), Net()
    for each, strategy in ((module, mt.MegaTrainStrategy(tmp_path / "pages")), (plain, "auto")):
        trainer = make_trainer(tmp_path, strategy)
        trainer.fit(each, loader())
        change(each)
        trainer.fit_loop.epoch_loop.max_steps = 7
        trainer.fit(each, loader())
    assert_usable(module, parameters_of(plain))


def test_copies_of_the_module_outlive_the_run(tmp_path: Path) -> None:
    module = Net()
    trainer = fit(module, tmp_path, "megatrain")
    module.trainer = None  # type: ignore[assignment]
    twins = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    del trainer, module
    for twin in twins:
        assert_usable(twin, after(4, tmp_path))
    assert_same(torch.load(tmp_path / "weights.pt"), after(4, tmp_path))


def test_relative_directory_and_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module = Net()
    module.on_train_batch_end = lambda *_: os.chdir("/")  # type: ignore[method-assign]
    fit(module, tmp_path, mt.MegaTrainStrategy("pages"))
    assert committed_step(tmp_path / "pages") == 4
    assert_usable(module, after(4, tmp_path))


def test_fast_dev_run_and_overfit_batches(tmp_path: Path) -> None:
    for settings in ({"fast_dev_run": True}, {"overfit_batches": 2}, {"barebones": True}):
        modules = []
        for strategy in ("megatrain", "auto"):
            module = Net()
            module.log = lambda *_, **__: None  # type: ignore[method-assign]
            fit(module, tmp_path, strategy, **settings)
            modules.append(parameters_of(module))
        assert_same(modules[0], modules[1])
