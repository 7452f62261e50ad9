// The only file that kernels include besides each other's: CUDA, or a host shim that emulates it for tests.
//
// No header of the toolkit is needed: half-precision numbers are bits that one instruction converts. What has another
// form on the host stands here once: shared memory, conversions, tensor cores, and how a kernel is made.
#pragma once

#ifndef HOST_SHIM

// Shared memory of a block: `count` elements, which hold anything at first.
#define SHARED(T, name, count) __shared__ __align__(16) T name[count]

// A kernel: `function` (a template with its arguments) of one struct, whose size is what the host believes it to be. It
// starts while the kernel before it ends (programmatic dependent launch), and waits for it first of all.
#define KERNEL(name, Arguments, size, threads, ...) \
  KERNEL_WITH(wait_for_earlier(), (threads), name, Arguments, size, __VA_ARGS__)
// One of which so many blocks shall fit on a multiprocessor: that bounds its registers.
#define BOUND_KERNEL(name, Arguments, size, threads, blocks, ...) \
  KERNEL_WITH(wait_for_earlier(), (threads, blocks), name, Arguments, size, __VA_ARGS__)
// One that calls `wait_for_earlier` itself, once it has asked for weights, which no kernel writes.
#define EARLY_KERNEL(name, Arguments, size, threads, ...) \
  KERNEL_WITH((void)0, (threads), name, Arguments, size, __VA_ARGS__)
#define KERNEL_WITH(first, bounds, name, Arguments, size, ...)                                       \
  static_assert(sizeof(Arguments) == size, "the host lays out " #Arguments " otherwise");             \
  extern "C" __global__ void __launch_bounds__ bounds name(const __grid_constant__ Arguments arguments) { \
    let_later_start();                                                                               \
    first;                                                                                           \
    __VA_ARGS__(arguments);                                                                          \
  }

#endif

// --- kernels that follow each other -----------------------------------------------------------------------------------

// The next kernel may be started when every block of this one has come here, so that it is on its way when this ends.
__device__ __forceinline__ void let_later_start() {
#if !defined(HOST_SHIM) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Until the kernels before have ended, and what they wrote is seen.
__device__ __forceinline__ void wait_for_earlier() {
#if !defined(HOST_SHIM) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int WARP = 32;

// --- numbers of 16 bits ---------------------------------------------------------------------------------------------

struct half_bits {
  unsigned short bits;
};

struct bfloat_bits {
  unsigned short bits;
};

__device__ __forceinline__ float to_float(float x) { return x; }

__device__ __forceinline__ float to_float(bfloat_bits x) { return __uint_as_float((unsigned)x.bits << 16); }

__device__ __forceinline__ float to_float(half_bits x) {
#ifndef HOST_SHIM
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x.bits));
  return result;
#else
  return shim::half_to_float(x.bits);
#endif
}

__device__ __forceinline__ void store(float* place, float x) { *place = x; }

__device__ __forceinline__ void store(half_bits* place, float x) {
#ifndef HOST_SHIM
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(place->bits) : "f"(x));
#else
  place->bits = shim::float_to_half(x);
#endif
}

// Two numbers as bfloat16, the first in the low half.
__device__ __forceinline__ unsigned bfloat_pair(float low, float high) {
#ifndef HOST_SHIM
  unsigned result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
#else
  return shim::float_to_bfloat(low) | (unsigned)shim::float_to_bfloat(high) << 16;
#endif
}

// Two numbers as float16, the first in the low half.
__device__ __forceinline__ unsigned half_pair(float low, float high) {
#ifndef HOST_SHIM
  unsigned result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
#else
  return shim::float_to_half(low) | (unsigned)shim::float_to_half(high) << 16;
#endif
}

// --- memory that is read once -----------------------------------------------------------------------------------------

// `count` words (1, 2 or 4) from a multiple of their bytes on, that leave the first-level cache to others. They are asked
// for where this stands: not later, behind a wait.
template <int count>
__device__ __forceinline__ void load_once(const void* from, unsigned* to) {
  static_assert(count == 1 || count == 2 || count == 4, "one instruction");
#ifndef HOST_SHIM
  if constexpr (count == 4)
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
        : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
        : "l"(from));
  else if constexpr (count == 2)
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
  else
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(to[0]) : "l"(from));
#else
  shim::load_once(from, to, count);
#endif
}

// --- products -------------------------------------------------------------------------------------------------------

// c + a . b, each four signed bytes.
__device__ __forceinline__ int dot4(int a, int b, int c) {
#ifndef HOST_SHIM
  int result;
  asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
#else
  return shim::dot4(a, b, c);
#endif
}

// start + a[16, 32] b[32, 8] by the tensor cores, signed bytes into int32 (sm_80 and newer). A lane with group g = lane / 4
// and place t = lane % 4 holds of a the columns 4 t to 4 t + 3 of rows g and g + 8, then 16 columns further, of b the rows
// 4 t to 4 t + 3 of column g, then 16 rows further; of the result rows g, g + 8 and columns 2 t, 2 t + 1.
__device__ __forceinline__ void multiply_bytes(int (&c)[4], const int (&a)[4], const int (&b)[2], int start) {
#ifndef HOST_SHIM
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(start));
#else
  shim::multiply_bytes(c, a, b, start, 32);
#endif
}

// The same of sixteen columns.
__device__ __forceinline__ void multiply_half_bytes(int (&c)[4], int a0, int a1, int b, int start) {
#ifndef HOST_SHIM
  asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a0), "r"(a1), "r"(b), "r"(start));
#else
  const int both[4] = {a0, a1, 0, 0}, rows[2] = {b, 0};
  shim::multiply_bytes(c, both, rows, start, 16);
#endif
}

// c[16, 8] += a[16, 16] b[16, 8] by the tensor cores, bfloat16 into float32 (sm_80 and newer). A lane with group
// g = lane / 4 and place t = lane % 4 holds of a (rows g, g + 8; columns 2 t, 2 t + 8) pairs of columns, of b (rows
// 2 t, 2 t + 8; column g) pairs of rows, of c rows g, g + 8 and columns 2 t, 2 t + 1.
__device__ __forceinline__ void multiply_tiles(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#ifndef HOST_SHIM
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  shim::multiply_tiles(c, a, b);
#endif
}

// The same of float16.
__device__ __forceinline__ void multiply_half_tiles(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#ifndef HOST_SHIM
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  const unsigned b[2] = {b0, b1};
  shim::multiply_half_tiles(c, a, b);
#endif
}

__device__ __forceinline__ void multiply_half_tiles(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  multiply_half_tiles(c, a, b[0], b[1]);
}

// Four tiles of 8 by 8 numbers of 16 bits out of shared memory: lane l says where row l % 8 of tile l / 8 begins (16 bytes),
// and gets of every tile the pair of columns 2 t, 2 t + 1 (t = l % 4) of row l / 4.
__device__ __forceinline__ void load_tiles(unsigned (&tiles)[4], const unsigned* row) {
#ifndef HOST_SHIM
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
               : "r"((unsigned)__cvta_generic_to_shared(row))
               : "memory");
#else
  shim::load_tiles(tiles, row);
#endif
}

// Four tiles of 8 by 8 numbers of 16 bits from shared memory, turned: lane l says where row l % 8 of tile l / 8 begins
// (16 bytes), and gets of every tile the rows 2 t, 2 t + 1 of column g. Two tiles of rows below each other are a `b`.
__device__ __forceinline__ void load_turned(unsigned (&tiles)[4], const void* row) {
#ifndef HOST_SHIM
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
               : "r"((unsigned)__cvta_generic_to_shared(row))
               : "memory");
#else
  shim::load_turned(tiles, row);
#endif
}

// --- memory that is asked for before it is needed ---------------------------------------------------------------------

// A line of 128 bytes into the L2 cache.
__device__ __forceinline__ void fetch(const void* global) {
#ifndef HOST_SHIM
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
#else
  (void)*static_cast<const volatile char*>(global);
#endif
}

// --- 16 bytes from global into shared memory, later (sm_80 and newer) -----------------------------------------------

__device__ __forceinline__ void copy_later(void* shared, const void* global) {
#ifndef HOST_SHIM
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(shared)),
               "l"(global)
               : "memory");
#else
  shim::copy_later(shared, global);
#endif
}

// The same of 4, 8 or 16 bytes.
template <int bytes>
__device__ __forceinline__ void copy_few_later(void* shared, const void* global) {
  static_assert(bytes == 4 || bytes == 8 || bytes == 16, "one instruction");
#ifndef HOST_SHIM
  if constexpr (bytes == 16) copy_later(shared, global);
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"((unsigned)__cvta_generic_to_shared(shared)),
                 "l"(global), "n"(bytes)
                 : "memory");
#else
  shim::copy_later(shared, global, bytes);
#endif
}

// What was asked for since the last time is a group.
__device__ __forceinline__ void end_group() {
#ifndef HOST_SHIM
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  shim::end_group();
#endif
}

// Wait until all groups but the last `pending` of this thread are there; other threads' need a barrier as well.
template <int pending>
__device__ __forceinline__ void wait_groups() {
#ifndef HOST_SHIM
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
#else
  shim::wait_groups(pending);
#endif
}
