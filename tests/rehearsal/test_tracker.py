"""Sums of gradients: whether autograd writes over the first, asked of autograd itself with no mode active."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from bridge_memory.rehearsal.tracker import Tracker  # noqa: E402

KEPT: list[Any] = []


def of_backward(gradient: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function that doubles its input, with the backward that ``gradient`` is."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return gradient(grad)

    return Doubled.apply


def kept(grad: Any) -> Any:
    KEPT.append(grad * 2)
    return KEPT[-1]


def detached(grad: Any) -> Any:
    """As Transformer Engine hands out the stand-in that it keeps."""
    return kept(grad).detach()


USES: dict[str, Callable[[Any], Any]] = {
    "an operation of PyTorch": torch.exp,
    "a fresh gradient": of_backward(lambda grad: grad * 2),
    "the gradient it was given": of_backward(lambda grad: grad),
    "a gradient that is kept": of_backward(kept),
    "a view of one that is kept": of_backward(detached),
    "a view": of_backward(lambda grad: (grad * 2).view(-1).view_as(grad)),
    "a sum of its own": of_backward(lambda grad: grad * 2 + grad),
}


def sums(first: Callable[[Any], Any], second: Callable[[Any], Any], mode: AbstractContextManager[Any]) -> list[str]:
    """The additions of the backward pass, in order; what comes last in forward comes first."""
    x = torch.ones(4, 4, requires_grad=True) * 1
    loss = second(x).sum() + first(x).sum()
    with mode, torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        loss.backward()
    return [e.name for e in seen.events() if e.name in ("aten::add", "aten::add_")]


@pytest.mark.parametrize("second", USES)
@pytest.mark.parametrize("first", USES)
def test_a_sum_of_gradients_is_in_place_where_autograd_makes_it_so(first: str, second: str) -> None:
    KEPT.clear()
    real = sums(USES[first], USES[second], nullcontext())
    tracked = sums(USES[first], USES[second], Tracker(device="cpu"))
    assert real[-1] == ("aten::add_" if first in ("an operation of PyTorch", "a fresh gradient", "a sum of its own")
                        else "aten::add")  # fmt: skip
    assert tracked[-1] == real[-1]


WRITES: dict[str, Callable[[Any], Any]] = {
    "index": lambda x: x[torch.zeros(8, dtype=torch.int64, device="meta")],
    "gather": lambda x: x.gather(0, torch.zeros(8, 4, dtype=torch.int64, device="meta")),
    "topk": lambda x: x.topk(2).values,
    "index_select": lambda x: x.index_select(0, torch.zeros(8, dtype=torch.int64, device="meta")),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_backward_writes_into_zeros_is_made_once(name: str) -> None:
    """On a GPU the gradient of x [4096, 4] is zeros, written in place: 65,536 bytes and the gradient that came,
    less than as much again."""
    x = torch.ones(4096, 4, device="meta", requires_grad=True)
    tracker = Tracker([x])
    with tracker.watching(torch.nn.Module()):
        picked = WRITES[name](x)
        tracker.reset_peak()
        picked.sum().backward()
    assert 65_536 <= tracker.peak().bytes < 2 * 65_536 + picked.numel() * 16


def test_what_backward_writes_into_a_gradient_that_another_refers_to_is_a_copy() -> None:
    """Where values are overwritten, as under the mask of a sharded embedding: the gradient that came is not changed, on
    any device. The copy is there beside what the multiplication makes of it."""
    x = torch.ones(4096, 4, device="meta", requires_grad=True)
    mask = torch.zeros(4096, dtype=torch.bool, device="meta")
    tracker = Tracker([x])
    with tracker.watching(torch.nn.Module()):
        written = x * 1
        written[mask, :] = 0.0
        gradient = torch.empty_like(written)
        before = tracker.live_bytes
        tracker.reset_peak()
        written.backward(gradient)
    assert tracker.peak().bytes - before >= 2 * 65_536
