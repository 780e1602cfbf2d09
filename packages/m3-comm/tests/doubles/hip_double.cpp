// The part of the HIP runtime's C interface that m3_comm uses, over host memory. Prototypes as in HIP's documentation of its runtime API.
#include "device_double.h"

using device_double::note;

using hipError_t = int;
struct hipIpcMemHandle_t {
  char reserved[64];
};

namespace {
int current_device = 0;
constexpr int kDevices = 4;
constexpr std::uint64_t kVirtualMemory = 0x7000'0000'0000, kManagedMemory = 0x7100'0000'0000;
int device() { return current_device; }
std::uint64_t number(const void* pointer) { return reinterpret_cast<std::uint64_t>(pointer); }
}  // namespace

extern "C" {

const char* hipGetErrorName(hipError_t error) {
  return error == 1 ? "hipErrorInvalidValue" : error == 2 ? "hipErrorOutOfMemory" : error == 101 ? "hipErrorInvalidDevice" : error == 4 ? "hipErrorDeinitialized" : "hipErrorUnknown";
}

hipError_t hipGetDevice(int* out) {
  *out = current_device;
  return device_double::state().failing == "hipGetDevice" ? device_double::state().failing_status : 0;
}

hipError_t hipSetDevice(int index) {
  if (index < 0 || index >= kDevices) return 101;
  current_device = index;
  return 0;
}

hipError_t hipDeviceSynchronize() { return note("hipDeviceSynchronize", "device=%d", device()); }

hipError_t hipExtMallocWithFlags(void** out, std::size_t size, unsigned flags) {
  if (const int status = note("hipExtMallocWithFlags", "device=%d size=%zu flags=%u", device(), size, flags)) return status;
  if (flags != 0 && flags != 1 && flags != 3) return 1;
  std::uint64_t address = 0;
  const int status = device_double::allocate(size, &address);
  *out = reinterpret_cast<void*>(address);
  return status;
}

hipError_t hipFree(void* pointer) {
  if (const int status = note("hipFree", "device=%d pointer=%#lx", device(), number(pointer))) return status;
  return device_double::release(device_double::state().owned, number(pointer));
}

hipError_t hipMemset(void* pointer, int value, std::size_t size) {
  if (const int status = note("hipMemset", "device=%d pointer=%#lx value=%d size=%zu", device(), number(pointer), value, size)) return status;
  std::memset(pointer, value, size);
  return 0;
}

hipError_t hipMemcpy(void* to, const void* from, std::size_t size, int kind) {
  std::uint64_t base;
  std::size_t extent;
  const bool to_device = device_double::range_of(number(to), &base, &extent);
  if (const int status = note("hipMemcpy", "device=%d size=%zu kind=%d", device(), size, kind)) return status;
  if (kind != (to_device ? 1 : 2)) return 1;
  std::memcpy(to, from, size);
  return 0;
}

hipError_t hipIpcGetMemHandle(hipIpcMemHandle_t* handle, void* pointer) {
  if (const int status = note("hipIpcGetMemHandle", "device=%d pointer=%#lx", device(), number(pointer))) return status;
  return device_double::export_handle(number(pointer), handle);
}

hipError_t hipIpcOpenMemHandle(void** out, hipIpcMemHandle_t handle, unsigned flags) {
  if (const int status = note("hipIpcOpenMemHandle", "device=%d flags=%u", device(), flags)) return status;
  if (flags != 1) return 1;
  std::uint64_t address = 0;
  const int status = device_double::open_handle(&handle, &address);
  *out = reinterpret_cast<void*>(address);
  return status;
}

hipError_t hipIpcCloseMemHandle(void* pointer) {
  if (const int status = note("hipIpcCloseMemHandle", "device=%d pointer=%#lx", device(), number(pointer))) return status;
  return device_double::release(device_double::state().mapped, number(pointer));
}

hipError_t hipMemGetAddressRange(void** base, std::size_t* size, void* pointer) {
  std::uint64_t start;
  if (!device_double::range_of(number(pointer), &start, size)) return 1;
  *base = reinterpret_cast<void*>(start);
  return 0;
}

hipError_t hipPointerGetAttribute(void* data, int attribute, void* pointer) {
  if (attribute != 8) return 1;
  *static_cast<bool*>(data) = number(pointer) == kManagedMemory;
  return 0;
}

hipError_t hipMemRetainAllocationHandle(void** handle, void* pointer) {
  if (number(pointer) != kVirtualMemory) return 1;
  note("hipMemRetainAllocationHandle", "");
  *handle = reinterpret_cast<void*>(0x77);
  return 0;
}

hipError_t hipMemRelease(void* handle) { return note("hipMemRelease", "handle=%#lx", number(handle)); }

hipError_t hipHostRegister(void* pointer, std::size_t size, unsigned flags) {
  if (const int status = note("hipHostRegister", "device=%d size=%zu flags=%u", device(), size, flags)) return status;
  return device_double::pin(number(pointer), size);
}

hipError_t hipHostGetDevicePointer(void** out, void* pointer, unsigned flags) {
  if (const int status = note("hipHostGetDevicePointer", "device=%d flags=%u", device(), flags)) return status;
  *out = pointer;
  return flags == 0 && device_double::state().pinned.count(number(pointer)) ? 0 : 1;
}

hipError_t hipHostUnregister(void* pointer) {
  if (const int status = note("hipHostUnregister", "device=%d", device())) return status;
  return device_double::unpin(number(pointer));
}
}
