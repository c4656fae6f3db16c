"""Configuration files of other trainers and of engines, one module a format; ``run`` makes one run of them."""
