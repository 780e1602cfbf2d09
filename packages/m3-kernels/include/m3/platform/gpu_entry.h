// An entry on a GPU is a kernel of the same name that takes the arguments by value.
#pragma once

#include <cstddef>

#ifndef M3_BUILD_KEY
#define M3_BUILD_KEY "unkeyed"
#endif

#if defined(__CUDACC__)

// What a host reads before the first launch: the key of the sources and flags, the layout of the arguments (offset and size of every field,
// in order), and the block's shared memory, which exceeds what a kernel may declare.
extern "C" __device__ const char m3_build_key[] = M3_BUILD_KEY;

#define M3_FIELD(field) static_cast<unsigned>(offsetof(m3::ffn::Arguments, field)), static_cast<unsigned>(sizeof(m3::ffn::Arguments::field))
extern "C" __device__ const unsigned m3_arguments_layout[] = {
    M3_FIELD(part),    M3_FIELD(residual), M3_FIELD(slots),       M3_FIELD(post_norm), M3_FIELD(router),    M3_FIELD(router_bias), M3_FIELD(w13),
    M3_FIELD(s13),     M3_FIELD(w2),       M3_FIELD(s2),          M3_FIELD(g13),     M3_FIELD(g2),        M3_FIELD(scratch),   M3_FIELD(epoch_words), M3_FIELD(injection),
    M3_FIELD(out),     M3_FIELD(residual_out), M3_FIELD(flight),  M3_FIELD(wait_ticks), M3_FIELD(peers), M3_FIELD(sizes),    M3_FIELD(regions),     M3_FIELD(constants),
    M3_FIELD(rank),    M3_FIELD(layer),    M3_FIELD(handshake),   M3_FIELD(mode),      M3_FIELD(timeline),  M3_FIELD(flight_launches),
};
#undef M3_FIELD

#define M3_KERNEL(name, Format, Shape)                                                                  \
  extern "C" __device__ const unsigned name##_shared_bytes = sizeof(m3::ffn::Shared<Shape>);            \
  extern "C" M3_GLOBAL void M3_LAUNCH_BOUNDS name(const M3_PARAMETER m3::ffn::Arguments arguments) { \
    extern __shared__ m3::Bytes16 m3_shared[];                                                          \
    m3::ffn::launch<Format, Shape>(arguments, *reinterpret_cast<m3::ffn::Shared<Shape>*>(m3_shared));   \
  }

#else

#define M3_KERNEL(name, Format, Shape)                                                                  \
  extern "C" M3_GLOBAL void M3_LAUNCH_BOUNDS name(const M3_PARAMETER m3::ffn::Arguments arguments) {    \
    M3_SHARED m3::ffn::Shared<Shape> shared;                                                            \
    m3::ffn::launch<Format, Shape>(arguments, shared);                                                  \
  }

#endif
