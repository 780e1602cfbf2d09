// What the host passes to a launch. The host mirrors this struct field by field and compares offsets when it loads the library.
#pragma once
#include "m3/shape.h"

namespace m3::ffn {

enum class Mode : int { skip = 0, run = 1 };

// Bytes from the start of scratch to its regions (protocol.h); the host computes them once a row count. The sums of squares begin it.
struct Regions {
  int x_ready, logit, route, intermediate_ready;  // pairs
  int stream, x, mid;                             // data
  int timeline;                                   // clock stamps, if any
};

// Rounding-free constants of the model.
struct Constants {
  float rms_norm_eps;
  float swiglu_alpha;
  float swiglu_beta;
  float swiglu_limit;
  float routed_scaling_factor;
};

struct Arguments {
  const Bits16* part;          // bf16 [rows, hidden], this rank's unreduced attention output projection
  const Bits16* residual;      // bf16 [rows, hidden]
  const long long* slots;      // [rows]; negative is a padded row
  const Bits16* post_norm;     // bf16 [hidden]
  const float* router;         // [experts, hidden]
  const float* router_bias;    // [experts]
  const unsigned char* w13;    // experts + 1 matrices of 2 * intermediate rows (gate, then up) of hidden values; the last is the shared expert
  const unsigned char* s13;    // its scales, if the format has any
  const unsigned char* w2;     // experts + 1 matrices of hidden rows of intermediate values
  const unsigned char* s2;     // its scales
  const float* g13;            // [experts + 1] a global scale of each expert's w13, if the format has any
  const float* g2;             // [experts + 1] of its w2
  unsigned char* scratch;      // private to one row count of one channel
  int* epoch_words;            // epoch, claim, marks
  const int* injection;        // [4] rank + 1 (0: none), delay in ticks; two more words for test builds
  Bits16* out;                 // bf16 [rows, hidden]
  Bits16* residual_out;        // bf16 [rows, hidden]
  unsigned char* flight;       // ring of the flight recorder, or null
  long long wait_ticks;        // bound of every wait
  long long peers[DynamicShape::kMostRanks];  // addresses of the peer buffers by rank, this rank's included
  Sizes sizes;
  Regions regions;
  Constants constants;
  int rank;
  int layer;
  int handshake;       // 1 on the step's last sparse layer
  int mode;            // Mode
  int timeline;        // 1: stamp the clock of every block at every stage
  int flight_launches; // launches that the ring keeps
};

}  // namespace m3::ffn
