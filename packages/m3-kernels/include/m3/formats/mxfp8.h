// MXFP8 expert weights: E4M3 codes [experts + 1, rows, K] and E8M0 scales [experts + 1, rows, K / 32], both row major. A scale covers 32 values
// along K. K and the rows of a matrix are multiples of 32.
//
// Value: e4m3 * 2^(scale - 127), widened to bf16 once: exact but for products of 2^128 and more, which become infinity, and products below
// 2^-126, which may have more bits than a bf16 subnormal and round to nearest even. Code 0x7F or 0xFF is NaN; scale 255 makes its 32 weights NaN.
#pragma once
#include "m3/bf16.h"

namespace m3::formats {

// kAnyScale: whether a scale may be beyond what the target's fast conversion takes, or a weight NaN.
template <bool kAnyScale>
struct Mxfp8Of {
  // Steps of a wave in flight; a step is 34 bytes a fragment row.
  static constexpr int kDepth = 6 / platform::kFragmentRows;
  static constexpr bool kHasGlobalScale = false;

  M3_DEVICE_METHOD static constexpr int element(int place) { return platform::fp8_element(place); }

  // A lane's share of 16 rows x 128 K: for each of its rows 16 codes of either half of the block, and their scales.
  struct Block {
    Bytes16 codes[platform::kFragmentRows][2];
    Bits32 scale[platform::kFragmentRows][2];
  };

  // A lane's 16 bytes are 16 consecutive K, two runs. The four groups' are neighbours, so that four lanes read 64 bytes of a row together.
  M3_DEVICE_METHOD static constexpr int run_k(int step, int group) { return 64 * (step / 2) + 16 * group + 8 * (step % 2); }

  // Where a lane's codes of a tile lie, and their scales, from some K block on.
  struct Tile {
    const unsigned char* codes[platform::kFragmentRows];
    const unsigned char* scales[platform::kFragmentRows];
    int block;
  };

  struct Matrices {
    const unsigned char* weights;
    const unsigned char* scales;
    int rows;
    int k;

    // Sixteen rows of `expert` from K block `block` on: eight from `lower` on and the eight that lie `distance` further.
    M3_DEVICE_METHOD Tile tile(int expert, int lower, int distance, int block, bool) const {
      const int lane = platform::lane_index(), first_k = 128 * block + run_k(0, platform::fragment_group(lane));
      Tile found;
      found.block = block;
      M3_UNROLL for (int chunk = 0; chunk < platform::kFragmentRows; ++chunk) {
        const int in_tile = platform::fragment_row(lane, chunk);
        const int row = lower + in_tile % 8 + (in_tile < 8 ? 0 : distance);
        found.codes[chunk] = rows_begin(expert, row) + first_k;
        found.scales[chunk] = scales_begin(expert, row) + first_k / 32;
      }
      return found;
    }

    // The i-th K block of a tile, if wanted; 0 past the end of K.
    M3_DEVICE_METHOD void load(Block& into, const Tile& tile, int i, bool wanted) const {
      M3_UNROLL for (int half = 0; half < 2; ++half) {
        const bool past = k % 128 != 0 && 128 * (tile.block + i) + run_k(2 * half, platform::fragment_group(platform::lane_index())) >= k;
        M3_UNROLL for (int chunk = 0; chunk < platform::kFragmentRows; ++chunk) {
          if (past) {
            into.codes[chunk][half] = Bytes16{};
            into.scale[chunk][half] = 0;
            continue;
          }
          platform::load_streamed(wanted, tile.codes[chunk] + 128 * i + 64 * half, into.codes[chunk][half]);
          platform::load_byte(wanted, tile.scales[chunk] + 4 * i + 2 * half, into.scale[chunk][half]);
        }
      }
    }

    // Neighbouring rows lie together.
    M3_DEVICE_METHOD const unsigned char* rows_begin(int expert, int first_row) const {
      return weights + static_cast<long long>(expert) * (rows * k) + first_row * k;
    }
    M3_DEVICE_METHOD int bytes_of_rows(int count) const { return count * k; }
    M3_DEVICE_METHOD const unsigned char* scales_begin(int expert, int first_row) const {
      return scales + static_cast<long long>(expert) * (rows * (k / 32)) + first_row * (k / 32);
    }
    M3_DEVICE_METHOD int scale_bytes_of_rows(int count) const { return count * (k / 32); }
  };

  M3_DEVICE_METHOD static void widen(const Block& block, platform::RowsBf16 (&rows)[4]) { platform::widen_fp8<kAnyScale>(block.codes, block.scale, rows); }
};

using Mxfp8AnyScale = Mxfp8Of<true>;
#ifdef M3_PLAIN_SCALES
using Mxfp8 = Mxfp8Of<false>;
#else
using Mxfp8 = Mxfp8AnyScale;
#endif

}  // namespace m3::formats
