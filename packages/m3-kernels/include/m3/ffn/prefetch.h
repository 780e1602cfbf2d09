// Weights that are known to be wanted soon, on their way to the cache that all blocks share.
#pragma once
#include "m3/ffn/down_work.h"

namespace m3::ffn {

// Whatever does not begin and end at 16 bytes is left to the loads.
M3_DEVICE_INLINE void prefetch_whole_lines(const unsigned char* begin, int bytes) {
  if (bytes > 0 && bytes % 16 == 0 && reinterpret_cast<unsigned long long>(begin) % 16 == 0) platform::prefetch(begin, bytes);
}

// The first weights of a wave in stage down.
template <class Format, class Shape>
M3_DEVICE_INLINE void prefetch_down(Context<Shape>& context) {
  if (platform::kPrefetchShares == 0 || platform::lane_index() != 0) return;
  const Tasks tasks = tasks_of_block(protocol::DOWN_START, protocol::down_tasks(context.shape.hidden()));
  if (tasks.first >= tasks.count) return;
  const typename Format::Matrices matrices = down_matrices<Format>(context);
  DownWork<Format, Shape> work(context, platform::wave_index(), tasks.first, tasks.stride, tasks_together(tasks, tasks.first));
  for (int i = 0; i < platform::kPrefetchShares && work.valid(); ++i, work.share += platform::wave_count()) {
    const int expert = context.shared.slot_expert[work.slot()], row = work.task() * kTile;
    const int rows = matrices.rows - row < kTile ? matrices.rows - row : kTile;
    prefetch_whole_lines(matrices.rows_begin(expert, row), matrices.bytes_of_rows(rows));
    prefetch_whole_lines(matrices.scales_begin(expert, row), matrices.scale_bytes_of_rows(rows));
  }
}

// This block's part of bytes that all blocks will want.
M3_DEVICE_INLINE void prefetch_part(const void* begin, int bytes) {
  constexpr Bits32 kLine = 128;
  const Bits32 size = static_cast<Bits32>(bytes), grid = static_cast<Bits32>(platform::grid_blocks());
  const Bits32 part = ((size + kLine - 1) / kLine + grid - 1) / grid * kLine, first = static_cast<Bits32>(platform::block_index()) * part;
  if (first < size) prefetch_whole_lines(static_cast<const unsigned char*>(begin) + first, static_cast<int>(size - first < part ? size - first : part));
}

// What every launch reads whatever its rows pick: the router and the shared expert. They come while the ranks trade their partial sums. The
// last wave asks for them; the first has the epoch to read.
template <class Format, class Shape>
M3_DEVICE_INLINE void prefetch_known(const Context<Shape>& context) {
  if (!platform::kPrefetchKnown || platform::thread_index() != platform::block_threads() - 1) return;
  const Shape& shape = context.shape;
  const Arguments& arguments = context.arguments;
  const int hidden = shape.hidden(), intermediate = shape.intermediate(), shared_expert = shape.experts();
  prefetch_part(arguments.router, 4 * shape.experts() * hidden);
  if constexpr (Format::kCopied) {
    const int up_bytes = protocol::gate_up_tiles(intermediate) * blocks_of(hidden) * Format::kStepBytes;
    const int down_bytes = protocol::down_tasks(hidden) * blocks_of(intermediate) * Format::kStepBytes;
    prefetch_part(arguments.w13 + static_cast<long long>(shared_expert) * up_bytes, up_bytes);
    prefetch_part(arguments.w2 + static_cast<long long>(shared_expert) * down_bytes, down_bytes);
    return;
  } else {
    const typename Format::Matrices matrices[2] = {{arguments.w13, arguments.s13, 2 * intermediate, hidden}, down_matrices<Format>(context)};
    M3_UNROLL for (int i = 0; i < 2; ++i) {
      prefetch_part(matrices[i].rows_begin(shared_expert, 0), matrices[i].bytes_of_rows(matrices[i].rows));
      prefetch_part(matrices[i].scales_begin(shared_expert, 0), matrices[i].scale_bytes_of_rows(matrices[i].rows));
    }
  }
}

}  // namespace m3::ffn
