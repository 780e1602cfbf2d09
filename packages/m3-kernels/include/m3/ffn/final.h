// Stage final: the ranks' combined outputs are added in rank order in fp32 and rounded to bf16 once: the launch's output.
// Waits for the ranks' pairs. Reference: m3_kernels.reference.final.
#pragma once
#include "m3/ffn/context.h"

namespace m3::ffn {

template <class Shape>
M3_DEVICE_INLINE void final(Context<Shape>& context) {
  constexpr int kPairs = protocol::FINAL_COLUMNS / protocol::COLUMNS_A_PAIR;
  const Shape& shape = context.shape;
  const int hidden = shape.hidden(), items = shape.rows() * kPairs;
  const Tasks tasks = tasks_of_block(protocol::FINAL_START, protocol::final_tasks(hidden));
  const int own_tasks = tasks.first < tasks.count ? protocol::ceil_div(tasks.count - tasks.first, tasks.stride) : 0;
  // All tasks at once, so that a block waits for its last one only.
  for (int index = platform::thread_index(); index < own_tasks * items; index += platform::block_threads()) {
    const int task = tasks.first + index / items * tasks.stride, item = index % items;
    const int row = item / kPairs, column_pair = task * kPairs + item % kPairs;
    if (column_pair >= protocol::column_pairs(hidden)) continue;
    Bits64 word[Shape::kMostRanks];
    const bool came = wait_for_words<Scope::system>(
        context.line, Site::FINAL, Source::rank_of_word, context.tag, shape.world(),
        [&](int source) { return context.ffn_pair(context.rank(), source, row, column_pair); }, word);
    context.note(came);
    float lower = lower_bf16(protocol::pair_word_value(word[0])), upper = upper_bf16(protocol::pair_word_value(word[0]));
    M3_UNROLL for (int source = 1; source < Shape::kMostRanks; ++source) {
      if (source >= shape.world()) continue;
      lower += lower_bf16(protocol::pair_word_value(word[source]));
      upper += upper_bf16(protocol::pair_word_value(word[source]));
    }
    AliasingBits32* out = reinterpret_cast<AliasingBits32*>(context.arguments.out + row * hidden + 2 * column_pair);
    *out = protocol::pack_bf16_pair(float_to_bf16(lower), float_to_bf16(upper));
  }
}

}  // namespace m3::ffn
