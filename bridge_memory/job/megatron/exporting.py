"""Exporting a model's weights as Hugging Face has them, parameter by parameter, from a Megatron job.

Every rank takes part and puts each parameter together: shards of all tensor and expert parallel ranks, and what they
are joined to (Megatron Bridge ``models/conversion/model_bridge.py: stream_weights_megatron_to_hf``,
``param_mapping.py: gather_from_tp_ranks, gather_from_ep_ranks, broadcast_from_pp_rank``). The first rank writes them
file by file (``training/checkpointing.py: _save_hf_weights``).
"""

from __future__ import annotations

from bridge_memory.components import Provenance
from bridge_memory.outside.amount import Amount
from bridge_memory.spec import RunSpec
from bridge_memory.spec.model import MLPSpec, MoESpec

#: Bytes of a file of weights, as transformers 4 writes them (``modeling_utils.py: save_pretrained, max_shard_size``).
_FILE = 5 * 10**9


def exported(run: RunSpec) -> tuple[Amount, ...]:
    """Bytes on the GPU beside the model: the largest parameter, gathered, and joined."""
    whole = _largest(run)
    name = "full tensors of one parameter: gathered shards, and joined"
    return (Amount(name, whole, 2 * whole, Provenance.FORMULA, "Megatron Bridge, mbridge: export_weights"),)


def host_of_exporting(run: RunSpec, parameters: int) -> tuple[tuple[Amount, ...], tuple[Amount, ...]]:
    """Bytes in host memory on every rank, and on the first, which keeps the parameters of a file until it has all of
    them; ``parameters``: of the model."""
    largest, width = _largest(run), _width(run)
    every = Amount("exported parameter", largest, 2 * largest, Provenance.FORMULA, "export_hf_weights (cpu=True)")
    whole = width * parameters
    first = Amount(
        "file of exported weights", min(largest, whole), min(_FILE + largest, whole), Provenance.ASSUMED,
        "SafeTensorsStateSource.save_generator; files of 5 GB",
    )  # fmt: skip
    return (every,), (first,)


def _width(run: RunSpec) -> int:
    return 2 if run.precision.params_dtype != "fp32" else 4


def _largest(run: RunSpec) -> int:
    """Bytes of the largest parameter, whole over tensor and expert parallel ranks, which every rank receives."""
    model, p = run.model, run.parallel
    h = model.hidden_size
    found = [model.vocab_size * h]
    for layer in dict.fromkeys(model.layers):
        ffn = layer.ffn
        if isinstance(ffn, MoESpec):
            # One expert of each rank at a time.
            found.append(2 * ffn.moe_ffn_hidden_size * h * p.ep)
        elif isinstance(ffn, MLPSpec):
            found.append(2 * ffn.ffn_hidden_size * h)
    return max(found) * _width(run)
