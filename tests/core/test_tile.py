"""Where a tile's elements lie: a bijection into its bytes, made of boxes and swizzle atoms."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmsmith.core.dtypes import BF16, FP16, FP32
from gemmsmith.core.tile import Tile, swizzled, widest_swizzle


@st.composite
def tiles(draw: st.DrawFn) -> Tile:
    """Every tile a TMA box and a wgmma can share: N a multiple of 8, K of 32 bytes."""
    dtype = draw(st.sampled_from([BF16, FP16, FP32]))
    k = draw(st.integers(1, 8)) * 32 // dtype.bytes
    return Tile(dtype, draw(st.integers(1, 32)) * 8, k, draw(st.sampled_from(["K", "MN"])))


def offsets(tile: Tile) -> np.ndarray:
    return np.asarray(tile.offset(np.arange(tile.mn)[:, None], np.arange(tile.k)[None, :]))


@given(tiles())
def test_offset_is_a_bijection_into_the_bytes(tile: Tile) -> None:
    at = offsets(tile)
    assert len(np.unique(at)) == tile.mn * tile.k
    assert at.min() >= 0
    assert at.max() + tile.dtype.bytes <= tile.bytes
    assert not np.any(at % tile.dtype.bytes)
    padding = (tile.inner - (tile.k if tile.major == "K" else tile.mn)) * tile.outer
    assert (tile.mn * tile.k + padding) * tile.dtype.bytes == tile.bytes


@given(tiles())
def test_boxes_add_up(tile: Tile) -> None:
    assert tile.boxes * tile.box_inner == tile.inner
    assert tile.box_inner * tile.dtype.bytes == tile.swizzle
    assert tile.boxes * tile.box_bytes == tile.bytes
    assert tile.swizzle in (32, 64, 128)
    assert tile.alignment == 8 * tile.swizzle
    assert tile.inner * tile.dtype.bytes % 32 == 0


@given(tiles())
def test_a_box_holds_one_swizzle_row_of_each_outer_index(tile: Tile) -> None:
    """TMA fills a box alone: its elements share the box's bytes, its rows `swizzle` bytes each."""
    at = offsets(tile)
    inner, outer = np.arange(tile.mn)[:, None], np.arange(tile.k)[None, :]
    if tile.major == "K":
        inner, outer = outer, inner
    assert np.array_equal(at // tile.box_bytes, np.broadcast_to(inner // tile.box_inner, at.shape))
    assert np.array_equal(at % tile.box_bytes // tile.swizzle, np.broadcast_to(outer, at.shape))


@given(tiles())
def test_chunks_of_16_bytes_stay_whole(tile: Tile) -> None:
    at = offsets(tile) if tile.major == "K" else offsets(tile).T
    chunk = 16 // tile.dtype.bytes
    whole = at[:, : at.shape[1] // chunk * chunk].reshape(at.shape[0], -1, chunk)
    assert np.all(whole - whole[:, :, :1] == np.arange(chunk) * tile.dtype.bytes)


@given(tiles())
def test_integers_and_arrays_agree(tile: Tile) -> None:
    mn, k = tile.mn - 1, tile.k // 2
    assert tile.offset(mn, k) == offsets(tile)[mn, k]


@pytest.mark.parametrize(("swizzle", "rows_before_repeat"), [(128, 8), (64, 4), (32, 2), (0, 1)])
def test_swizzle_patterns(swizzle: int, rows_before_repeat: int) -> None:
    """128: chunk c of 128-byte row r goes to c ^ r % 8; 64: to c ^ r % 4 of its 64; 32: likewise; 0: stays."""
    address = np.arange(0, 4096, 16)
    chunk, row = address // 16 % 8, address // 128
    want = row * 128 + (chunk ^ row % rows_before_repeat) * 16
    assert np.array_equal(swizzled(address, swizzle), want)
    assert np.array_equal(swizzled(swizzled(address, swizzle), swizzle), address)


def test_swizzle_128_first_atom_by_hand() -> None:
    tile = Tile(BF16, 8, 64, "K")
    assert [tile.offset(row, 0) for row in range(8)] == [0, 144, 288, 432, 576, 720, 864, 1008]
    assert [tile.offset(1, k) for k in (0, 8, 16, 63)] == [144, 128, 176, 128 + 6 * 16 + 14]


@pytest.mark.parametrize(("nbytes", "swizzle"), [(128, 128), (256, 128), (192, 64), (96, 32), (32, 32), (16, 0)])
def test_widest_swizzle(nbytes: int, swizzle: int) -> None:
    assert widest_swizzle(nbytes) == swizzle


def test_mn_major_pads_to_a_32_byte_row() -> None:
    """wgmma reads N = 24 MN-major as one and a half 32-byte rows: TMA fills the rest with what is there."""
    tile = Tile(BF16, 24, 64, "MN")
    assert (tile.inner, tile.swizzle, tile.boxes, tile.bytes) == (32, 64, 1, 64 * 64)
