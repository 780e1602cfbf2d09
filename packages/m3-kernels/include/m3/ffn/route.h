// Stage route: the router parts are added, each row picks top_k experts and weighs them.
// Waits for the row's logits. Reference: m3_kernels.reference.route.
//
// Parts are added as groups of four, each in order, and the groups in order. Selection is by sigmoid + bias, highest first, the lower
// expert id on a tie; a NaN key counts as -infinity and a NaN probability as 0. The weights are the unbiased probabilities, scaled to
// sum to routed_scaling_factor; their order, that of the picks, is the order in which stage down adds.
#pragma once
#include "m3/ffn/context.h"

namespace m3::ffn {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLeastSum = 1e-20f;

M3_DEVICE_INLINE float sigmoid(float x) { return platform::reciprocal(1.0f + platform::exp2_of(-x * kLog2E)); }

// Adds each expert's router parts into route.group.
template <class Shape>
M3_DEVICE_INLINE void sum_router_parts(Context<Shape>& context, int row) {
  constexpr int kGroup = 4;
  const int experts = context.shape.experts(), hidden = context.shape.hidden(), parts = protocol::router_parts(hidden);
  bool came = true;
  for (int item = platform::thread_index(); item < experts * kGroup; item += platform::block_threads()) {
    const int expert = item / kGroup, first = item % kGroup * kGroup;
    const int count = parts - first < kGroup ? parts - first : kGroup;
    if (count <= 0) continue;
    Bits64 word[kGroup];
    const Bits64* pairs = context.logit_pairs + protocol::logit_pair_index(hidden, experts, row, expert, first);
    came &= wait_for_words<Scope::device>(
        context.line, Site::ROUTE, Source::own_blocks, context.tag, count, [&](int i) { return pairs + i; }, word);
    float sum = platform::bits_to_float(protocol::pair_word_value(word[0]));
    M3_UNROLL for (int i = 1; i < kGroup; ++i) {
      if (i < count) sum += platform::bits_to_float(protocol::pair_word_value(word[i]));
    }
    context.shared.route.group[expert][item % kGroup] = sum;
  }
  context.note(came);
}

template <class Shape>
M3_DEVICE_INLINE void route(Context<Shape>& context) {
  const Shape& shape = context.shape;
  const int experts = shape.experts(), top_k = shape.top_k();
  const int groups = protocol::ceil_div(protocol::router_parts(shape.hidden()), 4);
  auto& work = context.shared.route;
  const Tasks tasks = tasks_of_block(protocol::ROUTE_START, shape.rows());
  for (int row = tasks.first; row < tasks.count; row += tasks.stride) {
    sum_router_parts(context, row);
    platform::block_barrier();
    for (int expert = platform::thread_index(); expert < experts; expert += platform::block_threads()) {
      float logit = work.group[expert][0];
      for (int group = 1; group < groups; ++group) logit += work.group[expert][group];
      const float probability = sigmoid(logit);
      const float key = probability + context.arguments.router_bias[expert];
      work.probability[expert] = probability == probability ? probability : 0.0f;
      work.key[expert] = key == key ? key : -platform::bits_to_float(0x7F800000u);
    }
    platform::block_barrier();
    // An expert's place is the number of experts that go before it; the order is total, so that every place below top_k is taken once.
    for (int expert = platform::thread_index(); expert < experts; expert += platform::block_threads()) {
      const float key = work.key[expert];
      int place = 0;
      for (int other = 0; other < experts; ++other) {
        const float other_key = work.key[other];
        if (other_key > key || (other_key == key && other < expert)) ++place;
      }
      if (place < top_k) work.picked[place] = expert;
    }
    platform::block_barrier();
    const int pick = platform::thread_index();
    if (pick < top_k && context.may_announce(Site::TABLE)) {
      float sum = work.probability[work.picked[0]];
      M3_UNROLL for (int k = 1; k < Shape::kMostTopK; ++k) {
        if (k < top_k) sum += work.probability[work.picked[k]];
      }
      const float scale = context.arguments.constants.routed_scaling_factor * platform::reciprocal(sum > kLeastSum ? sum : kLeastSum);
      const int expert = context.is_padded(row) ? -1 : work.picked[pick];
      Bits64* pairs = context.route_pairs + protocol::route_pair_index(top_k, row, pick);
      platform::store_device(pairs, context.pair(static_cast<Bits32>(expert)));
      platform::store_device(pairs + top_k, context.pair(platform::float_to_bits(work.probability[work.picked[pick]] * scale)));
    }
    platform::block_barrier();
  }
}

}  // namespace m3::ffn
