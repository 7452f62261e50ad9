// What attention of single rows is given, and how sequences are split: a block has a page for each of its warps.
#pragma once
#include "attention_store.cuh"
#include "groups.cuh"

// fresh: rows whose keys and values are in no page yet, for kernels that put them there; others are given `rotated`:
// [rows][heads * head_size]. parts: [rows - first_row][heads][splits], each a maximum, a sum and the unfinished
// result. arrived: [rows - first_row][heads], how many splits are there: zeros. sinks: [heads] or 0. window: -1 = all.
// softcap: 0 = none. The first `grouped_rows` rows also go where the next product reads them.
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
  float scale;
  float softcap;
  int smooth;
  int grouped_rows;
  int head_size;
  int v_head_size;
};

constexpr int SPLIT_WARPS = 4, SPLIT = SPLIT_WARPS * PAGE, SPLIT_THREADS = SPLIT_WARPS * WARP;
constexpr float NEVER = -3.0e38f;  // below every score, and finite: exp(NEVER - NEVER) is no NaN

// The splits that a row sees, from the first one to the one before the last; `end`: of its positions.
struct SeenSplits {
  int first, last;
  __device__ __forceinline__ SeenSplits(const AttentionArguments& given, int end)
      : first(given.window < 0 ? 0 : max(0, end - given.window) / SPLIT), last((end - 1) / SPLIT + 1) {}
};
