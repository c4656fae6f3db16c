"""One function per family of architectures: ``Fields`` -> ``ModelSpec``. See ``readers.huggingface``."""
