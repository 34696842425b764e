"""Rewrites of graphs, one a file, in the order they are tried: a later one builds on what an earlier one made."""

from __future__ import annotations

from typing import Any

from . import (
    fold_batchnorm,
    fold_embedding,
    fuse_attention,
    fuse_bias_gelu,
    fuse_gelu,
    fuse_layernorm,
    fuse_skip_layernorm,
    gemm_to_matmul,
    pack_attention,
    pack_gemms,
    pack_projections,
    skip_slices,
)
from .engine import Rewrite

REWRITES: tuple[Rewrite[Any], ...] = (
    fold_batchnorm.REWRITE,
    fold_embedding.REWRITE,
    skip_slices.REWRITE,
    fuse_layernorm.REWRITE,
    fuse_gelu.REWRITE,
    fuse_attention.REWRITE,
    gemm_to_matmul.REWRITE,
    pack_projections.REWRITE,
    pack_gemms.REWRITE,
    pack_attention.REWRITE,
    fuse_bias_gelu.REWRITE,
    fuse_skip_layernorm.REWRITE,
)

__all__ = ["REWRITES"]
