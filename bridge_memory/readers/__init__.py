"""Readers: config sources -> specs. A reader handles one source and knows nothing about memory.

    resolve_model("Qwen/Qwen3-30B-A3B")          preset, path or Hub id
    model_from_json_text('{"model_type": ...}')   a config inline
    model_from_hf_config({...}, "name")           a parsed config.json
    list_presets()                                what ships with the package
"""

from bridge_memory.readers.huggingface import model_from_hf_config
from bridge_memory.readers.presets import list_presets
from bridge_memory.readers.resolve import model_from_json_text, resolve_model
from bridge_memory.spec.run import read_names_with

read_names_with(resolve_model)

__all__ = ["list_presets", "model_from_hf_config", "model_from_json_text", "resolve_model"]
