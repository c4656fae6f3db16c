"""What the driver counts beyond torch's allocator: the CUDA context, communicators of NCCL, buffers of libraries."""
