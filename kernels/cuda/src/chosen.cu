// Copy tokens that were sampled on the device to the tokens of a step, with one thread per token.
#include "portable.cuh"

struct ChosenArguments {
  const unsigned long long* addresses;
  int* tokens;
  int count;
};

constexpr int CHOSEN_THREADS = 64;

// If no token could be sampled, the outcome is -1. The row is still computed, but its results are discarded.
__device__ __forceinline__ void take_chosen(const ChosenArguments& given) {
  const int i = blockIdx.x * CHOSEN_THREADS + threadIdx.x;
  if (i < given.count) given.tokens[i] = max(*reinterpret_cast<const int*>(given.addresses[i]), 0);
}
