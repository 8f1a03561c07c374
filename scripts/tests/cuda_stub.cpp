// A stand-in for CUDA's runtime, for machines without a GPU: programs of the
// tests are linked with it. Its memory of a GPU is the host's, in a shape that
// shows the mistakes which a real GPU would punish:
//
// - A program that touches it by itself dies: nobody may touch the addresses
//   that cudaMalloc returns. The same memory is mapped once more, for the copies
//   made here and for the adapter (strict.cpp).
// - A copy of what an adapter has written, and nothing has flushed, breaks a rule
//   of strict.cpp. A real GPU would show it to the copy, but perhaps not to a
//   kernel that is running.
// - A copy or cudaMemset to the GPU happens no earlier than it has to:
//   in cudaDeviceSynchronize, or when something is copied from the GPU.
//
//   CUDA_STUB_FAIL=NAME:N  the N-th call (from 1) of this function fails
//   CUDA_STUB_ORDERING=N   a cudaGPUDirectRDMAWritesOrdering (0: none)
//   CUDA_STUB_FLUSH=N      cudaFlushGPUDirectRDMAWritesOptions (1: by the host)

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

constexpr size_t kPageSize = 4096;

int Setting(const char* name, int otherwise) {
  const char* value = getenv(name);
  return value ? atoi(value) : otherwise;
}

// Tells strict.cpp something, if it is loaded.
template <typename... Args>
void Tell(const char* name, Args... args) {
  void* function = dlsym(RTLD_DEFAULT, name);
  if (function != nullptr)
    reinterpret_cast<void (*)(Args...)>(function)(args...);
}

// Begins each function: counts its calls, and returns what it has to return
// unless it is to do its work.
cudaError_t Call(const char* name) {
  static std::map<std::string, int> calls;
  std::string call = std::string(name) + ":" + std::to_string(++calls[name]);
  const char* to_fail = getenv("CUDA_STUB_FAIL");
  if (to_fail == nullptr || call != to_fail) return cudaSuccess;
  fprintf(stderr, "cuda_stub: %s fails\n", call.c_str());
  return cudaErrorUnknown;
}

// What has been allocated at an address.
struct Memory {
  char* alias;  // the memory, as an adapter sees it
  char* seen;   // as a running kernel may see it
  size_t size;  // a multiple of that of a page
};
std::map<char*, Memory> g_memory;

// A part of it.
struct Place {
  char* alias = nullptr;  // nullptr: this is memory of the host
  char* seen = nullptr;
  size_t room = 0;  // bytes, to the end of the allocation
};

Place Find(const void* address) {
  auto* at = static_cast<char*>(const_cast<void*>(address));
  auto it = g_memory.upper_bound(at);
  if (it == g_memory.begin()) return {};
  const auto& [data, memory] = *--it;
  if (at >= data + memory.size) return {};
  auto offset = static_cast<size_t>(at - data);
  return {memory.alias + offset, memory.seen + offset, memory.size - offset};
}

// What is still to be done.
std::vector<std::function<void()>> g_late;

void Finish() {
  for (const auto& action : g_late) action();
  g_late.clear();
}

// Returns whether work that is running needs a flush to see what an adapter has
// written. A GPU that has no such order and no flush is none that one can test with.
bool NeedsFlush() {
  return Setting("CUDA_STUB_ORDERING", 0) <
             cudaGPUDirectRDMAWritesOrderingOwner &&
         Setting("CUDA_STUB_FLUSH", 1) != 0;
}

extern "C" {

cudaError_t cudaMalloc(void** data, size_t size) {
  if (cudaError_t error = Call(__func__)) return error;
  size = (size + kPageSize - 1) / kPageSize * kPageSize;
  int fd = memfd_create("gpu", 0);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(size)) != 0) {
    return cudaErrorMemoryAllocation;
  }
  auto map = [&](int rights, int flags) {
    return static_cast<char*>(mmap(nullptr, size, rights, flags, fd, 0));
  };
  char* device = map(PROT_NONE, MAP_SHARED);
  char* alias = map(PROT_READ | PROT_WRITE, MAP_SHARED);
  close(fd);
  char* seen = static_cast<char*>(malloc(size));
  if (device == MAP_FAILED || alias == MAP_FAILED || seen == nullptr) {
    return cudaErrorMemoryAllocation;
  }
  memset(alias, 0xcd, size);  // whatever was there before
  memset(seen, 0xcd, size);
  g_memory[device] = {alias, seen, size};
  Tell("strict_gpu_memory", static_cast<void*>(device),
       static_cast<void*>(alias), size);
  *data = device;
  return cudaSuccess;
}

cudaError_t cudaFree(void* data) {
  if (cudaError_t error = Call(__func__)) return error;
  auto it = g_memory.find(static_cast<char*>(data));
  if (it == g_memory.end()) return cudaErrorInvalidValue;
  Finish();
  Tell("strict_gpu_memory_freed", data);
  munmap(data, it->second.size);
  munmap(it->second.alias, it->second.size);
  free(it->second.seen);
  g_memory.erase(it);
  return cudaSuccess;
}

cudaError_t cudaMemset(void* data, int value, size_t size) {
  if (cudaError_t error = Call(__func__)) return error;
  Place place = Find(data);
  if (size > place.room) return cudaErrorInvalidValue;
  g_late.push_back([=] {
    memset(place.alias, value, size);
    memset(place.seen, value, size);
  });
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t size,
                       enum cudaMemcpyKind kind) {
  if (cudaError_t error = Call(__func__)) return error;
  Place target = Find(to);
  Place source = Find(from);
  bool to_gpu = target.alias != nullptr;
  if (kind != cudaMemcpyDefault || to_gpu == (source.alias != nullptr) ||
      size > (to_gpu ? target.room : source.room)) {
    return cudaErrorInvalidValue;
  }
  if (!to_gpu) {
    Finish();
    if (NeedsFlush() && memcmp(source.seen, source.alias, size) != 0) {
      Tell("strict_gpu_not_flushed");
    }
    memcpy(to, source.alias, size);
    return cudaSuccess;
  }
  // The program may reuse its memory, so we keep a copy.
  std::string bytes(static_cast<const char*>(from), size);
  g_late.push_back([target, bytes = std::move(bytes)] {
    memcpy(target.alias, bytes.data(), bytes.size());
    memcpy(target.seen, bytes.data(), bytes.size());
  });
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  if (cudaError_t error = Call(__func__)) return error;
  Finish();
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr attribute,
                                   int device) {
  if (cudaError_t error = Call(__func__)) return error;
  if (device != 0) return cudaErrorInvalidValue;
  if (attribute == cudaDevAttrGPUDirectRDMAWritesOrdering) {
    *value = Setting("CUDA_STUB_ORDERING", 0);
  } else if (attribute == cudaDevAttrGPUDirectRDMAFlushWritesOptions) {
    *value = Setting("CUDA_STUB_FLUSH", 1);
  } else {
    return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceFlushGPUDirectRDMAWrites(
    enum cudaFlushGPUDirectRDMAWritesTarget,
    enum cudaFlushGPUDirectRDMAWritesScope) {
  if (cudaError_t error = Call(__func__)) return error;
  if (Setting("CUDA_STUB_FLUSH", 1) == 0) return cudaErrorInvalidValue;
  for (auto& [data, memory] : g_memory) {
    memcpy(memory.seen, memory.alias, memory.size);
  }
  return cudaSuccess;
}

const char* cudaGetErrorString(cudaError_t error) {
  if (error == cudaErrorUnknown) return "unknown error";
  return error == cudaErrorMemoryAllocation ? "out of memory"
                                            : "invalid argument";
}

}  // extern "C"
