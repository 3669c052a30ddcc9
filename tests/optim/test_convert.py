"""State goes between torch's form, lossless and packed; what was decoded packs to its own bytes."""

from __future__ import annotations

import pytest
import torch

from mt_lightning.errors import ConfigError
from mt_lightning.optim.compressed_adamw import CompressedAdamW
from mt_lightning.optim.convert import convert_state, convert_state_dict
from mt_lightning.optim.packed.formats import FORMATS
from tests.optim.packed_cases import wild

PACKED_FORMS = ["dynamic", *FORMATS]


def _params() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    weight = torch.randn(70, 64).t()
    return [torch.nn.Parameter(weight), torch.nn.Parameter(torch.randn(33))]


def _stepped(kind, num_steps: int = 3, **settings):
    params = _params()
    optimizer = kind(params, lr=1e-3, **settings)
    _step(params, optimizer, range(num_steps))
    return params, optimizer


def _step(params, optimizer, steps: range) -> None:
    for step in steps:
        for index, param in enumerate(params):
            grad = wild(param.numel(), 10 * step + index).view(param.shape)
            param.grad = torch.empty_like(param).copy_(grad)
        optimizer.step()


@pytest.mark.parametrize("form", ["fp32", "lossless"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_exact_forms_go_on_as_torch_does_and_back(form: str, kind) -> None:
    params, optimizer = _stepped(kind, fused=True, weight_decay=0.1)
    twins = [torch.nn.Parameter(torch.empty_like(p).copy_(p.detach())) for p in params]
    ours = CompressedAdamW(
        twins, format=form, weight_decay=0.1, decoupled_weight_decay=kind is torch.optim.AdamW
    )
    ours.load_state_dict(convert_state_dict(optimizer.state_dict(), form))
    _step(params, optimizer, range(3, 6))
    _step(twins, ours, range(3, 6))
    for param, twin in zip(params, twins, strict=True):
        assert torch.equal(param, twin)
    back = convert_state_dict(ours.state_dict(), "adamw")
    for index, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(back["state"][index][name], value)
            assert back["state"][index][name].stride() == value.stride()
    again = kind(twins, fused=True)
    again.load_state_dict(back)
    _step(params, optimizer, range(6, 8))
    _step(twins, again, range(6, 8))
    for param, twin in zip(params, twins, strict=True):
        assert torch.equal(param, twin)


@pytest.mark.parametrize("form", sorted({*PACKED_FORMS} - {"C5"}))
def test_packed_state_survives_a_trip_through_torch_byte_for_byte(form: str) -> None:
    params, optimizer = _stepped(CompressedAdamW, format=form, seed=4)
    state_dict = optimizer.state_dict()
    for between in ("adamw", "lossless", "fp32"):
        back = convert_state_dict(convert_state_dict(state_dict, between), form)
        for index, state in state_dict["state"].items():
            assert torch.equal(back["state"][index]["packed"], state["packed"])
            assert torch.equal(back["state"][index]["step"], state["step"])
            assert back["state"][index]["stride"] == state["stride"]
        other = CompressedAdamW(params, format=form)
        other.load_state_dict(back)


def test_columns_are_fitted_again_behind_a_trip_through_torch() -> None:
    """So bytes of C5 change, and values by what the docstring of `encode` says."""
    params, optimizer = _stepped(CompressedAdamW, format="C5")
    state_dict = optimizer.state_dict()
    before = convert_state_dict(state_dict, "adamw")
    back = convert_state_dict(before, "C5")
    after = convert_state_dict(back, "adamw")
    CompressedAdamW(params, format="C5").load_state_dict(back)
    values, twins = (x["state"][0] for x in (before, after))
    assert torch.allclose(twins["exp_avg_sq"], values["exp_avg_sq"], rtol=2**-15, atol=0)
    root = values["exp_avg_sq"].sqrt()
    coded, moved = (
        (x / root).nan_to_num().t().reshape(-1, 128).abs().amax(1)
        for x in (values["exp_avg"], values["exp_avg"] - twins["exp_avg"])
    )
    assert (moved <= 0.6 / 15 * coded).all()


def test_nothing_is_shared_with_the_source() -> None:
    _, optimizer = _stepped(torch.optim.AdamW)
    source = optimizer.state_dict()
    result = convert_state_dict(source, "adamw")
    for index, state in source["state"].items():
        for name, value in state.items():
            assert result["state"][index][name].data_ptr() != value.data_ptr()
    assert result["param_groups"][0] is not source["param_groups"][0]


def test_other_settings_of_a_group_are_kept() -> None:
    _, optimizer = _stepped(torch.optim.AdamW)
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    group = convert_state_dict(optimizer.state_dict(), "R1")["param_groups"][0]
    assert group["initial_lr"] == 1e-3
    assert group["format"] == "R1"
    assert "foreach" not in group


@pytest.mark.parametrize("fused", [True, False, None])
def test_how_torch_steps_is_kept_from_plain_to_plain(fused) -> None:
    _, optimizer = _stepped(torch.optim.AdamW, fused=fused, foreach=False)
    group = convert_state_dict(optimizer.state_dict(), "adamw")["param_groups"][0]
    assert group == optimizer.state_dict()["param_groups"][0]


def test_after_compression_torch_steps_with_the_same_rounding() -> None:
    _, optimizer = _stepped(CompressedAdamW, format="fp32")
    group = convert_state_dict(optimizer.state_dict(), "adamw")["param_groups"][0]
    assert group["fused"] is True


def test_unstepped_parameters_stay_without_state() -> None:
    state_dict = torch.optim.AdamW(_params()).state_dict()
    assert convert_state_dict(state_dict, "R1")["state"] == {}


def test_unknown_forms_and_states_are_refused() -> None:
    with pytest.raises(ConfigError, match="'R9'.*adamw, lossless, dynamic"):
        convert_state({}, "R9")
    with pytest.raises(ConfigError, match="momentum_buffer"):
        convert_state({"momentum_buffer": torch.ones(3)}, "R1")
    _, optimizer = _stepped(torch.optim.AdamW, amsgrad=True)
    with pytest.raises(ConfigError, match="amsgrad"):
        convert_state_dict(optimizer.state_dict(), "R1")
