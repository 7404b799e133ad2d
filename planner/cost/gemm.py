"""How long a matrix product takes on a GPU, from how it is tiled over the multiprocessors.

A library computes ``y[m, n]`` in tiles, one per multiprocessor at a time, so that work comes in whole tiles and
whole waves of them (NVIDIA, "Matrix Multiplication Background User's Guide", sections 3.3 and 3.4). A tile takes

    (k + fill) * max(its flops per k / peak of one multiprocessor, its operands' bytes per k / its share of the cache)

where ``fill`` is the stretch of k that passes before the first product and after the last: filling the pipeline
from memory and writing the tile. Where tiles are too few, k is split too, at the price of adding partial sums.
The library knows its kernels: the fastest cut counts.
"""

from __future__ import annotations

import math

from planner.cost.cluster import Device
from planner.cost.kernels import FLOAT8, Attention, Product

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
"""Tiles (rows, columns) of cuBLAS and CUTLASS on tensor cores; the first two are the fastest per flop."""
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Parts into which k is cut where tiles are few."""
FILL = 192
"""Elements of k: three stages of 64, as CUTLASS pipelines its loads in half precision."""
SHORTEST = 512
"""Elements of k that a part has at least."""
QUERIES = 128
"""Queries that one multiprocessor takes at a time in flash attention (Dao, 2023)."""
PARTIAL_BYTES = 8
"""A partial sum is written and read once, in float32."""


def product_s(device: Device, product: Product, dtype: str, item_bytes: int) -> float:
    """Seconds of a product at the sustained clock, or of the two of a backward; its start not included."""
    return sum(_product_s(device, part, dtype, item_bytes) for part in product.parts)


def _product_s(device: Device, p: Product, dtype: str, item_bytes: int) -> float:
    processors = device.multiprocessors
    if processors is None:
        return p.flops / (device.peak(dtype) * device.matmul_efficiency)
    memory = device.memory_bandwidth_bytes_per_s * device.memory_efficiency
    best = math.inf
    for rows, columns in TILES:
        per_k = _per_k_s(device, rows, columns, dtype, item_bytes)
        tiles = p.batch * math.ceil(p.m / rows) * math.ceil(p.n / columns)
        for split in SPLITS:
            if split > 1 and tiles >= processors:
                break
            part = p.k if split == 1 else max(p.k / split, SHORTEST)
            seconds = math.ceil(tiles * split / processors) * (part + FILL) * per_k
            if split > 1:
                seconds += split * p.batch * p.m * p.n * PARTIAL_BYTES / memory
            best = min(best, seconds)
    return best


def float8_product_s(device: Device, product: Product, dtype: str, item_bytes: int) -> float:
    """Seconds of a linear layer's products in float8, or of the two of its backward, with what scales their operands.

    Each operand is cast where it is multiplied. Backward has a new operand, the gradient of the result, for both
    products, and casts the others again, which lie the other way.
    """
    memory = device.memory_bandwidth_bytes_per_s * device.memory_efficiency
    return sum(_product_s(device, part, FLOAT8, 1) for part in product.parts) + product.cast_bytes / memory


def _per_k_s(device: Device, rows: int, columns: int, dtype: str, item_bytes: int) -> float:
    """Seconds of a whole wave of tiles per element of k."""
    processors = device.multiprocessors or 1
    per_k = 2 * rows * columns * processors / (device.peak(dtype) * device.matmul_efficiency)
    if device.cache_bandwidth_bytes_per_s is None:
        return per_k
    return max(per_k, (rows + columns) * item_bytes * processors / device.cache_bandwidth_bytes_per_s)


def product_at_least_s(device: Device, product: Product, dtype: str, item_bytes: int) -> float:
    """Seconds of all devices together that a product takes at least, however it is cut among them.

    As if tiles and waves came in parts: cutting m, n or the batch makes no more of them, cutting k fills more often.
    """
    processors = device.multiprocessors
    if processors is None:
        return product.flops / (device.peak(dtype) * device.matmul_efficiency)

    def per_element_s(k: int) -> float:
        tiles = (_per_k_s(device, rows, columns, dtype, item_bytes) / (rows * columns) for rows, columns in TILES)
        return (k + FILL) * min(tiles) / processors

    return sum(p.batch * p.m * p.n * per_element_s(p.k) for p in product.parts)


def attention_s(device: Device, kernel: Attention, dtype: str) -> float:
    """Seconds of a flash attention; its start not included."""
    forward, backward = device.attention
    seconds = kernel.flops / (device.peak(dtype) * (backward if kernel.is_backward else forward))
    if device.multiprocessors is None:
        return seconds
    blocks = kernel.heads * math.ceil(kernel.queries / QUERIES)
    return seconds * math.ceil(blocks / device.multiprocessors) * device.multiprocessors / blocks
