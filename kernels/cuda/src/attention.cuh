// The arguments of attention of single rows, and the splits of sequences: a block has one page for each of its warps.
#pragma once
#include "attention_store.cuh"
#include "groups.cuh"

// fresh: rows whose keys and values are not in a page yet, for kernels that store them; other kernels read `rotated`:
// [rows][heads * head_size]. parts: [rows - first_row][heads][splits], each with a maximum, a sum and the unnormalised
// result. arrived: [rows - first_row][heads], the number of splits that are complete; zero at the start. sinks: [heads]
// or null. window, chunk: see `first_seen`. softcap: 0 = none. The first `grouped_rows` rows are also written in the layout
// that the next matmul reads.
struct AttentionArguments {
  FreshRows fresh;
  const float* rotated;
  const float* sinks;
  float* parts;
  float* out;
  StepRows step;
  Pages pages;
  GroupedRows grouped;
  int* arrived;
  long long out_stride;
  int first_row;
  int rows;
  int heads;
  int kv_heads;
  int splits;
  int window;
  int chunk;
  float scale;
  float softcap;
  int smooth;
  int grouped_rows;
  int head_size;
  int v_head_size;
};

constexpr int SPLIT_WARPS = 4, SPLIT = SPLIT_WARPS * PAGE, SPLIT_THREADS = SPLIT_WARPS * WARP;
constexpr float NEVER = -3.0e38f;  // below every score, and finite, so that exp(NEVER - NEVER) is not NaN

// The splits that a row sees, from `first` to `last` (exclusive). `end` is the end of the positions that it sees.
struct SeenSplits {
  int first, last;
  __device__ __forceinline__ SeenSplits(const AttentionArguments& given, int end)
      : first(first_seen(end, given.window, given.chunk) / SPLIT), last((end - 1) / SPLIT + 1) {}
};
