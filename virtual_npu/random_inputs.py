"""Draw the numbers and tensors of a sample call from a seed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from virtual_npu.simulated_products import Product


class RandomInputs:
    """Random numbers and tensors of one call; successive seeds take the product's dtypes in turn."""

    def __init__(self, seed: int, product: Product) -> None:
        self.generator, self.product = torch.Generator().manual_seed(seed), product
        self.dtype = product.dtypes[::-1][seed % len(product.dtypes)]

    def number(self, least: int, most: int) -> int:
        """Draw an integer from least to most, both included."""
        return int(torch.randint(least, most + 1, (), generator=self.generator))

    def one(self, *values: Any) -> Any:
        """Choose one of the values."""
        return values[self.number(0, len(values) - 1)]

    def tensor(self, *shape: int) -> Tensor:
        """Draw normally distributed numbers in the call's dtype."""
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def int8(self, *shape: int) -> Tensor:
        """Draw int8 numbers, never -128."""
        return torch.randint(-127, 128, shape, generator=self.generator, dtype=torch.int8)

    def int4(self, *shape: int) -> Tensor:
        """Draw numbers of 4 bits, each in an int32."""
        return torch.randint(-8, 8, shape, generator=self.generator, dtype=torch.int32)

    def scale(self, *shape: int) -> Tensor:
        """Draw positive float32 numbers."""
        return 0.001 + 0.01 * torch.rand(*shape, generator=self.generator)

    def order(self, count: int) -> Tensor:
        """Return the numbers below `count`, shuffled."""
        return torch.randperm(count, generator=self.generator)

    def page_table(self, counts: list[int]) -> Tensor:
        """Draw `counts` pages for each sequence, shuffled, without page 0. int32 [S, pages]"""
        pages = (1 + self.order(sum(counts))).tolist()
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for row, count in enumerate(counts):
            table[row, :count] = torch.tensor([pages.pop() for _ in range(count)])
        return table
