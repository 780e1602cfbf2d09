// Gate and up projections of one expert and the activation between: 16 gate rows and the same 16 up rows a task, all columns of the slot.
// Stages shared_up (the shared expert, as soon as X is there) and up (the routed experts, once the table is there) are made of it.
// Reference: m3_kernels.reference.gate_up.
//
// Order of the sum: K blocks of 128 are dealt to 8 segments in runs, each summed as the platform's tile operation does, four 32-deep steps a
// block, the segments in order. Activation: g = min(g, limit), u = clamp(u, -limit, limit), g * sigmoid(alpha g) * (u + beta), a NaN stays;
// rounded to bf16 once.
#pragma once
#include "m3/ffn/ring.h"
#include "m3/ffn/route.h"

namespace m3::ffn {

constexpr int kBlockK = 128;

// Activations of one 128-deep block for 16 columns: a lane's runs. `row_of(column)` is the start of a column's values or null.
template <class Format, class RowOf>
M3_DEVICE_INLINE void load_activations(platform::FragmentBf16 (&fragment)[4], int block, int end, RowOf row_of) {
  const int lane = platform::lane_index(), group = platform::fragment_group(lane);
  M3_UNROLL for (int chunk = 0; chunk < platform::kFragmentRows; ++chunk) {
    const Bits16* values = row_of(platform::fragment_row(lane, chunk));
    M3_UNROLL for (int step = 0; step < 4; ++step) {
      const int k = kBlockK * block + Format::run_k(step, group);
      fragment[step].chunk[chunk] = values != nullptr && k < end ? platform::load_data(reinterpret_cast<const Bytes16*>(values + k)) : Bytes16{};
    }
  }
}

// Blocks of K that a segment sums: its first is segment * this.
M3_DEVICE_INLINE constexpr int segment_blocks(int k) { return protocol::ceil_div(protocol::ceil_div(k, kBlockK), kSegments); }

M3_DEVICE_INLINE float swiglu(float gate, float up, const Constants& constants) {
  const float limit = constants.swiglu_limit;
  const float g = gate > limit ? limit : gate;
  const float u = up > limit ? limit : up < -limit ? -limit : up;
  return g * sigmoid(constants.swiglu_alpha * g) * (u + constants.swiglu_beta);
}

// The weights of one gate/up task as one wave takes them.
template <class Format>
struct GateUpSource {
  struct Step {
    typename Format::Block gate;
    typename Format::Block up;
  };
  typename Format::Matrices matrices;
  int expert, intermediate, tile, blocks_a_segment, blocks;

  // K block of a wave's step; at or past `blocks` there is nothing to add.
  M3_DEVICE_METHOD int block_of(int step) const {
    const int segment = platform::wave_index() + platform::wave_count() * (step / blocks_a_segment);
    return segment * blocks_a_segment + step % blocks_a_segment;
  }
  M3_DEVICE_METHOD Step load(int step) const {
    const int block = block_of(step);
    if (block >= blocks) return Step{};
    return Step{matrices.load(expert, tile * kTile, block), matrices.load(expert, intermediate + tile * kTile, block)};
  }
};

// Adds the segments of a column tile, applies the activation and stores MID for two neighbouring rows a thread.
template <class Shape>
M3_DEVICE_INLINE void store_intermediate(Context<Shape>& context, int slot, int tile, int first_column, int columns, int segments) {
  const Shape& shape = context.shape;
  const int intermediate = shape.intermediate();
  for (int item = platform::thread_index(); item < columns * kTile / 2; item += platform::block_threads()) {
    const int column = item / (kTile / 2), row = item % (kTile / 2) * 2;
    Bits32 value[2];
    M3_UNROLL for (int i = 0; i < 2; ++i) {
      const int index = column * kTile + row + i;
      const float gate = sum_of_segments(context.shared.partial, 0, index, segments);
      const float up = sum_of_segments(context.shared.partial, 1, index, segments);
      // Rows past the matrix become the zeros that stage down's last K step reads.
      value[i] = tile * kTile + row + i < intermediate ? float_to_bf16(swiglu(gate, up, context.arguments.constants)) : 0;
    }
    Bits16* mid = context.mid + protocol::mid_index(shape.rows(), intermediate, slot, first_column + column, tile * kTile + row);
    platform::store_data(reinterpret_cast<AliasingBits32*>(mid), AliasingBits32{protocol::pack_bf16_pair(value[0], value[1])});
  }
}

// One task. `row_of_column(c)` is the row of the slot's column c; `wait_for_input` runs while the first weights are on their way.
template <class Format, class Shape, class RowOfColumn, class WaitForInput>
M3_DEVICE_INLINE void gate_up_task(Context<Shape>& context, int expert, int slot, int tile, int count, RowOfColumn row_of_column,
                                   WaitForInput wait_for_input) {
  constexpr int kColumnTiles = (Shape::kMostRows + kTile - 1) / kTile;
  const Shape& shape = context.shape;
  const int hidden = shape.hidden(), intermediate = shape.intermediate();
  const int blocks = protocol::ceil_div(hidden, kBlockK), blocks_a_segment = segment_blocks(hidden);
  const int segments = protocol::ceil_div(blocks, blocks_a_segment);
  const int wave = platform::wave_index(), waves = platform::wave_count();
  const int own_segments = wave < segments ? (segments - wave - 1) / waves + 1 : 0;
  const int column_tiles = protocol::ceil_div(count, kTile);
  using Source = GateUpSource<Format>;
  const Source source{{context.arguments.w13, context.arguments.s13, 2 * intermediate, hidden}, expert, intermediate, tile, blocks_a_segment, blocks};
  WeightRing<Source, Format::kDepth> ring(source, own_segments * blocks_a_segment);
  wait_for_input();

  platform::Accumulator gate_sum[kOwnSegments][kColumnTiles] = {}, up_sum[kOwnSegments][kColumnTiles] = {};
  M3_UNROLL for (int own = 0; own < kOwnSegments; ++own) {
    if (own >= own_segments) continue;
    M3_UNROLL for (int i = 0; i < blocks_a_segment; ++i) {
      const int step = own * blocks_a_segment + i, block = source.block_of(step);
      const typename Source::Step weights = ring.take(step);
      if (block >= blocks) continue;
      platform::FragmentBf16 gate[4], up[4];
      Format::widen(weights.gate, gate);
      Format::widen(weights.up, up);
      M3_UNROLL for (int column_tile = 0; column_tile < kColumnTiles; ++column_tile) {
        if (column_tile >= column_tiles) continue;
        const int first_column = column_tile * kTile;
        const int columns = count - first_column < kTile ? count - first_column : kTile;
        platform::FragmentBf16 x[4];
        load_activations<Format>(x, block, protocol::hidden_stride(hidden), [&](int column) -> const Bits16* {
          return column < columns ? context.x + protocol::x_index(hidden, row_of_column(first_column + column), 0) : nullptr;
        });
        platform::multiply_bf16(gate_sum[own][column_tile], gate, x, columns);
        platform::multiply_bf16(up_sum[own][column_tile], up, x, columns);
      }
    }
  }
  M3_UNROLL for (int column_tile = 0; column_tile < kColumnTiles; ++column_tile) {
    if (column_tile >= column_tiles) continue;
    const int first_column = column_tile * kTile;
    M3_UNROLL for (int own = 0; own < kOwnSegments; ++own) {
      if (own >= own_segments) continue;
      store_partial(context.shared.partial[wave + waves * own][0], gate_sum[own][column_tile]);
      store_partial(context.shared.partial[wave + waves * own][1], up_sum[own][column_tile]);
    }
    platform::block_barrier();
    store_intermediate(context, slot, tile, first_column, count - first_column < kTile ? count - first_column : kTile, segments);
    platform::drain_stores();
    platform::block_barrier();
  }
  if (platform::thread_index() == 0 && context.may_announce(Site::DOWN)) {
    platform::announce_device(context.intermediate_pairs + protocol::intermediate_pair_index(intermediate, slot, tile), context.pair(0));
  }
}

// Stage shared_up: the shared expert (the last one) over the valid rows, slot 0. Waits for X, with weights already on their way.
template <class Format, class Shape>
M3_DEVICE_INLINE void shared_up(Context<Shape>& context) {
  const int count = context.shared.valid_count;
  if (count == 0) return;
  const Tasks tasks = tasks_of_block(protocol::SHARED_UP_START, protocol::gate_up_tiles(context.shape.intermediate()));
  bool x_came = false;
  for (int tile = tasks.first; tile < tasks.count; tile += tasks.stride) {
    gate_up_task<Format>(
        context, context.shape.experts(), 0, tile, count, [&](int column) { return static_cast<int>(context.shared.valid_row[column]); },
        [&] {
          if (!x_came) wait_for_x(context, Site::ROUTER);
          x_came = true;
        });
  }
}

// Stage up: the picked experts by ascending id, slots 1 and up. The table says who they are; X is complete by then, but this block has not
// looked at it.
template <class Format, class Shape>
M3_DEVICE_INLINE void up(Context<Shape>& context) {
  const int tiles = protocol::gate_up_tiles(context.shape.intermediate()), top_k = context.shape.top_k();
  const Tasks tasks = tasks_of_block(protocol::UP_START, tiles * context.shared.routed_count);
  bool x_came = false;
  for (int task = tasks.first; task < tasks.count; task += tasks.stride) {
    const int routed = task / tiles, tile = task % tiles;
    const int first = context.shared.slot_first[routed], count = context.shared.slot_first[routed + 1] - first;
    gate_up_task<Format>(
        context, context.shared.slot_expert[routed], 1 + routed, tile, count,
        [&](int column) { return context.shared.sorted_pick[first + column] / top_k; },
        [&] {
          if (!x_came) wait_for_x(context, Site::UP);
          x_came = true;
        });
  }
}

}  // namespace m3::ffn
