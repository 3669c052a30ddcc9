"""No field of TrainingArguments is ignored: each is followed, or refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

import mt_lightning as mt
from mt_lightning.errors import ConfigError
from mt_lightning.huggingface.trainer import fields
from tests.huggingface.trainer_cases import arguments, llama


def test_every_field_is_in_one_table() -> None:
    assert fields.unknown_fields() == []
    assert not fields.MAPPED.keys() & fields.REFUSED.keys()


def test_the_defaults_are_accepted(tmp_path: Path) -> None:
    fields.check_arguments(TrainingArguments(output_dir=str(tmp_path)))


def test_one_error_lists_all_that_is_not_followed(tmp_path: Path) -> None:
    args = arguments(
        tmp_path,
        neftune_noise_alpha=5.0,
        auto_find_batch_size=True,
        optim="lomo",
        ddp_static_graph=True,
        accelerator_config={"use_seedable_sampler": False},
    )
    with pytest.raises(ConfigError) as caught:
        mt.Trainer(llama(), args)
    message = str(caught.value)
    assert message.startswith("5 of the TrainingArguments cannot be followed")
    for name in (
        "neftune_noise_alpha=5.0",
        "auto_find_batch_size=True",
        "optim='lomo': use one of adamw_torch",
        "ddp_static_graph=True",
        "accelerator_config.use_seedable_sampler=False",
    ):
        assert name in message


# Values that transformers itself accepts on a CPU; the other refused fields need what is not here.
CHANGED: dict[str, Any] = {
    "optim_target_modules": ["q_proj"],
    "fp16": True,
    "bf16_full_eval": True,
    "fp16_full_eval": True,
    "torch_compile": True,
    "use_liger_kernel": True,
    "liger_kernel_config": {"rope": True},
    "neftune_noise_alpha": 1.0,
    "auto_find_batch_size": True,
    "enable_jit_checkpoint": True,
    "push_to_hub": True,
    "hub_token": "t",
    "hub_private_repo": True,
    "hub_model_id": "a/b",
    "hub_strategy": "end",
    "hub_always_push": True,
    "hub_revision": "main",
    "ignore_data_skip": True,
    "ddp_find_unused_parameters": True,
    "ddp_bucket_cap_mb": 1,
    "ddp_broadcast_buffers": True,
    "ddp_static_graph": True,
    "debug": "underflow_overflow",
}


@pytest.mark.parametrize("name", sorted(CHANGED))
def test_a_field_that_is_not_followed_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"- {name}="):
        fields.check_arguments(arguments(tmp_path, **{name: CHANGED[name]}))


def test_a_field_of_a_newer_transformers_is_refused_unless_it_is_the_default(
    tmp_path: Path,
) -> None:
    @dataclasses.dataclass
    class Newer(TrainingArguments):
        forget_gate: float = 0.5

    fields.check_arguments(Newer(output_dir=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"forget_gate=0.7: this version does not know it"):
        fields.check_arguments(Newer(output_dir=str(tmp_path), forget_gate=0.7))
