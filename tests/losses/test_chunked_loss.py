"""`chunked_loss` is transformers' loss of a causal language model, without its logits."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers.loss.loss_utils import ForCausalLMLoss

import mt_lightning as mt
from mt_lightning.errors import ConfigError, StepError
from mt_lightning.losses import chunked

VOCABULARY, FEATURES, BATCH, LENGTH = 523, 48, 3, 37
NUM_TOKENS = BATCH * LENGTH
Case = dict[str, Any]

CASES: dict[str, Case] = {
    "plain": {},
    "bias": {"bias": True},
    "soft_cap": {"soft_cap": 2.0},
    "scale": {"scale": 0.3, "soft_cap": 1.5, "bias": True},
    "num_items": {"num_items": 71},
    "num_items_tensor": {"num_items": torch.tensor(71)},
    "shifted": {"shift": False},
    "ignore_index": {"ignore_index": 5},
    "bf16": {"dtype": torch.bfloat16, "bias": True, "soft_cap": 2.0},
    "fp16": {"dtype": torch.float16},
    "fp64": {"dtype": torch.float64},
    "autocast": {"autocast": torch.bfloat16, "bias": True},
    "autocast_fp16": {"autocast": torch.float16},
}


def tensors(case: Case) -> tuple[list[Tensor], Tensor]:
    """Return the leaves (hidden, weight and perhaps bias) and labels."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(BATCH, LENGTH, FEATURES), (VOCABULARY, FEATURES)]
    shapes += [(VOCABULARY,)] if case.get("bias") else []
    leaves = [
        (torch.randn(shape, generator=generator) * 0.7).to(case.get("dtype", torch.float32))
        for shape in shapes
    ]
    labels = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    labels[:, 5:9] = case.get("ignore_index", -100)
    labels[1, 20:] = case.get("ignore_index", -100)
    return [leaf.requires_grad_() for leaf in leaves], labels


def autocast(case: Case) -> Any:
    dtype = case.get("autocast")
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)


def own_loss(case: Case, leaves: list[Tensor], labels: Tensor) -> Tensor:
    """Do what models of transformers do."""
    with autocast(case):
        logits = functional.linear(*leaves)
        if "scale" in case:
            logits = logits * case["scale"]
        if "soft_cap" in case:
            logits = torch.tanh(logits / case["soft_cap"]) * case["soft_cap"]
        given = {
            "num_items_in_batch": case.get("num_items"),
            "ignore_index": case.get("ignore_index", -100),
        }
        if not case.get("shift", True):
            return ForCausalLMLoss(logits, None, VOCABULARY, shift_labels=labels, **given)
        return ForCausalLMLoss(logits, labels, VOCABULARY, **given)


def exact_loss(case: Case, leaves: list[Tensor], labels: Tensor) -> Tensor:
    """Do the same in float64."""
    logits = functional.linear(*leaves)
    logits = logits * case.get("scale", 1.0)
    if "soft_cap" in case:
        logits = torch.tanh(logits / case["soft_cap"]) * case["soft_cap"]
    ignored = case.get("ignore_index", -100)
    if case.get("shift", True):
        labels = functional.pad(labels, (0, 1), value=ignored)[:, 1:]
    total = functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=ignored, reduction="sum"
    )
    return total / case.get("num_items", (labels != ignored).sum())


def chunked_loss(case: Case, leaves: list[Tensor], labels: Tensor, size: int) -> Tensor:
    names = ("soft_cap", "scale", "num_items", "shift", "ignore_index")
    given = {name: case[name] for name in names if name in case}
    bias = leaves[2] if len(leaves) > 2 else None
    with autocast(case):
        return mt.chunked_loss(*leaves[:2], labels, bias=bias, chunk_size=size, **given)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("factor", [1.0, 1 / 3])
def test_one_chunk_has_the_bits_of_transformers(name: str, factor: float) -> None:
    leaves, labels = tensors(CASES[name])
    loss = chunked_loss(CASES[name], leaves, labels, NUM_TOKENS)
    expected = own_loss(CASES[name], leaves, labels)
    assert loss.dtype == expected.dtype
    assert torch.equal(loss, expected)
    grads = torch.autograd.grad(loss * factor, leaves)
    for grad, want in zip(grads, torch.autograd.grad(expected * factor, leaves), strict=True):
        assert torch.equal(grad, want)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [NUM_TOKENS // 2, 16, 1])
def test_chunks_are_as_near_to_the_truth(name: str, size: int) -> None:
    case = CASES[name]
    leaves, labels = tensors(case)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    # A scaler's factor: fp16 gradients would vanish before it if they were taken too early.
    factor = 1024.0
    results = []
    for loss, of in (
        (chunked_loss(case, leaves, labels, size), leaves),
        (own_loss(case, leaves, labels), leaves),
        (exact_loss(case, exact, labels), exact),
    ):
        results.append([loss.detach(), *torch.autograd.grad(loss * factor, of)])
    for ours, theirs, truth in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        size_of_truth = truth.norm()
        error, allowed = (x.double().sub(truth).norm() / size_of_truth for x in (ours, theirs))
        # The order of sums differs: a few units in the last place of the arithmetic are chance.
        chance = 4 * torch.finfo(torch.float32).eps
        assert error <= 1.02 * allowed + chance, (error, allowed)


@pytest.mark.parametrize("size", [NUM_TOKENS, 16])
def test_an_all_ignored_batch_is_what_it_is_in_pytorch(size: int) -> None:
    leaves, labels = tensors({})
    labels.fill_(-100)
    loss = chunked_loss({}, leaves, labels, size)
    assert loss.isnan()
    assert own_loss({}, leaves, labels).isnan()
    grads = torch.autograd.grad(loss, leaves)
    for grad, want in zip(
        grads, torch.autograd.grad(own_loss({}, leaves, labels), leaves), strict=True
    ):
        assert torch.equal(grad, want)
    counted = chunked_loss({"num_items": 7}, leaves, labels, size)
    assert counted.item() == own_loss({"num_items": 7}, leaves, labels).item() == 0.0


def test_label_smoothing_is_that_of_pytorch() -> None:
    (hidden, weight), labels = tensors({})
    expected = functional.cross_entropy(
        functional.linear(hidden, weight).flatten(0, 1), labels.flatten(), label_smoothing=0.1
    )
    for size in (NUM_TOKENS, 16):
        loss = mt.chunked_loss(
            hidden, weight, labels, shift=False, label_smoothing=0.1, chunk_size=size
        )
        torch.testing.assert_close(loss, expected)
        grads = torch.autograd.grad(loss, (hidden, weight))
        torch.testing.assert_close(
            grads, torch.autograd.grad(expected, (hidden, weight), retain_graph=True)
        )


def test_it_is_a_term_like_any_other() -> None:
    """Summed with other terms, used twice, with a weight that is also the embedding."""
    (_, weight), labels = tensors({})
    tokens = labels.clamp(min=0)

    def total(loss: Any) -> Tensor:
        hidden = functional.embedding(tokens, weight).tanh()
        other = hidden.roll(1, 1)
        terms = loss(hidden) * 0.7, loss(other), hidden.square().mean() * 0.01
        return terms[0] + terms[1] * terms[1] + terms[2]

    ours = total(lambda h: mt.chunked_loss(h, weight, labels, chunk_size=16))
    theirs = total(lambda h: own_loss({}, [h, weight], labels))
    torch.testing.assert_close(ours, theirs)
    (grad,), (want,) = torch.autograd.grad(ours, weight), torch.autograd.grad(theirs, weight)
    torch.testing.assert_close(grad, want)


def test_only_what_is_trained_gets_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    (hidden, weight), labels = tensors({})
    for trained in (hidden, weight):
        leaves = [leaf if leaf is trained else leaf.detach() for leaf in (hidden, weight)]
        (grad,) = torch.autograd.grad(chunked_loss({}, leaves, labels, 16), trained)
        (want,) = torch.autograd.grad(own_loss({}, leaves, labels), trained)
        torch.testing.assert_close(grad, want)
    with torch.no_grad():
        assert not chunked_loss({}, [hidden, weight], labels, 16).requires_grad
    monkeypatch.setattr(chunked, "_logits_grad", None)
    frozen = [leaf.detach() for leaf in (hidden, weight)]
    assert not chunked_loss({}, frozen, labels, 16).requires_grad


def test_backward_twice_gives_the_same_and_second_order_is_refused() -> None:
    leaves, labels = tensors({})
    loss = chunked_loss({}, leaves, labels, 16)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    with pytest.raises(StepError, match="no gradient of second order"):
        torch.autograd.grad(loss, leaves, create_graph=True)
    second = torch.autograd.grad(loss, leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_recomputed_part_of_a_model_may_hold_it() -> None:
    leaves, labels = tensors({"bias": True})
    loss = checkpoint(
        lambda *args: chunked_loss({}, list(args), labels, 16), *leaves, use_reentrant=False
    )
    expected = chunked_loss({}, leaves, labels, 16)
    grads = torch.autograd.grad(loss, leaves)
    for grad, want in zip(grads, torch.autograd.grad(expected, leaves), strict=True):
        assert torch.equal(grad, want)


class Largest(TorchDispatchMode):
    """Knows the largest result of any operation, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, Tensor):
                self.num_elements = max(self.num_elements, value.numel())
        return result


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_no_tensor_grows_with_tokens_times_vocabulary(dtype: torch.dtype | None) -> None:
    head = nn.Linear(16, 4000, bias=False)
    largest = {}
    for num_tokens in (128, 1024):
        hidden = torch.randn(1, num_tokens, 16, requires_grad=True)
        labels = torch.randint(4000, (1, num_tokens))
        with Largest() as seen, autocast({"autocast": dtype}):
            mt.chunked_loss(hidden, head, labels, chunk_size=32).backward()
        largest[num_tokens] = seen.num_elements
    assert largest == dict.fromkeys(largest, 32 * 4000)


def test_auto_chunks_follow_the_vocabulary() -> None:
    cpu = torch.device("cpu")
    for vocabulary, num_tokens in ((257, 32640), (49152, 128), (262144, 32), (1 << 20, 16)):
        assert chunked.chunk_tokens("auto", vocabulary, cpu) == num_tokens
    assert chunked.chunk_tokens("auto", 49152, torch.device("meta")) == 1344
    assert chunked.chunk_tokens(5, 49152, cpu) == 5


def test_errors_name_the_setting() -> None:
    (hidden, weight), labels = tensors({})
    for given, message in (
        ({"chunk_size": 0}, "chunk of 0 tokens"),
        ({"chunk_size": True}, "chunk of True tokens"),
        ({"soft_cap": 0.0}, "soft_cap=0.0 must be above 0"),
        ({"label_smoothing": 2.0}, "label_smoothing=2.0"),
        ({"head": nn.Sequential(nn.Linear(FEATURES, 5))}, "got Sequential"),
        ({"head": torch.zeros(5)}, r"got shape \(5,\)"),
        ({"head": nn.Linear(7, 5)}, "a head of 7 features"),
        ({"labels": labels[:, 1:]}, r"labels \(3, 36\)"),
        ({"head": nn.Linear(FEATURES, 5), "bias": torch.zeros(5)}, "a module and a bias"),
    ):
        with pytest.raises(ConfigError, match=message):
            mt.chunked_loss(**{"hidden": hidden, "head": weight, "labels": labels, **given})
