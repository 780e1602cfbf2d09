// Stage router: logits = f32(X) . W in fp32, cut along K into parts, a task being 16 experts of one part for all rows.
// Waits for X in every row, with the weights already on their way. Reference: m3_kernels.reference.router.
//
// Order of the sum: a part's columns are cut into 8 segments of whole 16-column steps, each summed as the platform's fp32 tile operation
// does, the segments in order; stage route adds the parts.
#pragma once
#include "m3/ffn/norm.h"

namespace m3::ffn {

constexpr int kRouterStep = 16;
// Steps of a wave in flight: a segment of the published shape.
constexpr int kRouterDepth = 3;

// Columns of a segment of a router part.
M3_DEVICE_INLINE constexpr int router_segment_columns(int hidden) {
  return static_cast<int>(protocol::round_up(protocol::ceil_div(protocol::router_part_columns(hidden), kSegments), kRouterStep));
}

// A lane's run of four fp32 of row `row` from `column` on, 0 from `end` on. Rows begin at 16 bytes only where `hidden` is a multiple of 4.
M3_DEVICE_INLINE Bytes16 load_run_f32(const float* matrix, int row, int hidden, int column, int end) {
  const float* values = matrix + static_cast<long long>(row) * hidden + column;
  Bytes16 run{};
  if (hidden % 4 == 0 && column + 4 <= end) {
    platform::load_streamed(true, values, run);
    return run;
  }
  for (int i = 0; i < 4; ++i) {
    if (column + i < end) run.word[i] = platform::float_to_bits(values[i]);
  }
  return run;
}

// The router weights of one tile and part, as one wave takes them: its segments one after another, step by step.
template <class Shape>
struct RouterSource {
  const float* weights;
  int experts, hidden, first_expert, part_start, part_end, segment_columns, wave, waves;

  // The segment of a wave's step, and the column of its first value.
  M3_DEVICE_METHOD int segment(int step) const { return wave + waves * (step / (segment_columns / kRouterStep)); }
  M3_DEVICE_METHOD int step_column(int step) const {
    return part_start + segment(step) * segment_columns + step % (segment_columns / kRouterStep) * kRouterStep;
  }
  // Steps from `first` on, below `end`.
  M3_DEVICE_METHOD void load_steps(platform::RowsF32 (&ahead)[kRouterDepth], int first, int end) const {
    M3_UNROLL for (int i = 0; i < kRouterDepth; ++i) {
      if (first + i < end) ahead[i] = load(first + i);
    }
  }
  M3_DEVICE_METHOD platform::RowsF32 load(int step) const {
    const int lane = platform::lane_index();
    const int column = step_column(step) + 4 * platform::fragment_group(lane);
    platform::RowsF32 rows;
    M3_UNROLL for (int chunk = 0; chunk < platform::kFragmentRows; ++chunk) {
      const int expert = first_expert + platform::fragment_row(lane, chunk);
      // Rows past the last expert repeat it; their sums are not announced.
      rows.chunk[chunk] = load_run_f32(weights, expert < experts ? expert : experts - 1, hidden, column, part_end);
    }
    return rows;
  }
};

// Value `i` of the first or second half of a run of eight bf16 in the format's order, widened.
template <class Format>
M3_DEVICE_INLINE Bits32 widen_from_run(const Bytes16& run, bool second_half, int i) {
  const int places[2] = {place_of<Format>(i), place_of<Format>(4 + i)};
  const Bits32 word = second_half ? run.word[places[1] / 2] : run.word[places[0] / 2];
  const bool upper = second_half ? places[1] % 2 : places[0] % 2;
  return upper ? word & 0xFFFF0000u : word << 16;
}

// The matching run of X, widened, for the rows of a column tile from `first_row` on.
template <class Format, class Shape>
M3_DEVICE_INLINE platform::ColumnsF32 load_router_activations(Context<Shape>& context, int first_row, int column, int part_end) {
  const int lane = platform::lane_index(), hidden = context.shape.hidden();
  const int first = column + 4 * platform::fragment_group(lane);
  platform::ColumnsF32 columns;
  M3_UNROLL for (int chunk = 0; chunk < platform::kFragmentColumns; ++chunk) {
    const int row = first_row + platform::fragment_column(lane, chunk);
    Bytes16 run{};
    if (row < context.shape.rows() && first < part_end) {
      run = platform::load_data(reinterpret_cast<const Bytes16*>(context.x + protocol::x_index(hidden, row, first / kRun * kRun)));
    }
    M3_UNROLL for (int i = 0; i < 4; ++i) columns.chunk[chunk].word[i] = widen_from_run<Format>(run, first % kRun != 0, i);
  }
  return columns;
}

// Adds the segments of every tile and announces the logits.
template <class Shape>
M3_DEVICE_INLINE void announce_logits(Context<Shape>& context, int first_expert, int part, int segments) {
  constexpr int kColumns = platform::kTileColumns;
  const int hidden = context.shape.hidden(), experts = context.shape.experts(), rows = context.shape.rows();
  for (int item = platform::thread_index(); item < kTile * rows; item += platform::block_threads()) {
    const int row = item / kTile, expert = first_expert + item % kTile;
    if (expert >= experts || !context.may_announce(Site::ROUTE)) continue;
    const float logit = sum_of_segments(context.shared.partial[row / kColumns], item % kTile, row % kColumns, segments);
    platform::store_device(context.logit_pairs + protocol::logit_pair_index(hidden, experts, row, expert, part),
                           context.pair(platform::float_to_bits(logit)));
  }
}

// One task's products: a wave's segments for every tile of rows. `ahead` holds the first segment's first steps; where they are all of the task's,
// they serve every tile, else each tile loads its weights again.
template <class Format, class Shape>
M3_DEVICE_INLINE void router_task(Context<Shape>& context, const RouterSource<Shape>& source, platform::RowsF32 (&ahead)[kRouterDepth], int own_segments,
                                  int steps) {
  constexpr int kTileColumns = platform::kTileColumns;
  const int rows = context.shape.rows();
  const bool all_ahead = own_segments == 1 && steps <= kRouterDepth;
  M3_ROLLED for (int own = 0; own < own_segments; ++own) {
    M3_ROLLED for (int tile = 0; tile < kRowTiles<Shape> && tile * kTileColumns < rows; ++tile) {
      const int count = rows - tile * kTileColumns;
      platform::Accumulator sum{};
      M3_ROLLED for (int base = 0; base < steps; base += kRouterDepth) {
        if (!all_ahead && own + tile + base > 0) source.load_steps(ahead, own * steps + base, own * steps + steps);
        // All of the tile's activations are on their way before the first is used.
        platform::ColumnsF32 x[kRouterDepth][1];
        M3_UNROLL for (int i = 0; i < kRouterDepth; ++i) {
          if (base + i < steps) x[i][0] = load_router_activations<Format>(context, tile * kTileColumns, source.step_column(own * steps + base + i), source.part_end);
        }
        M3_UNROLL for (int i = 0; i < kRouterDepth; ++i) {
          const platform::RowsF32 a[1] = {ahead[i]};
          if (base + i < steps) platform::multiply_f32(sum, a, x[i], count < kTileColumns ? count : kTileColumns);
        }
      }
      store_partial(context.shared.partial[tile][source.segment(own * steps)], sum);
    }
  }
}

// Every block waits for X here, whether or not a task falls to it: the expert stages that follow read X too.
template <class Format, class Shape>
M3_DEVICE_INLINE void router(Context<Shape>& context) {
  const Shape& shape = context.shape;
  const int hidden = shape.hidden(), experts = shape.experts();
  const int parts = protocol::router_parts(hidden), part_columns = protocol::router_part_columns(hidden);
  const int segment_columns = router_segment_columns(hidden), steps = segment_columns / kRouterStep;
  const int segments = protocol::ceil_div(part_columns, segment_columns);
  const int wave = platform::uniform(platform::wave_index()), waves = platform::wave_count();
  const int own_segments = wave < segments ? (segments - wave - 1) / waves + 1 : 0;
  const Tasks tasks = tasks_of_block(protocol::ROUTER_START, protocol::router_tasks(hidden, experts));
  bool x_came = false;
  for (int task = tasks.first; task < tasks.count; task += tasks.stride) {
    const int first_expert = task / parts * kTile, part = task % parts;
    const int part_start = part * part_columns;
    const int part_end = part_start + part_columns < hidden ? part_start + part_columns : hidden;
    const RouterSource<Shape> source{context.arguments.router, experts, hidden, first_expert, part_start, part_end, segment_columns, wave, waves};
    platform::RowsF32 ahead[kRouterDepth]{};
    if (own_segments > 0) source.load_steps(ahead, 0, steps);
    if (!x_came) wait_for_x(context);
    x_came = true;
    router_task<Format>(context, source, ahead, own_segments, steps);
    platform::block_barrier();
    announce_logits(context, first_expert, part, segments);
    platform::block_barrier();
  }
  if (!x_came) wait_for_x(context);
}

}  // namespace m3::ffn
