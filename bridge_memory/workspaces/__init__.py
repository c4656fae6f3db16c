"""Buffers that outlive a step and belong to no parameter, and the overhead of torch's allocator.

``persistent.persistent_buffers``: workspaces of libraries, MoE dispatchers, rotary tables, the pipeline's last input.
"""
