"""What follows the decoder layers, by megatron-core's release: where the final norm is, where the losses of MTP depths
are made, what they keep and what their backward finds.

1024 tokens of h = 2048 in bf16: hidden states of H = 4 MiB, logits [1024, 32768] of 64 MiB, 128 MiB in fp32. A weight
[32768, 2048] has a gradient of 128 MiB.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from bridge_memory.inventory.layer import mtp_block
from bridge_memory.inventory.shared_weights import pending_gradients
from bridge_memory.inventory.stack import chunk_units, named_parameters
from bridge_memory.inventory.tail import tail_blocks, tail_links
from bridge_memory.readers import resolve_model
from bridge_memory.spec import BatchSpec, ImplementationSpec, LayerSpec, ModelSpec, RunSpec
from bridge_memory.spec.layout import ChunkShape
from bridge_memory.tapes.chain import Label, Link
from bridge_memory.tapes.context import BlockContext, context_of

MIB = 1 << 20
H = 4 * MIB
LLAMA = replace(
    resolve_model("meta-llama/Llama-3.2-1B"), vocab_size=32768, share_embeddings_and_output_weights=False
)
KIND: LayerSpec = LLAMA.layers[0]
NORM, MTP, LOSS = Label.FINAL_NORM, Label.MTP, Label.LOSS
#: The last decoder layers of a pipeline, and what follows on a stage of its own.
LAYERS = ChunkShape(((KIND, 2),), embedding=False, output=False, num_depths=0, last_layer=True)


def with_mtp(depths: int) -> ModelSpec:
    return replace(LLAMA, mtp_num_layers=depths, mtp_layer=KIND if depths else None)


def end(depths: int) -> ChunkShape:
    return ChunkShape((), embedding=False, output=True, num_depths=depths, last_layer=False)


def context(release: tuple[int, int] = (0, 16), **impl: object) -> BlockContext:
    return context_of(
        RunSpec(
            model=LLAMA, batch=BatchSpec(seq_length=1024),
            implementation=ImplementationSpec(megatron_core=release, **impl),  # type: ignore[arg-type]
        )
    )


def labels(shape: ChunkShape, depths: int, release: tuple[int, int]) -> list[Label]:
    return [label for _, label in tail_blocks(with_mtp(depths), shape, context(release))]


def links(depths: int, release: tuple[int, int] = (0, 16), **impl: object) -> list[Link]:
    """The tail of the last stage, which holds no layers, as links of its chain."""
    model, shape, ctx = with_mtp(depths), end(depths), context(release, **impl)
    tail = tail_blocks(model, shape, ctx)
    pending = pending_gradients([label for _, label in tail], ctx, tied=False)
    return [link for link, _ in tail_links(tail, model, shape, ctx, pending)]


# ---- what there is ----


@pytest.mark.parametrize(
    ("release", "layers", "last"),
    [((0, 15), [], [NORM, MTP, LOSS, LOSS]), ((0, 16), [NORM], [MTP, LOSS, LOSS])],
)
def test_with_mtp_the_final_norm_moved_to_the_last_layer(
    release: tuple[int, int], layers: list[Label], last: list[Label]
) -> None:
    """``transformer_block.py: has_final_layernorm_in_this_stage`` of 0.16; before, on the last stage."""
    assert labels(LAYERS, 1, release) == layers
    assert labels(end(1), 1, release) == last


@pytest.mark.parametrize("release", [(0, 15), (0, 16)])
def test_without_mtp_the_final_norm_is_on_the_last_stage(release: tuple[int, int]) -> None:
    assert labels(LAYERS, 0, release) == []
    assert labels(end(0), 0, release) == [NORM, LOSS]


@pytest.mark.parametrize(
    ("release", "found"),
    [((0, 13), [NORM, MTP, LOSS, MTP, LOSS, LOSS]), ((0, 14), [NORM, MTP, MTP, LOSS, LOSS, LOSS])],
)
def test_losses_of_depths_moved_behind_all_depths(release: tuple[int, int], found: list[Label]) -> None:
    """``MultiTokenPredictionBlock.forward`` of 0.13 makes each after its depth; ``GPTModel._postprocess`` of 0.14 all
    of them at the end."""
    assert labels(end(2), 2, release) == found


def test_a_norm_is_owned_where_it_runs() -> None:
    model = with_mtp(1)
    names = [
        {p.name for p in named_parameters(chunk_units(model, shape, context()))} for shape in (LAYERS, end(1))
    ]
    assert ["decoder.final_layernorm.weight" in there for there in names] == [True, False]
    assert names[1] >= {"embedding.word_embeddings.weight", "output_layer.weight", "mtp.layers.0.enorm.weight"}


def test_a_tied_weight_is_owned_again_away_from_the_embedding() -> None:
    """Beside the copy of the embedding that MTP uses (``GPTModel.__init__``); where the embedding is, there is one."""
    tied = replace(with_mtp(1), share_embeddings_and_output_weights=True)
    whole = ChunkShape(((KIND, 2),), embedding=True, output=True, num_depths=1, last_layer=True)
    for shape, copies in ((end(1), 2), (whole, 1)):
        found = [p for p in named_parameters(chunk_units(tied, shape, context())) if p.shape == (32768, 2048)]
        assert len(found) == copies


# ---- what it keeps ----

#: Of a loss: the softmax of its logits in fp32, a byte and an int64 a token of the target.
SOFTMAX = 128 * MIB + 9 * 1024


def test_losses_outside_keep_a_part_of_all_hidden_states_each() -> None:
    assert [link.retained for link in links(2, (0, 14)) if link.label is LOSS] == [H + SOFTMAX] * 3


def test_losses_inside_share_what_the_depths_keep() -> None:
    """The first depth's output is what the second depth keeps as its input; the main loss is of what the first depth
    was given."""
    assert [link.retained for link in links(2, (0, 13)) if link.label is LOSS] == [SOFTMAX, H + SOFTMAX, SOFTMAX]


# ---- what runs ----

#: A loss alone, forward: its input, the logits and their softmax, target and loss (4 bytes a token).
FORWARD = H + 64 * MIB + SOFTMAX + 4 * 1024
#: Backward of the cross entropy: input, softmax, target, the loss's gradient and the logits'.
BACKWARD = H + SOFTMAX + 4 * 1024 + 64 * MIB


@pytest.mark.parametrize(("release", "held"), [((0, 16), 64 * MIB), ((0, 17), 0)])
def test_a_variable_holds_a_depths_logits_while_the_main_loss_is_made(release: tuple[int, int], held: int) -> None:
    """Until the losses of depths got a function of their own."""
    assert [link.forward_peak for link in links(1, release) if link.label is LOSS] == [FORWARD, FORWARD + held]


def test_logits_that_are_kept_anyway_are_not_counted_twice() -> None:
    """Transformer Engine's cross entropy of 2.17 keeps the logits for backward: at the peak 64 MiB of them, their
    input, the loss and scratch of 12 bytes a token."""
    fused = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te", "transformer_engine": (2, 17)}
    assert [link.forward_peak for link in links(1, **fused) if link.label is LOSS] == [H + 64 * MIB + 16 * 1024] * 2


def test_a_loss_finds_the_gradients_and_the_parts_that_those_after_it_left() -> None:
    """Three losses of the hidden states of two depths and the main path, joined in one tensor. The last finds nothing.
    The second finds the gradient of the last one's part, and that part, which stays as the whole does: 2 H. The first
    finds 4 H, and the sum of two stand-ins for the weight's gradient, a tensor of its own: 128 MiB."""
    peaks = [link.backward_peak for link in links(2) if link.label is LOSS]
    assert peaks == [BACKWARD + 4 * H + 128 * MIB, BACKWARD + 2 * H, BACKWARD]


def test_losses_inside_find_one_gradient_and_no_joined_tensor() -> None:
    """In 0.13 megatron-core's own linears make gradients of weights: when the logits run backward, their gradient is
    there, that of their input and the weight's, 64 + 4 + 128 MiB; at the second depth's loss its input of 4 too, which
    at the others is counted by the block that it came from.

    Order of backward: main loss, second depth's loss, second depth, first depth's loss, first depth."""
    first, second, main = (link.backward_peak for link in links(2, (0, 13)) if link.label is LOSS)
    plain = 64 * MIB + H + 128 * MIB
    assert main == plain
    # It finds the main loss's gradients of its hidden states and of the weight.
    assert second == H + plain + H + 128 * MIB
    # And beside them what the second depth gave, the embedding's gradient and that of its input; and that input, which
    # the second depth counted and this loss keeps (beside 0.13.1 Qwen2.5-72B, 2 depths: 2 H too few before).
    assert first == plain + H + 128 * MIB + 128 * MIB + H + H


def test_depths_run_backward_beside_the_gradient_of_all_hidden_states() -> None:
    """[(1 + 2) T, h] waits: 3 H. The last depth's output has its gradient in there, 1 H of them; at the first depth
    the gradient of the embedding, from the last depth, waits beside it: 128 MiB. There nothing is left of the 3 H when
    the embedding's own gradient is made, which alone would be the higher."""
    cost = mtp_block(KIND, context()).cost
    before = cost.without_apart
    first, last = (link for link in links(2) if link.label is MTP)
    assert last.backward_peak == cost.backward_peak_held + 2 * H
    assert before.backward_peak < cost.backward_peak
    assert first.backward_peak == max(before.backward_peak + 3 * H, cost.backward_peak) + 128 * MIB


def test_depths_with_losses_inside_have_no_joined_gradient() -> None:
    """Before 0.14: the last depth finds the output layer's gradient only, as another loss waits for it (128 MiB)."""
    cost = mtp_block(KIND, context((0, 13))).cost
    first, last = (link for link in links(2, (0, 13)) if link.label is MTP)
    assert last.backward_peak == cost.backward_peak + 128 * MIB
    assert first.backward_peak == cost.backward_peak + 128 * MIB
