"""Every YAML composes, names things that exist, and is found in a clone and in a wheel."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf

import mt_lightning_command
from mt_lightning import MegaTrainStrategy
from mt_lightning.callbacks import PagingMonitor
from mt_lightning.commands.settings import complete_arguments, settings_directory
from mt_lightning.commands.train import build_trainer
from mt_lightning.errors import ConfigError
from mt_lightning.planning.machines import GIB, MACHINES

CONF = settings_directory()
GROUPS = {
    folder.name: sorted(path.stem for path in folder.glob("*.yaml"))
    for folder in CONF.iterdir()
    if folder.is_dir()
}
CHOICES = [(group, choice) for group, choices in GROUPS.items() for choice in choices]


def compose_run(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=["output_dir=out", *overrides])


def targets(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        if "_target_" in node:
            yield node
        node = list(node.values())
    if isinstance(node, list):
        for value in node:
            yield from targets(value)


def test_every_group_is_here() -> None:
    expected = {
        "model": ["hf", "smollm2", "tiny"],
        "data": ["chat", "completion", "dataset", "shakespeare", "text"],
        "strategy": ["auto", "megatrain"],
        "optimizer": ["adafactor", "adamw", "sgd"],
        "trainer": ["default", "smoke"],
        "callbacks": ["default", "none", "report"],
        "logger": ["csv", "none"],
        "checkpoints": ["linked", "none", "standard"],
        "experiment": ["tiny_sgd"],
        "hardware": sorted(["none", *MACHINES]),
        "recipe": ["auto", "none"],
    }
    assert expected == GROUPS


@pytest.mark.parametrize("name", MACHINES)
def test_hardware_sets_budgets_that_the_machine_has(name: str) -> None:
    machine = MACHINES[name]
    run = compose_run(f"hardware={name}")
    strategy = instantiate(run.strategy, _convert_="all")
    assert run.trainer.precision == "bf16-mixed"
    assert 0.5 * machine.ram_bytes < strategy.options.max_ram_gb * GIB < 0.85 * machine.ram_bytes
    vram_gb = strategy.options.max_vram_gb
    if machine.on_host:
        assert vram_gb is None
    else:
        assert (
            0.8 * machine.device.memory_bytes < vram_gb * GIB < 0.95 * machine.device.memory_bytes
        )
    assert compose_run(f"hardware={name}", "strategy.max_ram_gb=7").strategy.max_ram_gb == 7


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_choice_composes_and_fits_its_classes(group: str, choice: str) -> None:
    required = {
        "hf": ["model.model=name"],
        "text": ["data.path=a.txt"],
        "chat": ["data.path=a.jsonl"],
        "completion": ["data.path=a.jsonl"],
        "dataset": ["data.dataset.path=csv"],
    }.get(choice, [])
    run = OmegaConf.to_container(compose_run(f"{group}={choice}", *required), resolve=True)
    found = list(targets(run))
    assert found
    for node in found:
        parameters = inspect.signature(get_object(node["_target_"])).parameters
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
            assert {key for key in node if not key.startswith("_")} <= set(parameters), node


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_yaml_holds_only_what_differs_from_the_defaults(group: str, choice: str) -> None:
    raw = OmegaConf.to_container(OmegaConf.load(CONF / group / f"{choice}.yaml"))
    for node in targets(raw):
        parameters = inspect.signature(get_object(node["_target_"])).parameters
        for key in set(node) & set(parameters):
            assert node[key] != parameters[key].default, f"{node['_target_']}.{key}"


def test_the_demo_pages_through_half_a_gib() -> None:
    run = compose_run()
    assert run.strategy.max_ram_gb == 0.5
    assert run.model.model == run.tokenizer == run.data.tokenizer == "smollm2"
    assert "path" not in run.data  # the text of the package


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor"])
@pytest.mark.parametrize("strategy", ["megatrain", "auto"])
def test_parts_can_be_built(optimizer: str, strategy: str, tmp_path: Path) -> None:
    run = compose_run(
        "model=tiny", f"optimizer={optimizer}", f"strategy={strategy}", f"output_dir={tmp_path}"
    )
    module = instantiate(run.model, _convert_="all")
    assert type(module.configure_optimizers()).__name__.lower() == optimizer
    trainer = build_trainer(run)
    assert isinstance(trainer.strategy, MegaTrainStrategy) == (strategy == "megatrain")
    assert trainer.max_steps == 40
    assert any(isinstance(callback, PagingMonitor) for callback in trainer.callbacks)  # pyright: ignore


def test_names_and_switches_are_themselves(tmp_path: Path) -> None:
    run = compose_run("model=tiny", "logger=none", "callbacks=none", f"output_dir={tmp_path}")
    trainer = build_trainer(run)
    assert trainer.loggers == []
    assert not any(isinstance(callback, PagingMonitor) for callback in trainer.callbacks)  # pyright: ignore


def test_an_experiment_overrides() -> None:
    run = compose_run("experiment=tiny_sgd")
    assert (run.tokenizer, run.data.batch_size, run.trainer.max_steps) == ("bytes", 4, 100)
    assert run.optimizer._target_ == "torch.optim.SGD"
    assert compose_run("experiment=tiny_sgd", "trainer.max_steps=7").trainer.max_steps == 7


def test_arguments_that_are_not_written_can_be_set() -> None:
    given = ["trainer.accumulate_grad_batches=4", "data.path=my.txt", "strategy.units=[A]"]
    assert complete_arguments(given) == [f"++{line}" for line in given]


def test_other_arguments_are_left_alone() -> None:
    given = [
        "model=tiny",
        "trainer.max_steps=2",
        "+trainer.fast_dev_run=true",
        "~callbacks.progress",
        "samples.max_new_tokens=3",
        "+nonsense=1",
        "hydra.job.name=other",
    ]
    assert complete_arguments(given) == given


def test_flags_and_settings_may_be_mixed() -> None:
    given = ["model=tiny", "--cfg", "job", "trainer.max_steps=2", "-p", "model"]
    flags = ["--cfg", "job", "-p", "model"]
    assert complete_arguments(given) == [*flags, "model=tiny", "trainer.max_steps=2"]


def test_a_plus_before_a_group_is_allowed() -> None:
    assert complete_arguments(["+experiment=tiny_sgd"]) == ["experiment=tiny_sgd"]
    assert complete_arguments(["-m", "+experiment=tiny_sgd,null"])[1] == "experiment=tiny_sgd,null"


@pytest.mark.parametrize(
    "arguments", [["save_model=no"], ["resume=1"], ["recipe=auto", "recipe.lossy='false'"]]
)
def test_a_switch_takes_nothing_else_for_true(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match="is a switch; set it to true or false"):
        complete_arguments(["model=tiny", *arguments])
    name = arguments[-1].partition("=")[0]
    for good in ("true", "False", "${oc.env:SWITCH}"):
        given = ["model=tiny", *arguments[:-1], f"{name}={good}"]
        assert complete_arguments(given) == given


def test_choices_of_ones_own_folder_are_found(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nseed: 7\n")
    given = ["experiment=mine", "trainer.max_epochs=2"]
    expected = ["experiment=mine", "++trainer.max_epochs=2"]
    flag = ["--config-dir", str(tmp_path)]
    assert complete_arguments([*flag, *given]) == [*flag, *expected]
    path = f"hydra.searchpath=[file://{tmp_path}]"
    assert complete_arguments([path, *given]) == [path, *expected]


def test_groups_decide_which_arguments_there_are() -> None:
    assert complete_arguments(["optimizer=sgd", "optimizer.nesterov=true"]) == [
        "optimizer=sgd",
        "++optimizer.nesterov=true",
    ]
    deep = "model.model.config.rms_norm_eps=1e-4"
    assert complete_arguments(["model=tiny", deep]) == ["model=tiny", f"++{deep}"]
    assert complete_arguments(["-m", "model=tiny,hf", "optimizer.eps=1,2"]) == [
        "-m",
        "model=tiny,hf",
        "++optimizer.eps=1,2",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["strategy.max_ram=1"], r"no setting 'max_ram'; did you mean strategy\.max_ram_gb\?"),
        (["strategy._link=1"], "no setting '_link'"),
        (["optimizer=sgd", "optimizer.betas=[1,2]"], "torch.optim.SGD has no setting 'betas'"),
        (["modle=tiny"], r"no setting 'modle'; did you mean model\?"),
        (["optimzer.lr=1"], r"no setting 'optimzer'; did you mean optimizer\?"),
        (["samples.max_tokens=3"], r"did you mean samples\.max_new_tokens\?"),
        (["zzz=1"], r"known are .*checkpoints.* write \+zzz="),
        (["model=tinny"], r"no such choice; did you mean model=tiny\? .* hf, smollm2, tiny"),
        (["tiny"], "Write model=tiny"),
        (["model"], "Write model=CHOICE, of hf, smollm2, tiny"),
        (["trainer.max_steps", "3"], r"Write trainer\.max_steps=3"),
        (["trainer.max_steps"], r"Write trainer\.max_steps=VALUE"),
        (["--trainer.max_steps=3"], r"without dashes: trainer\.max_steps=3.*`megatrain fit`"),
    ],
)
def test_unknown_arguments_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        complete_arguments(arguments)


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(HydraException, match="Could not find 'model/nope'"):
        complete_arguments(["model=nope", "trainer.fast_dev_run=true"])


def test_settings_are_found_in_a_clone_and_in_a_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site-packages" / "mt_lightning"
    package.mkdir(parents=True)
    beside = str(package.parent / "mt_lightning_command.py")
    monkeypatch.setattr(mt_lightning_command, "__file__", beside)
    with pytest.raises(ConfigError, match="Reinstall the package"):
        settings_directory()
    shutil.copytree(CONF, package.parent / "conf")
    assert settings_directory() == package.parent / "conf"
    shutil.copytree(CONF, package / "conf")
    assert settings_directory() == package / "conf"
