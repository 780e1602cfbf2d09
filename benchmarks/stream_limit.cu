// What a launch could do at best: blocks that only read bytes, each once, sixteen a load and eight loads in flight a thread.
extern "C" __global__ __launch_bounds__(512) void stream(const uint4* bytes, unsigned long long count, uint4* sink) {
  uint4 all = {0, 0, 0, 0};
  const unsigned long long stride = static_cast<unsigned long long>(gridDim.x) * blockDim.x;
  unsigned long long i = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  const auto take = [&](const uint4& value) {
    all.x ^= value.x;
    all.y ^= value.y;
    all.z ^= value.z;
    all.w ^= value.w;
  };
  for (; i + 7 * stride < count; i += 8 * stride) {
    uint4 value[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(value[k].x), "=r"(value[k].y), "=r"(value[k].z), "=r"(value[k].w)
                   : "l"(bytes + i + k * stride));
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) take(value[k]);
  }
  for (; i < count; i += stride) take(bytes[i]);
  // Never true for random bytes, which the compiler cannot know.
  if (all.x == 1 && all.y == 2 && all.z == 3 && all.w == 4) *sink = all;
}
