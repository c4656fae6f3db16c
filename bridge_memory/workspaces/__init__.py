"""Workspaces: buffers that outlive a step and belong to no parameter, and what torch's allocator adds to a tensor.

Libraries, MoE dispatchers, rotary tables, the pipeline's last input: ``persistent.persistent_buffers``.
"""
