// Tokens that were chosen on the device become those of a step, wherever they lie. A thread per token.
#include "portable.cuh"

struct ChosenArguments {
  const unsigned long long* addresses;
  int* tokens;
  int count;
};

constexpr int CHOSEN_THREADS = 64;

// Where there is no token to choose, the outcome says -1: what comes of the row is thrown away, but it must be computed.
__device__ __forceinline__ void take_chosen(const ChosenArguments& given) {
  const int i = blockIdx.x * CHOSEN_THREADS + threadIdx.x;
  if (i < given.count) given.tokens[i] = max(*reinterpret_cast<const int*>(given.addresses[i]), 0);
}
