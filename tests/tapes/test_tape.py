"""The tape's rules, each on a case small enough to count by hand. Sizes are bytes."""

from __future__ import annotations

from plain_tapes import cost_of

from bridge_memory.tapes.tape import Delayed, Tape


def _linear_chain(*, checkpoint: bool = False) -> Tape:
    """x(100) -> a(300) -> b(100) -> y(100), where a and b are saved by their consumers, x by its own."""
    t = Tape()
    x = t.input("x", 100)
    with t.checkpoint("region", (x,), enabled=checkpoint):
        a = t.make("a", x, 300, saves=(x,))
        b = t.make("b", a, 100, saves=(a,))
        y = t.make("y", b, 100, saves=(b,))
    t.output(y)
    return t


def test_saved_tensors_live_and_the_output_is_handed_on() -> None:
    cost = cost_of(_linear_chain())
    # x + a + b; y belongs to the next block.
    assert cost.retained == 500
    assert cost.output_bytes == 100
    assert cost.input_retained
    # At y: x, a, b and y itself.
    assert cost.forward_peak == 600


def test_backward_frees_as_it_goes() -> None:
    """Backward of y: 500 saved + grad y 100 + grad b 100 = 700; then b goes (500 - 100 = 400 saved).
    Backward of b: 400 + grad b 100 + grad a 300 = 800. Backward of a: 100 + 300 + 100 = 500."""
    cost = cost_of(_linear_chain())
    assert cost.backward_peak == 800
    assert cost.backward_name() == "b"


def test_a_checkpoint_keeps_its_input_and_pays_in_backward() -> None:
    cost = cost_of(_linear_chain(checkpoint=True))
    assert cost.retained == 100
    # No-grad forward: x, a and b at once; then a goes before y is made.
    assert cost.forward_peak == 500
    # Replayed forward with the gradient of y waiting: x, a, b, y and grad y = 700; backward of b then holds
    # x, a + grad b + grad a = 800, and the checkpoint's own variables y and grad y.
    assert cost.backward_peak == 1000


def test_a_storage_saved_twice_counts_once() -> None:
    t = Tape()
    x = t.input("x", 100)
    a = t.make("a", x, 10, saves=(x,))
    b = t.make("b", x, 10, saves=(x,))
    t.output(t.make("y", (a, b), 10))
    assert cost_of(t).retained == 100


def test_what_nobody_saves_goes_at_its_last_use() -> None:
    t = Tape()
    x = t.input("x", 100)
    a = t.make("a", x, 1000)
    b = t.make("b", a, 10)
    t.output(t.make("y", b, 10))
    cost = cost_of(t)
    assert cost.retained == 0
    assert cost.forward_peak == 1100  # x and a while a is made; x goes before b comes


def test_a_variable_holds_its_tensor_to_the_end_of_its_scope() -> None:
    t = Tape()
    x = t.input("x", 0)
    a = t.make("a", x, 1000)
    b = t.make("b", a, 10)
    c = t.make("c", b, 500)
    t.keep_alive(a)
    t.output(c)
    assert cost_of(t).forward_peak == 1510  # a, b and c


def test_discarded_outputs_are_refilled_when_their_consumers_gradient_arrives() -> None:
    """moe_act's shape: fc1 output m (400) is kept, the activation a (200) is not."""
    t = Tape()
    x = t.input("x", 100)
    m = t.make("m", x, 400, saves=(x,))
    with t.discardable("act", (m,)) as region:
        a = t.make("a", m, 200, saves=(m,))
    y = t.make("y", a, 100, saves=(a,))
    t.discard(region, a)
    t.output(y)
    cost = cost_of(t)
    assert cost.retained == 500  # x and m
    assert cost.forward_peak == 800  # x, m, a, y before the discard
    # Backward of a: x, m, a as it was recomputed (random.py: ctx.outputs holds it), its gradient 200 and m's 400; the
    # copy that y keeps went after y's backward.
    assert cost.backward_peak == 100 + 400 + 200 + 200 + 400


def test_addition_shares_its_gradient() -> None:
    """y = x + f(x): both terms get the same gradient storage, and f's input gradient is added into it."""
    t = Tape()
    x = t.input("x", 100)
    f = t.make("f", x, 100, saves=(x,))
    t.output(t.make("y", (f, x), 100, alias=True))
    cost = cost_of(t)
    # Backward of f: x saved 100, the shared gradient 100, f's fresh input gradient 100.
    assert cost.backward_peak == 300


def test_a_gradient_written_over_what_was_saved_needs_no_room() -> None:
    """Transformer Engine's cross entropy writes the logits' gradient over the logits."""
    t = Tape()
    x = t.input("hidden", 10)
    logits = t.make("logits", x, 1000, saves=(x,))
    t.output(t.make("loss", logits, 1, saves=(logits,), in_place=True))
    cost = cost_of(t)
    assert cost.retained == 1010
    # Backward of the logits: hidden, the gradient in the logits' place, hidden's gradient.
    assert cost.backward_peak == 10 + 1000 + 10


def test_workspaces_count_only_while_their_operation_runs() -> None:
    t = Tape()
    x = t.input("x", 10)
    a = t.make("a", x, 10, workspace=500, backward_workspace=900, saves=(x,))
    t.output(t.make("y", a, 10, saves=(a,)))
    cost = cost_of(t)
    assert cost.retained == 20
    assert cost.forward_peak == 520
    assert cost.backward_peak == 10 + 10 + 10 + 900  # x, grad a, grad x, scratch


def test_a_delayed_weight_gradient_waits_with_what_it_is_made_of() -> None:
    """x(100) -> a(300) -> y(100); both keep their inputs, and both weight gradients wait to the end.

    At the end are x and a, the gradients of y and a, what a's backward gathered (50) and the gradient of x: 100 + 300
    + 100 + 300 + 50 + 100, and y's weight gradient of 7. Without delay the highest is backward of y: 400 saved, 100
    and 300."""
    def tape(enabled: bool) -> Tape:
        t = Tape()
        with t.delays("later", enabled=enabled):
            x = t.input("x", 100)
            a = t.make("a", x, 300, saves=(x,), delayed=Delayed((x,), made=50))
            y = t.make("y", a, 100, saves=(a,), delayed=Delayed((a,), weight=7))
        t.output(y)
        return t

    assert cost_of(tape(False)).backward_peak == 800
    cost = cost_of(tape(True))
    assert cost.backward_peak == 957
    assert cost.backward_name() == "y (later)"
    assert cost.retained == cost_of(tape(False)).retained


def test_what_waits_inside_goes_before_what_is_outside_runs_backward() -> None:
    """x(100) -> a(100) -> [b(100)] -> y(100): b's weight gradient waits for its own node alone, and is made when b has
    run: x, a and the gradients of b and a. Backward of a then has x and two gradients, of a and of x."""
    t = Tape()
    x = t.input("x", 100)
    a = t.make("a", x, 100, saves=(x,), delayed=Delayed((x,)))
    with t.delays("inner"):
        b = t.make("b", a, 100, saves=(a,), delayed=Delayed((a,), weight=900))
    t.output(t.make("y", b, 100))
    cost = cost_of(t)
    assert cost.backward_peak == 400 + 900
    assert cost.backward_name() == "b (inner)"


def test_what_waits_is_not_added_into() -> None:
    """x has two gradients, of which each is another's that waits: the sum is a third tensor. Two saved x of 100, four
    gradients of 100 of which two wait, and the sum."""
    t = Tape()
    with t.delays("later"):
        x = t.input("x", 100)
        a = t.make("a", x, 100, saves=(x,), alias=True, delayed=Delayed((x,)))
        b = t.make("b", x, 100, saves=(x,), alias=True, delayed=Delayed((x,)))
        t.output(a, b)
    # x; the gradients of a and b, which are x's; their sum.
    assert cost_of(t).backward_peak == 400
