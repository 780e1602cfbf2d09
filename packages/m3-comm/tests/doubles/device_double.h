// Device memory that is really host memory, shared between processes through their file descriptors, and a record of every call. What a
// GPU library would refuse is refused here with the library's "invalid value".
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>

namespace device_double {

constexpr int kInvalidValue = 1;

struct Memory {
  std::size_t size;
  int descriptor;
};

struct State {
  std::string record;
  std::map<std::uint64_t, Memory> owned, mapped;
  std::map<std::uint64_t, std::size_t> pinned;
  std::string failing;
  int failing_status = 0;
  int failing_calls = 0;
};

inline State& state() {
  static State instance;
  return instance;
}

// Adds a line to the record; returns the status that a test asked for, if this is the call, or 0.
inline int note(const char* name, const char* format, ...) {
  char text[256];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  State& s = state();
  s.record += std::string(name) + (text[0] ? " " : "") + text + "\n";
  if (s.failing == name && s.failing_calls > 0 && --s.failing_calls == 0) return s.failing_status;
  return 0;
}

inline int map_descriptor(int descriptor, std::size_t size, std::uint64_t* address) {
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (memory == MAP_FAILED) return kInvalidValue;
  *address = reinterpret_cast<std::uint64_t>(memory);
  return 0;
}

// Fresh device memory holds garbage: who needs zeros must write them.
inline int allocate(std::size_t size, std::uint64_t* address) {
  const int descriptor = memfd_create("device", MFD_CLOEXEC);
  if (descriptor < 0 || ftruncate(descriptor, off_t(size)) != 0 || map_descriptor(descriptor, size, address) != 0) return 2;
  std::memset(reinterpret_cast<void*>(*address), 0xA5, size);
  state().owned[*address] = {size, descriptor};
  return 0;
}

inline int release(std::map<std::uint64_t, Memory>& memories, std::uint64_t address) {
  const auto found = memories.find(address);
  if (found == memories.end()) return kInvalidValue;
  munmap(reinterpret_cast<void*>(address), found->second.size);
  close(found->second.descriptor);
  memories.erase(found);
  return 0;
}

struct Handle {
  char magic[8];
  std::uint64_t size;
  int process, descriptor;
  char rest[40];
};
static_assert(sizeof(Handle) == 64);

inline int export_handle(std::uint64_t address, void* handle) {
  const auto found = state().owned.find(address);
  if (found == state().owned.end() || found->second.size % 4096 != 0) return kInvalidValue;
  Handle made{{'d', 'o', 'u', 'b', 'l', 'e', 0, 1}, found->second.size, getpid(), found->second.descriptor, {}};
  // The last bytes count too: a handle that was cut at a zero byte is not opened.
  made.rest[39] = 0x5A;
  std::memcpy(handle, &made, sizeof made);
  return 0;
}

inline int open_handle(const void* handle, std::uint64_t* address) {
  Handle given;
  std::memcpy(&given, handle, sizeof given);
  if (std::memcmp(given.magic, "double\0\1", 8) != 0 || given.rest[39] != 0x5A || given.process == getpid()) return kInvalidValue;
  const std::string path = "/proc/" + std::to_string(given.process) + "/fd/" + std::to_string(given.descriptor);
  const int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (descriptor < 0 || map_descriptor(descriptor, given.size, address) != 0) return kInvalidValue;
  state().mapped[*address] = {given.size, descriptor};
  return 0;
}

// The memory that an address lies in.
inline bool range_of(std::uint64_t address, std::uint64_t* base, std::size_t* size) {
  for (const auto* memories : {&state().owned, &state().mapped}) {
    for (const auto& [start, memory] : *memories) {
      if (start <= address && address < start + memory.size) {
        *base = start;
        *size = memory.size;
        return true;
      }
    }
  }
  return false;
}

inline int pin(std::uint64_t address, std::size_t size) {
  if (address % 4096 != 0 || size % 4096 != 0 || state().pinned.count(address)) return kInvalidValue;
  state().pinned[address] = size;
  return 0;
}

inline int unpin(std::uint64_t address) { return state().pinned.erase(address) ? 0 : kInvalidValue; }

}  // namespace device_double

// What the tests use beside the library's own functions.
extern "C" {
const char* double_record() { return device_double::state().record.c_str(); }
void double_forget() { device_double::state().record.clear(); }
int double_held() {
  const auto& s = device_double::state();
  return int(s.owned.size() + s.mapped.size() + s.pinned.size());
}
// The `calls`-th call of `name` from now on returns `status`.
void double_fail(const char* name, int status, int calls) {
  auto& s = device_double::state();
  s.failing = name;
  s.failing_status = status;
  s.failing_calls = calls;
}
}
