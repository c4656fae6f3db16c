"""One function per kind of architecture: ``Fields`` -> ``ModelSpec``. See ``bridge_memory.readers.huggingface``."""
