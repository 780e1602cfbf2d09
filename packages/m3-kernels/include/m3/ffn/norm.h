// Stage norm: the Gemma norm of the unrounded fp32 stream, y = (s * rstd) * (1 + w), rounded to bf16 once: X.
// Waits for the row's sums of squares. Reference: m3_kernels.reference.norm.
//
// The sum over tasks is part of the arithmetic: strand i adds tasks i, i + 32, i + 64, ... in order, then the 32 strands pairwise at
// distances 16, 8, 4, 2, 1. Every wave computes it for itself, so that no barrier stands between the words and the result.
#pragma once
#include "m3/ffn/context.h"

namespace m3::ffn {

constexpr int kNormStrands = 32;

// X and MID lie in runs of eight values, each in the order in which the format's weights come.
constexpr int kRun = 8;

// Where a run has its element `i`; the inverse of the format's `element`.
template <class Format>
M3_DEVICE_INLINE constexpr int place_of(int i) {
  int place = 0;
  for (int candidate = 0; candidate < kRun; ++candidate) {
    if (Format::element(candidate) == i) place = candidate;
  }
  return place;
}

template <class Shape>
M3_DEVICE_INLINE float row_sum_of_squares(Context<Shape>& context, int row, bool& came) {
  constexpr int kTogether = 4;
  const int hidden = context.shape.hidden(), count = protocol::push_tasks(hidden);
  const Bits64* pairs = context.ssq_pairs + protocol::ssq_pair_index(hidden, row, 0);
  float sum = 0.0f;
  came = true;
  for (int first = platform::lane_index() % kNormStrands; first < count; first += kTogether * kNormStrands) {
    const int rest = (count - first + kNormStrands - 1) / kNormStrands;
    const int words = rest < kTogether ? rest : kTogether;
    Bits64 word[kTogether];
    came &= wait_for_words<Scope::device_data>(
        context.line, Site::NORM, Source::own_blocks, context.tag, words, [&](int i) { return pairs + first + i * kNormStrands; }, word);
    M3_UNROLL for (int i = 0; i < kTogether; ++i) {
      if (i < words) sum += platform::bits_to_float(protocol::pair_word_value(word[i]));
    }
  }
  M3_UNROLL for (int distance = kNormStrands / 2; distance > 0; distance /= 2) sum += platform::shuffle_xor(sum, distance);
  return sum;
}

// The same for an element that is known only when the launch runs.
template <class Format>
M3_DEVICE_INLINE int place_in_run(int i) {
  int place = 0;
  M3_UNROLL for (int candidate = 0; candidate < kRun; ++candidate) {
    if (Format::element(candidate) == i) place = candidate;
  }
  return place;
}

// The bf16 weights of a run that begins at `column`, 0 past the row's end.
M3_DEVICE_INLINE Bytes16 load_norm_run(const Bits16* weights, int column, int hidden) {
  if (column + kRun <= hidden) return platform::load_kept(reinterpret_cast<const Bytes16*>(weights + column));
  Bytes16 run{};
  for (int i = 0; column + i < hidden; ++i) run.word[i / 2] |= static_cast<Bits32>(weights[column + i]) << (16 * (i % 2));
  return run;
}

template <class Format, class Shape>
M3_DEVICE_INLINE void norm(Context<Shape>& context) {
  const int hidden = context.shape.hidden(), stride = protocol::hidden_stride(hidden);
  const Tasks tasks = tasks_of_block(protocol::NORM_START, context.shape.rows());
  for (int row = tasks.first; row < tasks.count; row += tasks.stride) {
    bool came;
    const float mean = row_sum_of_squares(context, row, came) / static_cast<float>(hidden);
    context.note(came);
    platform::acquire_device();
    const float rstd = platform::reciprocal_root(mean + context.arguments.constants.rms_norm_eps);
    // X is zero between the row's end and the next row's start: matrix steps read whole runs.
    for (int column = kRun * platform::thread_index(); column < stride; column += kRun * platform::block_threads()) {
      const Bytes16 weights = load_norm_run(context.arguments.post_norm, column, hidden);
      const Bytes16* stream = reinterpret_cast<const Bytes16*>(context.stream + protocol::stream_index(hidden, row, column));
      const Bytes16 quad[2] = {platform::load_data(stream), platform::load_data(stream + 1)};
      Bits32 value[kRun];
      M3_UNROLL for (int i = 0; i < kRun; ++i) {
        const float s = platform::bits_to_float(quad[i / 4].word[i % 4]);
        const float weight = i % 2 == 0 ? lower_bf16(weights.word[i / 2]) : upper_bf16(weights.word[i / 2]);
        value[i] = column + i < hidden ? float_to_bf16((s * rstd) * (1.0f + weight)) : 0;
      }
      Bytes16 y;
      M3_UNROLL for (int i = 0; i < kRun / 2; ++i) {
        y.word[i] = protocol::pack_bf16_pair(value[Format::element(2 * i)], value[Format::element(2 * i + 1)]);
      }
      platform::store_data(reinterpret_cast<Bytes16*>(context.x + protocol::x_index(hidden, row, column)), y);
    }
    announce_data(context, Site::ROUTER, context.x_ready_pairs + row);
  }
}

// Waits until X is complete in every row: one wave looks, for the whole block.
template <class Shape>
M3_DEVICE_INLINE void wait_for_x(Context<Shape>& context) {
  if (platform::wave_index() == 0) {
    bool came = true;
    for (int row = platform::lane_index(); row < context.shape.rows(); row += platform::kWaveWidth) {
      Bits64 word[1];
      came &= wait_for_words<Scope::device_data>(
          context.line, Site::ROUTER, Source::own_blocks, context.tag, 1, [&](int) { return context.x_ready_pairs + row; }, word);
    }
    context.note(came);
    platform::acquire_device();
  }
  platform::block_barrier();
}

}  // namespace m3::ffn
