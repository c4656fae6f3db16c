"""Gradients of a weight that serves more than once, in the order in which backward meets its uses.

V = 32768 rows of h = 2048 in bf16 are D = 128 MiB. ``input_buffer.cpp: accumulate`` adds a second gradient into the
first if that has no other reference: D waits, D is the use's own, no third. If the GEMM adds into the main gradient
(gradient accumulation fusion), the output layer gives autograd a dummy gradient that Transformer Engine keeps for good:
it takes no memory here, but a sum may not overwrite it, so that the sum is a third tensor of D.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from bridge_memory.inventory.shared_weights import PendingGradients, pending_gradients, with_pending
from bridge_memory.readers import resolve_model
from bridge_memory.spec import ImplementationSpec, ParallelSpec, RunSpec
from bridge_memory.tapes.chain import Label, Link
from bridge_memory.tapes.context import BlockContext, context_of

MODEL = replace(resolve_model("meta-llama/Llama-3.2-1B"), vocab_size=32768)
D = 32768 * 2048 * 2
EMBEDDING, LAYER, NORM, MTP, LOSS = Label.EMBEDDING, Label.LAYER, Label.FINAL_NORM, Label.MTP, Label.LOSS


def context(*, stand_in: bool, tp: int = 1) -> BlockContext:
    return context_of(
        RunSpec(
            model=MODEL, parallel=ParallelSpec(world_size=tp, tensor_model_parallel_size=tp),
            implementation=ImplementationSpec(gradient_accumulation_fusion=stand_in),
        )
    )


DENSE, DUMMY = context(stand_in=False), context(stand_in=True)


def pending(ctx: BlockContext, *labels: Label, tied: bool) -> list[tuple[int, int, int]]:
    """(waiting before, the use's own, the tensor of the sum) of each block, in units of D."""
    assert all(n % D == 0 for p in pending_gradients(labels, ctx, tied=tied) for n in (p.before, p.own, p.total))
    return [(p.before // D, p.own // D, p.total // D) for p in pending_gradients(labels, ctx, tied=tied)]


def test_a_weight_used_once_waits_for_nobody() -> None:
    chain = (EMBEDDING, LAYER, NORM, LOSS)
    assert pending(DENSE, *chain, tied=False) == [(0, 1, 0), (0, 0, 0), (0, 0, 0), (0, 1, 0)]
    assert pending(DUMMY, *chain, tied=False) == [(0, 1, 0), (0, 0, 0), (0, 0, 0), (0, 0, 0)]


def test_tied_the_output_layers_gradient_waits_through_the_whole_backward() -> None:
    """The embedding's own is added into it."""
    chain = (EMBEDDING, LAYER, LAYER, NORM, LOSS)
    assert pending(DENSE, *chain, tied=True) == [(1, 1, 0), (1, 0, 0), (1, 0, 0), (1, 0, 0), (0, 1, 0)]


def test_a_dummy_gradient_takes_no_memory_and_is_not_overwritten() -> None:
    """At the embedding: its own gradient, and a third tensor for the sum of it and the dummy gradient."""
    assert pending(DUMMY, EMBEDDING, LAYER, LOSS, tied=True) == [(0, 1, 1), (0, 0, 0), (0, 0, 0)]


def test_tied_with_mtp_every_use_is_of_one_weight() -> None:
    """Backward meets two losses, the depth's embedding and the embedding: one D waits from the first on, and each adds
    its own into it."""
    chain = (EMBEDDING, LAYER, MTP, LOSS, LOSS)
    assert pending(DENSE, *chain, tied=True) == [(1, 1, 0), (1, 0, 0), (1, 1, 0), (1, 1, 0), (0, 1, 0)]
    # Two stand-ins make a third tensor, D from there on, into which all later ones are added.
    assert pending(DUMMY, *chain, tied=True) == [(1, 1, 0), (1, 0, 0), (1, 1, 0), (0, 0, 1), (0, 0, 0)]


def test_untied_with_mtp_each_weight_waits_for_its_own_uses() -> None:
    """The output layer's: from the main loss to the depth's, and then it goes. The embedding's: from the depth through
    the layers to the embedding, which adds its own."""
    chain = (EMBEDDING, LAYER, NORM, MTP, LOSS, LOSS)
    assert pending(DENSE, *chain, tied=False) == [
        (1, 1, 0), (1, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (0, 1, 0),
    ]  # fmt: skip
    assert pending(DUMMY, *chain, tied=False) == [
        (1, 1, 0), (1, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0),
    ]  # fmt: skip


def test_losses_between_depths_both_weights_wait_at_once() -> None:
    """Before 0.14 each depth is followed by its loss: backward meets loss, loss, depth, loss, depth. At the first
    depth's loss the output layer's D waits and so does the embedding's, of the second depth."""
    assert pending(DENSE, MTP, LOSS, MTP, LOSS, LOSS, tied=False) == [
        (1, 1, 0), (2, 1, 0), (1, 1, 0), (1, 1, 0), (0, 1, 0),
    ]  # fmt: skip


def test_a_copy_of_the_embedding_waits_for_its_depths_alone() -> None:
    """MTP on a stage without the embedding: two depths share the copy, the last one's gradient waits for the first's
    and goes with it."""
    assert pending(DENSE, LAYER, MTP, MTP, LOSS, tied=False) == [(0, 0, 0), (1, 1, 0), (0, 1, 0), (0, 1, 0)]


def test_tensor_parallelism_divides_the_rows() -> None:
    (found, *_) = pending_gradients((EMBEDDING, LOSS), context(stand_in=False, tp=2), tied=True)
    assert found == PendingGradients(D // 2, D // 2, 0)
    assert found.at_the_sum == D


def link(label: Label) -> Link:
    """Keeps 10; backward peaks at 40, at 44 with its output's gradient held."""
    return Link(label, 10, 30, 40, 44, str, str)


def test_a_layer_finds_what_waits() -> None:
    found = with_pending(link(LAYER), PendingGradients(before=100))
    assert (found.retained, found.forward_peak) == (10, 30)
    assert (found.backward_peak, found.backward_peak_held) == (140, 144)


@pytest.mark.parametrize(
    ("waits", "peak"),
    [
        # 40 + 100 while it runs; its own 100 beside the 100 that wait, when nothing is left of the 10 that it keeps.
        (PendingGradients(before=100, own=100), 100 + 100),
        # Only a dummy gradient waits: its own and the sum.
        (PendingGradients(own=100, total=100), 100 + 100),
        # Its own is part of its own peak; alone it adds nothing.
        (PendingGradients(own=100), 40),
    ],
)
def test_the_embedding_adds_its_own_at_its_end(waits: PendingGradients, peak: int) -> None:
    assert with_pending(link(EMBEDDING), waits).backward_peak == peak
