"""Host memory of torch's engines and DeepSpeed's while a job loads, and while it saves.

Loading: ``from_pretrained`` maps safetensors files (safetensors ``torch.safe_open``), and ranks of a node share the
pages; a cast, a file that is not mapped or a trainer that copies makes a whole model a rank. ZeRO-3 reads one file
after the other (transformers ``modeling_utils.py: load_shard_files``). Saving: a full state dict is gathered on the
first rank (torch ``checkpoint/state_dict.py``: full_state_dict, cpu_offload; DeepSpeed ``engine.py:
_zero3_consolidated_16bit_state_dict``); what is saved in shards, or from the GPU, is copied tensor by tensor.
"""

from __future__ import annotations

from bridge_memory.components import Lifetime, Provenance
from bridge_memory.engines.by_name import engine_of
from bridge_memory.engines.fsdp1 import FSDP1
from bridge_memory.engines.fsdp2 import FSDP2
from bridge_memory.engines.torch_modules import parameter_width
from bridge_memory.engines.zero3 import ZeRO3
from bridge_memory.job.host import Moment
from bridge_memory.job.torch.building import rank_of
from bridge_memory.outside.amount import Amount
from bridge_memory.outside.phase import Phase
from bridge_memory.spec import RunSpec

#: Bytes of a file of a checkpoint at most (huggingface_hub ``serialization/_base.py: MAX_SHARD_SIZE``).
_FILE = 5 * 10**9


def host_moments(run: RunSpec) -> tuple[Moment, ...]:
    """What a load and a save hold in host memory, on every rank and on the first one. Raises SpecError."""
    rank, engine = rank_of(run, 0), engine_of(run)
    weights = rank.model.numel * parameter_width(run)
    read = min(weights, _FILE) if isinstance(engine, ZeRO3) else weights
    loaded = Amount("weights as they are read", 0, read, Provenance.FORMULA, "modeling_utils.py: from_pretrained")
    ranks = run.parallel.data_parallel_size
    states = 0
    if isinstance(engine, (FSDP1, FSDP2)):
        states = ranks * sum(nbytes for _, nbytes in rank.kept(lifetime=Lifetime.FIRST_STEP))
    elif isinstance(engine, ZeRO3) and not run.deepspeed.stage3_gather_16bit_weights_on_model_save:
        weights = 0
    saved = (
        Amount("weights, whole, as they are saved", 0, weights, Provenance.FORMULA, "state_dict.py: full_state_dict"),
        Amount("optimizer states, whole", 0, states, Provenance.FORMULA, "state_dict.py: full_state_dict"),
    )
    return Moment(Phase.LOAD, every=(loaded,)), Moment(Phase.SAVE, first=tuple(a for a in saved if a.most))
