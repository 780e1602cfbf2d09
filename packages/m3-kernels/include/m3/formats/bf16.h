// BF16 expert weights: [experts + 1, rows, K], row major. Any even K; 16-byte loads where K is a multiple of 8.
#pragma once
#include "m3/bf16.h"

namespace m3::formats {

struct Bf16 {
  // Steps of a wave in flight; a step is 64 bytes a fragment row, and registers hold them.
  static constexpr int kDepth = 4 / platform::kFragmentRows;
  static constexpr bool kHasGlobalScale = false;

  // Activations lie as they are.
  M3_DEVICE_METHOD static constexpr int element(int place) { return place; }

  // A lane's share of 16 rows x 128 K: for each of its rows, the runs of four 32-deep tile steps.
  struct Block {
    platform::RowsBf16 run[4];
  };

  // K of the first value of a lane's run in tile step `step` of a block: the four groups of a step are neighbours, so that four lanes
  // read 64 bytes of a row together.
  M3_DEVICE_METHOD static constexpr int run_k(int step, int group) { return 32 * step + 8 * group; }

  // Where a lane's rows of a tile lie from some K block on.
  struct Tile {
    const Bits16* row[platform::kFragmentRows];
    int block;
  };

  struct Matrices {
    const unsigned char* weights;
    const unsigned char* scales;  // none
    int rows;
    int k;

    // Sixteen rows of `expert` from K block `block` on: eight from `lower` on and the eight that lie `distance` further. Rows past the matrix
    // repeat its last one.
    M3_DEVICE_METHOD Tile tile(int expert, int lower, int distance, int block, bool) const {
      const int lane = platform::lane_index();
      const Bits16* matrix = reinterpret_cast<const Bits16*>(weights) + static_cast<long long>(expert) * rows * k + 128 * block;
      Tile found;
      found.block = block;
      M3_UNROLL for (int chunk = 0; chunk < platform::kFragmentRows; ++chunk) {
        const int in_tile = platform::fragment_row(lane, chunk);
        const int wanted = lower + in_tile % 8 + (in_tile < 8 ? 0 : distance);
        // Whole tiles have no rows past the matrix.
        const int row = rows % 16 == 0 || wanted < rows ? wanted : rows - 1;
        found.row[chunk] = matrix + static_cast<long long>(row) * k + run_k(0, platform::fragment_group(lane));
      }
      return found;
    }

    // The i-th K block of a tile, if wanted; 0 past the end of K.
    M3_DEVICE_METHOD void load(Block& into, const Tile& tile, int i, bool wanted) const {
      M3_UNROLL for (int chunk = 0; chunk < platform::kFragmentRows; ++chunk) {
        M3_UNROLL for (int step = 0; step < 4; ++step) {
          const int ahead = 128 * i + run_k(step, 0);
          const int left = k - 128 * tile.block - run_k(0, platform::fragment_group(platform::lane_index())) - ahead;
          load_run(into.run[step].chunk[chunk], tile.row[chunk] + ahead, left, wanted);
        }
      }
    }

    // A run, of which the row has `left` values.
    M3_DEVICE_METHOD void load_run(Bytes16& run, const Bits16* values, int left, bool wanted) const {
      if (k % 8 == 0 && (k % 128 == 0 || left >= 8)) return platform::load_streamed(wanted, values, run);
      if (!wanted) return;
      run = Bytes16{};
      for (int i = 0; i < 8; ++i) {
        if (i < left) run.word[i / 2] |= static_cast<Bits32>(values[i]) << (16 * (i % 2));
      }
    }

    // Neighbouring rows lie together.
    M3_DEVICE_METHOD const unsigned char* rows_begin(int expert, int first_row) const {
      return weights + (static_cast<long long>(expert) * rows + first_row) * k * 2;
    }
    M3_DEVICE_METHOD int bytes_of_rows(int count) const { return 2 * count * k; }
    M3_DEVICE_METHOD const unsigned char* scales_begin(int, int) const { return nullptr; }
    M3_DEVICE_METHOD int scale_bytes_of_rows(int) const { return 0; }
  };

  M3_DEVICE_METHOD static void widen(const Block& block, platform::RowsBf16 (&rows)[4]) {
    M3_UNROLL for (int step = 0; step < 4; ++step) rows[step] = block.run[step];
  }
};

}  // namespace m3::formats
