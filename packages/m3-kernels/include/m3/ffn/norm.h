// Stage norm: the Gemma norm of the unrounded fp32 stream, y = (s * rstd) * (1 + w), rounded to bf16 once: X.
// Waits for the row's sums of squares. Reference: m3_kernels.reference.norm.
//
// The sum over tasks is part of the arithmetic: strand i adds tasks i, i + 32, i + 64, ... in order, then the 32 strands pairwise at
// distances 16, 8, 4, 2, 1. Every wave computes it for itself, so that no barrier stands between the words and the result.
#pragma once
#include "m3/ffn/context.h"

namespace m3::ffn {

constexpr int kNormStrands = 32;

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
    came &= wait_for_words<Scope::device>(
        context.line, Site::NORM, Source::own_blocks, context.tag, words, [&](int i) { return pairs + first + i * kNormStrands; }, word);
    M3_UNROLL for (int i = 0; i < kTogether; ++i) {
      if (i < words) sum += platform::bits_to_float(protocol::pair_word_value(word[i]));
    }
  }
  M3_UNROLL for (int distance = kNormStrands / 2; distance > 0; distance /= 2) sum += platform::shuffle_xor(sum, distance);
  return sum;
}

template <class Shape>
M3_DEVICE_INLINE void norm(Context<Shape>& context) {
  constexpr int kColumns = 8;
  const int hidden = context.shape.hidden(), stride = protocol::hidden_stride(hidden);
  const Tasks tasks = tasks_of_block(protocol::NORM_START, context.shape.rows());
  for (int row = tasks.first; row < tasks.count; row += tasks.stride) {
    bool came;
    const float mean = row_sum_of_squares(context, row, came) / static_cast<float>(hidden);
    context.note(came);
    platform::acquire_device();
    const float rstd = platform::reciprocal_root(mean + context.arguments.constants.rms_norm_eps);
    // X is zero between the row's end and the next row's start: matrix steps read whole runs.
    for (int column = kColumns * platform::thread_index(); column < stride; column += kColumns * platform::block_threads()) {
      Bytes16 y{};
      M3_UNROLL for (int i = 0; i < kColumns; ++i) {
        if (column + i >= hidden) continue;
        const float s = platform::load_data(&context.stream[protocol::stream_index(hidden, row, column + i)]);
        const float weight = bf16_to_float(context.arguments.post_norm[column + i]);
        y.word[i / 2] |= float_to_bf16((s * rstd) * (1.0f + weight)) << (16 * (i % 2));
      }
      platform::store_data(reinterpret_cast<Bytes16*>(context.x + protocol::x_index(hidden, row, column)), y);
    }
    announce_data(context, Site::ROUTER, context.x_ready_pairs + row);
  }
}

// Waits until X is complete in every row; each wave waits for itself. Three stages read X, each under its own site.
template <class Shape>
M3_DEVICE_INLINE void wait_for_x(Context<Shape>& context, Site site) {
  bool came = true;
  for (int row = platform::lane_index(); row < context.shape.rows(); row += platform::kWaveWidth) {
    Bits64 word[1];
    came &= wait_for_words<Scope::device>(
        context.line, site, Source::own_blocks, context.tag, 1, [&](int) { return context.x_ready_pairs + row; }, word);
  }
  context.note(came);
  platform::wave_barrier();
  platform::acquire_device();
}

}  // namespace m3::ffn
