// An entry on the CPU is an exported function that runs the resident blocks of a channel; beside it, what a host needs to use the library.
#pragma once
#include <cerrno>
#include <cstddef>
#include <new>
#include <system_error>

#include "m3/platform/cpu.h"

#ifndef M3_BUILD_KEY
#define M3_BUILD_KEY "unkeyed"
#endif

#define M3_EXPORT extern "C" __attribute__((visibility("default")))

namespace m3::platform::cpu {

template <class Format, class Shape>
void run_thread(const void* arguments) {
  ffn::launch<Format, Shape>(*static_cast<const ffn::Arguments*>(arguments), *static_cast<ffn::Shared<Shape>*>(current->shared()));
}

}  // namespace m3::platform::cpu

// Returns when every thread of every block has returned. `residents` serves one launch at a time.
#define M3_KERNEL(name, Format, Shape)                                                                                           \
  M3_EXPORT void name(void* residents, const m3::ffn::Arguments* arguments) {                                                    \
    static_cast<m3::platform::cpu::Residents*>(residents)->launch(&m3::platform::cpu::run_thread<Format, Shape>, arguments);    \
  }

// The key of the sources and flags that this library was compiled from; a host compares it with the key it looked for.
M3_EXPORT const char* m3_build_key() { return M3_BUILD_KEY; }

// "field:offset:size;..." of the arguments, so that a host can compare its own.
M3_EXPORT const char* m3_arguments_layout() {
  static char text[2048];
  using m3::ffn::Arguments;
  char* end = text;
#define M3_ADD(field)                                                                                                             \
  end += std::snprintf(end, static_cast<std::size_t>(text + sizeof text - end), "%s:%zu:%zu;", #field, offsetof(Arguments, field), \
                       sizeof(Arguments::field))
  M3_ADD(part);
  M3_ADD(residual);
  M3_ADD(slots);
  M3_ADD(post_norm);
  M3_ADD(router);
  M3_ADD(router_bias);
  M3_ADD(w13);
  M3_ADD(s13);
  M3_ADD(w2);
  M3_ADD(s2);
  M3_ADD(g13);
  M3_ADD(g2);
  M3_ADD(scratch);
  M3_ADD(epoch_words);
  M3_ADD(injection);
  M3_ADD(out);
  M3_ADD(residual_out);
  M3_ADD(flight);
  M3_ADD(wait_ticks);
  M3_ADD(peers);
  M3_ADD(sizes);
  M3_ADD(regions);
  M3_ADD(constants);
  M3_ADD(rank);
  M3_ADD(layer);
  M3_ADD(handshake);
  M3_ADD(mode);
  M3_ADD(timeline);
  M3_ADD(flight_launches);
#undef M3_ADD
  return text;
}

M3_EXPORT int m3_wave_width() { return m3::platform::kWaveWidth; }
M3_EXPORT long long m3_ticks_per_second() { return m3::platform::kTicksPerSecond; }

// `grid` resident blocks of `block_threads` threads, or null with errno set.
M3_EXPORT void* m3_residents_create(int grid, int block_threads, std::size_t shared_bytes) {
  try {
    return new m3::platform::cpu::Residents(grid, block_threads, shared_bytes);
  } catch (const std::system_error& error) {
    errno = error.code().value();
  } catch (const std::bad_alloc&) {
    errno = ENOMEM;
  }
  return nullptr;
}
M3_EXPORT void m3_residents_destroy(void* residents) { delete static_cast<m3::platform::cpu::Residents*>(residents); }

// The host's view of a fault word: two 64-bit words, read so that a set word comes with the rest.
M3_EXPORT void m3_read_fault(const m3::Bits64* line, m3::Bits64* words) {
  words[0] = m3::platform::load_system(line);
  words[1] = m3::platform::load_system(line + 1);
}

// A host gives up for its rank: (1, rank, -1, 0) on every rank that knows of no fault yet.
M3_EXPORT void m3_abort(const long long* peers, int world, int rank) {
  for (int target = 0; target < world; ++target) {
    m3::Bits64* line = reinterpret_cast<m3::Bits64*>(peers[target]);
    if ((m3::platform::load_system(line) & 0xFFFFFFFFu) == 0) m3::write_fault(line, rank, m3::protocol::HOST_EPOCH, 0);
  }
}

M3_EXPORT std::size_t m3_shared_bytes() { return sizeof(m3::ffn::Shared<m3::DynamicShape>); }
