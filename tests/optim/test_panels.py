"""Format C5: panels are independent, columns are what they should be, bytes are as documented."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_lightning.errors import ConfigError
from mt_lightning.optim.packed import panels, reference
from mt_lightning.optim.packed.panels import C5
from mt_lightning.optim.packed.place import Place
from mt_lightning.optim.packed.update import adamw_step, decode, encode
from tests.optim.packed_cases import fresh, same, scalars, wild

WIDTHS = [1, 7, 16, 50, 127, 128, 129, 300, 1000]
NUMEL = 20_077


@pytest.fixture(scope="module", autouse=True)
def short_panels() -> Iterator[None]:
    """Make panels of 1024 elements, or 64 rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(panels, "PANEL_NUMEL", 1024)
        yield


def grads(numel: int, seed: int) -> torch.Tensor:
    """Return gradients as a layer has them: rows and columns of their own scale, some of them 0."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * (torch.arange(numel) % 37 / 10).exp()
    values[numel // 2 : numel // 2 + 500] = 0
    return values


def vectors(state: torch.Tensor, numel: int, width: int) -> torch.Tensor:
    """Return cols_old and cols of a state of one panel."""
    start = C5.vectors_at(numel)
    return state[start : start + 8 * width].clone().view(torch.float32).view(2, width)


def run(width: int, numel: int = NUMEL, num_steps: int = 3, **threads):
    param, state = wild(numel, 1), fresh(C5, numel, width)
    for step in range(1, num_steps + 1):
        grad = grads(numel, step)
        adamw_step(C5, param, grad, state, scalars(step), key=0, width=width, **threads)
    return param, state


def test_a_panel_has_64_rows_at_least_and_bytes_that_pages_can_be_cut_at(monkeypatch) -> None:
    for numel in (1024, 1 << 19):
        monkeypatch.setattr(panels, "PANEL_NUMEL", numel)
        for width in (1, 16, 4096, 8192, 8193, 32768, 50_000):
            place = Place(numel, width)
            grain, nbytes = C5.grain_numel(place), C5.grain_bytes(place)
            assert grain % numel == 0
            assert grain >= 64 * width
            assert grain == numel or grain - numel < 64 * width
            assert nbytes % 4096 == 0
            assert nbytes - 4096 < 85 * grain // 128 + 8 * width <= nbytes
            assert C5.state_bytes(Place(2 * grain, width)) == 2 * nbytes
            last = 85 * 2 + 2 + 8 * width
            assert C5.state_bytes(Place(2 * grain + 129, width)) == 2 * nbytes + last
            assert C5.state_bytes(Place(0, width)) == 0


@pytest.mark.parametrize("width", WIDTHS)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_pieces_in_any_order_give_the_same_bytes(width: int, data: st.DataObject) -> None:
    place = Place(NUMEL, width)
    grain, size = C5.grain_numel(place), C5.grain_bytes(place)
    inner = range(grain, NUMEL, grain)
    cuts = data.draw(st.sets(st.sampled_from(inner))) if inner else set()
    bounds = [0, *sorted(cuts), NUMEL]
    pieces = data.draw(st.permutations(list(zip(bounds[:-1], bounds[1:], strict=True))))
    expected_param, expected = run(width, threads=1)
    param, state = wild(NUMEL, 1), fresh(C5, NUMEL, width)
    for step in (1, 2, 3):
        grad = grads(NUMEL, step)
        for a, b in pieces:
            adamw_step(
                C5,
                param[a:b],
                grad[a:b],
                state[a // grain * size :],
                scalars(step),
                key=0,
                first=a,
                width=width,
            )
    assert torch.equal(param, expected_param)
    assert torch.equal(state, expected)
    moments = decode(C5, state, NUMEL, width=width)
    coded = fresh(C5, NUMEL, width) + 0xA5
    again = fresh(C5, NUMEL, width) + 0xA5
    encode(C5, *moments, coded, width=width)
    for a, b in pieces:
        stored = state[a // grain * size :]
        values = decode(C5, stored, b - a, first=a, width=width)
        for value, moment in zip(values, moments, strict=True):
            assert torch.equal(value, moment[a:b])
        encode(C5, *values, again[a // grain * size :], first=a, width=width)
    assert torch.equal(again, coded)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("threads", [2, 3, 8])
def test_any_number_of_threads_gives_the_same_bytes(width: int, threads: int) -> None:
    param, state = run(width, threads=1)
    twin_param, twin = run(width, threads=threads)
    assert torch.equal(param, twin_param)
    assert torch.equal(state, twin)
    moments = decode(C5, state, NUMEL, width=width, threads=1)
    for ours, theirs in zip(
        moments, decode(C5, state, NUMEL, width=width, threads=threads), strict=True
    ):
        assert torch.equal(ours, theirs)
    coded, coded_twin = fresh(C5, NUMEL, width), fresh(C5, NUMEL, width)
    encode(C5, *moments, coded, width=width, threads=1)
    encode(C5, *moments, coded_twin, width=width, threads=threads)
    assert torch.equal(coded, coded_twin)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("numel", [1, 127, 128, 1000, 4096, NUMEL])
@pytest.mark.parametrize("kind", ["plain", "wild", "spike", "bad"])
def test_kernels_equal_the_reference_whatever_the_width(width, numel: int, kind: str) -> None:
    param, state = torch.ones(numel), fresh(C5, numel, width)
    twin, twin_state = param.clone(), state.clone()
    for step in range(1, 6):
        grad = (wild if kind == "wild" else grads)(numel, step)
        if kind in ("spike", "bad"):
            grad[:: max(1, numel // 3)] = {"spike": 1e15, "bad": 1e30}[kind]
        if kind == "bad" and step % 2:
            grad[:: max(1, numel // 2)] = torch.nan
        constants = scalars(step, beta2=(0.999, 0.0)[step == 4])
        adamw_step(C5, param, grad, state, constants, key=0, width=width)
        reference.step(C5, twin, grad, twin_state, constants, key=0, width=width)
        assert same(param, twin)
        assert torch.equal(state, twin_state)
    values = decode(C5, state, numel, width=width)
    expected = reference.decode(C5, state, numel, width=width)
    assert same(values[0], expected[0])
    assert same(values[1], expected[1])
    encode(C5, *values, state, width=width)
    reference.encode(C5, *values, twin_state, width=width)
    assert torch.equal(state, twin_state)


@pytest.mark.parametrize("width", WIDTHS)
def test_state_need_not_be_aligned(width: int) -> None:
    expected_param, expected = run(width)
    param, state = wild(NUMEL, 1), torch.zeros(expected.numel() + 1, dtype=torch.uint8)
    for step in (1, 2, 3):
        grad = grads(NUMEL, step)
        adamw_step(C5, param, grad, state[1:], scalars(step), key=0, width=width)
    assert torch.equal(param, expected_param)
    assert torch.equal(state[1:], expected)


@pytest.mark.parametrize("width", WIDTHS)
def test_what_was_decoded_is_coded_to_its_bytes_with_its_vectors(width: int) -> None:
    _, state = run(width, num_steps=5)
    moments = decode(C5, state, NUMEL, width=width)
    again = torch.full_like(state, 0xA5)
    encode(C5, *moments, again, width=width, vectors=state)
    assert torch.equal(again, state)


# --- what it stands for ---------------------------------------------------------------------------


def test_a_record_by_hand() -> None:
    """Written from the documentation and not from the code."""
    numel, width = 128, 128
    state = fresh(C5, numel, width)
    q = [j * 7 % 31 - 15 for j in range(128)]
    for j in range(64):
        state[j] = (q[j] & 15) | (q[j + 64] & 15) << 4
    for j in range(16):
        state[64 + j] = sum((q[j + 16 * i] < 0) << i for i in range(8))
    state[80:82] = torch.tensor([0.5]).to(torch.bfloat16).view(torch.uint8)
    state[82:85] = torch.tensor([3.0]).view(torch.uint8)[1:]
    cols = torch.ones(2, 128)
    cols[0, :64], cols[1, :32] = 4.0, 5.0
    state[88:] = cols.view(torch.uint8).view(-1)
    m, v = decode(C5, state, numel, width=width)
    assert m.tolist() == [0.5 * q[j] * (2 if j < 64 else 1) for j in range(128)]
    # The mean column is 2, and the mean of v is 3.
    assert v.tolist() == [7.5 if j < 32 else 1.5 for j in range(128)]


@pytest.mark.parametrize("width", WIDTHS)
def test_the_first_step_is_that_of_adam(width: int) -> None:
    param = torch.nn.Parameter(torch.ones(NUMEL))
    flat, state, grad = torch.ones(NUMEL), fresh(C5, NUMEL, width), grads(NUMEL, 1)
    adamw_step(C5, flat, grad, state, scalars(1), key=0, width=width)
    param.grad = grad
    torch.optim.AdamW([param], lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1).step()
    assert torch.allclose(flat, param.detach(), rtol=1e-6)


@pytest.mark.parametrize("width", [7, 50, 128, 300, 1000])
def test_a_v_of_rank_one_is_kept(width: int) -> None:
    """Where rows are as long as blocks, or of one scale."""
    numel = 4 * C5.grain_numel(Place(0, width)) + 700
    index = torch.arange(numel)
    scale = (index % width * 5 % 11 + 1.0) * 10.0 ** (index // 128 % 5)
    if width % 128:
        scale = index % width * 5 % 11 + 1.0
    param, state, expected = torch.zeros(numel), fresh(C5, numel, width), torch.zeros(numel)
    for step in range(1, 50):
        signs = torch.randint(0, 2, (numel,), generator=torch.Generator().manual_seed(step))
        grad = scale * (2 * signs - 1)
        adamw_step(C5, param, grad, state, scalars(step), key=0, width=width)
        expected = 0.99 * expected + 0.01 * grad.square()
    _, v = decode(C5, state, numel, width=width)
    assert torch.allclose(v, expected, rtol=0.02)


@pytest.mark.parametrize("width", [50, 300, 1000])
def test_rows_that_are_cut_do_not_skew_columns(width: int) -> None:
    grain = C5.grain_numel(Place(0, width))
    assert grain % width
    numel = grain + 5 * width // 2
    param, state = torch.zeros(numel), fresh(C5, numel, width)
    for step in (1, 2, 3):
        adamw_step(C5, param, torch.ones(numel), state, scalars(step), key=0, width=width)
    first = vectors(state, grain, width)
    last = vectors(state[C5.grain_bytes(Place(0, width)) :], numel - grain, width)
    for cols in (first, last):
        assert torch.allclose(cols, torch.ones(2, width), atol=1e-4)


def test_columns_follow_a_change_of_gradients_as_slowly_as_v() -> None:
    width, numel = 128, 128 * 64
    param, state = torch.zeros(numel), fresh(C5, numel, width)
    step = 0
    for louder in (slice(0, 64), slice(64, 128)):
        grad = torch.ones(64, 128)
        grad[:, louder] = 3.0
        for _ in range(600):
            step += 1
            adamw_step(C5, param, grad.view(-1), state, scalars(step), key=0, width=width)
        cols = vectors(state, numel, width)[1]
        assert torch.allclose(cols, grad[0].square() / 5, rtol=0.15)


def test_columns_have_a_floor() -> None:
    width, numel = 128, 128 * 64
    param, state = torch.zeros(numel), fresh(C5, numel, width)
    grad = torch.ones(64, 128)
    grad[:, 5] = 0
    for step in (1, 2):
        adamw_step(C5, param, grad.view(-1), state, scalars(step), key=0, width=width)
    cols = vectors(state, numel, width)
    assert 2.0**-17 < cols[1, 5] < 2.0**-15
    assert (cols[1] > 0).all()


@pytest.mark.parametrize("width", WIDTHS)
def test_no_step_is_longer_than_adams_can_be(width: int) -> None:
    constants = scalars(1, weight_decay=0.0)
    bound = 1e-3 * max(1.0, 0.1 / 0.01**0.5) * (1 + 1e-6)
    param, state = torch.zeros(NUMEL), fresh(C5, NUMEL, width)
    for step in range(1, 20):
        before, grad = param.clone(), wild(NUMEL, step)
        constants = scalars(step, weight_decay=0.0)
        adamw_step(C5, param, grad, state, constants, key=0, width=width)
        assert (param - before).abs().max() <= bound + 1e-8


@pytest.mark.parametrize("width", [50, 1000])
def test_a_panel_without_gradients_keeps_its_columns_and_its_v_decays(width: int) -> None:
    numel = 4000
    param, state = torch.zeros(numel), fresh(C5, numel, width)
    for step in range(1, 4):
        adamw_step(C5, param, torch.zeros(numel), state, scalars(step), key=0, width=width)
    assert not state.any()
    assert not param.any()
    adamw_step(C5, param, grads(numel, 1), state, scalars(4), key=0, width=width)
    cols, v = vectors(state, numel, width), decode(C5, state, numel, width=width)[1]
    adamw_step(C5, param, torch.zeros(numel), state, scalars(5), key=0, width=width)
    assert torch.equal(vectors(state, numel, width)[0], cols[1])
    assert torch.equal(vectors(state, numel, width)[1], cols[1])
    assert torch.allclose(decode(C5, state, numel, width=width)[1], 0.99 * v, rtol=2e-5)


def test_the_first_gradients_of_a_panel_set_its_columns_however_late_they_come() -> None:
    states = []
    loud = 1 + torch.arange(4096) % 64 / 32 + torch.arange(4096) // 128 % 3
    for num_idle in (0, 500):
        state = fresh(C5, 4096, 64)
        for step in range(1, num_idle + 2):
            grad = loud if step > num_idle else torch.zeros(4096)
            adamw_step(C5, torch.zeros(4096), grad, state, scalars(step), key=0, width=64)
        states.append(vectors(state, 4096, 64)[1])
    assert torch.allclose(*states, rtol=1e-3)


@pytest.mark.parametrize("width", [50, 1000])
def test_a_panel_of_bad_gradients_keeps_its_records(width: int) -> None:
    _, state = run(width, 4000)
    before = state.clone()
    bad = torch.full((4000,), torch.nan)
    adamw_step(C5, torch.zeros(4000), bad, state, scalars(4), key=0, width=width)
    start = C5.vectors_at(4000)
    assert torch.equal(state[:start], before[:start])
    assert torch.equal(state[start + 4 * width :], before[start + 4 * width :])


@pytest.mark.parametrize(("width", "within"), [(64, 2.0**-15), (256, 2.0**-15), (300, 0.05)])
def test_columns_are_fitted_to_a_v_of_rank_one(width: int, within: float) -> None:
    index = torch.arange(NUMEL)
    v = (index % width * 5 % 11 + 1.0) * 10.0 ** (index // 128 % 7 - 3)
    state = fresh(C5, NUMEL, width)
    encode(C5, torch.zeros(NUMEL), v, state, width=width)
    assert torch.allclose(decode(C5, state, NUMEL, width=width)[1], v, rtol=within)


def test_the_width_and_a_place_at_a_panel_are_asked_for() -> None:
    with pytest.raises(AssertionError, match="width"):
        adamw_step(C5, torch.zeros(9), torch.zeros(9), fresh(C5, 9), scalars(1), key=0)
    with pytest.raises(AssertionError):
        decode(C5, fresh(C5, 9), 9, first=128, width=50)


def test_blocks_that_are_unfit_are_counted_over_panels() -> None:
    v = torch.ones(NUMEL)
    v[5] = v[9000] = -1.0
    with pytest.raises(ConfigError, match="2 of 157 blocks .*C5"):
        encode(C5, torch.ones(NUMEL), v, fresh(C5, NUMEL, 50), width=50)
