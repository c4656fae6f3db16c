# ruff: noqa: E501
"""Failures of training jobs as their programs print them: torch 2.0, 2.1, 2.4 and 2.9, NCCL, cuBLAS, Ray, vLLM, the
kernel, Slurm, Docker, Triton. The wordings are those of the sources that ``failure/texts.py`` names; the figures are
made up, each so that one cause holds."""

from __future__ import annotations

SEE = "  See documentation for Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
HINT = "If reserved but unallocated memory is large try setting {}=expandable_segments:True to avoid fragmentation."


def trace(*frames: str, prefix: str = "") -> str:
    """A traceback of such frames, outermost first: "megatron/training/training.py:train_step:losses = f(x)"."""
    lines = ["Traceback (most recent call last):"]
    for frame in frames:
        file, name, code = frame.split(":", 2)
        lines += [f'  File "/opt/{file}", line 12, in {name}', f"    {code}"]
    return "".join(f"{prefix}{line}\n" for line in lines)


BACKWARD = (
    "megatron/training/training.py:train_step:losses_reduced = forward_backward_func(",
    "megatron/core/pipeline_parallel/schedules.py:backward_step:custom_backward(output_tensor[0], output_tensor_grad[0])",
    "torch/autograd/graph.py:_engine_run_backward:return Variable._execution_engine.run_backward(",
)
STEP = (
    "torchtitan/train.py:train_step:self.optimizers.step()",
    "torch/optim/adamw.py:step:adamw(",
    "torch/optim/adam.py:_init_group:state[\"exp_avg_sq\"] = torch.zeros_like(p)",
)

TORCH_2_0 = (
    trace("transformers/trainer.py:training_step:loss = self.compute_loss(model, inputs)")
    + "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB (GPU 3; 39.59 GiB total capacity; "
    "36.10 GiB already allocated; 512.00 MiB free; 37.20 GiB reserved in total by PyTorch) If reserved memory is >> "
    "allocated memory try setting max_split_size_mb to avoid fragmentation.  See documentation for Memory Management "
    "and PYTORCH_CUDA_ALLOC_CONF\n"
)
TORCH_2_1 = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.50 GiB. GPU 0 has a total capacty of "
    "23.69 GiB of which 1.40 GiB is free. Including non-PyTorch memory, this process has 22.28 GiB memory in use. Of the "
    "allocated memory 15.45 GiB is allocated by PyTorch, and 6.31 GiB is reserved by PyTorch but unallocated. If "
    "reserved but unallocated memory is large try setting max_split_size_mb to avoid fragmentation.  See documentation "
    "for Memory Management and PYTORCH_CUDA_ALLOC_CONF\n"
)
IN_A_CONTAINER = (
    trace(*BACKWARD, prefix="[rank5]: ")
    + "[rank5]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.25 GiB. GPU 5 has a total capacity of "
    "79.10 GiB of which 1.20 GiB is free. Process 812345 has 77.90 GiB memory in use. Of the allocated memory 73.30 GiB "
    "is allocated by PyTorch, with 64.00 MiB allocated in private pools (e.g., CUDA Graphs), and 640.00 MiB is reserved "
    "by PyTorch but unallocated. " + HINT.format("PYTORCH_CUDA_ALLOC_CONF") + SEE + "\n"
)
TORCH_2_9 = (
    trace(*STEP, prefix="[rank0]:")
    + "[rank0]:torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1002.00 MiB. GPU 0 has a total capacity of "
    "79.10 GiB of which 421.00 MiB is free. Including non-PyTorch memory, this process has 78.68 GiB memory in use. Of "
    "the allocated memory 76.90 GiB is allocated by PyTorch, and 210.00 MiB is reserved by PyTorch but unallocated. "
    + HINT.format("PYTORCH_ALLOC_CONF") + SEE + "\n"
)
ANOTHER_PROCESS = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB. GPU 1 has a total capacity of 79.10 GiB of "
    "which 364.00 MiB is free. Process 175080 has 31.46 GiB memory in use. Process 175356 has 47.27 GiB memory in use. "
    "Of the allocated memory 44.12 GiB is allocated by PyTorch, and 1.78 GiB is reserved by PyTorch but unallocated. "
    + HINT.format("PYTORCH_CUDA_ALLOC_CONF") + SEE + "\n"
)
SIBLINGS = (
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 52.00 MiB. GPU 0 has a total capacty of 31.74 GiB of which "
    "39.62 MiB is free. " + "".join(f"Process 1015{i:02} has 1.19 GiB memory in use. " for i in range(49, 63))
    + "Including non-PyTorch memory, this process has 15.04 GiB memory in use. Of the allocated memory 13.54 GiB is "
    "allocated by PyTorch, and 6.26 MiB is reserved by PyTorch but unallocated.\n"
)
OUTSIDE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 4 has a total capacity of 79.10 GiB of "
    "which 1.10 GiB is free. Including non-PyTorch memory, this process has 78.00 GiB memory in use. Of the allocated "
    "memory 58.00 GiB is allocated by PyTorch, and 512.00 MiB is reserved by PyTorch but unallocated. "
    + HINT.format("PYTORCH_CUDA_ALLOC_CONF") + SEE + "\n"
)
LIMITED = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 6.00 GiB. GPU 0 has a total capacity of 79.10 GiB of "
    "which 40.00 GiB is free. 39.55 GiB allowed; Of the allocated memory 36.00 GiB is allocated by PyTorch, and "
    "1.00 GiB is reserved by PyTorch but unallocated. " + HINT.format("PYTORCH_CUDA_ALLOC_CONF") + "\n"
)
HUGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 593.50 GiB. GPU 0 has a total capacity of 79.10 GiB "
    "of which 60.00 GiB is free. Including non-PyTorch memory, this process has 19.10 GiB memory in use. Of the "
    "allocated memory 17.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated.\n"
)
ASYNC_ALLOCATOR = """torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)
Currently allocated     : 14.90 GiB
Requested               : 2.00 GiB
Device limit            : 15.89 GiB
Free (according to CUDA): 16.25 MiB
PyTorch limit (set by user-supplied memory fraction)
                        : 17179869184.00 GiB
"""
WRAPPED = """    torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.25 GiB. GPU 0 has
    a total capacity of 79.10 GiB of which 1.20 GiB is free. Including non-PyTorch
    memory, this process has 77.90 GiB memory in use. Of the allocated memory 70.12 GiB
    is allocated by PyTorch, and 4.35 GiB is reserved by PyTorch but unallocated.
"""
NCCL = """[rank3]: torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:340, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5
[rank3]: ncclUnhandledCudaError: Call to CUDA function failed.
[rank3]: Last error:
[rank3]: Failed to CUDA calloc async 8388608 bytes
"""
NCCL_WARN = """node7:3063028:3066152 [3] include/alloc.h:178 NCCL WARN Cuda failure 2 'out of memory'
node7:3063028:3066152 [3] NCCL INFO transport/p2p.cc:204 -> 1
"""
NCCL_OTHER = """ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
Cuda failure 999 'unknown error'
"""
CUDA_ERROR = """torch.AcceleratorError: CUDA error: out of memory
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
"""
CUBLAS = """RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`
"""
CUDNN = """RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED
"""
VLLM = """(EngineCore_0 pid=271) ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache is needed, which is larger than the available KV cache memory (8.36 GiB). Based on the available memory, the estimated maximum model length is 68480.
"""
VLLM_STARTUP = """ValueError: Free memory on device (31.2/79.1 GiB) on startup is less than desired GPU memory utilization (0.6, 47.46 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.
"""
RAY = """ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.
Memory on the node (IP: 10.1.2.3, ID: 8289f87b) where the task (actor ID: f9cc340f, name=WorkerDict.__init__, pid=4331, memory used=182.22GB) was running was 1913.49GB / 2003.58GB (0.955035), which exceeds the memory usage threshold of 0.95.
"""
SLURM = """slurmstepd: error: Detected 1 oom_kill event in StepId=11300781.0. Some of the step tasks have been OOM Killed.
srun: error: node07: task 3: Out Of Memory
"""
KERNEL = """[884201.1] Out of memory: Killed process 393463 (python) total-vm:912345678kB, anon-rss:501234567kB, file-rss:0kB
"""
TORCHRUN = """W1128 07:42:14.609000 17676 torch/distributed/elastic/multiprocessing/api.py:897] Sending process 17776 closing signal SIGTERM
E1128 07:42:15.588000 17676 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: -9) local_rank: 1 (pid: 17774) of binary: /opt/conda/bin/python3.11
 traceback : Signal 9 (SIGKILL) received by PID 17774
"""
SHELL = """launch.sh: line 31: 40713 Killed                  python train.py --config big.yaml
"""
CPU_ALLOCATOR = """RuntimeError: [enforce fail at alloc_cpu.cpp:114] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 53687091200 bytes. Error code 12 (Cannot allocate memory)
"""
SHARED = """RuntimeError: DataLoader worker (pid 1533) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory. Please try to raise your shared memory limit.
"""
SGLANG_GRAPH = """[2025-11-03 08:12:47 TP3] Scheduler hit an exception: Traceback (most recent call last):
  File "/sgl-workspace/sglang/python/sglang/srt/model_executor/cuda_graph_runner.py", line 338, in __init__
    self.capture()
Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 594.00 MiB. GPU 3 has a total capacity of 79.11 GiB of which 312.50 MiB is free. Including non-PyTorch memory, this process has 78.79 GiB memory in use. Of the allocated memory 76.02 GiB is allocated by PyTorch, with 1.20 GiB allocated in private pools (e.g., CUDA Graphs), and 130.20 MiB is reserved by PyTorch but unallocated.
"""
SGLANG_PREFILL = """[2025-11-03 09:02:41 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "/sgl-workspace/sglang/python/sglang/srt/mem_cache/allocation.py", line 239, in alloc_token_slots
RuntimeError: Prefill out of memory. Try to lower your batch size.
Try to allocate 16384 tokens.
"""
VLLM_WARM_UP = """(Worker_TP0 pid=2) RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please try lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine.
"""
MEMORY_SAVER = """(SGLangEngine pid=8821) [torch_memory_saver.cpp] CUresult error: 2 (out of memory)  file=csrc/utils.h func=cu_mem_create line=29
"""
PINNED = """  File "/opt/deepspeed/runtime/zero/stage_1_and_2.py", line 411, in __init__
    self.single_partition_of_fp32_groups.append(tensor.pin_memory())
RuntimeError: CUDA error: out of memory
"""
CUBLAS_OF_TE = """RuntimeError: /opt/transformer-engine/transformer_engine/common/gemm/cublaslt_gemm.cu:398 in function cublas_gemm: cuBLAS Error: the resource allocation failed
"""
BITSANDBYTES = """Error out of memory at line 380 in file /src/csrc/pythonInterface.c
"""
TRITON_LOADS = """RuntimeError: Triton Error [CUDA]: out of memory
"""
DEEP_EP = """RuntimeError: Failed: CUDA error csrc/deep_ep.cpp:26 'out of memory'
"""
SHM_FILE = """RuntimeError: unable to write to file </torch_193_2891>: No space left on device (28)
"""
SHM_OF_NCCL = """node1:1234:1300 [0] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-abc to 33030532 bytes
"""
LSF = """TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.
Exited with exit code 137.
"""
OOMD = """systemd-oomd[812]: Killed /user.slice/user-1000.slice/session-3.scope due to memory used (270Gi) / total (256Gi)
"""
TRITON = """triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 232448, Hardware limit: 166912. Reducing block sizes or `num_stages` may help.
"""
TIMEOUT = """[rank2]:[E] [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=81, OpType=BROADCAST, Timeout(ms)=1800000) ran for 1800512 milliseconds before timing out.
torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate more than 1EB memory.
"""
ILLEGAL = """RuntimeError: CUDA error: an illegal memory access was encountered
"""

#: Text -> (the cause that decides, a word that its remedies have).
EVERY: dict[str, tuple[str, str, str]] = {
    "SGLang captures graphs": (SGLANG_GRAPH, "too large", "--mem-fraction-static"),
    "SGLang prefills": (SGLANG_PREFILL, "the inference engine's share", "--max-running-requests"),
    "vLLM warms up": (VLLM_WARM_UP, "the inference engine's share", "--max-num-seqs"),
    "a memory saver wakes": (MEMORY_SAVER, "no room beside torch's cache", "set_per_process_memory_fraction"),
    "pinned": (PINNED, "host memory", "no offload of optimizer"),
    "Transformer Engine's cuBLAS": (CUBLAS_OF_TE, "no room beside torch's cache", "set_per_process_memory_fraction"),
    "bitsandbytes": (BITSANDBYTES, "no room beside torch's cache", "set_per_process_memory_fraction"),
    "Triton loads a kernel": (TRITON_LOADS, "no room beside torch's cache", "set_per_process_memory_fraction"),
    "DeepEP": (DEEP_EP, "no room beside torch's cache", "set_per_process_memory_fraction"),
    "a file in shared memory": (SHM_FILE, "host memory", "--shm-size"),
    "shared memory of NCCL": (SHM_OF_NCCL, "host memory", "--shm-size"),
    "LSF": (LSF, "host memory", "more memory for the job"),
    "systemd": (OOMD, "host memory", "more memory for the job"),
    "torch 2.0": (TORCH_2_0, "too large", "--per_device_train_batch_size"),
    "torch 2.1, fragmented": (TORCH_2_1, "fragmented", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
    "in a container": (IN_A_CONTAINER, "too large", "--micro-batch-size"),
    "torch 2.9, optimizer step": (TORCH_2_9, "too large", "--parallelism.data_parallel_shard_degree"),
    "another process": (ANOTHER_PROCESS, "another process", "175080"),
    "contexts of siblings": (SIBLINGS, "another process", "torch.cuda.set_device(local_rank)"),
    "outside": (OUTSIDE, "outside of PyTorch", "NCCL_DEBUG=INFO"),
    "a limit": (LIMITED, "a limit that was set", "set_per_process_memory_fraction"),
    "one tensor": (HUGE, "one impossible tensor", "shapes"),
    "cudaMallocAsync": (ASYNC_ALLOCATOR, "too large", "micro batch"),
    "wrapped": (WRAPPED, "too large", "expandable_segments"),
    "NCCL": (NCCL, "no room beside torch's cache", "empty_cache"),
    "NCCL's warning": (NCCL_WARN, "no room beside torch's cache", "empty_cache"),
    "CUDA": (CUDA_ERROR, "no room beside torch's cache", "set_per_process_memory_fraction"),
    "cuBLAS": (CUBLAS, "no room beside torch's cache", "set_per_process_memory_fraction"),
    "cuDNN": (CUDNN, "no room beside torch's cache", "set_per_process_memory_fraction"),
    "vLLM, KV cache": (VLLM, "the inference engine's share", "--max-model-len"),
    "vLLM, at start": (VLLM_STARTUP, "the inference engine's share", "lower --gpu-memory-utilization"),
    "Ray": (RAY, "host memory", "--mem"),
    "Slurm": (SLURM, "host memory", "--mem"),
    "the kernel": (KERNEL, "host memory", "--mem"),
    "torchrun": (TORCHRUN, "host memory", "dmesg"),
    "a shell": (SHELL, "host memory", "dmesg"),
    "torch on the host": (CPU_ALLOCATOR, "host memory", "--mem"),
    "/dev/shm": (SHARED, "host memory", "--shm-size"),
    "Triton": (TRITON, "not memory", ""),
    "a timeout": (TIMEOUT, "not memory", ""),
    "an illegal access": (ILLEGAL, "not memory", ""),
    "another error of NCCL": (NCCL_OTHER, "not memory", ""),
}  # fmt: skip
