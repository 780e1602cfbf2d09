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
  // Steps of a wave in flight; a step is 36 bytes a fragment row.
  static constexpr int kDepth = platform::kFragmentRows == 1 ? 6 : 2;
  static constexpr bool kHasGlobalScale = false;

  M3_DEVICE_METHOD static constexpr int element(int place) { return platform::fp8_element(place); }

  // A lane's share of 16 rows x 128 K: for each of its rows 16 codes of either half of the block, and the scales of the block's four groups, of
  // which the lane needs the one that its first codes are in, and the one two further.
  struct Block {
    Bytes16 codes[platform::kFragmentRows][2];
    Bits32 scales[platform::kFragmentRows];
  };
  M3_DEVICE_METHOD static int own_scale() { return platform::fragment_group(platform::lane_index()) / 2; }

  // A lane's 16 bytes are 16 consecutive K, two runs. The four groups' are neighbours, so that four lanes read 64 bytes of a row together.
  M3_DEVICE_METHOD static constexpr int run_k(int step, int group) { return 64 * (step / 2) + 16 * group + 8 * (step % 2); }

  // Where a lane's codes of a tile lie, from some K block on, in units of 16 bytes; a scale covers two of them.
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
        found.codes[chunk] = static_cast<Bits32>(row) * static_cast<Bits32>(k / 16) + static_cast<Bits32>(8 * block + platform::fragment_group(lane));
      }
      return found;
    }

    // The i-th K block of a tile, if wanted; 0 past the end of K.
    M3_DEVICE_METHOD void load(Block& into, const Tile& tile, int i, bool wanted) const {
      M3_UNROLL for (int chunk = 0; chunk < platform::kFragmentRows; ++chunk) {
        const unsigned char* codes = weights + 16ll * tile.codes[chunk] + 128 * i;
        if (k % 128 == 0) {
          M3_UNROLL for (int half = 0; half < 2; ++half) platform::load_streamed(wanted, codes + 64 * half, into.codes[chunk][half]);
          platform::load_four_bytes(wanted, scales + 4ll * (tile.codes[chunk] / 8) + 4 * i, into.scales[chunk]);
          continue;
        }
        Bits32 own[2] = {};
        M3_UNROLL for (int half = 0; half < 2; ++half) {
          const bool past = 128 * (tile.block + i) + run_k(2 * half, platform::fragment_group(platform::lane_index())) >= k;
          if (past) into.codes[chunk][half] = Bytes16{};
          platform::load_streamed(wanted && !past, codes + 64 * half, into.codes[chunk][half]);
          platform::load_byte(wanted && !past, scales + tile.codes[chunk] / 2 + 4 * i + 2 * half, own[half]);
        }
        if (wanted) into.scales[chunk] = (own[0] | own[1] << 16) << (8 * own_scale());
      }
    }

    // Neighbouring rows lie together.
    M3_DEVICE_METHOD const unsigned char* rows_begin(int expert, int first_row) const {
      return weights + static_cast<long long>(expert * rows + first_row) * k;
    }
    M3_DEVICE_METHOD int bytes_of_rows(int count) const { return count * k; }
    M3_DEVICE_METHOD const unsigned char* scales_begin(int expert, int first_row) const {
      return scales + static_cast<long long>(expert * rows + first_row) * (k / 32);
    }
    M3_DEVICE_METHOD int scale_bytes_of_rows(int count) const { return count * (k / 32); }
  };

  M3_DEVICE_METHOD static void widen(const Block& block, platform::RowsBf16 (&rows)[4]) {
    Bits32 own[platform::kFragmentRows];
    M3_UNROLL for (int chunk = 0; chunk < platform::kFragmentRows; ++chunk) own[chunk] = block.scales[chunk] >> (8 * own_scale());
    platform::widen_fp8<kAnyScale>(block.codes, own, rows);
  }
};

using Mxfp8AnyScale = Mxfp8Of<true>;
#ifdef M3_PLAIN_SCALES
using Mxfp8 = Mxfp8Of<false>;
#else
using Mxfp8 = Mxfp8AnyScale;
#endif

}  // namespace m3::formats
