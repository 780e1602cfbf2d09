// Stage push: this rank's bf16 partial of the attention output projection goes to every rank, itself included, three columns a word.
// Waits for nothing. Reference: m3_kernels.reference.push.
#pragma once
#include "m3/ffn/context.h"

namespace m3::ffn {

template <class Shape>
M3_DEVICE_INLINE void push(Context<Shape>& context) {
  const Shape& shape = context.shape;
  const int hidden = shape.hidden(), triples = protocol::triples(hidden);
  const Tasks tasks = tasks_of_block(protocol::PUSH_START, protocol::push_tasks(hidden));
  for (int task = tasks.first; task < tasks.count; task += tasks.stride) {
    for (int item = platform::thread_index(); item < shape.rows() * protocol::PUSH_TRIPLES; item += platform::block_threads()) {
      const int row = item / protocol::PUSH_TRIPLES;
      const int triple = task * protocol::PUSH_TRIPLES + item % protocol::PUSH_TRIPLES;
      if (triple >= triples || !context.may_announce(Site::REDUCE)) continue;
      Bits32 value[protocol::COLUMNS_A_TRIPLE];
      for (int i = 0; i < protocol::COLUMNS_A_TRIPLE; ++i) {
        const int column = triple * protocol::COLUMNS_A_TRIPLE + i;
        value[i] = column < hidden ? context.arguments.part[row * hidden + column] : 0;
      }
      const Bits64 word = protocol::pack_triple(value[0], value[1], value[2], context.triple_tag.tag);
      // Each rank starts at itself, so that no rank is every rank's first target.
      for (int i = 0; i < shape.world(); ++i) {
        const int target = (context.rank() + i) % shape.world();
        platform::store_system(context.attention_pair(target, context.rank(), row, triple), word);
      }
    }
  }
}

}  // namespace m3::ffn
