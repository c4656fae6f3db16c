"""One function per kind of architecture: ``Fields`` -> ``ModelSpec``. See ``readers.huggingface``."""
