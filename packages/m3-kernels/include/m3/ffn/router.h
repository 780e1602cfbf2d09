// Stage router: logits = f32(X) . W in fp32, cut along K into parts, a task being 16 experts of one part for all rows.
// Waits for X in every row, with the weights already on their way. Reference: m3_kernels.reference.router.
//
// Order of the sum: a part's columns are cut into 8 segments of whole 16-column steps, each summed as the platform's fp32 tile operation
// does, the segments in order; stage route adds the parts.
#pragma once
#include "m3/ffn/norm.h"
#include "m3/ffn/ring.h"

namespace m3::ffn {

constexpr int kRouterStep = 16;

// Columns of a segment of a router part.
M3_DEVICE_INLINE constexpr int router_segment_columns(int hidden) {
  return static_cast<int>(protocol::round_up(protocol::ceil_div(protocol::router_part_columns(hidden), kSegments), kRouterStep));
}

// A lane's run of four fp32 of row `row` from `column` on, 0 from `end` on. Rows begin at 16 bytes only where `hidden` is a multiple of 4.
M3_DEVICE_INLINE Bytes16 load_run_f32(const float* matrix, int row, int hidden, int column, int end) {
  const float* values = matrix + static_cast<long long>(row) * hidden + column;
  if (hidden % 4 == 0 && column + 4 <= end) return platform::load_streamed(values);
  Bytes16 run{};
  for (int i = 0; i < 4; ++i) {
    if (column + i < end) run.word[i] = platform::float_to_bits(values[i]);
  }
  return run;
}

// The router weights of one tile and part, as one wave takes them: its segments one after another, step by step.
template <class Shape>
struct RouterSource {
  using Step = platform::FragmentF32;
  const float* weights;
  int experts, hidden, first_expert, part_start, part_end, segment_columns;

  // Column of the first value of a wave's step.
  M3_DEVICE_METHOD int step_column(int step) const {
    const int steps = segment_columns / kRouterStep;
    const int segment = platform::wave_index() + platform::wave_count() * (step / steps);
    return part_start + segment * segment_columns + step % steps * kRouterStep;
  }
  M3_DEVICE_METHOD Step load(int step) const {
    const int lane = platform::lane_index();
    const int column = step_column(step) + 4 * platform::fragment_group(lane);
    Step fragment;
    M3_UNROLL for (int chunk = 0; chunk < platform::kFragmentRows; ++chunk) {
      const int expert = first_expert + platform::fragment_row(lane, chunk);
      // Rows past the last expert repeat it; their sums are not announced.
      fragment.chunk[chunk] = load_run_f32(weights, expert < experts ? expert : experts - 1, hidden, column, part_end);
    }
    return fragment;
  }
};

// The matching run of X, widened, for 16 rows from `first_row` on.
template <class Shape>
M3_DEVICE_INLINE platform::FragmentF32 load_router_activations(Context<Shape>& context, int first_row, int column, int part_end) {
  const int lane = platform::lane_index(), hidden = context.shape.hidden();
  const int run = column + 4 * platform::fragment_group(lane);
  platform::FragmentF32 fragment;
  M3_UNROLL for (int chunk = 0; chunk < platform::kFragmentRows; ++chunk) {
    const int row = first_row + platform::fragment_row(lane, chunk);
    Bytes8 bits{};
    if (row < context.shape.rows() && run < part_end) {
      bits = platform::load_data(reinterpret_cast<const Bytes8*>(context.x + protocol::x_index(hidden, row, run)));
    }
    M3_UNROLL for (int i = 0; i < 4; ++i) {
      fragment.chunk[chunk].word[i] = i % 2 == 0 ? bits.word[i / 2] << 16 : bits.word[i / 2] & 0xFFFF0000u;
    }
  }
  return fragment;
}

// Adds the segments of one column tile and announces its logits.
template <class Shape>
M3_DEVICE_INLINE void announce_logits(Context<Shape>& context, int first_expert, int part, int tile, int segments) {
  const int hidden = context.shape.hidden(), experts = context.shape.experts();
  for (int item = platform::thread_index(); item < kTile * kTile; item += platform::block_threads()) {
    const int row = tile * kTile + item / kTile, expert = first_expert + item % kTile;
    if (row >= context.shape.rows() || expert >= experts || !context.may_announce(Site::ROUTE)) continue;
    const float logit = sum_of_segments(context.shared.partial, 0, item, segments);
    platform::store_device(context.logit_pairs + protocol::logit_pair_index(hidden, experts, row, expert, part),
                           context.pair(platform::float_to_bits(logit)));
  }
}

template <class Shape>
M3_DEVICE_INLINE void router(Context<Shape>& context) {
  constexpr int kDepth = 3;
  constexpr int kColumnTiles = (Shape::kMostRows + kTile - 1) / kTile;
  const Shape& shape = context.shape;
  const int hidden = shape.hidden(), experts = shape.experts(), rows = shape.rows();
  const int parts = protocol::router_parts(hidden), part_columns = protocol::router_part_columns(hidden);
  const int segment_columns = router_segment_columns(hidden), steps = segment_columns / kRouterStep;
  const int segments = protocol::ceil_div(part_columns, segment_columns);
  const int column_tiles = protocol::ceil_div(rows, kTile);
  const int wave = platform::wave_index(), waves = platform::wave_count();
  const int own_segments = wave < segments ? (segments - wave - 1) / waves + 1 : 0;
  const Tasks tasks = tasks_of_block(protocol::ROUTER_START, protocol::router_tasks(hidden, experts));
  bool x_came = false;
  for (int task = tasks.first; task < tasks.count; task += tasks.stride) {
    const int first_expert = task / parts * kTile, part = task % parts;
    const int part_start = part * part_columns;
    const int part_end = part_start + part_columns < hidden ? part_start + part_columns : hidden;
    const RouterSource<Shape> source{context.arguments.router, experts, hidden, first_expert, part_start, part_end, segment_columns};
    WeightRing<RouterSource<Shape>, kDepth> ring(source, own_segments * steps);
    if (!x_came) wait_for_x(context, Site::ROUTER);
    x_came = true;

    platform::Accumulator sum[kOwnSegments][kColumnTiles] = {};
    M3_UNROLL for (int own = 0; own < kOwnSegments; ++own) {
      if (own >= own_segments) continue;
      M3_UNROLL for (int step = 0; step < steps; ++step) {
        const platform::FragmentF32 a[1] = {ring.take(own * steps + step)};
        M3_UNROLL for (int tile = 0; tile < kColumnTiles; ++tile) {
          if (tile >= column_tiles) continue;
          const int columns = rows - tile * kTile;
          const platform::FragmentF32 b[1] = {load_router_activations(context, tile * kTile, source.step_column(own * steps + step), part_end)};
          platform::multiply_f32(sum[own][tile], a, b, columns < kTile ? columns : kTile);
        }
      }
    }
    M3_UNROLL for (int tile = 0; tile < kColumnTiles; ++tile) {
      if (tile >= column_tiles) continue;
      M3_UNROLL for (int own = 0; own < kOwnSegments; ++own) {
        if (own < own_segments) store_partial(context.shared.partial[wave + waves * own][0], sum[own][tile]);
      }
      platform::block_barrier();
      announce_logits(context, first_expert, part, tile, segments);
      platform::block_barrier();
    }
  }
}

}  // namespace m3::ffn
