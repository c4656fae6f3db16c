"""Balanced routing: tokens per expert are known without the values of a router."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import gcd
from typing import Any

import torch

from bridge_memory.rehearsal.patches.replace import module_or_empty, replaced


def spread(total: int, parts: int, *, multiple: int = 0, together: int = 1) -> list[int]:
    """Divide ``total`` over ``parts`` as evenly as integers allow, and so the sums of consecutive parts, as of a rank.

    ``multiple``: the number of rows that quantized experts are padded to. The counts of ``together`` consecutive parts
    then spread over that range at equal distances, so that padding adds half of it on average, as with natural routing.
    Their sum does not change.
    """
    even = [(i + 1) * total // parts - i * total // parts for i in range(parts)]
    width = min(multiple, min(even))
    return [n + int((2 * (i % together) + 1 - together) * width / (2 * together)) for i, n in enumerate(even)]


def dealt(totals: Sequence[int], ranks: int) -> list[list[int]]:
    """Divide each of ``totals`` over ``ranks`` as evenly as integers allow, and so the sums of consecutive ones.

    The remainder of one total goes to the ranks after those that got the remainder of the total before. Returns
    [rank][total].
    """
    out = [[n // ranks for n in totals] for _ in range(ranks)]
    at = 0
    for i, n in enumerate(totals):
        for _ in range(n % ranks):
            out[at % ranks][i] += 1
            at += 1
    return out


def sent_to_experts(
    tokens: int, topk: int, experts: int, config: Any, *, multiple: int = 0, together: int = 1
) -> list[int]:
    """How many of a rank's ``tokens`` each expert gets: an even share, at most the expert capacity, or exactly the
    capacity where inputs are padded to it (``moe_utils.py: apply_router_token_dropping``). ``multiple``, ``together``:
    as for ``spread``."""
    even = spread(tokens * topk, experts, multiple=multiple, together=together)
    factor = config.moe_expert_capacity_factor
    if factor is None:
        return even
    of_expert = module_or_empty("megatron.core.transformer.moe.moe_utils").get_capacity
    capacity = min(of_expert(tokens * topk, experts, factor), tokens)
    return [capacity if config.moe_pad_expert_input_to_capacity else min(n, capacity) for n in even]


class _BalancedMap:
    """A routing map of which only the number of tokens and the column sums are known."""

    def __init__(self, tokens: int, sums: list[int]) -> None:
        self._tokens = tokens
        self._sums = torch.tensor(sums, device="cpu")

    def size(self, dim: int) -> int:
        return self._tokens

    def sum(self, dim: int = 0) -> torch.Tensor:
        return self._sums


def _balance(routing_map: torch.Tensor, topk: int) -> None:
    """Overwrite the map in place, without a temporary: token i goes to the ``topk`` experts after those of token i - 1.

    ``.data`` is written, since autograd may have saved the map.
    """
    experts = routing_map.shape[1]
    period = experts // gcd(experts, topk)
    routing_map.data.zero_()
    for token in range(period):
        first = token * topk % experts
        routing_map.data[token::period, first : first + topk] = True
        routing_map.data[token::period, : max(0, first + topk - experts)] = True


class _MaskedSelect(torch.autograd.Function):
    """``masked_select`` with a known count: autograd saves the source and the mask (``derivatives.yaml``)."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, mask: torch.Tensor, count: int) -> torch.Tensor:
        ctx.save_for_backward(source, mask)
        return source.new_empty((count,))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, None, None]:
        source, _ = ctx.saved_tensors
        return torch.zeros_like(source, memory_format=torch.contiguous_format), None, None


@contextmanager
def balanced_routing(topk: int, experts: int, multiple: int = 0) -> Iterator[None]:
    """Give every expert the same number of tokens, so that shapes are known without values.

    ``moe/token_dispatcher.py`` counts tokens per rank on the GPU and copies the counts to the host. On the meta device
    the same code counts a balanced map on the host; for tensors with data the router's map is overwritten.
    ``multiple``: rows to which quantized GEMMs pad (``spread``).
    """
    module = module_or_empty("megatron.core.transformer.moe.token_dispatcher")
    counts: list[list[int]] = []
    #: Elements of a routing map -> tokens that it sends.
    sent: dict[int, int] = {}
    masked_select, cpu = torch.Tensor.masked_select, torch.Tensor.cpu
    all_to_all = module.MoEAlltoAllTokenDispatcher
    all_gather = module.MoEAllGatherTokenDispatcher
    preprocess = all_to_all.preprocess
    postprocess = all_gather.dispatch_postprocess
    to_cpu: Any = getattr(module, "maybe_move_tensor_to_cpu", None)
    router = module_or_empty("megatron.core.transformer.moe.router").TopKRouter
    forward = router.forward

    def counted(self: Any, routing_map: torch.Tensor) -> Any:
        if self.drop_and_pad:
            return preprocess(self, routing_map)
        tokens, columns = routing_map.shape
        known: Any = routing_map
        if routing_map.is_meta:
            # Tokens of several ranks are spread by their sum, below, unless a capacity bounds each rank's.
            own = self.ep_size * self.tp_size == 1 or self.config.moe_expert_capacity_factor is not None
            sums = sent_to_experts(
                tokens, topk, columns, self.config, multiple=multiple if own else 0, together=self.num_local_experts
            )
            known, sent[tokens * columns] = _BalancedMap(tokens, sums), sum(sums)

        def of_all_ranks(sums: torch.Tensor, group: Any = None, **_: object) -> torch.Tensor:
            ranks = group.size()
            gathered = sums.repeat(ranks)
            if routing_map.is_meta and ranks > 1 and self.config.moe_expert_capacity_factor is None:
                # The other ranks together make up for what this rank sends above or below its share.
                table = gathered.view(ranks, -1)
                others = [rank for rank in range(ranks) if rank != group.rank()]
                everywhere = spread(
                    ranks * tokens * topk, columns, multiple=multiple, together=self.num_local_experts
                )
                rest = [whole - n for whole, n in zip(everywhere, sums.tolist(), strict=True)]
                table[others] = torch.tensor(dealt(rest, ranks - 1), device="cpu")
            return gathered

        with replaced(module, "gather_from_sequence_parallel_region", of_all_ranks):
            return preprocess(self, known)

    def gathered(self: Any, hidden_states: torch.Tensor, probs: torch.Tensor) -> Any:
        if not self.routing_map.is_meta and self.config.moe_expert_capacity_factor is None:
            _balance(self.routing_map, topk)
        first, last = self.local_expert_indices[0], self.local_expert_indices[-1]
        ranks = self.tp_size * self.ep_size
        of_a_rank = sent_to_experts(hidden_states.shape[0] // ranks, topk, experts, self.config)
        everywhere = [ranks * n for n in of_a_rank]
        if self.config.moe_expert_capacity_factor is None:
            everywhere = spread(
                hidden_states.shape[0] * topk, experts, multiple=multiple, together=last - first + 1
            )
        counts.append(everywhere[first : last + 1])
        try:
            return postprocess(self, hidden_states, probs)
        finally:
            counts.pop()

    def selected(source: torch.Tensor, mask: torch.Tensor) -> Any:
        """Selects as many elements as a balanced map has ones in these columns."""
        if not source.is_meta:
            return masked_select(source, mask)
        evenly = mask.numel() * topk // experts
        return _MaskedSelect.apply(source, mask, sum(counts[-1]) if counts else sent.get(mask.numel(), evenly))

    def to_host(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if tensor.is_meta and counts:
            return torch.tensor(counts[-1], device="cpu")
        return cpu(tensor, *args, **kwargs)

    def routed(self: Any, *args: Any, **kwargs: Any) -> Any:
        probs, routing_map = forward(self, *args, **kwargs)
        if not routing_map.is_meta and self.config.moe_expert_capacity_factor is None:
            _balance(routing_map, topk)
        return probs, routing_map

    def on_host(tensor: Any, as_numpy: bool = False, **more: Any) -> Any:
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
            return to_cpu(tensor, as_numpy, **more)
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    utils = module_or_empty("megatron.core.transformer.moe.moe_utils")
    with ExitStack() as stack:
        if not hasattr(utils, "te_general_gemm"):
            # The router's linear reads a name of TE's GEMM that does not exist without TE (0.16.1).
            stack.enter_context(replaced(utils, "te_general_gemm", None, add=True))
        stack.enter_context(replaced(router, "forward", routed))
        stack.enter_context(replaced(all_to_all, "preprocess", counted))
        stack.enter_context(replaced(all_gather, "dispatch_postprocess", gathered))
        stack.enter_context(replaced(module, "maybe_move_tensor_to_cpu", on_host))
        stack.enter_context(replaced(torch.Tensor, "masked_select", selected))
        stack.enter_context(replaced(torch.Tensor, "cpu", to_host))
        yield
