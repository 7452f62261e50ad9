// Arrays of any shape and of several types: reads and writes of elements, and the offset of an element.
#pragma once
#include "functions.cuh"

// Maximum number of axes of an array, after contiguous axes have been merged.
constexpr int AXES = 8;

// The types in which elements are computed: float for halves, int for booleans and bytes, and their own type for
// others.
__device__ __forceinline__ float wide(float x) { return x; }
__device__ __forceinline__ float wide(half_bits x) { return to_float(x); }
__device__ __forceinline__ int wide(int x) { return x; }
__device__ __forceinline__ int wide(unsigned char x) { return x; }
__device__ __forceinline__ int wide(unsigned short x) { return x; }
__device__ __forceinline__ long long wide(long long x) { return x; }

template <class C>
__device__ __forceinline__ void put(float& out, C x) { out = (float)x; }
template <class C>
__device__ __forceinline__ void put(half_bits& out, C x) { store(&out, (float)x); }
template <class C>
__device__ __forceinline__ void put(int& out, C x) { out = (int)x; }
template <class C>
__device__ __forceinline__ void put(long long& out, C x) { out = (long long)x; }
template <class C>
__device__ __forceinline__ void put(unsigned char& out, C x) { out = (unsigned char)(int)x; }
template <class C>
__device__ __forceinline__ void put(unsigned short& out, C x) { out = (unsigned short)(int)x; }

// `count` adjacent elements, read or written by one instruction.
template <class T, int count>
struct alignas(sizeof(T) * count) Pack {
  T of[count];
};

// The offset of element `i` of an array with these sizes, innermost axis first. Each axis except the last needs a
// division.
__device__ __forceinline__ long long offset_of(unsigned i, int axes, const int (&sizes)[AXES],
                                               const long long (&strides)[AXES]) {
  long long offset = 0;
  for (int axis = 0; axis < axes - 1; ++axis) {
    const unsigned rest = i / (unsigned)sizes[axis];
    offset += (i - rest * (unsigned)sizes[axis]) * strides[axis];
    i = rest;
  }
  return offset + i * strides[axes - 1];
}
