"""How a Megatron job saves and loads its checkpoints, where that changes memory."""

from __future__ import annotations

from dataclasses import dataclass

from bridge_memory.spec.fields import Checked, choice, flag

#: Formats of Megatron-LM and Megatron Bridge, of any release.
FORMATS = ("torch_dist", "torch", "torch_dcp", "fsdp_dtensor", "zarr")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec(Checked):
    """Checkpoints of megatron-core's engines (Megatron-LM ``training/config/training_config.py: CheckpointConfig``).

    They change what is alive while a job saves, resumes and loads, and no training step.

    Example:
        >>> from bridge_memory import CheckpointSpec, RunSpec, whole_job
        >>> run = RunSpec(model="meta-llama/Llama-3.2-1B")
        >>> fresh = run.with_(checkpoint=CheckpointSpec(load_optim=False))
        >>> resumes = [whole_job(each, "H100").phases[-1] for each in (run, fresh)]
        >>> resumes[1].driver.most < resumes[0].driver.most
        True
    """

    #: Phases beside the step are modelled for "torch_dist".
    ckpt_format: str = choice("torch_dist", *FORMATS)
    #: States of the distributed optimizer are saved parameter by parameter, not as each rank's buffers.
    dist_ckpt_optim_fully_reshardable: bool = flag(False)
    #: ... gathered over gloo, on one data-parallel rank. Megatron Bridge refuses it.
    distrib_optim_fully_reshardable_mem_efficient: bool = flag(False)
    #: Data-parallel ranks divide what is saved; else their first rank saves all that they share.
    ckpt_fully_parallel_save: bool = flag(True)
    #: Data-parallel ranks divide what is read, and broadcast it.
    ckpt_fully_parallel_load: bool = flag(False)
    #: A persistent process writes, with a CUDA context of its own (``async_save`` with ``use_persistent_ckpt_worker``).
    async_save: bool = flag(False)
    #: Quantized weights are loaded through one 16-bit tensor at a time.
    stream_ckpt_dequant: bool = flag(True)
    #: Off: a resume loads weights only (``no_load_optim``, ``finetune``).
    load_optim: bool = flag(True)
    save_optim: bool = flag(True)
    #: A resume's FusedAdam takes fp32 moments for its own as the checkpoint has filled them, as in Megatron Bridge from
    #: 0.6; off: it copies them, so that they are there twice, as in Megatron-LM. None: as in the release of Megatron
    #: Bridge that goes with the megatron-core.
    adopt_optim_states: bool | None = flag(None)
    #: A save also writes the weights as Hugging Face has them, each put together on the GPU (Megatron Bridge).
    also_save_hf_checkpoint: bool = flag(False)
    #: The weights of a layer's experts are one tensor, saved transposed, as of megatron-core's removed GroupedMLP and
    #: experts over torch._grouped_mm; a load transposes them and puts them together.
    experts_in_one_tensor: bool = flag(False)

    @property
    def resumes_optimizer(self) -> bool:
        """Whether a resume loads an optimizer."""
        return self.load_optim and self.save_optim


DEFAULT_CHECKPOINT_SPEC = CheckpointSpec()
