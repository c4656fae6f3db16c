"""MoonViT of Kimi-K2.5 in plain torch, with the operations of the classes of its repository, which is on the hub alone
(``modeling_kimi_k25.py: MoonViT3dPretrainedModel, PatchMergerMLP``). torch's attention takes the place of flash-attn's,
all images in one row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

#: Rows and columns of the patches of each image.
Grids = Sequence[tuple[int, int]]


class Layer(nn.Module):
    def __init__(self, h: int, f: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm0, self.norm1 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.wqkv, self.wo = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.fc0, self.fc1 = nn.Linear(h, f), nn.Linear(f, h)

    def turned(self, query: Tensor, key: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """As complex numbers times the table."""
        table = table.unsqueeze(-2)
        wide_query = torch.view_as_complex(query.float().view(*query.shape[:-1], -1, 2))
        wide_key = torch.view_as_complex(key.float().view(*key.shape[:-1], -1, 2))
        new_query = torch.view_as_real(wide_query * table).flatten(-2)
        new_key = torch.view_as_real(wide_key * table).flatten(-2)
        return new_query.type_as(query), new_key.type_as(key)

    def attention(self, x: Tensor, table: Tensor) -> Tensor:
        query, key, value = torch.unbind(self.wqkv(x).view(len(x), 3, self.heads, -1), -3)
        query, key = self.turned(query, key, table)
        out = functional.scaled_dot_product_attention(*(y.transpose(0, 1)[None] for y in (query, key, value)))
        return self.wo(out[0].transpose(0, 1).reshape(len(x), -1))

    def mlp(self, x: Tensor) -> Tensor:
        y = self.fc0(x)
        y = functional.gelu(y, approximate="tanh")
        return self.fc1(y)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        before = x
        x = self.norm0(x)
        x = self.attention(x, table)
        x = before + x
        before = x
        x = self.norm1(x)
        x = self.mlp(x)
        return before + x


class MoonViT(nn.Module):
    """With its projector; ``side``: of the grid of positions."""

    def __init__(self, h: int, f: int, heads: int, layers: int, side: int, out: int) -> None:
        super().__init__()
        self.half = h // heads // 2
        self.patches, self.grid = nn.Conv2d(3, h, 14, 14), nn.Parameter(torch.zeros(side, side, h))
        self.layers = nn.ModuleList(Layer(h, f, heads) for _ in range(layers))
        self.norm, self.pre_norm = nn.LayerNorm(h), nn.LayerNorm(h)
        self.first, self.second = nn.Linear(4 * h, 4 * h), nn.Linear(4 * h, out)

    def embedded(self, pixels: Tensor, grids: Grids) -> Tensor:
        x = self.patches(pixels).view(len(pixels), -1)
        found = []
        for size in grids:
            if size == tuple(self.grid.shape[:2]):
                found.append(self.grid.flatten(end_dim=1))
                continue
            scaled = functional.interpolate(self.grid.permute(2, 0, 1).unsqueeze(0), size=size, mode="bicubic")
            found.append(scaled.squeeze(0).permute(1, 2, 0).flatten(end_dim=1))
        return x + torch.cat(found)

    def encoded(self, x: Tensor, grids: Grids) -> Tensor:
        table = torch.zeros(sum(rows * columns for rows, columns in grids), self.half, dtype=torch.complex64)
        for one in self.layers:
            x = one(x, table)
        return self.norm(x)

    def by_image(self, pixels: Tensor, grids: Grids) -> list[Tensor]:
        x = self.embedded(pixels, grids)
        x = self.encoded(x, grids)
        out, at = [], 0
        for rows, columns in grids:
            image = x[at : at + rows * columns].view(1, rows // 2, 2, columns // 2, 2, -1)
            image = image.permute(0, 1, 3, 2, 4, 5).contiguous().mean(dim=0)
            out.append(image.view(rows * columns // 4, 4, -1))
            at += rows * columns
        return out

    def projected(self, image: Tensor) -> Tensor:
        return self.second(functional.gelu(self.first(self.pre_norm(image).view(len(image), -1))))

    def forward(self, pixels: Tensor, grids: Grids) -> Tensor:
        pixels = pixels.to(self.grid.dtype)
        images = self.by_image(pixels, grids)
        out = [self.projected(image) for image in images]
        return out[0] if len(out) == 1 else torch.cat(out)
