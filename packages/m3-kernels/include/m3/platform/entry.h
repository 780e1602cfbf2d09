// M3_KERNEL(name, Format, Shape): the launch as the target's host starts it.
#pragma once
#include "m3/ffn/launch.h"

#if defined(__HIP__) || defined(__CUDACC__)
#include "m3/platform/gpu_entry.h"
#else
#include "m3/platform/cpu/entry.h"
#endif
