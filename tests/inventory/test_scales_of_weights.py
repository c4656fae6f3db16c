"""Scales of fp8 weights in blocks, each tensor padded by itself; shapes as Transformer Engine gives them."""

from __future__ import annotations

import pytest

from bridge_memory.tapes.parameters import Parameter, Use, scales_of_rows, square_scales


@pytest.mark.parametrize(
    ("shape", "mxfp8", "square"),
    [
        # Nothing to pad: 256 x 4 and 8 x 128 bytes; 2 x 1 and 1 x 2 squares, in rows of four.
        ((256, 128), 256 * 4 + 8 * 128, 4 * (2 * 4 + 1 * 4)),
        # DeepSeek's kv down-projection: 576 rows become 640, 18 blocks of columns 20; 5 x 40 and 40 x 5 squares.
        ((576, 5120), 640 * 160 + 20 * 5120, 4 * (5 * 40 + 40 * 8)),
    ],
)
def test_scales_are_padded_tensor_by_tensor(shape: tuple[int, int], mxfp8: int, square: int) -> None:
    weight = Parameter("linear.weight", shape)
    assert (scales_of_rows(weight, 32), square_scales(weight, 128)) == (mxfp8, square)
    router = Parameter("router.weight", shape, use=Use.ROUTER)
    assert (scales_of_rows(router, 32), square_scales(router, 128)) == (0, 0)
