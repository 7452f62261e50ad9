// Arrays of any shape and of several types: how an element is read and written, and where the element of an index lies.
#pragma once
#include "functions.cuh"

// Arrays have at most so many axes, once those that lie one behind the other are joined.
constexpr int AXES = 8;

// What an element is computed in: halves in float, booleans and bytes in int, the others as they are.
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

// So many neighbours, read or written by one instruction.
template <class T, int count>
struct alignas(sizeof(T) * count) Pack {
  T of[count];
};

// The offset of number `i` of an array with these sizes, the innermost axis first; all axes but the last divide.
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
