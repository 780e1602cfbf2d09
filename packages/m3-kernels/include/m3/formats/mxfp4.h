// MXFP4 expert weights as AITER holds them after loading: E2M1 codes in the (16, 16) shuffle, E8M0 scales in their own.
// A scale covers 32 values along K. K and the rows of a matrix are multiples of 64; the scales' K is padded to 8, their rows to 256.
#pragma once
#include "m3/bf16.h"

namespace m3::formats {

// Byte of an E8M0 scale of a matrix: `groups` is the padded number of groups (K / 32) a row.
M3_DEVICE_INLINE constexpr Bits32 shuffled_scale(Bits32 row, Bits32 group, Bits32 groups) {
  return row / 32 * (32 * groups) + group / 8 * 256 + group % 4 * 64 + row % 16 * 4 + group % 8 / 4 * 2 + row % 32 / 16;
}

// kAnyScale: whether a scale may be beyond what the target's fast conversion takes.
template <bool kAnyScale>
struct Mxfp4Of {
  // Steps of a wave in flight; a step is 20 bytes a fragment row.
  static constexpr int kDepth = 6 / platform::kFragmentRows;
  static constexpr bool kHasGlobalScale = false;

  M3_DEVICE_METHOD static constexpr int element(int place) { return platform::fp4_element(place); }

  // A lane's share of 16 rows x 128 K: for each of its rows one group of 32 codes and the group's scale.
  struct Block {
    Bytes16 codes[platform::kFragmentRows];
    Bits32 scale[platform::kFragmentRows];
  };

  // A lane's 16 bytes are 32 consecutive K, so its runs in the four tile steps follow each other.
  M3_DEVICE_METHOD static constexpr int run_k(int step, int group) { return 32 * group + 8 * step; }

  // Where a lane's groups of a tile lie, and their scales, from some K block on.
  struct Tile {
    const unsigned char* codes[platform::kFragmentRows];
    const unsigned char* scales[platform::kFragmentRows];  // of the even block below
    int block;
    int odd;  // 1 if the block is not even
  };

  struct Matrices {
    const unsigned char* weights;
    const unsigned char* scales;
    int rows;
    int k;

    M3_DEVICE_METHOD int groups() const { return (k / 32 + 7) / 8 * 8; }
    // An expert's matrix and its scales begin at whole tiles.
    M3_DEVICE_METHOD const unsigned char* expert_weights(int expert) const { return weights + static_cast<long long>(expert) * (rows * (k / 2)); }
    M3_DEVICE_METHOD const unsigned char* expert_scales(int expert) const { return scales + static_cast<long long>(expert) * (rows * groups()); }

    // Sixteen rows of `expert` from K block `block` on: eight from `lower` (a multiple of 8) on and the eight that lie `distance` (8 where
    // lower is a multiple of 16, or a multiple of 32) further. `even`: the block is known to be even.
    M3_DEVICE_METHOD Tile tile(int expert, int lower, int distance, int block, bool even) const {
      const int lane = platform::lane_index(), group = platform::fragment_group(lane);
      const Bits32 row = static_cast<Bits32>(lower), index = static_cast<Bits32>(block);
      const Bits32 codes_apart = static_cast<Bits32>(distance == 8 ? 8 * 16 : distance * (k / 2));
      const Bits32 scales_apart = static_cast<Bits32>(distance == 8 ? 8 * 4 : distance * groups());
      Tile found;
      found.block = block;
      found.odd = even ? 0 : block % 2;
      M3_UNROLL for (int chunk = 0; chunk < platform::kFragmentRows; ++chunk) {
        const int in_tile = platform::fragment_row(lane, chunk);
        const Bits32 apart = in_tile < 8 ? 0 : 1;
        const Bits32 code = row / 16 * (8 * static_cast<Bits32>(k)) + row % 16 * 16 + 1024 * index + static_cast<Bits32>(256 * group + in_tile % 8 * 16);
        const Bits32 scale = shuffled_scale(row, 0, static_cast<Bits32>(groups())) + index / 2 * 256 + static_cast<Bits32>(64 * group + in_tile % 8 * 4);
        found.codes[chunk] = expert_weights(expert) + code + apart * codes_apart;
        found.scales[chunk] = expert_scales(expert) + scale + apart * scales_apart;
      }
      return found;
    }

    // The i-th K block of a tile, if wanted; 0 past the end of K.
    M3_DEVICE_METHOD void load(Block& into, const Tile& tile, int i, bool wanted) const {
      if (k % 128 != 0 && 128 * (tile.block + i) + 32 * platform::fragment_group(platform::lane_index()) >= k) {
        into = Block{};
        return;
      }
      const int from_even = tile.odd + i;
      M3_UNROLL for (int chunk = 0; chunk < platform::kFragmentRows; ++chunk) {
        platform::load_streamed(wanted, tile.codes[chunk] + 1024 * i, into.codes[chunk]);
        platform::load_byte(wanted, tile.scales[chunk] + (from_even / 2 * 256 + from_even % 2 * 2), into.scale[chunk]);
      }
    }

    // Neighbouring rows from `first_row` (a multiple of 16) on lie together, and so do the scales of the 32 rows around it.
    M3_DEVICE_METHOD const unsigned char* rows_begin(int expert, int first_row) const { return expert_weights(expert) + first_row * (k / 2); }
    M3_DEVICE_METHOD int bytes_of_rows(int count) const { return count * (k / 2); }
    M3_DEVICE_METHOD const unsigned char* scales_begin(int expert, int first_row) const { return expert_scales(expert) + first_row / 32 * 32 * groups(); }
    M3_DEVICE_METHOD int scale_bytes_of_rows(int count) const { return (count + 31) / 32 * 32 * groups(); }
  };

  M3_DEVICE_METHOD static void widen(const Block& block, platform::RowsBf16 (&rows)[4]) { platform::widen_fp4<kAnyScale>(block.codes, block.scale, rows); }
};

using Mxfp4AnyScale = Mxfp4Of<true>;
#ifdef M3_PLAIN_SCALES
using Mxfp4 = Mxfp4Of<false>;
#else
using Mxfp4 = Mxfp4AnyScale;
#endif

}  // namespace m3::formats
