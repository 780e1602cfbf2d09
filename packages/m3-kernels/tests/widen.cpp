// The widening operations of a target by themselves, for tests: the CPU target's, or, with M3_PAIRS, those that the NVIDIA target has in
// m3/platform/fp8_by_pairs.h, on a bf16 product that rounds as its instruction is documented to. Compiled by nvcc, those of the device itself.
#include <cmath>
#include <cstring>

#ifdef M3_PAIRS

#include "m3/types.h"
#define M3_DEVICE_INLINE static inline
#define M3_DEVICE_METHOD
#define M3_UNROLL

namespace m3::platform {

constexpr int kFragmentRows = 2;
struct RowsBf16 {
  Bytes16 chunk[kFragmentRows];
};

inline double bf16_value(Bits32 half) {
  const Bits32 bits = half << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
// The product of two bf16 is exact in double precision; its last place in bf16 is worth 2^-133 at least.
inline Bits32 rounded_bf16(double value) {
  if (value != value) return 0x7FFF;
  int exponent;
  std::frexp(value, &exponent);
  const double last = std::ldexp(1.0, exponent - 8 > -133 ? exponent - 8 : -133);
  const float nearest = std::isinf(value) ? static_cast<float>(value) : static_cast<float>(std::nearbyint(value / last) * last);
  Bits32 bits;
  std::memcpy(&bits, &nearest, 4);
  return bits >> 16;
}
inline Bits32 multiply_pair(Bits32 a, Bits32 b) {
  return rounded_bf16(bf16_value(a & 0xFFFF) * bf16_value(b & 0xFFFF)) | rounded_bf16(bf16_value(a >> 16) * bf16_value(b >> 16)) << 16;
}
// As in m3/platform/nvidia.h.
inline Bits32 spread_nibbles(Bits32 codes, Bits32 mask, int shift) {
  return (codes & mask) * ((1u << (6 - shift)) + (1u << (12 - shift))) & 0x81C081C0u;
}
constexpr int fp4_element(int place) { return place / 2 + 4 * (place % 2); }

}  // namespace m3::platform

#include "m3/platform/fp8_by_pairs.h"

#else
#include "m3/platform.h"
#endif

using namespace m3;

namespace {

template <class Element>
M3_DEVICE_INLINE void put(const platform::RowsBf16 (&rows)[4], Element element, Bits16* out) {
  for (int step = 0; step < 4; ++step) {
    for (int place = 0; place < 8; ++place) {
      const Bits32 pair = rows[step].chunk[platform::kFragmentRows - 1].word[place / 2];
      out[8 * step + element(place)] = static_cast<Bits16>(pair >> (16 * (place % 2)));
    }
  }
}

// Sixteen bytes at any address.
M3_DEVICE_INLINE Bytes16 gather(const unsigned char* bytes) {
  Bytes16 found{};
  for (int i = 0; i < 16; ++i) found.word[i / 4] |= static_cast<Bits32>(bytes[i]) << (8 * (i % 4));
  return found;
}

struct Fp8Element {
  M3_DEVICE_METHOD int operator()(int place) const { return platform::fp8_element(place); }
};
struct Fp4Element {
  M3_DEVICE_METHOD int operator()(int place) const { return platform::fp4_element(place); }
};

template <bool kAnyScale>
struct WidenFp8 {
  M3_DEVICE_METHOD static void one(const unsigned char* codes, const unsigned char* scales, Bits16* out, int i) {
    Bytes16 own[platform::kFragmentRows][2] = {};
    Bits32 scale_codes[platform::kFragmentRows] = {};
    constexpr int kLast = platform::kFragmentRows - 1;
    for (int half = 0; half < 2; ++half) own[kLast][half] = gather(codes + 32 * i + 16 * half);
    // Whatever else the word holds.
    scale_codes[kLast] = scales[2 * i] | static_cast<Bits32>(scales[2 * i + 1]) << 16 | 0xA500C300u;
    platform::RowsBf16 rows[4];
    platform::widen_fp8<kAnyScale>(own, scale_codes, rows);
    put(rows, Fp8Element{}, out + 32 * i);
  }
};

struct WidenFp4 {
  M3_DEVICE_METHOD static void one(const unsigned char* codes, const unsigned char* scales, Bits16* out, int i) {
    Bytes16 own[platform::kFragmentRows] = {};
    Bits32 scale_codes[platform::kFragmentRows] = {};
    constexpr int kLast = platform::kFragmentRows - 1;
    own[kLast] = gather(codes + 16 * i);
    scale_codes[kLast] = scales[2 * i] | static_cast<Bits32>(scales[2 * i + 1]) << 8;
    platform::RowsBf16 rows[4];
    platform::widen_fp4_e4m3(own, scale_codes, rows);
    put(rows, Fp4Element{}, out + 32 * i);
  }
};

#ifdef __CUDACC__
template <class Widen>
__global__ void each(const unsigned char* codes, const unsigned char* scales, Bits16* out, int count) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) Widen::one(codes, scales, out, i);
}
template <class Widen>
int all(const unsigned char* codes, const unsigned char* scales, Bits16* out, int count) {
  each<Widen><<<(count + 127) / 128, 128>>>(codes, scales, out, count);
  return static_cast<int>(cudaDeviceSynchronize());
}
#else
template <class Widen>
int all(const unsigned char* codes, const unsigned char* scales, Bits16* out, int count) {
  for (int i = 0; i < count; ++i) Widen::one(codes, scales, out, i);
  return 0;
}
#endif

}  // namespace

// `count` times 32 codes, the first 16 with one scale and the others with the next, to bf16 in the order of the codes. Returns 0, or a CUDA error.
extern "C" int widen_fp8_any(const unsigned char* codes, const unsigned char* scales, Bits16* out, int count) {
  return all<WidenFp8<true>>(codes, scales, out, count);
}
extern "C" int widen_fp8_plain(const unsigned char* codes, const unsigned char* scales, Bits16* out, int count) {
  return all<WidenFp8<false>>(codes, scales, out, count);
}
extern "C" int widen_fp4_e4m3(const unsigned char* codes, const unsigned char* scales, Bits16* out, int count) {
  return all<WidenFp4>(codes, scales, out, count);
}
