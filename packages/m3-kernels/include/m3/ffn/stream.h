// Weights in flight: a wave's next steps, loaded ahead of their use, across the borders of its tasks, and at the start ahead of the wait for
// the activations that they meet.
//
// Steps, a K block each, come in groups, so that within a group every address is a pointer and a constant. `Work` is a place in the wave's
// list of groups: kGroup, the steps of a group, a multiple of the format's depth; valid(), advance(); tile(matrices), the weights of the group;
// steps(), how many of its steps have a K block; whole(): every step of every group has one.
#pragma once
#include "m3/platform.h"

namespace m3::ffn {

constexpr int kBlockK = 128;

// Steps of a group for `blocks` K blocks a task: all of them, if they are few, or six, where that leaves nothing over.
M3_DEVICE_INLINE constexpr int group_of(int blocks, int depth) {
  constexpr int kMost = 6;
  if (blocks <= kMost && blocks % depth == 0) return blocks;
  return blocks % kMost == 0 && kMost % depth == 0 ? kMost : depth;
}

template <class Format, class Work>
class WeightStream {
 public:
  M3_DEVICE_METHOD WeightStream(const typename Format::Matrices& matrices, const Work& first) : matrices_(matrices), ahead_place_(first) {
    find_next();
    current_ = next_;
    M3_UNROLL for (int i = 0; i < kDepth; ++i) matrices_.load(ahead_[i], current_, i, has_step(next_steps_, i));
    current_steps_ = next_steps_;
    skip();
  }

  // Whether everything has been loaded or is on its way.
  M3_DEVICE_METHOD bool drained() const { return next_steps_ == 0; }

  // Calls use(i, weights) for every step of the next group, in order. The freed place is filled at once.
  template <class Use>
  M3_DEVICE_METHOD void take_group(Use use) {
    M3_UNROLL for (int i = 0; i < kGroup; ++i) {
      use(i, ahead_[i % kDepth]);
      const int ahead = i + kDepth;
      if (ahead < kGroup) {
        matrices_.load(ahead_[i % kDepth], current_, ahead, has_step(current_steps_, ahead));
      } else {
        matrices_.load(ahead_[i % kDepth], next_, ahead - kGroup, has_step(next_steps_, ahead - kGroup));
      }
    }
    current_ = next_;
    current_steps_ = next_steps_;
    skip();
  }

 private:
  static constexpr int kDepth = Format::kDepth, kGroup = Work::kGroup;
  static_assert(kGroup % kDepth == 0);

  M3_DEVICE_METHOD bool has_step(int steps, int i) const { return ahead_place_.whole() ? steps > 0 : i < steps; }
  M3_DEVICE_METHOD void find_next() {
    next_steps_ = ahead_place_.valid() ? ahead_place_.steps() : 0;
    if (next_steps_ > 0) next_ = ahead_place_.tile(matrices_);
  }
  M3_DEVICE_METHOD void skip() {
    if (next_steps_ == 0) return;
    ahead_place_.advance();
    find_next();
  }

  typename Format::Matrices matrices_;
  Work ahead_place_;  // of next_
  typename Format::Tile current_{}, next_{};
  typename Format::Block ahead_[kDepth]{};
  int current_steps_ = 0, next_steps_ = 0;
};

}  // namespace m3::ffn
