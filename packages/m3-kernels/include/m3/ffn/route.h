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

// Lanes of a wave that work on an expert together.
constexpr int kRouteLanes = 4;

// The logit of an expert, in the first of its four lanes: lane i adds parts 4 i to 4 i + 3, then the groups are added in order.
template <class Shape>
M3_DEVICE_INLINE float expert_logit(Context<Shape>& context, int row, int expert, bool& came) {
  const int hidden = context.shape.hidden(), experts = context.shape.experts(), parts = protocol::router_parts(hidden);
  const int lane = platform::lane_index() % kRouteLanes, first = lane * kRouteLanes;
  const int left = expert < experts ? parts - first : 0, count = left < kRouteLanes ? left : kRouteLanes;
  float group = 0.0f;
  if (count > 0) {
    Bits64 word[kRouteLanes];
    const Bits64* pairs = context.logit_pairs + protocol::logit_pair_index(hidden, experts, row, expert, first);
    came &= wait_for_words<Scope::device>(
        context.line, Site::ROUTE, Source::own_blocks, context.tag, count, [&](int i) { return pairs + i; }, word);
    group = platform::bits_to_float(protocol::pair_word_value(word[0]));
    M3_UNROLL for (int i = 1; i < kRouteLanes; ++i) {
      if (i < count) group += platform::bits_to_float(protocol::pair_word_value(word[i]));
    }
  }
  float logit = group;
  M3_UNROLL for (int other = 1; other < kRouteLanes; ++other) {
    const float value = platform::shuffle_xor(group, other);
    if (other * kRouteLanes < parts) logit += value;
  }
  return logit;
}

// The number of experts among this lane's share that go before `expert`; the order is total: by key, the lower id on a tie.
template <class Shape>
M3_DEVICE_INLINE int experts_before(const Shared<Shape>& shared, int experts, int expert, float key) {
  const int quarter = (experts + 15) / 16 * 4, first = platform::lane_index() % kRouteLanes * quarter;
  int before = 0;
  for (int other = first; other < first + quarter; other += 4) {
    const Bytes16 four = *reinterpret_cast<const Bytes16*>(shared.key + other);
    M3_UNROLL for (int i = 0; i < 4; ++i) {
      const float other_key = platform::bits_to_float(four.word[i]);
      before += other_key > key || (other_key == key && other + i < expert);
    }
  }
  return before;
}

template <class Shape>
M3_DEVICE_INLINE void route(Context<Shape>& context) {
  const Shape& shape = context.shape;
  auto& shared = context.shared;
  const int experts = shape.experts(), top_k = shape.top_k();
  const int lane = platform::lane_index() % kRouteLanes, at_once = platform::block_threads() / kRouteLanes;
  const float least = -platform::bits_to_float(0x7F800000u);
  const Tasks tasks = tasks_of_block(protocol::ROUTE_START, shape.rows());
  for (int row = tasks.first; row < tasks.count; row += tasks.stride) {
    bool came = true;
    // Every lane goes round as often as the others: four exchange their sums. What fills the last keys goes before nobody.
    for (int base = 0; base < experts + 15; base += at_once) {
      const int expert = base + platform::thread_index() / kRouteLanes;
      const float logit = expert_logit(context, row, expert, came);
      if (lane != 0 || expert >= experts + 15) continue;
      if (expert >= experts) {
        shared.key[expert] = least;
        continue;
      }
      const float probability = sigmoid(logit);
      const float key = probability + context.arguments.router_bias[expert];
      shared.probability[expert] = probability == probability ? probability : 0.0f;
      shared.key[expert] = key == key ? key : least;
    }
    context.note(came);
    platform::block_barrier();
    for (int base = 0; base < experts; base += at_once) {
      const int expert = base + platform::thread_index() / kRouteLanes;
      int place = expert < experts ? experts_before(shared, experts, expert, shared.key[expert]) : top_k;
      M3_UNROLL for (int distance = 1; distance < kRouteLanes; distance *= 2) place += platform::shuffle_xor(place, distance);
      if (lane == 0 && place < top_k) shared.picked[place] = expert;
    }
    platform::block_barrier();
    const int pick = platform::thread_index();
    if (pick < top_k && context.may_announce(Site::TABLE)) {
      float sum = shared.probability[shared.picked[0]];
      M3_UNROLL for (int k = 1; k < Shape::kMostTopK; ++k) {
        if (k < top_k) sum += shared.probability[shared.picked[k]];
      }
      const float scale = context.arguments.constants.routed_scaling_factor * platform::reciprocal(sum > kLeastSum ? sum : kLeastSum);
      const int expert = context.is_padded(row) ? -1 : shared.picked[pick];
      Bits64* pairs = context.route_pairs + protocol::route_pair_index(top_k, row, pick);
      platform::store_device(pairs, context.pair(static_cast<Bits32>(expert)));
      platform::store_device(pairs + top_k, context.pair(platform::float_to_bits(shared.probability[shared.picked[pick]] * scale)));
    }
    platform::block_barrier();
  }
}

}  // namespace m3::ffn
