"""Differentiate from a loss back to where its last unit began, and no further.

[Note: tail first]
What a step computes from its last unit to its loss (the logits above all) is the largest thing it
holds. With all micro-batches of a window waiting for one backward it would be held for each of
them. So the part of the graph that is younger than the entry of the last unit is differentiated as
soon as the loss is there; what flows out of it waits as the gradient of older nodes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

from mt_lightning.engine.usage import next_sequence_number

Root = tuple[GradientEdge, torch.Tensor]
"""A node's output and the gradient that has come to it."""


class Entry:
    """Where the last unit of a step begins.

    Args:
        args: What the unit receives.
        kwargs: By name.

    Attributes:
        args: The same with a node of its own for each tensor: its gradient is caught there. Hooks
            on the tensor itself then see a gradient once, when it goes on.
        kwargs: By name.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._nodes: set[Node] = set()
        self.args = tuple(map(self._alias, args))
        self.kwargs = {name: self._alias(value) for name, value in kwargs.items()}
        self._first = next_sequence_number()

    def _alias(self, value: Any) -> Any:
        if type(value) is tuple:
            return tuple(map(self._alias, value))
        if isinstance(value, torch.Tensor) and value.requires_grad and value.grad_fn is not None:
            alias = value.view_as(value)
            assert alias.grad_fn is not None
            self._nodes.add(alias.grad_fn)
            return alias
        return value

    def differentiate(self, loss: torch.Tensor) -> list[Root]:
        """Differentiate through the unit and what follows it; return what flows out.

        Gradients of leaves are accumulated, as `backward` would.

        Args:
            loss: A scalar.
        """
        split = self._split(loss)
        if split is None:
            return whole(loss)
        leaves, out = split
        edges = [GradientEdge(node, number) for node, number in out]
        edges += [GradientEdge(node, 0) for node in leaves]
        grads: list[torch.Tensor | None]
        grads = list(torch.autograd.grad([loss], edges, allow_unused=True))
        for number, node in enumerate(leaves, len(out)):
            grad, grads[number] = grads[number], None
            if grad is not None:
                with torch.no_grad():
                    node(grad)  # type: ignore[operator]
            del grad
        return [(edge, grad) for edge, grad in zip(edges, grads, strict=True) if grad is not None]

    def _split(self, loss: torch.Tensor) -> tuple[list[Node], list[tuple[Node, int]]] | None:
        """Return leaves and other outputs of the part to differentiate; None if there is no such.

        [Note: what belongs to the tail]
        The nodes that lead to the unit's inputs or to leaves, and are younger than its entry. Other
        young nodes (a loss on router logits) wait: autograd would go on from one output to another
        that it leads to. Where an older tensor enters the tail beside the inputs, it does just
        that, and nothing can be split off.
        """
        if loss.grad_fn is None or loss.numel() != 1 or not self._young(loss.grad_fn):
            return None
        young = self._young_nodes(loss.grad_fn)
        leaves: dict[Node, None] = {}
        inside: set[Node] = set()
        for node in sorted(young, key=_number):
            for following, _ in node.next_functions:
                if following is not None and hasattr(following, "variable"):
                    leaves[following] = None
                    inside.add(node)
                elif following in self._nodes or following in inside:
                    inside.add(node)
        if loss.grad_fn not in inside:
            return None
        out: dict[tuple[Node, int], None] = {}
        for node in inside:
            for following, number in node.next_functions:
                if following is None or following in leaves or following in inside:
                    continue
                if following not in self._nodes and following not in young:
                    return None
                out[following, number] = None
        aside = {node for node, _ in out if node in young}
        for node in aside:
            if aside & (self._young_nodes(node) - {node}):
                return None
        return list(leaves), list(out)

    def _young_nodes(self, root: Node) -> set[Node]:
        seen, nodes = {root}, [root]
        while nodes:
            for node, _ in nodes.pop().next_functions:
                if node is not None and node not in seen and self._young(node):
                    seen.add(node)
                    nodes.append(node)
        return seen

    def _young(self, node: Node) -> bool:
        return not hasattr(node, "variable") and _number(node) >= self._first


def whole(loss: torch.Tensor) -> list[Root]:
    """Return the loss itself as the only root."""
    return [(torch.autograd.graph.get_gradient_edge(loss), torch.ones_like(loss))]


def _number(node: Node) -> int:
    return node._sequence_nr()  # type: ignore[attr-defined]
