// Weights in flight: the next kDepth steps of a wave's weights, loaded ahead of their use and, at the start, ahead of the wait for the
// activations that they meet.
#pragma once
#include "m3/platform.h"

namespace m3::ffn {

template <class Source, int kDepth>
class WeightRing {
 public:
  using Step = typename Source::Step;

  // Starts loading. `source.load(step)` is called once for every step below `steps`, in order.
  M3_DEVICE_METHOD WeightRing(const Source& source, int steps) : source_(source), steps_(steps) {
    M3_UNROLL for (int step = 0; step < kDepth; ++step) {
      if (step < steps) ahead_[step] = source.load(step);
    }
  }

  // The weights of `step`; steps are taken in order. The freed place is filled at once.
  M3_DEVICE_METHOD Step take(int step) {
    const Step taken = ahead_[step % kDepth];
    if (step + kDepth < steps_) ahead_[step % kDepth] = source_.load(step + kDepth);
    return taken;
  }

 private:
  Source source_;
  int steps_;
  Step ahead_[kDepth];
};

}  // namespace m3::ffn
