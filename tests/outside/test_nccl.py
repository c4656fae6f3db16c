"""Communicators against public figures: issues of NVIDIA/nccl, logs of NCCL, notes of users. None was measured here."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from scripts_of import load_script

from bridge_memory.cards.rows import GPUS
from bridge_memory.outside.amount import total
from bridge_memory.outside.nccl import (
    DEFAULT_RELEASE,
    NOTHING,
    OF_TORCH,
    RULES,
    Channels,
    Machine,
    Spread,
    Use,
    channels,
    communicator_bytes,
    local_connection,
    machine_of,
    pool_bytes,
    release_of_torch,
    ring_bytes,
    rules,
    send_receive_bytes,
    suspended,
    tree_bytes,
)
from bridge_memory.spec.gpus import find_gpu

MIB = 1 << 20
H100, A100, B200, GB200, B300 = (machine_of(find_gpu(n)) for n in ("H100", "A100-80GB", "B200", "GB200", "B300"))
NODE = Spread(8)


def most(machine: Machine, spread: Spread) -> Channels:
    return channels(machine, spread)[1]


def part(machine: Machine, spread: Spread, use: Use, name: str, release: tuple[int, int, int] = DEFAULT_RELEASE) -> int:
    (found,) = (a for a in communicator_bytes(machine, spread, use, release) if a.name == name)
    return found.most


figures: Any = load_script("outside_figures")


@pytest.mark.parametrize("figure", figures.explained(), ids=lambda figure: figure.where)
def test_public_figures(figure: Any) -> None:
    assert abs(figure.found - figure.measured) <= figure.within * figure.measured


def test_verl_suspends_less_than_reported() -> None:
    """Every communicator of TP 2 PP 2 DP 2 in a node, with all algorithms: still below what the report frees."""
    freed = 0
    for ranks in (8, 2, 2, 2, 8, 4):  # WORLD, TP, PP, DP, INTRA_DIST_OPT, MODEL.
        use = Use.ALL_REDUCE | Use.SHARDED | (Use.ONE_PEER if ranks == 2 else NOTHING)
        made = communicator_bytes(H100, Spread(ranks), use, (2, 29, 7))
        freed += total(made).most - total(suspended(made, H100, Spread(ranks), (2, 29, 7))).most
    assert 3e9 < freed < figures.unexplained()[0].measured


def test_channels_of_logs() -> None:
    """The lines that NCCL prints: collective, NVLS, p2p, p2p a peer."""
    assert channels(A100, NODE) == (Channels(24, 0, 32, 32),) * 2
    assert channels(H100, NODE) == (Channels(24, 16, 32, 32),) * 2
    assert most(H100, Spread(16, 2)) == Channels(16, 16, 16, 2)
    assert channels(H100, Spread(16, 2), (2, 29, 7))[1].peer == 4
    assert channels(GB200, Spread(64)) == (Channels(32, 24, 32, 32),) * 2
    assert most(H100, Spread(1)).most == 64
    assert channels(H100, Spread(1), (2, 24, 3))[0].most == 32


def test_nvls_needs_three_gpus_of_a_domain() -> None:
    """``transport/nvls.cc: ncclNvlsInit`` returns where its topology has two GPUs or fewer."""
    for spread, there in ((Spread(2), 0), (Spread(3), 16), (Spread(4, 2), 0), (Spread(16, 2), 16)):
        assert most(H100, spread).nvls == there, spread


def test_connections_by_generation() -> None:
    """Ampere's peers read, so the sender keeps the Simple buffer: 6 + 6 MiB in place of 2 + 10."""
    assert local_connection(H100) == local_connection(B200) == (2 * MIB, 10 * MIB)
    assert local_connection(A100) == (6 * MIB, 6 * MIB)
    assert local_connection(machine_of(find_gpu("RTX-3090"))) == (2 * MIB, 10 * MIB)


def test_rings_of_a_node() -> None:
    assert ring_bytes(most(H100, NODE), NODE, H100) == ring_bytes(most(A100, NODE), NODE, A100) == 288 * MIB
    assert ring_bytes(most(GB200, Spread(72)), Spread(72), GB200) == 384 * MIB


def test_a_boundary_takes_more_than_its_neighbours() -> None:
    """Two nodes of one rank each: all 16 MiB of 8 + 8 network connectors; of eight each, two channels of sixteen."""
    found = most(H100, Spread(16, 2))
    assert ring_bytes(found, Spread(16, 2), H100) == (14 * 12 + 2 * 20) * MIB
    alone = most(H100, Spread(2, 2))
    assert ring_bytes(alone, Spread(2, 2), H100) == alone.collective * 20 * MIB
    assert tree_bytes(alone, Spread(2, 2), H100).most == 0  # The same two neighbours.


def test_all_to_all_of_eight_costs_more_inside_a_node_than_of_sixteen_over_two() -> None:
    inside = part(H100, NODE, Use.ALL_TO_ALL, "send-receive")
    over = part(H100, Spread(16, 2), Use.ALL_TO_ALL, "send-receive")
    assert inside == 2688 * MIB
    assert over < 500 * MIB


def test_remote_peers_share_a_pool() -> None:
    """Whatever their number: 32 MiB a direction with 16 channels."""
    assert pool_bytes(16) == 32 * MIB
    two, many = (
        send_receive_bytes(most(H100, s), s, H100, Use.GATHER).least for s in (Spread(16, 2), Spread(512, 64))
    )  # fmt: skip
    assert two == many


def test_connections_at_first_use_since_2_22_and_only_with_cumem() -> None:
    def size(release: tuple[int, int, int], cumem: bool = True) -> int:
        return total(communicator_bytes(H100, NODE, NOTHING, release, cumem)).most

    assert size((2, 22, 3)) == size((2, 25, 1)) == 228 * MIB  # 8 x H100 has less than 64 channels.
    assert size((2, 26, 2)) == 230 * MIB
    assert size((2, 30, 3)) == 228 * MIB
    # Rings, trees, NVLS and a pool of sends.
    assert size((2, 21, 5)) == (228 + 288 + 288 + 768 + 256) * MIB
    # Heads of sends are no granules then: two of 4 KiB on each of 24 channels.
    assert size(DEFAULT_RELEASE, cumem=False) == (2 + 240 + 240 + 256 + 256) * MIB + 2 * 24 * 4096


def test_without_cumem_a_rank_alone_has_the_pool_and_no_granules() -> None:
    one = total(communicator_bytes(B300, Spread(1), Use.ALL_REDUCE, (2, 28, 9), cumem=False))
    assert 0 <= one.most - 536_870_912 <= 2 * MIB


def test_suspending_keeps_init_and_nvls() -> None:
    use = Use.ALL_REDUCE | Use.ALL_TO_ALL
    made = communicator_bytes(H100, NODE, use, (2, 29, 7))
    assert total(suspended(made, H100, NODE, (2, 29, 7))).least == 230 * MIB
    assert suspended(made, H100, NODE, (2, 28, 9)) == made


def test_releases_of_torch() -> None:
    assert release_of_torch(None) == DEFAULT_RELEASE
    assert release_of_torch((1, 13)) == release_of_torch((2, 1))
    assert release_of_torch((2, 99)) == DEFAULT_RELEASE
    assert list(OF_TORCH.values()) == sorted(OF_TORCH.values())
    assert list(RULES) == sorted(RULES, reverse=True)
    assert rules((2, 18, 3)).nvls == 2 * rules((2, 21, 5)).nvls == 6 * rules((2, 22, 3)).nvls


def test_every_card_and_spread_has_a_range_in_order() -> None:
    """Least and most, more uses never less, on every card, release and kind of use."""
    spreads = [Spread(1), Spread(2), Spread(2, 2), Spread(3), Spread(5, 3), Spread(8), Spread(16, 2), Spread(100, 13)]
    for gpu, spread, release, cumem in product(GPUS.values(), spreads, RULES, (True, False)):
        machine = machine_of(gpu)
        everything = NOTHING
        last = 0
        for use in Use:
            alone = communicator_bytes(machine, spread, use, release, cumem)
            assert all(0 <= a.least <= a.most for a in alone), (gpu.name, spread, use)
            everything |= use
            together = total(communicator_bytes(machine, spread, everything, release, cumem))
            assert together.most >= last, (gpu.name, spread, everything)
            last = together.most


@pytest.mark.slow
def test_the_page_of_figures_is_current() -> None:
    ((path, text),) = figures.files().items()
    assert path.read_text(encoding="utf-8") == text, "run python scripts/outside_figures.py"
