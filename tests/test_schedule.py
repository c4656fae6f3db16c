"""When activations are alive on a pipeline rank, against megatron-core's own schedules run on the CPU."""

from __future__ import annotations

import array
import random
import weakref
from types import SimpleNamespace

import pytest
from schedule_walk import in_flight, schedule_events, walked_peak

from bridge_memory.schedule.events import (
    ChunkCost,
    LayerTurns,
    OverlapCost,
    num_warmup,
    overlapped,
    schedule_table,
    walk,
)
from bridge_memory.schedule.peak import dynamic_peak, few_microbatches, peak_bytes, peak_moments

# --------------------------------------------------------------------------------------------------
# megatron-core's schedules, one rank of them, with storages that tell when they go
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def run_schedule(monkeypatch):
    """Run one rank of megatron-core's own schedule; returns [(phase, microbatch, chunk, hidden states alive)].

    Only the wire is replaced (``P2PCommunicator._communicate``): a receive makes a tensor, a send does nothing.
    Every hidden state lies in an ``array.array``, whose weak reference dies with the tensor's storage. The count
    is taken as a pass starts: in forward before the chunk's own output is made.
    """
    torch = pytest.importorskip("torch")
    pytest.importorskip("megatron.core")
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel import schedules, utils
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.transformer.transformer_config import TransformerConfig

    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, **k: zeros(*a, **{**k, "device": "cpu"}))
    # Without torch.distributed these two answer for a world of one.
    monkeypatch.setattr(utils, "get_pg_rank", lambda group: group.rank())
    monkeypatch.setattr(utils, "get_pg_size", lambda group: group.size())
    size = 8

    def run(
        pp: int, rank: int, m: int, v: int, group: int | None, overlap_p2p: bool, deallocate: bool = True
    ) -> list[tuple]:
        alive: weakref.WeakSet = weakref.WeakSet()

        class Block:
            """Owns one hidden state's memory; hashable, so that a WeakSet can hold it."""

        def hidden(requires_grad: bool = False):
            memory = array.array("f", [0.0] * size)
            tensor = torch.frombuffer(memory, dtype=torch.float32)
            block = Block()
            alive.add(block)
            weakref.finalize(memory, lambda kept: None, block)
            return tensor.requires_grad_(requires_grad)

        events: list[tuple] = []

        class Chunk(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, chunk, microbatch, is_loss):
                events.append(("forward", microbatch, chunk, len(alive)))
                ctx.at = (microbatch, chunk)
                return torch.ones(1) if is_loss else hidden()

            @staticmethod
            def backward(ctx, grad):
                events.append(("backward", *ctx.at, len(alive)))
                return (hidden() if ctx.needs_input_grad[0] else None), None, None, None

        class Model(torch.nn.Module):
            model_type = ModelType.encoder_or_decoder

            def __init__(self, chunk: int) -> None:
                super().__init__()
                self.config = config
                self.chunk = chunk
                self.seen = 0
                self.weight = torch.nn.Parameter(torch.ones(1))

            def set_input_tensor(self, tensors) -> None:
                self.x = tensors[0]

            def forward(self):
                x, self.x = self.x, None
                first = rank == 0 and self.chunk == 0
                assert (x is None) == first
                if first:
                    x = self.weight.expand(size)  # an embedding: nothing was received
                microbatch, self.seen = self.seen, self.seen + 1
                return Chunk.apply(x, self.chunk, microbatch, rank == pp - 1 and self.chunk == v - 1)

        class Wire(P2PCommunicator):
            def __init__(self) -> None:
                self.pp_group = SimpleNamespace(size=lambda: pp, rank=lambda: rank)
                self.config = config
                self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size

            def _communicate(
                self, *, tensor_send_next, tensor_send_prev, recv_prev, recv_next, tensor_shape,
                wait_on_reqs=True,
            ):  # fmt: skip
                said = {
                    "send_next": tensor_send_next is not None, "send_prev": tensor_send_prev is not None,
                    "recv_prev": recv_prev, "recv_next": recv_next,
                }  # fmt: skip
                handles = {name: SimpleNamespace(wait=lambda: None) for name, on in said.items() if on}
                return (
                    hidden(True) if recv_prev else None,
                    hidden(True) if recv_next else None,
                    None if wait_on_reqs else handles,
                )

        config = TransformerConfig(
            num_layers=pp * v, hidden_size=size, num_attention_heads=1, pipeline_dtype=torch.float32,
            pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=v if v > 1 else None,
            microbatch_group_size_per_vp_stage=group, deallocate_pipeline_outputs=deallocate,
            overlap_p2p_comm=overlap_p2p and v > 1, batch_p2p_comm=not (overlap_p2p and v > 1),
        )  # fmt: skip
        one = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
        wire = Wire()
        groups = SimpleNamespace(tp=one, cp=one, embd=None, pos_embd=None, pp=wire.pp_group, dp_cp=one)

        def loss(output):
            return output, {}

        run_it = (
            schedules.forward_backward_no_pipelining
            if pp == 1
            else schedules.forward_backward_pipelining_with_interleaving
            if v > 1
            else schedules.forward_backward_pipelining_without_interleaving
        )
        run_it(
            forward_step_func=lambda _, model: (model(), loss),
            data_iterator=[None] * v,
            model=[Model(c) for c in range(v)],
            num_microbatches=m,
            seq_length=1,
            micro_batch_size=1,
            p2p_communicator=None if pp == 1 else wire,
            pg_collection=groups,
        )
        return events

    return run


def cases(seed: int, n: int) -> list[tuple]:
    """(pp, rank, microbatches, v, group, overlap_p2p_comm) that the schedules accept."""
    draw = random.Random(seed)
    out = []
    for _ in range(n):
        pp = draw.choice([1, 2, 2, 3, 4, 5])
        v = 1 if pp == 1 else draw.choice([1, 2, 2, 3])
        rank = draw.choice([0, pp - 1, draw.randrange(pp)])
        group = None if v == 1 else draw.choice([None, pp, pp + draw.randrange(0, pp + 2)])
        whole = group or pp
        m = draw.randrange(1, 3 * pp) if v == 1 else whole * draw.randrange(1, 4)
        if v > 1 and whole > pp:
            m += draw.choice([0, *range(pp, whole)])  # a last group of at least pp
        out.append((pp, rank, m, v, group, draw.random() < 0.5))
    return out


def test_passes_run_in_megatron_cores_order_and_hold_what_it_holds(run_schedule):
    """Every pass of no pipelining, 1F1B and interleaved schedules, and the hidden states alive as it starts.

    Beside what the schedule holds (``Moment.hidden``) those are: the received input of every microbatch and chunk
    alive, and in backward the received gradient of the chunk's output.
    """
    kinds = set()
    for pp, rank, m, v, group, overlap in cases(7, 250):
        real = run_schedule(pp, rank, m, v, group, overlap)
        ours = schedule_events(pp, rank, m, v, group)
        assert [e[:3] for e in real] == [tuple(e) for e in ours], (pp, rank, m, v, group)
        wanted = []
        for moment in walk(pp, rank, m, v, group, False, overlap):
            inputs = sum(n for c, n in enumerate(moment.alive) if not (rank == 0 and c == 0))
            own_grad = moment.phase == "backward" and not (rank == pp - 1 and moment.chunk == v - 1)
            wanted.append((moment.phase, moment.chunk, moment.hidden + inputs + own_grad))
        assert [(e[0], e[2], e[3]) for e in real] == wanted, (pp, rank, m, v, group, overlap)
        kinds.add((pp > 1, v > 1, overlap and v > 1, (group or pp) > pp))
    assert len(kinds) == 6


def test_outputs_that_are_not_freed_stay_until_their_backward_pass(run_schedule):
    """Without ``deallocate_pipeline_outputs``, of every microbatch and chunk alive that went to another stage, its
    output is there too; the one that runs forward has not made its own yet."""
    for pp, rank, m, v, group, overlap in cases(9, 150):
        if pp == 1:
            continue
        real = run_schedule(pp, rank, m, v, group, overlap, False)
        wanted = []
        for moment in walk(pp, rank, m, v, group, False, overlap, True):
            inputs = sum(n for c, n in enumerate(moment.alive) if not (rank == 0 and c == 0))
            outputs = sum(n for c, n in enumerate(moment.alive) if not (rank == pp - 1 and c == v - 1))
            own = not (rank == pp - 1 and moment.chunk == v - 1)
            own_grad = own if moment.phase == "backward" else -own
            wanted.append((moment.phase, moment.chunk, moment.hidden + inputs + outputs + own_grad))
        assert [(e[0], e[2], e[3]) for e in real] == wanted, (pp, rank, m, v, group, overlap)


def test_warm_up_and_order_of_chunks_are_megatron_cores():
    """``get_pp_rank_microbatches`` and ``get_schedule_table`` for many sizes, clamped ones too."""
    pytest.importorskip("megatron.core")
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

    draw = random.Random(8)
    for _ in range(3000):
        pp = draw.randrange(2, 17)
        rank, v = draw.randrange(pp), draw.choice([1, 2, 3, 4])
        group, m, extra = pp + draw.randrange(0, 9), draw.randrange(1, 60), draw.random() < 0.5
        wire = SimpleNamespace(
            pp_group=SimpleNamespace(size=lambda pp=pp: pp, rank=lambda rank=rank: rank),
            virtual_pipeline_model_parallel_size=v if v > 1 else None,
        )
        total, _, warmup, _ = get_pp_rank_microbatches(
            m, v, group, overlap_moe_expert_parallel_comm=extra, p2p_communicator=wire
        )
        assert num_warmup(pp, rank, m, v, group, extra) == warmup
        assert in_flight(pp, rank, m, v, group, extra) == min(total, warmup + 1)
        assert schedule_table(m, v, group) == get_schedule_table(m, v, group)


# --------------------------------------------------------------------------------------------------
# Statements about memory
# --------------------------------------------------------------------------------------------------


def peak(pp: int, rank: int, m: int, *saved: int, **more: int | bool | None) -> tuple[int, tuple[int, ...]]:
    """Peak bytes and microbatches alive with chunks that save so much and need nothing else."""
    moment = dynamic_peak(pp, rank, m, [ChunkCost(s, s, s) for s in saved], **more)  # type: ignore[arg-type]
    return moment.bytes, moment.alive


def test_1f1b_holds_p_minus_r_microbatches_or_all_of_them():
    assert [peak(4, r, 100, 10) for r in range(4)] == [(40, (4,)), (30, (3,)), (20, (2,)), (10, (1,))]
    assert [peak(4, r, 2, 10) for r in range(4)] == [(20, (2,)), (20, (2,)), (20, (2,)), (10, (1,))]


def test_without_a_pipeline_one_microbatch_is_alive():
    assert peak(1, 0, 64, 10) == (10, (1,))
    # Two, where the next forward pass runs beside the backward pass; their layers trade places.
    both = dynamic_peak(1, 0, 64, [ChunkCost(10, 12, 15)], overlap_moe_expert_parallel_comm=True)
    assert (both.phase, both.alive, both.bytes) == ("overlapped", (1,), 10 + 2 + 5)


def test_overlapped_losses_do_not_meet():
    """Without a pipeline, forward of one microbatch overlaps backward of the one before. The loss (saved 40 of 100)
    runs backward before any layer runs forward, and forward after the last layer has run backward.

    The loss backward (150) with the next embedding (2): 152. Two layers (29 each): one saved by either, and both of a
    pair at the turn at which they have most. The loss forward (145) with the embedding of the one before. If layers are
    freed only when the chunk is done, their 50 bytes are alive too. The embedding runs forward beside all that the
    microbatch before has saved (100), and backward beside all that the next one has.
    """
    kept = {"saved": 100, "forward_peak": 145, "backward_peak": 150}

    def parts(*before: int, forward: int = 30, backward: int = 31, held: int = 0) -> OverlapCost:
        turns = (0, 20, 20, forward, 29, 29, 29, 29), (31, 30, 30, backward, 20, 20, 20, 25)
        return OverlapCost(2, 2, 2, *before, (LayerTurns(2, 29, 35, 36, *turns),), held)

    for overlap, highest in (
        (parts(2, 2), 152), (parts(2, 2, forward=90, backward=50), 2 + 2 + 29 + 90 + 50),
        (parts(2, 2, held=50), 145 + 2 + 50), (parts(60, 2), 160), (parts(2, 70), 170), (parts(2, 70, held=50), 220),
    ):
        both = dynamic_peak(1, 0, 64, [ChunkCost(**kept, overlap=overlap)], overlap_moe_expert_parallel_comm=True)
        assert (both.phase, both.alive, both.bytes) == ("overlapped", (1,), highest)


def test_few_microbatches_and_64_differ_under_virtual_stages():
    """Rank 0 of 2 with two chunks warms up with (2 - 0 - 1) * 2 + (2 - 1) * 2 = 4 passes.

    Two microbatches are 4 pairs, all in warm-up. Of 64, a fifth pass runs before the first backward pass. Forward
    takes chunks 0 0 1 1 0 0 1 1, backward 1 1 0 0: before the third backward pass four microbatches of chunk 0
    are alive, and never more than two of chunk 1.
    """
    assert peak(2, 0, 2, 10, 10) == (40, (2, 2))
    assert peak(2, 0, 64, 10, 10)[0] == 50
    assert peak(2, 0, 64, 10, 0)[0] == 40
    assert peak(2, 0, 64, 0, 10)[0] == 20


def test_the_first_chunk_is_alive_more_often_than_the_last():
    """Chunk 0 goes forward first and back last: with its bytes in chunk 0, a rank needs more."""
    front, back = peak(4, 0, 64, 30, 10)[0], peak(4, 0, 64, 10, 30)[0]
    assert front > back
    assert peak(4, 0, 64, 20, 20)[0] == 20 * (3 * 2 + 4 + 1)


def test_one_more_chunk_is_in_flight_where_expert_communication_overlaps():
    assert in_flight(4, 1, 64, 2, extra=True) == in_flight(4, 1, 64, 2) + 1 == 2 * 2 + 4 + 2


def test_the_running_chunk_counts_with_its_own_peak_and_the_others_with_what_they_saved():
    """1F1B rank 0 of 4: three wait (10 each), one runs backward (10 saved, 25 at its peak)."""
    moment = dynamic_peak(4, 0, 8, [ChunkCost(saved=10, forward_peak=14, backward_peak=25)])
    assert (moment.phase, moment.bytes) == ("backward", 3 * 10 + 25)
    moment = dynamic_peak(4, 0, 8, [ChunkCost(saved=10, forward_peak=26, backward_peak=25)])
    assert (moment.phase, moment.bytes) == ("forward", 3 * 10 + 26)


def test_a_middle_rank_of_1f1b_holds_the_gradients_of_the_pass_before():
    """``input_tensor_grad``, and in forward ``output_tensor_grad`` and the input under ``output_tensor``'s graph."""
    forward, backward = [ChunkCost(10, 20, 10)], [ChunkCost(10, 10, 20)]
    assert [dynamic_peak(4, r, 8, forward, hidden_bytes=1).hidden_bytes for r in range(4)] == [1, 3, 3, 2]
    assert [dynamic_peak(4, r, 8, backward, hidden_bytes=1).hidden_bytes for r in range(4)] == [0, 1, 1, 1]


def test_a_chunk_carries_over_from_its_backward_pass_to_its_next_forward_pass() -> None:
    """As the passes of the schedule say one by one; before the first they are as after the last of the step before."""
    chance = random.Random(11)
    for _ in range(100):
        pp, v = chance.choice((2, 3, 4, 8)), chance.randint(1, 5)
        group = pp + chance.choice((0, 0, 1, pp))
        m = chance.randint(1, 4) * group if v > 1 else chance.randint(1, 9)
        rank = chance.randrange(pp)
        last = ["backward"] * v
        moments = walk(pp, rank, m, v, group)
        for event, moment in zip(schedule_events(pp, rank, m, v, group), moments, strict=True):
            expected = tuple(c != event.chunk and last[c] == "backward" for c in range(v))
            assert (moment.phase, moment.chunk, moment.carrying) == (event.phase, event.chunk, expected)
            last[event.chunk] = event.phase


def test_what_idle_chunks_carry_over_adds_to_the_peak() -> None:
    """Two virtual stages on the last of two ranks, two microbatches: forward 0, 0, then forward 1 and backward 1 in
    turn, then backward 0, 0. Chunk 1 carries over while chunk 0 runs backward, chunk 0 while nothing else runs."""
    chunks = [ChunkCost(10, 10, 11, carried_over=5), ChunkCost(10, 10, 11, carried_over=7)]
    peak = dynamic_peak(2, 1, 2, chunks)
    # Both microbatches of chunk 0 are alive, and one of chunk 1, while that runs backward; or they are alone, beside 7.
    assert (peak.bytes, peak.alive) == (31, (2, 1))
    chunks[1] = chunks[1]._replace(carried_over=12)
    peak = dynamic_peak(2, 1, 2, chunks)
    assert (peak.bytes, peak.phase, peak.chunk, peak.alive) == (33, "backward", 0, (2, 0))


# --------------------------------------------------------------------------------------------------
# Closed form == event by event
# --------------------------------------------------------------------------------------------------

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies


@st.composite
def schedules_with_costs(draw):
    pp = draw(st.integers(1, 9))
    v = draw(st.integers(1, 6)) if pp > 1 else 1
    rank = draw(st.integers(0, pp - 1))
    group = draw(st.none() | st.integers(pp, 3 * pp)) if v > 1 else None
    whole = group or pp
    if v == 1:
        m = draw(st.integers(1, 3 * pp + 3))
    else:
        m = whole * draw(st.integers(1, 8)) + draw(st.sampled_from([0, *range(pp, whole)]))
    sizes = st.integers(0, 1000)
    kinds, carries = [], draw(st.booleans())
    for _ in range(draw(st.integers(1, v))):
        saved = draw(sizes)
        carried = draw(sizes) if carries and draw(st.booleans()) else 0
        kinds.append(ChunkCost(saved, saved + draw(sizes), saved + draw(sizes), carried_over=carried))
    chunks = [kinds[c] if c < len(kinds) else draw(st.sampled_from(kinds)) for c in range(v)]
    chunks = draw(st.sampled_from([chunks, chunks[::-1]]))
    return (
        (pp, rank, m, chunks, group),
        {
            "hidden_bytes": draw(st.sampled_from([0, 1, 20, 300])),
            "overlap_moe_expert_parallel_comm": draw(st.booleans()) and (pp == 1 or v > 1),
            "overlap_p2p_comm": draw(st.booleans()),
            "keeps_outputs": draw(st.booleans()),
        },
    )


@pytest.mark.slow
@hypothesis.given(schedules_with_costs())
@hypothesis.settings(max_examples=3000, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
def test_the_closed_form_is_the_walk_over_every_event(case):
    (pp, rank, m, chunks, group), more = case
    walked = walked_peak(pp, rank, m, chunks, group, **more)
    closed = dynamic_peak(pp, rank, m, chunks, group, **more)
    assert closed.bytes == walked.bytes == peak_bytes(pp, rank, m, chunks, group, **more)
    # The moment it names is one of the schedule, and its parts add up.
    options = (more[name] for name in ("overlap_moe_expert_parallel_comm", "overlap_p2p_comm", "keeps_outputs"))
    moments = walk(pp, rank, m, len(chunks), group, *options)
    carried = {}  # what other chunks carry over at such a moment
    for n in moments:
        beside = sum(c.carried_over for c, carries in zip(chunks, n.carrying, strict=True) if carries)
        carried.setdefault((n.phase, n.chunk, n.forward_chunk, n.alive), set()).add(beside)
    counted = list(closed.alive)
    passing = closed.bytes - closed.hidden_bytes - sum(n * c.saved for n, c in zip(counted, chunks, strict=True))
    running = chunks[closed.chunk]
    if closed.phase == "overlapped":
        beside = chunks[closed.forward_chunk]
        counted[min(closed.chunk, closed.forward_chunk, key=lambda c: chunks[c].saved)] += 1
        passing -= running.backward_peak - running.saved + beside.forward_peak - beside.saved
    else:
        peak = running.backward_peak if closed.phase == "backward" else running.forward_peak
        passing -= peak - running.saved
    assert passing in carried[closed.phase, closed.chunk, closed.forward_chunk, tuple(counted)]


def test_more_groups_of_microbatches_repeat_the_same_moments() -> None:
    """What ``few_microbatches`` leaves out: the moments of longer schedules are those of shorter ones."""
    chance = random.Random(5)
    for _ in range(400):
        pp, v = chance.choice((2, 3, 4, 6, 8, 12)), chance.randint(2, 8)
        group = pp + chance.choice((0, 0, 1, pp, 2 * pp, chance.randint(0, 9)))
        rest = chance.choice((0, 0, *range(pp, group)))
        rank, extra, overlap = chance.randrange(pp), chance.random() < 0.3, chance.random() < 0.7
        keeps = chance.random() < 0.3
        carries = chance.random() < 0.5
        m = chance.randint(5, 12) * group + rest
        few = few_microbatches(pp, m, v, group, extra)
        assert few <= (4 + extra) * group + rest
        options = (v, group, extra, overlap, keeps, None, carries)
        ours, theirs = (set(peak_moments(pp, rank, n, *options)) for n in (few, m))
        assert ours == theirs, (pp, rank, m, v, group, extra, overlap)


def test_layers_of_two_chunks_run_in_pairs() -> None:
    """Pair by pair and turn by turn, beside the sum over all layers of what runs of layers say."""
    chance = random.Random(5)

    def chunk() -> ChunkCost:
        layers = []
        for _ in range(chance.randint(0, 3)):
            forward, backward = ([chance.randint(1, 40) for _ in range(8)] for _ in range(2))
            saved, most = chance.randint(1, 30), (max(forward), max(backward))
            layers.append(LayerTurns(chance.randint(1, 3), saved, *most, tuple(forward), tuple(backward)))
        return ChunkCost(0, 0, 0, OverlapCost(0, 0, 0, 0, 0, tuple(layers)))

    def one_by_one(cost: ChunkCost) -> list[LayerTurns]:
        assert cost.overlap is not None
        return [layers for layers in cost.overlap.layers for _ in range(layers.number)]

    for _ in range(100):
        f, b = chunk(), chunk()
        forward, backward = one_by_one(f), one_by_one(b)
        highest = saved = 0
        for turn in range(max(len(forward), len(backward))):
            one = forward[turn] if turn < len(forward) else None
            other = backward.pop() if backward else None
            beside = saved + sum(layer.saved for layer in backward)
            for place in range(8):
                alone = (one.forward[place] if one else 0) + (other.backward[place] if other else 0)
                highest = max(highest, beside + alone)
            saved += one.saved if one else 0
        assert overlapped(f, b) == highest
