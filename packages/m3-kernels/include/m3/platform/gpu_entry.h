// An entry on a GPU is a kernel of the same name that takes the arguments by value.
#pragma once

#define M3_KERNEL(name, Format, Shape)                                                                  \
  extern "C" M3_GLOBAL void M3_LAUNCH_BOUNDS name(const M3_PARAMETER m3::ffn::Arguments arguments) {    \
    M3_SHARED m3::ffn::Shared<Shape> shared;                                                            \
    m3::ffn::launch<Format, Shape>(arguments, shared);                                                  \
  }
