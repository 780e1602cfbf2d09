// MXFP4 expert weights as AITER holds them after loading: E2M1 codes in the (16, 16) shuffle, E8M0 scales in their own.
// A scale covers 32 values along K. K is a multiple of 64, rows of a multiple of 16; the scales' K is padded to 8, their rows to 256.
#pragma once
#include "m3/bf16.h"

namespace m3::formats {

// Byte of an E8M0 scale: `row` counts over all experts, `group` is K / 32, `groups` the padded number of groups a row.
M3_DEVICE_INLINE constexpr long long shuffled_scale(long long row, int group, int groups) {
  return row / 32 * (32LL * groups) + group / 8 * 256 + group % 4 * 64 + row % 16 * 4 + group % 8 / 4 * 2 + row % 32 / 16;
}

struct Mxfp4 {
  // Steps of a wave in flight; a step of gate and up is 40 bytes a fragment row.
  static constexpr int kDepth = 6 / platform::kFragmentRows;

  // A lane's share of 16 rows x 128 K: for each of its rows one group of 32 codes and the group's scale.
  struct Block {
    Bytes16 codes[platform::kFragmentRows];
    Bits32 scale[platform::kFragmentRows];
  };

  // A lane's 16 bytes are 32 consecutive K, so its runs in the four tile steps follow each other.
  M3_DEVICE_METHOD static int run_k(int step, int group) { return 32 * group + 8 * step; }

  struct Matrices {
    const unsigned char* weights;
    const unsigned char* scales;
    int rows;
    int k;

    // 16 rows from `first_row` (a multiple of 16) on of `expert`, K block `block`. K past the end is 0.
    M3_DEVICE_METHOD Block load(int expert, int first_row, int block) const {
      const int lane = platform::lane_index(), group = 4 * block + platform::fragment_group(lane);
      const long long first = static_cast<long long>(expert) * rows + first_row;
      const int groups = static_cast<int>(protocol::round_up(k / 32, 8));
      Block loaded{};
      if (32 * group >= k) return loaded;
      M3_UNROLL for (int chunk = 0; chunk < platform::kFragmentRows; ++chunk) {
        const int row = platform::fragment_row(lane, chunk);
        loaded.codes[chunk] = platform::load_streamed(weights + first * (k / 2) + group * 256 + row * 16);
        loaded.scale[chunk] = scales[shuffled_scale(first + row, group, groups)];
      }
      return loaded;
    }
  };

  M3_DEVICE_METHOD static void widen(const Block& block, platform::FragmentBf16 (&fragment)[4]) {
    M3_UNROLL for (int step = 0; step < 4; ++step) {
      M3_UNROLL for (int chunk = 0; chunk < platform::kFragmentRows; ++chunk) {
        platform::widen_fp4(block.codes[chunk].word[step], block.scale[chunk], fragment[step].chunk[chunk].word);
      }
    }
  }
};

}  // namespace m3::formats
