// Pages of keys and values: 32 tokens of a layer's head. A warp has a lane per token for keys, whose tokens lie side by
// side; for values, whose columns do, a lane per column.
#pragma once
#include "portable.cuh"

constexpr int PAGE = 32;

// keys: [block][kv_head][head_size][PAGE]; values: [block][kv_head][PAGE][v_head_size]; blocks are so many numbers apart.
struct Pages {
  void* keys;
  void* values;
  long long key_block;
  long long value_block;
};

// What a step says of its rows. tables: [sequences][table_stride] block ids. sequence_of, positions, slots: [rows].
struct StepRows {
  const int* tables;
  const int* sequence_of;
  const int* positions;
  const int* slots;
  int table_stride;
};
