// NVFP4 expert weights: E2M1 codes [experts + 1, rows, K / 2], two a byte, the even K in the low nibble, and E4M3 scales [experts + 1, rows, K / 16],
// both row major; one fp32 global scale a matrix. A scale covers 16 values along K. K and the rows of a matrix are multiples of 32.
//
// Value: e2m1 * e4m3, exact in bf16 (two bits times four, between 2^-10 and 2688); scale 0x7F or 0xFF makes its 16 weights NaN, a negative scale
// turns their signs. The global scale multiplies the fp32 sums, once each: gate and up before the activation, the contribution of stage down.
#pragma once
#include "m3/bf16.h"

namespace m3::formats {

struct Nvfp4 {
  // Steps of a wave in flight; a step is 18 bytes a fragment row.
  static constexpr int kDepth = 6 / platform::kFragmentRows;
  static constexpr bool kHasGlobalScale = true;

  M3_DEVICE_METHOD static constexpr int element(int place) { return platform::fp4_element(place); }

  // A lane's share of 16 rows x 128 K: for each of its rows 32 codes and the scales of their halves, the first half's in the low byte.
  struct Block {
    Bytes16 codes[platform::kFragmentRows];
    Bits32 scales[platform::kFragmentRows];
  };

  // A lane's 16 bytes are 32 consecutive K, so its runs in the four tile steps follow each other.
  M3_DEVICE_METHOD static constexpr int run_k(int step, int group) { return 32 * group + 8 * step; }

  // Where a lane's codes of a tile lie, from some K block on, in units of 16 bytes, for which there are two scales.
  struct Tile {
    Bits32 codes[platform::kFragmentRows];
    int block;
  };

  struct Matrices {
    const unsigned char* weights;
    const unsigned char* scales;
    int rows;
    int k;

    // Sixteen rows of `expert` from K block `block` on: eight from `lower` on and the eight that lie `distance` further.
    M3_DEVICE_METHOD Tile tile(int expert, int lower, int distance, int block, bool) const {
      const int lane = platform::lane_index();
      Tile found;
      found.block = block;
      M3_UNROLL for (int chunk = 0; chunk < platform::kFragmentRows; ++chunk) {
        const int in_tile = platform::fragment_row(lane, chunk);
        const int row = expert * rows + lower + in_tile % 8 + (in_tile < 8 ? 0 : distance);
        found.codes[chunk] = static_cast<Bits32>(row) * static_cast<Bits32>(k / 32) + static_cast<Bits32>(4 * block + platform::fragment_group(lane));
      }
      return found;
    }

    // The i-th K block of a tile, if wanted; 0 past the end of K.
    M3_DEVICE_METHOD void load(Block& into, const Tile& tile, int i, bool wanted) const {
      if (k % 128 != 0 && 128 * (tile.block + i) + run_k(0, platform::fragment_group(platform::lane_index())) >= k) {
        into = Block{};
        return;
      }
      M3_UNROLL for (int chunk = 0; chunk < platform::kFragmentRows; ++chunk) {
        platform::load_streamed(wanted, weights + 16ll * tile.codes[chunk] + 64 * i, into.codes[chunk]);
        platform::load_two_bytes(wanted, scales + 2ll * tile.codes[chunk] + 8 * i, into.scales[chunk]);
      }
    }

    // Neighbouring rows lie together.
    M3_DEVICE_METHOD const unsigned char* rows_begin(int expert, int first_row) const {
      return weights + static_cast<long long>(expert * rows + first_row) * (k / 2);
    }
    M3_DEVICE_METHOD int bytes_of_rows(int count) const { return count * (k / 2); }
    M3_DEVICE_METHOD const unsigned char* scales_begin(int expert, int first_row) const {
      return scales + static_cast<long long>(expert * rows + first_row) * (k / 16);
    }
    M3_DEVICE_METHOD int scale_bytes_of_rows(int count) const { return count * (k / 16); }
  };

  M3_DEVICE_METHOD static void widen(const Block& block, platform::RowsBf16 (&rows)[4]) { platform::widen_fp4_e4m3(block.codes, block.scales, rows); }
};

}  // namespace m3::formats
