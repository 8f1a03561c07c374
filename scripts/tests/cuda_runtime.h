// Declares what the programs use of CUDA's runtime, for machines without the CUDA
// Toolkit: cuda_stub.cpp implements it. The numbers are those of the toolkit's own
// header.

#pragma once

#include <stddef.h>

enum cudaError {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorUnknown = 999
};
typedef enum cudaError cudaError_t;

enum cudaMemcpyKind { cudaMemcpyDefault = 4 };

enum cudaDeviceAttr {
  cudaDevAttrGPUDirectRDMAFlushWritesOptions = 117,
  cudaDevAttrGPUDirectRDMAWritesOrdering = 118
};

enum cudaGPUDirectRDMAWritesOrdering {
  cudaGPUDirectRDMAWritesOrderingOwner = 100
};

enum cudaFlushGPUDirectRDMAWritesOptions {
  cudaFlushGPUDirectRDMAWritesOptionHost = 1
};

enum cudaFlushGPUDirectRDMAWritesScope {
  cudaFlushGPUDirectRDMAWritesToOwner = 100
};

enum cudaFlushGPUDirectRDMAWritesTarget {
  cudaFlushGPUDirectRDMAWritesTargetCurrentDevice = 0
};

extern "C" {
cudaError_t cudaMalloc(void** data, size_t size);
cudaError_t cudaFree(void* data);
cudaError_t cudaMemset(void* data, int value, size_t size);
cudaError_t cudaMemcpy(void* to, const void* from, size_t size,
                       enum cudaMemcpyKind kind);
cudaError_t cudaDeviceSynchronize(void);
cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr attribute,
                                   int device);
cudaError_t cudaDeviceFlushGPUDirectRDMAWrites(
    enum cudaFlushGPUDirectRDMAWritesTarget target,
    enum cudaFlushGPUDirectRDMAWritesScope scope);
const char* cudaGetErrorString(cudaError_t error);
}
