"""What of random tapes is alive when: against the rules read off the whole tape at once, and against every moment
where only the few that can be the highest are kept."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st
from plain_tapes import cost_of
from random_tapes import Writer

from bridge_memory.tapes.alive import Atoms, BlockCost, Moment, Structure, _PeakCandidates, _undominated
from bridge_memory.tapes.symbolic import DIMENSIONS, SIZES, ShapeEnv, SymInt, Traces
from bridge_memory.tapes.tape import Op, Tape, Tensor

MIB = 1 << 20
SEEDS = st.integers(0, 1 << 32)
#: Bytes behind the numbers that a tape asks for; whatever is offloaded has 2 MiB at least.
BYTES = st.lists(st.sampled_from([0, 1, 5, 100, MIB, 2 * MIB, 3 * MIB]), min_size=6, max_size=6)


# ---- by the rules themselves ----


def forward_by_rule(tape: Tape) -> tuple[int, int]:
    """(peak, retained) of a tape of operations and variables, each read off the whole tape at once.

    While operation i runs, a tensor is alive that was made by then (the inputs before all), and that i or a later one
    uses, or i made, or an operation before i has saved; so are outputs, which the caller receives.
    """
    ops = [node for node in tape.nodes if isinstance(node, Op)]
    tensors = list(dict.fromkeys([*tape.input_tensors, *(t for op in ops for t in op.outputs)]))

    def alive(i: int, t: Tensor) -> bool:
        made = next((n for n, op in enumerate(ops) if t in op.outputs), -1)
        uses = [n for n, op in enumerate(ops) if t in op.inputs]
        saved = any(t in op.saves for op in ops[:i])
        return made <= i and (max([made, *uses]) >= i or saved or t in tape.output_tensors)

    peak = sum(t.bytes for t in tape.input_tensors)
    for i, op in enumerate(ops):
        if not op.scope:
            peak = max(peak, op.workspace + sum(t.bytes for t in tensors if alive(i, t)))
    retained = sum(t.bytes for t in {t for op in ops for t in op.saves})
    return peak, retained


def backward_by_rule(tape: Tape, *, hold: bool) -> int:
    """The peak of backward, each moment read off the whole tape.

    While operation i runs backward, what it and those before it saved is alive; so is the gradient of a tensor from the
    first of its uses in backward (of an output, from the start) until the operation that made it has run (where the
    caller holds that of an output, to the end); so are the gradients that i is making.
    """
    ops = [node for node in tape.nodes if isinstance(node, Op) and not node.scope]
    outputs = set(tape.output_tensors)
    grads = {t for t in outputs if t.grad_bytes}
    held = set(grads) if hold else set()
    peak = sum(t.bytes for t in {t for op in ops for t in op.saves}) + sum(t.grad_bytes for t in grads)
    for i in reversed(range(len(ops))):
        op = ops[i]
        if any(t in grads for t in op.outputs):
            fresh = [t for t in dict.fromkeys(op.inputs) if t.grad_bytes]
            saved = {t for before in ops[: i + 1] for t in before.saves}
            alive = sum(t.bytes for t in saved) + sum(t.grad_bytes for t in (*grads, *fresh))
            peak = max(peak, alive + op.backward_workspace)
            grads |= set(fresh)
        grads -= set(op.outputs) - held
    return peak


@given(SEEDS, BYTES)
def test_plain_tapes_are_what_the_rules_say(seed: int, sizes: list[int]) -> None:
    tape = Writer(Random(seed), sizes.__getitem__, plain=True).write()
    cost = cost_of(tape)
    assert (cost.forward_peak, cost.retained) == forward_by_rule(tape)
    assert cost.backward_peak == backward_by_rule(tape, hold=False)


@given(SEEDS, BYTES)
def test_a_held_gradient_stays_to_the_end(seed: int, sizes: list[int]) -> None:
    """Of an output that is used by nobody else; else a third storage takes the sum, which the caller's is not."""
    tape = Writer(Random(seed), sizes.__getitem__, plain=True).write()
    if not any(t in tape.output_tensors for node in tape.nodes for t in node.inputs if not node.scope):
        assert cost_of(tape).backward_peak_held == backward_by_rule(tape, hold=True)


# ---- whatever a tape says ----


@given(SEEDS, BYTES)
def test_peaks_hold_what_is_kept(seed: int, sizes: list[int]) -> None:
    cost = cost_of(Writer(Random(seed), sizes.__getitem__).write())
    assert cost.forward_peak >= cost.input_bytes
    assert cost.forward_peak >= cost.retained
    assert cost.backward_peak_held >= cost.backward_peak >= cost.retained
    assert cost.no_grad_peak <= cost.forward_peak
    assert sum(t.bytes for t in cost.tensors) == sum(cost.by_part().values()) == cost.retained


@given(SEEDS, BYTES)
def test_offloading_moves_bytes_and_makes_none(seed: int, sizes: list[int]) -> None:
    """The same tape where nothing is sent away keeps what this one keeps and sends."""

    class Stays(Tape):
        def offload(self, enabled: bool):  # type: ignore[no-untyped-def]
            return super().offload(False)

    sent = cost_of(Writer(Random(seed), sizes.__getitem__).write())
    kept = cost_of(Writer(Random(seed), sizes.__getitem__, Stays()).write())
    assert kept.retained == sent.retained + sent.offloaded
    assert kept.backward_peak == sent.backward_peak


@given(SEEDS, BYTES, st.sampled_from(["", "a", "b", "ab"]))
def test_one_trace_serves_every_set_of_offloaded_modules(seed: int, sizes: list[int], modules: str) -> None:
    """As a trace of these modules alone does."""

    class Named(Tape):
        def __init__(self, enabled: str) -> None:
            super().__init__()
            self.enabled, self.named = enabled, Random(seed)

        def offload(self, enabled: bool):  # type: ignore[no-untyped-def]
            module = self.named.choice("ab")
            return super().offload(module in self.enabled, module)

    def properties(structure: Structure, atoms: Atoms) -> list[object]:
        cost = BlockCost(structure, list(atoms.sizes))
        names = "retained offloaded discarded input_retained input_discarded forward_peak backward_peak by_part tensors"
        return [value() if callable(value := getattr(cost, name)) else value for name in names.split()]

    found = []
    for enabled in ("ab", modules):
        atoms = Atoms()
        structure = Structure(Writer(Random(seed), sizes.__getitem__, Named(enabled)).write(), atoms)
        found.append(properties(structure.offloading(frozenset(modules)), atoms))
    assert found[0] == found[1]


@given(SEEDS, BYTES)
def test_one_trace_serves_with_and_without_what_counts_apart(seed: int, sizes: list[int]) -> None:
    """As a tape without that scratch does."""

    class Apart(Tape):
        def __init__(self, *, there: bool) -> None:
            super().__init__()
            self.there, self.which = there, Random(seed)

        def op(self, *args, backward_workspace=0, **kwargs):  # type: ignore[no-untyped-def]
            apart = self.which.random() < 0.3
            nbytes = backward_workspace if self.there or not apart else 0
            super().op(*args, **{**kwargs, "backward_workspace": nbytes, "apart": apart and self.there})

    both, neither = (
        Writer(Random(seed), sizes.__getitem__, Apart(there=there)).write() for there in (True, False)
    )  # fmt: skip
    plain, numbers = cost_of(Writer(Random(seed), sizes.__getitem__).write()), cost_of(both)
    for name in ("forward_peak", "backward_peak", "backward_peak_held", "retained", "before_landmark"):
        assert getattr(numbers, name) == getattr(plain, name)
        assert getattr(numbers.without_apart, name) == getattr(cost_of(neither), name)


# ---- recorded once, for any size ----


@given(SEEDS, st.lists(st.integers(1, 9), min_size=14, max_size=14))
def test_a_structure_serves_every_size_that_answers_alike(seed: int, numbers: list[int]) -> None:
    """A tape recorded for one run, with the sizes of another put in, is that other run's tape."""
    off = [0] * (len(DIMENSIONS) - len(SIZES))
    here, there = ([n * MIB for n in some] + off for some in (numbers[:7], numbers[7:]))

    def written(dimensions: list) -> Tape:
        def size(i: int):  # type: ignore[no-untyped-def]
            return 0 if not i else dimensions[i] * i if i % 2 else dimensions[i] + dimensions[i - 1]

        return Writer(Random(seed), size).write()

    env, atoms = ShapeEnv(here), Atoms()
    structure = Structure(written(env.sizes), atoms)
    traces = Traces()
    traces.add(env, structure, [n if type(n) is SymInt else env.constant(n) for n in atoms.sizes])
    for run in (here, there):
        found = traces.find(run)
        assert found is not None or run is there
        if found is not None:
            assert numbers_of(BlockCost(*found)) == numbers_of(cost_of(written(run)))


def numbers_of(cost: BlockCost) -> tuple:
    return (
        cost.retained, cost.offloaded, cost.input_bytes, cost.output_bytes, cost.forward_peak, cost.backward_peak,
        cost.backward_peak_held, cost.no_grad_peak, cost.no_grad_retained, cost.before_landmark, cost.tensors,
    )  # fmt: skip


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), max_size=12),
    st.lists(st.integers(0, 50), min_size=4, max_size=4),
)
def test_the_moments_that_are_kept_have_the_highest(counts: list[list[int]], sizes: list[int]) -> None:
    """Whatever the sizes are: the highest of all moments, by name too (of equally high ones any)."""
    atoms = Atoms()
    units = [atoms.unit(n) for n in (1000, 2000, 3000, 4000)]  # Stand for sizes; what they are comes below.
    moments = [
        Moment(str(i), sum(n * unit for n, unit in zip(row, units, strict=True))) for i, row in enumerate(counts)
    ]
    high = [sum(n * size for n, size in zip(row, sizes, strict=True)) for row in counts]
    found, name = _PeakCandidates(_undominated(moments, atoms), atoms).named([*sizes, *(-n for n in sizes)])
    assert found == max(high, default=0)
    assert found == 0 or high[int(name)] == found
