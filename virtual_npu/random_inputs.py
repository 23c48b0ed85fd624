"""What are the arguments of a sample call made of? Random numbers and tensors, drawn from a seed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from virtual_npu.simulated_products import Product


class RandomInputs:
    """Random numbers and tensors of one call, in the product's types by turns."""

    def __init__(self, seed: int, product: Product) -> None:
        self.generator, self.product = torch.Generator().manual_seed(seed), product
        self.dtype = product.dtypes[::-1][seed % len(product.dtypes)]

    def number(self, least: int, most: int) -> int:
        """From least to most, both included."""
        return int(torch.randint(least, most + 1, (), generator=self.generator))

    def one(self, *values: Any) -> Any:
        """One of these."""
        return values[self.number(0, len(values) - 1)]

    def tensor(self, *shape: int) -> Tensor:
        """Normal numbers in the call's type."""
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def int8(self, *shape: int) -> Tensor:
        """Every value but -128."""
        return torch.randint(-127, 128, shape, generator=self.generator, dtype=torch.int8)

    def int4(self, *shape: int) -> Tensor:
        """Every number of 4 bits, each in an int32."""
        return torch.randint(-8, 8, shape, generator=self.generator, dtype=torch.int32)

    def scale(self, *shape: int) -> Tensor:
        """Positive float32."""
        return 0.001 + 0.01 * torch.rand(*shape, generator=self.generator)

    def order(self, count: int) -> Tensor:
        """The numbers below `count`, shuffled."""
        return torch.randperm(count, generator=self.generator)

    def page_table(self, counts: list[int]) -> Tensor:
        """`counts` pages for each sequence, shuffled, without page 0. int32 [S, pages]"""
        pages = (1 + self.order(sum(counts))).tolist()
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for row, count in enumerate(counts):
            table[row, :count] = torch.tensor([pages.pop() for _ in range(count)])
        return table
