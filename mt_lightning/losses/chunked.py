"""Head and cross-entropy of a language model, a chunk of tokens at a time.

[Note: why gradients wait for backward]
The forward pass keeps no logits: it takes the loss of one chunk after the other. The backward pass
makes each chunk's logits once more and takes their gradient there and then. Taking it in the
forward pass already would save that one product, but the gradient that comes from above would not
be known: fp16 gradients would underflow before the scaler's factor reaches them, a factor on the
loss would be rounded twice, and a gradient as large as the head would lie in memory between the
passes, outside of every budget. Under paging it costs nothing, since a unit is run again anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mt_lightning.errors import ConfigError, StepError

ChunkSize = int | Literal["auto"]
Step = tuple[Callable[..., Tensor], tuple[Any, ...], dict[str, Any]]
"""A function of the logits alone, its further arguments and keywords."""

_CHUNK_BYTES = {"cpu": 32 << 20}
_DEVICE_CHUNK_BYTES = 256 << 20
_MIN_CHUNK_TOKENS = {"cpu": 16}
"""Fewer would leave a product bound by reading the head's weight."""
_DEVICE_MIN_CHUNK_TOKENS = 512


def chunked_loss(
    hidden: Tensor,
    head: nn.Linear | Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    shift: bool = True,
    ignore_index: int = -100,
    num_items: Tensor | float | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    label_smoothing: float = 0.0,
    chunk_size: ChunkSize = "auto",
) -> Tensor:
    """Return the next-token loss of a causal language model without the logits of all tokens.

    The value and its gradients are those of transformers' `ForCausalLMLoss` on
    `head(hidden)`: bit for bit while all tokens fit in one chunk, else up to the order of sums.
    It can be multiplied, added to other losses and differentiated once; gradients of second order
    are refused. Under `strategy="megatrain"`, `head` must be the module, and the loss runs as a
    call of its unit.

    Args:
        hidden: `[..., sequence, features]`, what the head is applied to.
        head: a Linear, or its weight `[vocabulary, features]`.
        labels: int64 `[..., sequence]`; not shifted unless `shift=False`.
        bias: `[vocabulary]`, for a head that is given as a weight.
        shift: whether the token at position t is predicted at position t - 1.
        ignore_index: the label of positions that do not count.
        num_items: what the sum of losses is divided by; None means the number of labels that
            count, for which an all-ignored batch gives NaN, as it does in PyTorch.
        soft_cap: logits become `tanh(logits / soft_cap) * soft_cap`, as in Gemma 2.
        scale: factor on the logits, before `soft_cap`.
        label_smoothing: as in `torch.nn.functional.cross_entropy`.
        chunk_size: tokens whose logits exist at once; "auto" takes as many as 32 MiB of fp32
            logits hold, 256 MiB on an accelerator.

    Returns:
        The loss, a float32 scalar.

    Raises:
        ConfigError: if shapes do not fit each other or a setting is out of range.
        StepError: in a backward pass with `create_graph=True`.
    """
    if isinstance(head, nn.Linear):
        if bias is not None:
            raise ConfigError("chunked_loss got a module and a bias; bias= goes with a weight.")
        features, vocabulary = head.in_features, head.out_features
    elif isinstance(head, Tensor) and head.dim() == 2:
        vocabulary, features = head.shape
    else:
        what = f"shape {tuple(head.shape)}" if isinstance(head, Tensor) else type(head).__name__
        raise ConfigError(
            f"chunked_loss needs a head that is a torch.nn.Linear or a weight [vocabulary, "
            f"features], and got {what}. For another head, call the model's own loss."
        )
    if hidden.shape[-1] != features or hidden.shape[:-1] != labels.shape:
        raise ConfigError(
            f"chunked_loss got hidden {tuple(hidden.shape)}, labels {tuple(labels.shape)} and a "
            f"head of {features} features: hidden must be labels' shape and features."
        )
    if soft_cap is not None and not soft_cap > 0:
        raise ConfigError(f"soft_cap={soft_cap} must be above 0; None turns it off.")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ConfigError(f"label_smoothing={label_smoothing} must be between 0 and 1.")
    if shift:
        labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    steps: list[Step] = [] if scale is None else [(torch.mul, (scale,), {})]
    if soft_cap is not None:
        steps += [(torch.div, (soft_cap,), {}), (torch.tanh, (), {}), (torch.mul, (soft_cap,), {})]
    steps.append((Tensor.float, (), {}))
    loss = cross_entropy(
        hidden.reshape(-1, features),
        Head(head, bias),
        labels.reshape(-1).to(hidden.device),
        CrossEntropy(
            steps=tuple(steps),
            ignore_index=ignore_index,
            reduction="mean" if num_items is None else "sum",
            label_smoothing=label_smoothing,
        ),
        chunk_tokens(chunk_size, vocabulary, hidden.device),
    )
    if num_items is None:
        return loss
    if isinstance(num_items, Tensor):
        num_items = num_items.to(loss.device)
    return loss / num_items


def chunk_tokens(chunk_size: ChunkSize, vocabulary: int, device: torch.device) -> int:
    """Return how many tokens a chunk has, by the setting, the vocabulary and the kind of device.

    Raises:
        ConfigError: if the setting is not "auto" or a number above 0.
    """
    if chunk_size == "auto":
        num_bytes = _CHUNK_BYTES.get(device.type, _DEVICE_CHUNK_BYTES)
        least = _MIN_CHUNK_TOKENS.get(device.type, _DEVICE_MIN_CHUNK_TOKENS)
        num_tokens = num_bytes // (4 * max(1, vocabulary))
        return max(least, num_tokens // 64 * 64 or num_tokens // least * least)
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise ConfigError(
            f"A loss chunk of {chunk_size!r} tokens is not possible; set it to 'auto' or to a "
            "number above 0."
        )
    return chunk_size


@dataclass(frozen=True)
class Head:
    """A linear head, whose weights may be in memory only while its module runs.

    Attributes:
        linear: the module, or its weight `[vocabulary, features]`.
        bias: `[vocabulary]`, with a weight.
        forward: the module's forward; None means the one it has.
    """

    linear: nn.Linear | Tensor
    bias: Tensor | None = None
    forward: Callable[..., Any] | None = None

    def weights(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias."""
        if isinstance(self.linear, nn.Linear):
            return self.linear.weight, self.linear.bias
        return self.linear, self.bias

    def run(self, function: Callable[..., Tensor], *args: Any) -> Tensor:
        """Call a function that reads the weights, as a call of the module where it is paged."""
        if isinstance(self.linear, nn.Linear):
            forward = self.linear.forward if self.forward is None else self.forward
            run_inside = getattr(forward, "run_inside", None)
            if run_inside is not None:
                return run_inside(function, *args)
        return function(*args)


@dataclass(frozen=True, kw_only=True)
class CrossEntropy:
    """What is done with logits, a loss whose terms belong to one token each."""

    steps: tuple[Step, ...] = ()
    """Functions applied to the logits first, one after the other."""
    ignore_index: int = -100
    """The label of tokens that do not count."""
    reduction: str = "mean"
    """"mean" over the tokens that count, or "sum"."""
    label_smoothing: float = 0.0
    """Share of the target that is spread over the vocabulary."""

    def __call__(self, logits: Tensor, target: Tensor, reduction: str) -> Tensor:
        """Return the loss of logits `[tokens, vocabulary]` as a scalar."""
        for function, args, kwargs in self.steps:
            logits = function(logits, *args, **kwargs)
        return F.cross_entropy(
            logits,
            target,
            ignore_index=self.ignore_index,
            reduction=reduction,
            label_smoothing=self.label_smoothing,
        )


def cross_entropy(
    hidden: Tensor, head: Head, target: Tensor, loss: CrossEntropy, num_tokens: int
) -> Tensor:
    """Return the loss of `hidden` `[tokens, features]`, `num_tokens` at a time.

    One chunk is computed as it always is, by autograd.
    """
    call = _Call(loss, num_tokens)

    def whole(hidden: Tensor, target: Tensor) -> Tensor:
        return loss(F.linear(hidden, *head.weights()), target, loss.reduction)

    def chunked(hidden: Tensor, target: Tensor) -> Tensor:
        return _ChunkedSum.apply(hidden, *head.weights(), target, call)  # type: ignore[return-value]

    if len(hidden) <= num_tokens:
        return head.run(whole, hidden, target)
    total = head.run(chunked, hidden, target)
    if loss.reduction == "sum":
        return total
    return total / (target != loss.ignore_index).sum()


class _Call:
    """One loss, whose node may be made again by a recomputation that needs no second value."""

    def __init__(self, loss: CrossEntropy, num_tokens: int) -> None:
        self.loss = loss
        self.num_tokens = num_tokens
        self.value: Tensor | None = None


class _ChunkedSum(torch.autograd.Function):
    """The sum of the losses of all tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        call: _Call,
    ) -> Tensor:
        device = hidden.device.type
        ctx.call = call
        ctx.device = device
        ctx.autocast = torch.get_autocast_dtype(device) if _autocasts(device) else None
        ctx.save_for_backward(hidden, weight, bias, target)
        if call.value is None:
            weight, bias = _cast(weight, ctx.autocast), _cast(bias, ctx.autocast)
            sums = [
                call.loss(F.linear(_cast(part, ctx.autocast), weight, bias), labels, "sum")
                for part, labels in _chunks(call, hidden, target)
            ]
            call.value = torch.stack(sums).sum()
        value: Tensor = call.value
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise StepError(
                "The chunked loss has no gradient of second order (create_graph=True). Turn it "
                "off (loss_chunk_size=None in CausalLMModule), or compute the loss from the "
                "model's logits."
            )
        with _autocast(ctx.device, None):
            return _gradients(ctx, grads[0])


def _gradients(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
    hidden, weight, bias, target = ctx.saved_tensors
    needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    grad_hidden = torch.empty_like(hidden) if needs_hidden else None
    sum_weight, sum_bias = _Sum(), _Sum()
    cast_weight, cast_bias = _cast(weight, ctx.autocast), _cast(bias, ctx.autocast)
    start = 0
    for part, labels in _chunks(ctx.call, hidden, target):
        part = _cast(part, ctx.autocast)
        grad = _logits_grad(ctx, F.linear(part, cast_weight, cast_bias), labels, grad_loss)
        if grad_hidden is not None:
            grad_hidden[start : start + len(part)] = grad.mm(cast_weight)
        if needs_weight:
            sum_weight.add_product(grad.t(), part)
        if needs_bias:
            sum_bias.add(_at_least_float32(grad).sum(0))
        start += len(part)
        del grad
    return (
        grad_hidden,
        sum_weight.value.to(weight.dtype) if needs_weight else None,
        sum_bias.value.to(bias.dtype) if needs_bias else None,
        None,
        None,
    )


def _logits_grad(ctx: Any, logits: Tensor, target: Tensor, grad: Tensor) -> Tensor:
    with torch.enable_grad(), _autocast(ctx.device, ctx.autocast):
        loss = ctx.call.loss(logits.requires_grad_(), target, "sum")
        return torch.autograd.grad(loss, logits, grad)[0]


class _Sum:
    """A sum over chunks, in float32 at least: it is rounded once, as the whole would be."""

    value: Tensor

    def __init__(self) -> None:
        self._begun = False

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add a matrix product, without a second matrix of its size where the device allows."""
        if left.device.type != "cpu" and left.dtype in (torch.float16, torch.bfloat16):
            self.add(left.mm(right).float())  # matrix units, at the price of a rounding per chunk
            return
        left, right = _at_least_float32(left), _at_least_float32(right)
        if self._begun:
            self.value.addmm_(left, right)
        else:
            self.add(left.mm(right))

    def add(self, term: Tensor) -> None:
        """Add a term."""
        if self._begun:
            self.value.add_(term)
        else:
            self.value, self._begun = term, True


def _chunks(call: _Call, hidden: Tensor, target: Tensor) -> Any:
    return zip(hidden.split(call.num_tokens), target.split(call.num_tokens), strict=True)


def _at_least_float32(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def _autocasts(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _autocast(device: str, dtype: torch.dtype | None) -> Any:
    if not torch.amp.is_autocast_available(device):
        return nullcontext()
    return torch.autocast(device, dtype=dtype, enabled=dtype is not None, cache_enabled=False)


def _cast(values: Any, dtype: torch.dtype | None) -> Any:
    """Do what autocast does to an argument of a matrix product."""
    if dtype is None or values is None or values.dtype == torch.float64:
        return values
    return values.to(dtype)
