"""A chain of blocks, on links small enough to count by hand: what is before, what the schedule holds, what backward
leaves behind. Sizes are bytes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge_memory.inventory.stack import chunk_inventory, stage_inventories
from bridge_memory.readers import resolve_model
from bridge_memory.spec import BatchSpec, ImplementationSpec, RunSpec
from bridge_memory.spec.layout import layout
from bridge_memory.tapes.chain import Concurrent, EngineBytes, Label, Link, change_last_of, compose, with_engine
from bridge_memory.tapes.context import context_of

MIB = 1 << 20


def link(
    name: str, retained: int, forward: int, backward: int, *, held: int | None = None, carried_over: int = 0
) -> Link:
    """``held``: its backward peak where the gradient of its output is held to the end (default: the same)."""
    return Link(
        Label.LAYER, retained, forward, backward, backward if held is None else held, lambda: f"{name} forward",
        lambda: f"{name} backward", carried_over=carried_over, carried_over_gradient=carried_over // 2,
    )  # fmt: skip


NARROW = link("narrow", 10, 30, 40)
WIDE = link("wide", 20, 25, 50)


def test_what_is_before_is_alive_while_a_link_runs() -> None:
    """Forward: the first alone 30, then 10 + 25 = 35. Backward: the second first, 10 + 50 = 60, then 40."""
    chunk = compose([(NARROW, 1), (WIDE, 1)])
    assert chunk.retained == 30
    assert (chunk.forward_peak, chunk.forward_operation) == (35, "wide forward")
    assert (chunk.backward_peak, chunk.backward_operation) == (60, "wide backward")


def test_the_first_is_the_highest_where_the_others_are_small() -> None:
    """Forward 30 against 10 + 5; backward 40 against 10 + 6."""
    chunk = compose([(NARROW, 1), (link("small", 5, 5, 6), 1)])
    assert (chunk.forward_peak, chunk.backward_peak) == (30, 40)
    assert (chunk.forward_operation, chunk.backward_operation) == ("narrow forward", "narrow backward")


def test_links_in_a_row_are_highest_at_the_last() -> None:
    """Beside two before it: 20 + 30 and 20 + 40."""
    chunk = compose([(NARROW, 3)])
    assert (chunk.retained, chunk.forward_peak, chunk.backward_peak) == (30, 50, 60)


def test_a_chain_peaks_at_least_where_it_ends() -> None:
    """All that is kept is there at once when forward is over."""
    chunk = compose([(link("keeps", 50, 0, 0), 2)])
    assert (chunk.forward_peak, chunk.backward_peak) == (100, 100)
    assert compose([]).retained == compose([]).forward_peak == 0


def test_the_gradient_of_the_output_is_held_beside_all_but_the_last() -> None:
    """``schedules.py: backward_step`` holds 7 bytes to the end of backward. The last link is where they arrive: its
    own peak with the gradient held, 10 + 44. The one before it: 40 + 7."""
    held = link("held", 10, 30, 40, held=44)
    assert compose([(held, 2)], output_bytes=7).backward_peak == 10 + 44
    # Where links keep little, the one before the last is the highest: 2 + 41 at the last, 40 + 7 before it.
    held = link("held", 2, 30, 40, held=41)
    assert compose([(held, 2)], output_bytes=7).backward_peak == 40 + 7
    # And of three in a row the second: 2 x 2 + 41 at the last, 2 + 40 + 7 before it.
    assert compose([(held, 3)], output_bytes=7).backward_peak == 2 + 40 + 7


def test_no_output_holds_no_gradient() -> None:
    """On the last stage the loss is the output: nothing is held, whatever a block would have with it held."""
    assert compose([(link("held", 10, 30, 40, held=44), 2)]).backward_peak == 10 + 40


def test_what_the_last_backward_left_is_there_until_the_next_forward_has_passed() -> None:
    """Each of three leaves 6, which its next forward replaces; 3 of them are the gradient of its input.

    Forward finds what those after it left: 30 + 12, 10 + 30 + 6 and 20 + 30. Backward finds what those after it have
    just left, less the gradient of its own output, which it counts itself: 20 + 40; 10 + 40 + 6 - 3; 40 + 12 - 3.
    """
    chunk = compose([(link("router", 10, 30, 40, carried_over=6), 3)])
    assert chunk.carried_over == 18
    assert (chunk.forward_peak, chunk.backward_peak) == (50, 60)


def test_the_first_of_a_row_is_the_highest_where_more_is_left_than_kept() -> None:
    """Kept 4 each. Forward: 30 + 12, 4 + 30 + 6, 8 + 30. Backward: 8 + 40, 4 + 40 + 6 - 3, 40 + 12 - 3 = 49."""
    chunk = compose([(link("router", 4, 30, 40, carried_over=6), 3)])
    assert (chunk.forward_peak, chunk.backward_peak) == (42, 49)


def test_dense_links_before_a_router_find_what_it_left() -> None:
    """Forward: 30 + 6, 10 + 30. Backward: 10 + 40; then 40 beside the 6 that the router left, of which 3 are the
    gradient that arrives here."""
    chunk = compose([(link("dense", 10, 30, 40), 1), (link("router", 10, 30, 38, carried_over=6), 1)])
    assert (chunk.forward_peak, chunk.backward_peak) == (40, 48)
    chunk = compose([(link("dense", 1, 30, 40), 1), (link("router", 1, 30, 38, carried_over=6), 1)])
    assert (chunk.forward_peak, chunk.backward_peak) == (30 + 6, 40 + 6 - 3)


def one_by_one(links: Sequence[Link], output: int) -> tuple[int, int]:
    """(forward, backward) peaks, every link looked at."""
    forward = backward = before = 0
    for i, at in enumerate(links):
        left = sum(after.carried_over for after in links[i + 1 :])
        forward = max(forward, before + at.forward_peak + left)
        own = links[i + 1].carried_over_gradient if i + 1 < len(links) else 0
        last = i + 1 == len(links)
        peak = at.backward_peak_held if output and last else at.backward_peak + output
        backward = max(backward, before + peak + left - own)
        before += at.retained
    return max(forward, before), max(backward, before)


BYTES = st.integers(0, 50)
LINKS = st.builds(
    lambda retained, forward, backward, held, carried_over: link(
        "any", retained, retained + forward, retained + backward, held=retained + held, carried_over=carried_over
    ),
    BYTES, BYTES, BYTES, BYTES, st.just(0) | BYTES,
)  # fmt: skip


@given(st.lists(st.tuples(LINKS, st.integers(1, 5)), max_size=4), BYTES)
def test_looking_at_the_ends_of_rows_is_looking_at_every_link(rows: list[tuple[Link, int]], output: int) -> None:
    chunk = compose(rows, output)
    links = [at for at, count in rows for _ in range(count)]
    assert (chunk.forward_peak, chunk.backward_peak) == one_by_one(links, output)
    assert chunk.retained == sum(at.retained for at in links)
    assert chunk.carried_over == sum(at.carried_over for at in links)


# ---- links that change ----


def test_only_the_last_of_a_row_changes() -> None:
    links = [(WIDE, 1), (NARROW, 3)]
    change_last_of(links, 1, WIDE)
    assert links == [(WIDE, 1), (NARROW, 2), (WIDE, 1)]
    change_last_of(links, 0, NARROW)
    assert links == [(NARROW, 1), (NARROW, 2), (WIDE, 1)]


def test_an_engine_holds_bytes_beside_each_layer() -> None:
    """Two layers of 30 forward, 40 backward and 44 with the output's gradient held. Without a router all gradients are
    made at the end: beside the first 5 forward and 7 backward; beside the second 1 and 2, and at some moment 60."""
    layers = (Concurrent(5, 9, 7), Concurrent(1, 9, 2, least_backward=60))
    held = link("held", 10, 30, 40, held=44)
    found = [at for at, _ in with_engine([(held, 2)], EngineBytes(layers))]
    assert [at.retained for at in found] == [10, 10]
    assert [at.forward_peak for at in found] == [35, 31]
    assert [(at.backward_peak, at.backward_peak_held) for at in found] == [(47, 51), (60, 60)]
    # Recomputed together they are one link, which has the most of theirs.
    ((group, _),) = with_engine([(held._replace(layers=2), 1)], EngineBytes(layers))
    assert (group.forward_peak, group.backward_peak) == (35, 60)


def test_an_engine_meets_experts_and_the_rest_at_their_own_moments() -> None:
    """Until the experts have run backward 9 beside 40; then the larger of 12 and 20 beside 25, or beside 32."""
    held = Concurrent(backward=9, backward_at_end=12, least_backward=20)
    plain = link("held", 10, 30, 40, held=44)
    assert plain.with_engine(held, 25).backward_peak == 49
    assert plain.with_engine(held, 32).backward_peak == 52


@pytest.fixture
def offloading() -> RunSpec:
    """Llama-3.2-1B on 4096 tokens; 32 query heads and 8 groups of 64."""
    return RunSpec(
        model=resolve_model("meta-llama/Llama-3.2-1B"), batch=BatchSpec(seq_length=4096),
        implementation=ImplementationSpec(offload_modules=("core_attn",)),
    )


def test_the_last_offloading_layer_stays_where_backward_comes_next(offloading: RunSpec) -> None:
    """Core attention sends query (16 MiB), key and value (4 each) to the host; its output is kept by linear_proj too,
    and so stays. On the last stage the last layer's 24 MiB stay, as its backward comes next
    (``fine_grained_activation_offload.py: should_bulk_offload``)."""
    plan = layout(offloading.model, offloading.parallel).shapes(offloading.model)[0]
    ctx = context_of(offloading)
    away = chunk_inventory(offloading.model, plan[0], ctx)
    (last,) = stage_inventories(offloading.model, plan, ctx)
    assert last.retained - away.retained == 24 * MIB
    layers = [(at, count) for at, count in last.links if at.label is Label.LAYER]
    assert [(at.offloaded, count) for at, count in layers] == [(24 * MIB, 15), (0, 1)]
    assert layers[1][0].retained - layers[0][0].retained == 24 * MIB
