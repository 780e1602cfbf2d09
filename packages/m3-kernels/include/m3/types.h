// The few value types that stages, formats and platforms share.
#pragma once

namespace m3 {

using Bits16 = unsigned short;
using Bits32 = unsigned int;
using Bits64 = unsigned long long;
static_assert(sizeof(Bits16) == 2 && sizeof(Bits32) == 4 && sizeof(Bits64) == 8);

// Memory that is written as one type and read as another goes through types that may alias any other.
#define M3_MAY_ALIAS [[gnu::may_alias]]

// Sixteen bytes that move in one load or store: eight bf16, four fp32, thirty-two FP4 codes.
struct alignas(16) M3_MAY_ALIAS Bytes16 {
  Bits32 word[4];
};

struct alignas(8) M3_MAY_ALIAS Bytes8 {
  Bits32 word[2];
};

using AliasingBits16 M3_MAY_ALIAS = Bits16;
using AliasingBits32 M3_MAY_ALIAS = Bits32;
using AliasingBits64 M3_MAY_ALIAS = Bits64;

}  // namespace m3
