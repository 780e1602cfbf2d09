// Stage reduce: the ranks' partials are added in rank order in fp32, rounded to bf16 once, and added to the residual.
// Waits for the ranks' triples. Reference: m3_kernels.reference.reduce.
//
// The sum of squares of a task's 48 columns is part of the arithmetic: (s0^2 + s1^2) + s2^2 in a triple, then the 16 triples pairwise at
// distances 8, 4, 2, 1. The sum is taken of the unrounded fp32 values.
#pragma once
#include "m3/ffn/context.h"

namespace m3::ffn {

// Reduces one triple of one row; returns the sum of its squares.
template <class Shape>
M3_DEVICE_INLINE float reduce_triple(Context<Shape>& context, int row, int triple, bool& came) {
  const Shape& shape = context.shape;
  const int hidden = shape.hidden();
  Bits64 word[Shape::kMostRanks];
  came = wait_for_words<Scope::system>(
      context.line, Site::REDUCE, Source::rank_of_word, context.triple_tag, shape.world(),
      [&](int source) { return context.attention_pair(context.rank(), source, row, triple); }, word);
  float squares = 0.0f;
  M3_UNROLL for (int i = 0; i < protocol::COLUMNS_A_TRIPLE; ++i) {
    const int column = triple * protocol::COLUMNS_A_TRIPLE + i;
    if (column >= hidden) continue;
    float sum = bf16_to_float(protocol::triple_word_value(word[0], i));
    M3_UNROLL for (int source = 1; source < Shape::kMostRanks; ++source) {
      if (source < shape.world()) sum += bf16_to_float(protocol::triple_word_value(word[source], i));
    }
    const float s = round_to_bf16(sum) + bf16_to_float(context.arguments.residual[row * hidden + column]);
    context.arguments.residual_out[row * hidden + column] = static_cast<Bits16>(float_to_bf16(s));
    platform::store_data(&context.stream[protocol::stream_index(hidden, row, column)], s);
    squares += s * s;
  }
  return squares;
}

template <class Shape>
M3_DEVICE_INLINE void reduce(Context<Shape>& context) {
  constexpr int kTriples = protocol::PUSH_TRIPLES;
  const int hidden = context.shape.hidden(), triples = protocol::triples(hidden);
  const int items = context.shape.rows() * kTriples;
  const Tasks tasks = tasks_of_block(protocol::REDUCE_START, protocol::push_tasks(hidden));
  for (int task = tasks.first; task < tasks.count; task += tasks.stride) {
    // Every thread goes round as often as the others: sixteen lanes, one row, exchange their sums.
    for (int base = 0; base < items; base += platform::block_threads()) {
      const int item = base + platform::thread_index();
      const int row = item / kTriples;
      const int triple = task * kTriples + item % kTriples;
      bool came = true;
      float squares = 0.0f;
      if (item < items && triple < triples) squares = reduce_triple(context, row, triple, came);
      context.note(came);
      M3_UNROLL for (int distance = kTriples / 2; distance > 0; distance /= 2) squares += platform::shuffle_xor(squares, distance);
      platform::drain_stores();
      platform::wave_barrier();
      if (item < items && item % kTriples == 0 && context.may_announce(Site::NORM)) {
        platform::announce_device(context.ssq_pairs + protocol::ssq_pair_index(hidden, row, task), context.pair(platform::float_to_bits(squares)));
      }
    }
  }
  context.record(protocol::FLIGHT_DONE, Site::REDUCE, context.flight_outcome());
}

}  // namespace m3::ffn
