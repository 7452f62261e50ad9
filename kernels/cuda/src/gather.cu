// Copy single numbers from any device addresses to adjacent addresses. One thread per number.
#include "portable.cuh"

struct GatherArguments {
  const unsigned long long* addresses;
  float* out;
  int count;
};

constexpr int GATHER_THREADS = 128;

__device__ __forceinline__ void gather_numbers(const GatherArguments& given) {
  const int i = blockIdx.x * GATHER_THREADS + threadIdx.x;
  if (i < given.count) given.out[i] = *reinterpret_cast<const float*>(given.addresses[i]);
}
