"""Device memory of one NCCL communicator on one rank: arithmetic on channels and connections.

Everything is counted for the rank with the most, in bytes. Sources are files of NCCL 2.28.9 unless another release is
named. Channel counts are what NCCL's logs print ("24 coll channels, 16 nvls channels, 32 p2p channels, 32 p2p channels
per peer"); those without a public log are assumed.
"""

from __future__ import annotations

from enum import Flag, auto
from functools import lru_cache
from typing import NamedTuple

from bridge_memory.cards.generations import GENERATIONS, NVIDIA, since_hopper
from bridge_memory.cards.gpu import Gpu
from bridge_memory.components import Provenance
from bridge_memory.outside.amount import Amount, Range

MIB = 1 << 20
#: Multiple of a device allocation through cuMem, and of a large one through cudaMalloc (``alloc.h: ncclCuMemAlloc``).
GRANULE = 2 * MIB
#: Buffers of the protocols (``init.cc: computeBuffSizes``), and the head of a connection (``comm.h: ncclSendMem``).
LL, LL128, SIMPLE = 524_288, 4_915_200, 4 * MIB
HEAD = 4096
#: Chunks a channel of the pool of remote sends or receives (``transport/net.cc``: NCCL_SHARED_STEPS).
POOL_CHUNKS = 16
#: Bytes of such a chunk: all peers over NVLink in one node, else (``init.cc``: p2pChunkSize).
CHUNK_IN_NODE, CHUNK = 512 << 10, 128 << 10


class Use(Flag):
    """What runs on a communicator; decides which algorithms can be chosen."""

    ALL_REDUCE = auto()
    #: All-reduces of a few bytes, and small objects.
    SCALARS = auto()
    #: All-gather and reduce-scatter.
    SHARDED = auto()
    BROADCAST = auto()
    #: To and from a neighbour, or two.
    ONE_PEER = auto()
    TWO_PEERS = auto()
    ALL_TO_ALL = auto()
    #: Objects gathered on the first rank by sends (torch ``gather_object``).
    GATHER = auto()


NOTHING = Use(0)
COLLECTIVES = Use.ALL_REDUCE | Use.SCALARS | Use.SHARDED | Use.BROADCAST


class Rules(NamedTuple):
    """What depends on NCCL's release."""

    #: Device memory through cuMem, in granules.
    cumem: bool
    #: Connections of an algorithm at its first use, with cuMem (``init.cc``: NCCL_RUNTIME_CONNECT); else all at init.
    lazy: bool
    most_channels: int
    #: Tables at init beside three a channel.
    tables: int
    #: Bytes a NVLS channel and head (``transport/nvls.cc``): 12 and 6 MiB in public logs of 8 H100.
    nvls: int
    #: ``ncclCommSuspend`` exists: frees rings, trees and send-receive, keeps init and NVLS.
    suspends: bool = False


#: First release -> its rules, newest first.
RULES: dict[tuple[int, int, int], Rules] = {
    (2, 30, 0): Rules(True, True, 64, 1, 2 * MIB, True),
    (2, 29, 7): Rules(True, True, 64, 2, 2 * MIB, True),
    (2, 26, 0): Rules(True, True, 64, 2, 2 * MIB),
    (2, 25, 0): Rules(True, True, 64, 1, 2 * MIB),
    (2, 22, 0): Rules(True, True, 32, 1, 2 * MIB),
    (2, 19, 0): Rules(True, False, 32, 1, 6 * MIB),
    (0, 0, 0): Rules(False, False, 32, 1, 12 * MIB),
}
Release = tuple[int, int, int]
#: Where a run does not say which torch it uses.
DEFAULT_RELEASE: Release = (2, 28, 9)
#: torch -> the NCCL that its wheels require (their metadata); containers may have another.
OF_TORCH: dict[tuple[int, int], Release] = {
    (2, 1): (2, 18, 1), (2, 2): (2, 19, 3), (2, 3): (2, 20, 5), (2, 4): (2, 20, 5), (2, 5): (2, 21, 5),
    (2, 6): (2, 21, 5), (2, 7): (2, 26, 2), (2, 8): (2, 27, 3), (2, 9): (2, 27, 5),
}  # fmt: skip


def rules(release: Release) -> Rules:
    """The rules of a release."""
    return next(found for first, found in RULES.items() if release >= first)


def release_of_torch(torch: tuple[int, int] | None) -> Release:
    """NCCL's release with a torch release."""
    if torch is None:
        return DEFAULT_RELEASE
    return OF_TORCH.get(torch, OF_TORCH[2, 1] if torch < (2, 1) else DEFAULT_RELEASE)


class Machine(NamedTuple):
    """What NCCL's sizes depend on."""

    #: One of ``generations.GENERATIONS``.
    generation: str
    #: GPUs of a domain are linked by NVLink.
    nvlink: bool
    #: Through NVSwitches: NVLS, and all links to any one peer.
    switched: bool
    #: NVLinks of a GPU.
    links: int
    #: Peers read over NVLink instead of being written to: compute capability 8.0 only (``graph/paths.cc:
    #: ncclTopoCheckP2p``).
    reads: bool
    #: GPUs of a domain.
    domain: int


#: GB/s each way of PCIe 5 with sixteen lanes; a faster link is NVLink.
_PCIE = 64
#: GB/s each way of one NVLink: to Hopper, from Blackwell (NVIDIA data sheets).
_LINK, _LINK_BLACKWELL = 25, 50
#: GPUs of a domain where the card does not say.
DOMAIN = 8


def machine_of(gpu: Gpu) -> Machine:
    """The machine that a card is in. Cards of other vendors (RCCL) are counted as NVIDIA's Ampere: assumed."""
    nvidia = gpu.vendor == NVIDIA
    generation = gpu.generation if nvidia and gpu.generation in GENERATIONS else None
    speed, domain = (gpu.rates.link, gpu.rates.domain) if gpu.rates is not None else (0.0, DOMAIN)
    nvlink = speed > _PCIE
    links = int(speed / (_LINK_BLACKWELL if generation == "blackwell" else _LINK)) if nvlink else 0
    return Machine(
        generation or "ampere", nvlink, nvlink and domain >= DOMAIN and generation != "volta", links,
        nvidia and gpu.capability == (8, 0) and nvlink, domain,
    )  # fmt: skip


class Spread(NamedTuple):
    """How the ranks of a communicator lie: how many, in how many NVLink domains."""

    ranks: int
    domains: int = 1

    @property
    def local(self) -> int:
        """Ranks in the domain with the most."""
        return -(-self.ranks // self.domains)


class Channels(NamedTuple):
    """Numbers of channels, as NCCL logs them."""

    collective: int
    nvls: int
    p2p: int
    #: Channels of send-receive a peer: what the paths to all peers allow.
    peer: int

    @property
    def most(self) -> int:
        return max(self.collective, self.p2p)


def channels(machine: Machine, spread: Spread, release: Release = DEFAULT_RELEASE) -> tuple[Channels, Channels]:
    """(fewest, most) channels.

    From public logs: 8 A100, 8 H100, H100 over nodes, GB200 in one domain, NVLS of B200, a single rank. Assumed: GPUs
    without NVSwitch, PCIe. Over the network: two a network adapter, of which each local rank has one; four from Hopper
    on while that is below 16 (``graph/connect.cc: ncclTopoPostset``); the search may find twice as many. Channels a
    peer: two a link on the way to it, and at most 2 once a peer is remote, one for some 14 GB/s of the network in later
    sources (from 2.29, assumed: 4) (``graph/paths.cc: ncclTopoGetNchannels, ncclTopoComputeP2pChannels``).
    """
    limit = rules(release).most_channels
    if spread.ranks == 1:
        return (Channels(limit, 0, limit, limit),) * 2
    hopper, blackwell = since_hopper(machine.generation), machine.generation == "blackwell"
    nvls = machine.switched and hopper and spread.local > 2  # transport/nvls.cc: ncclNvlsInit
    if not machine.nvlink:
        return Channels(2, 0, 2, 1), Channels(4, 0, 4, 2)
    if spread.domains > 1:
        remote = 4 if release >= (2, 29, 0) else 2
        few = 2 * spread.local
        few = min(limit, 32, 2 * few if hopper and few < 16 else few)
        most = min(limit, 32, max(few, min(16, 2 * few)))
        return (
            Channels(few, 16 if nvls else 0, _power_of_two(few), 1),
            Channels(most, (32 if blackwell else 16) if nvls else 0, _power_of_two(most), remote),
        )
    if not machine.switched:
        mesh = _power_of_two(2 * machine.links // max(1, min(machine.domain, DOMAIN) - 1))
        return Channels(12, 0, 16, min(16, mesh)), Channels(24, 0, 32, min(32, mesh))
    peer = min(32, _power_of_two(2 * machine.links))
    if blackwell:
        return (Channels(32, 24 if nvls else 0, 32, peer),) * 2
    return (Channels(24, 16 if nvls else 0, 32, peer),) * 2


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def _up(nbytes: int) -> int:
    return -(-nbytes // GRANULE) * GRANULE


def _allocated(nbytes: int, cumem: bool) -> int:
    """Small blocks of cudaMalloc share a granule."""
    return _up(nbytes) if cumem or nbytes >= MIB else nbytes


class Connection(NamedTuple):
    """Bytes of one channel to or from one peer."""

    send: int
    receive: int

    @property
    def both(self) -> int:
        return self.send + self.receive


def local_connection(machine: Machine, cumem: bool = True) -> Connection:
    """Over NVLink or PCIe (``transport/p2p.cc: p2pSendSetup, p2pRecvSetup``): the buffer of the Simple protocol is the
    sender's where peers read, else the receiver's, as the others always are."""
    simple = SIMPLE if machine.reads else 0
    return Connection(
        _allocated(HEAD + simple, cumem), _allocated(HEAD + LL + LL128 + SIMPLE - simple, cumem)
    )  # fmt: skip


def network_connector(cumem: bool = True) -> int:
    """Bytes of a send or a receive over the network with GPUDirect (``transport/net.cc: sendProxyConnect``): LL stays
    on the host. Without GPUDirect all of it does."""
    return _allocated(LL128 + SIMPLE, cumem)


def pool_bytes(p2p_channels: int, chunk: int = CHUNK) -> int:
    """Bytes that the sends to all remote peers share, or the receives (``transport/net.cc: sharedNetBuffersInit``)."""
    return p2p_channels * POOL_CHUNKS * chunk


def pool_at_init_bytes(found: Channels, spread: Spread, machine: Machine) -> int:
    """Bytes of the pool that a communicator makes at init unless connections are made at first use, whether or not it
    has remote peers (``init.cc``: "Connect to local net proxy"; ``net.cc: proxySharedInit``)."""
    in_node = spread.domains == 1 and machine.nvlink
    return pool_bytes(found.p2p, CHUNK_IN_NODE if in_node else CHUNK)


def init_bytes(found: Channels, release: Release = DEFAULT_RELEASE, cumem: bool = True) -> int:
    """Bytes of a communicator before its first operation (``init.cc: initTransportsRank, devCommSetup``,
    ``channel.cc: initChannel``): three tables a channel and some of its own; NVLS: one a channel and one more."""
    known = rules(release)
    if not (cumem and known.cumem):
        return GRANULE
    nvls = found.nvls + 1 if found.nvls else 0
    return GRANULE * (3 * found.most + known.tables + nvls)


def ring_bytes(found: Channels, spread: Spread, machine: Machine, cumem: bool = True) -> int:
    """Bytes of a ring: a send and a receive a channel; those over a node's boundary are shared out among its ranks."""
    if spread.ranks == 1:
        return 0
    link, remote = local_connection(machine, cumem), _boundary(found, spread)
    return (found.collective - remote) * link.both + remote * 2 * network_connector(cumem)


def tree_bytes(found: Channels, spread: Spread, machine: Machine, cumem: bool = True) -> Range:
    """Bytes of a double tree beyond those of a ring through the same ranks: none at the end of a chain that sends (and
    with two ranks), the ring's connections the other way round in its middle. Over the network a node has one neighbour
    in one tree and three in the other: two a channel, of which the ring may have none."""
    if spread.ranks <= 2:
        return Range(0, 0)
    link, remote = local_connection(machine, cumem), _boundary(found, spread)
    within = found.collective * link.both if spread.local > 1 else 0
    return Range(0, within + remote * 4 * network_connector(cumem))


def _boundary(found: Channels, spread: Spread) -> int:
    """Channels on which a rank is the one of its node that talks to others."""
    return -(-found.collective // spread.local) if spread.domains > 1 else 0


def nvls_bytes(found: Channels, spread: Spread, release: Release = DEFAULT_RELEASE) -> int:
    """Bytes of NVLS (``transport/nvls.cc: ncclNvlsBufferSetup``): a buffer each way a channel and head, a head a rank
    of the domain, at most one a channel."""
    return found.nvls * rules(release).nvls * min(spread.local, found.nvls)


def send_receive_bytes(found: Channels, spread: Spread, machine: Machine, use: Use, cumem: bool = True) -> Range:
    """Bytes of the sends and receives of ``use`` (``transport.cc: ncclTransportP2pSetup``).

    Each local peer has separate connections; all remote peers share one pool in each direction. Least: the
    neighbours are the kind with less, and an object gather is sent; most: the other kind, and it is received.
    """
    link = local_connection(machine, cumem)
    remote = 2 * pool_bytes(found.p2p) if spread.domains > 1 else 0  # Both directions.
    pair = found.peer * link.both
    least = most = 0
    if Use.ALL_TO_ALL in use:
        least = most = pair * (spread.local - 1) + remote
        # PXN: a GPU keeps a pool of sends for each local rank that goes through its network adapter.
        most += (spread.local - 1) * remote // 2
    elif use & (Use.ONE_PEER | Use.TWO_PEERS) and spread.ranks > 1:
        peers = min(2 if Use.TWO_PEERS in use else 1, spread.ranks - 1)
        near = pair * min(peers, spread.local - 1)
        if spread.domains == 1:
            least = most = near
        else:
            least, most = min(near, remote) or remote, near * (peers > 1) + remote
    if Use.GATHER in use and spread.ranks > 1:
        gathered = found.peer * link.receive * (spread.local - 1) + remote // 2
        sent = min(found.peer * link.send, remote // 2) if spread.domains > 1 else found.peer * link.send
        least, most = max(least, sent), max(most, most + gathered)
    return Range(least, most)


@lru_cache(maxsize=4096)
def communicator_bytes(
    machine: Machine, spread: Spread, use: Use, release: Release = DEFAULT_RELEASE, cumem: bool = True
) -> tuple[Amount, ...]:
    """What one communicator takes on a rank: "init", "rings, trees, NVLS", "send-receive".

    Args:
        machine: The kind of machine.
        spread: How its ranks lie.
        use: What has run on it.
        release: NCCL's.
        cumem: False for ``NCCL_CUMEM_ENABLE=0``: no granules, and all connections at init.

    Returns:
        Amounts in bytes. The range of the second is the tuner's choice of algorithm; NVLS may be off.

    Example:
        >>> from bridge_memory.cards.rows import common_gpus
        >>> h100 = next(machine_of(gpu) for gpu in common_gpus() if gpu.name == "H100")
        >>> [amount.most >> 20 for amount in communicator_bytes(h100, Spread(8), Use.ALL_TO_ALL)]
        [230, 2688]
    """
    known = rules(release)
    with_cumem = cumem and known.cumem
    lazy = known.lazy and with_cumem
    few, many = channels(machine, spread, release)
    basis = Provenance.FORMULA if few == many or not spread.ranks > 1 else Provenance.ASSUMED
    least, most = init_bytes(few, release, with_cumem), init_bytes(many, release, with_cumem)
    if not lazy:
        least += pool_at_init_bytes(few, spread, machine)
        most += pool_at_init_bytes(many, spread, machine)
    out = [Amount("init", least, most, basis, "init.cc: devCommSetup; channel.cc: initChannel")]
    if spread.ranks == 1:
        return tuple(out)
    ring = Range(*(ring_bytes(f, spread, machine, with_cumem) for f in (few, many)))
    tree = Range(0, tree_bytes(many, spread, machine, with_cumem).most)
    nvls = nvls_bytes(many, spread, release)
    least, most = _algorithms(use, ring, tree, nvls, at_init=not lazy)
    if most:
        source = "transport/p2p.cc, net.cc, nvls.cc; init.cc: NCCL_RUNTIME_CONNECT"
        out.append(Amount("rings, trees, NVLS", least, most, basis, source))
    sent = [send_receive_bytes(f, spread, machine, use, with_cumem) for f in (few, many)]
    if sent[1].most:
        out.append(Amount("send-receive", sent[0].least, sent[1].most, basis, "transport.cc: ncclTransportP2pSetup"))
    return tuple(out)


def _algorithms(use: Use, ring: Range, tree: Range, nvls: int, at_init: bool) -> Range:
    """Bytes of the algorithms that ``use`` can have (``graph/tuning.cc: ncclTopoTuneModel``): rings for each, trees for
    all-reduce, NVLS for all but broadcast and a few bytes, for which its latency is too long. Least: one of them serves
    all."""
    if at_init:
        return Range(ring.least, ring.most + tree.most + nvls)
    if not use & COLLECTIVES:
        return Range(0, 0)
    many = ring.most
    least = ring.least
    if use & (Use.ALL_REDUCE | Use.SCALARS):
        many += tree.most
    if use & (Use.ALL_REDUCE | Use.SHARDED):
        many += nvls
        least = min(least, nvls) if nvls and not use & (Use.BROADCAST | Use.SCALARS) else least
    return Range(least, many)


def gather_transports_bytes(peers: int, channels_a_peer: int) -> int:
    """Bytes of remote connections where GDRCopy is on (NCCL_GDRCOPY_ENABLE=1): a granule each (``transport/net.cc:
    ncclGdrCudaCalloc``)."""
    return peers * channels_a_peer * GRANULE


def suspended(amounts: tuple[Amount, ...], machine: Machine, spread: Spread, release: Release) -> tuple[Amount, ...]:
    """What ``ncclCommSuspend`` leaves of a communicator: all of it before 2.29.7, then init and NVLS."""
    if not rules(release).suspends:
        return amounts
    nvls = nvls_bytes(channels(machine, spread, release)[1], spread, release)
    kept = [amount for amount in amounts if amount.name == "init"]
    if any(amount.name == "rings, trees, NVLS" for amount in amounts) and nvls:
        kept.append(Amount("NVLS", 0, nvls, Provenance.FORMULA, "transport/nvls.cc"))
    return tuple(kept)


def modules() -> Amount:
    """NCCL's kernels, once a process."""
    return Amount("NCCL's kernels", 100 * MIB, 200 * MIB, Provenance.ASSUMED, "100 to 200 MiB; no source states it")
