// The only file that kernels include in addition to each other. The file supports CUDA, and a host shim that emulates
// CUDA in tests.
//
// No header of the CUDA toolkit is needed: half-precision numbers are bits that one instruction converts. All code that
// differs on the host is defined here: shared memory, conversions, tensor cores, and the declaration of kernels.
#pragma once

#ifndef HOST_SHIM

// Shared memory of a block: `count` uninitialised elements.
#define SHARED(T, name, count) __shared__ __align__(16) T name[count]
// The same for bytes, with the size that a launch specifies (CudaKernel.shared), which may exceed 48 KiB; see
// `aligned_shared`.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]

// A kernel: `function` (a template with its arguments) of one struct, whose size must match the size that the host
// assumes. The kernel starts while the preceding kernel ends (programmatic dependent launch), and first waits for that
// kernel.
#define KERNEL(name, Arguments, size, threads, ...) \
  KERNEL_WITH(wait_for_earlier(), (threads), name, Arguments, size, __VA_ARGS__)
// A kernel whose number of registers is limited so that `blocks` blocks fit on a multiprocessor.
#define BOUND_KERNEL(name, Arguments, size, threads, blocks, ...) \
  KERNEL_WITH(wait_for_earlier(), (threads, blocks), name, Arguments, size, __VA_ARGS__)
// A kernel that calls `wait_for_earlier` itself, after it has requested weights, which no kernel writes.
#define EARLY_KERNEL(name, Arguments, size, threads, ...) \
  KERNEL_WITH((void)0, (threads), name, Arguments, size, __VA_ARGS__)
#define BOUND_EARLY_KERNEL(name, Arguments, size, threads, blocks, ...) \
  KERNEL_WITH((void)0, (threads, blocks), name, Arguments, size, __VA_ARGS__)
#define KERNEL_WITH(first, bounds, name, Arguments, size, ...)                                       \
  static_assert(sizeof(Arguments) == size, "the host lays out " #Arguments " otherwise");             \
  extern "C" __global__ void __launch_bounds__ bounds name(const __grid_constant__ Arguments arguments) { \
    first;                                                                                           \
    __VA_ARGS__(arguments);                                                                          \
  }

#endif

// --- consecutive kernels -------------------------------------------------------------------------------------------

// Wait until the preceding kernels have ended and their writes are visible. When every block has reached this point,
// the next kernel is started, so that it is ready when this kernel ends. If it were started earlier, the blocks of
// three kernels would share the multiprocessors unevenly.
__device__ __forceinline__ void wait_for_earlier() {
#if !defined(HOST_SHIM) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#elif defined(HOST_SHIM)
  shim::waited();
#endif
}

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int WARP = 32;

// --- numbers of 16 and of 8 bits -----------------------------------------------------------------------------------

struct half_bits {
  unsigned short bits;
};

struct bfloat_bits {
  unsigned short bits;
};

struct float8_bits {  // E4M3: the largest number is 448, there is no infinity, and all ones are NaN
  unsigned char bits;
};

struct float8_pair {  // the first number is in the low byte
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

__device__ __forceinline__ float to_float(float8_bits x) {
  const unsigned size = x.bits & 0x7fu;  // as a half, the same bits have 2 ** -8 times the value
  const unsigned moved = (x.bits & 0x80u) << 8 | (size == 0x7fu ? 0x7fffu : size << 7);
  return to_float(half_bits{(unsigned short)moved}) * 256.0f;
}

__device__ __forceinline__ void store(float* address, float x) { *address = x; }

__device__ __forceinline__ void store(half_bits* address, float x) {
#ifndef HOST_SHIM
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(address->bits) : "f"(x));
#else
  address->bits = shim::float_to_half(x);
#endif
}

__device__ __forceinline__ void store(bfloat_bits* address, float x) {
#ifndef HOST_SHIM
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(address->bits) : "f"(x));
#else
  address->bits = shim::float_to_bfloat(x);
#endif
}

// Round to nearest even. Infinity and numbers that are too large become the largest number; NaN stays NaN.
__device__ __forceinline__ void store(float8_bits* address, float x) {
  const unsigned bits = __float_as_uint(x), size = bits & 0x7fffffffu;
  unsigned code;
  if (size > 0x7f800000u) {
    code = 0x7fu;
  } else if (size >= 0x3c800000u) {  // 2 ** -6, the smallest normal number
    code = (size + 0x7ffffu + (size >> 20 & 1u)) >> 20;
    code = min(code - (120u << 3), 0x7eu);  // the exponent bias differs by 120
  } else {  // subnormal: integers in units of 2 ** -9, the last digit of floats from 2 ** 14 upwards
    code = __float_as_uint(__uint_as_float(size) + 16384.0f) - 0x46800000u;
  }
  address->bits = (unsigned char)(bits >> 24 & 0x80u | code);
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

// Two E4M3 numbers as float16, which represents all of them.
__device__ __forceinline__ unsigned half_pair(float8_pair two) {
#if !defined(HOST_SHIM) && __CUDA_ARCH__ >= 890
  unsigned result;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(result) : "h"(two.bits));
  return result;
#else
  return half_pair(to_float(float8_bits{(unsigned char)two.bits}), to_float(float8_bits{(unsigned char)(two.bits >> 8)}));
#endif
}

// One of the two numbers.
__device__ __forceinline__ float to_float(float8_pair two, int i) {
#if !defined(HOST_SHIM) && __CUDA_ARCH__ >= 890
  return to_float(half_bits{(unsigned short)(half_pair(two) >> 16 * i)});
#else
  return to_float(float8_bits{(unsigned char)(two.bits >> 8 * i)});
#endif
}

// 1 / x to within a few units in the last place, for x that are neither infinite nor tiny.
__device__ __forceinline__ float reciprocal(float x) {
#ifndef HOST_SHIM
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return 1.0f / x;
#endif
}

// --- memory that is read once --------------------------------------------------------------------------------------

// Load `count` words (1, 2 or 4), aligned to their size, without displacing other data from the L1 cache. The loads are
// issued at the call, and are not moved past a wait.
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

// Load four words that are part of a 32-byte sector, the rest of which adjacent lanes load as well.
__device__ __forceinline__ void load_four(const void* from, unsigned (&to)[4]) {
#ifndef HOST_SHIM
  asm("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(from));
#else
  shim::load_once(from, to, 4);
#endif
}

// --- blocks that do not wait for each other ------------------------------------------------------------------------

// All earlier writes of a thread to global memory are visible to every thread that sees the thread's later writes.
__device__ __forceinline__ void publish() { __threadfence(); }

// Add one to a number in global memory, and return its previous value.
__device__ __forceinline__ int count_up(int* address) { return atomicAdd(address, 1); }

// Load numbers that other blocks of the same kernel have written, bypassing the L1 cache, which may hold older numbers.
__device__ __forceinline__ float4 load_published(const float4* from) {
#ifndef HOST_SHIM
  float4 four;
  asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w) : "l"(from));
  return four;
#else
  return shim::load_published(from);
#endif
}

// --- products ------------------------------------------------------------------------------------------------------

// c + a . b, where a and b are four signed bytes each.
__device__ __forceinline__ int dot4(int a, int b, int c) {
#ifndef HOST_SHIM
  int result;
  asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
#else
  return shim::dot4(a, b, c);
#endif
}

// The same with unsigned bytes in a.
__device__ __forceinline__ int dot4_unsigned(unsigned a, int b, int c) {
#ifndef HOST_SHIM
  int result;
  asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
#else
  return shim::dot4_unsigned(a, b, c);
#endif
}

// start + a[16, 32] b[32, 8] by the tensor cores, signed bytes into int32 (sm_80 and newer). A lane, member t = lane %
// 4 of group g = lane / 4, holds: of a, the columns 4 t to 4 t + 3 of rows g and g + 8, then the columns 16 further on;
// of b, the rows 4 t to 4 t + 3 of column g, then the rows 16 further on; and of the result, rows g, g + 8 and columns
// 2 t, 2 t + 1.
__device__ __forceinline__ void multiply_bytes(int (&c)[4], const int (&a)[4], const int (&b)[2], int start) {
#ifndef HOST_SHIM
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(start));
#else
  shim::multiply_bytes(c, a, b, start, 32);
#endif
}

// The same with sixteen columns.
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

// c[16, 8] += a[16, 16] b[16, 8] by the tensor cores, bfloat16 into float32 (sm_80 and newer). A lane, member t = lane
// % 4 of group g = lane / 4, holds: of a, pairs of columns (rows g, g + 8; columns 2 t, 2 t + 8); of b, pairs of rows
// (rows 2 t, 2 t + 8; column g); and of c, rows g, g + 8 and columns 2 t, 2 t + 1.
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

// The same for float16.
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

// Load four tiles of 8 by 8 16-bit numbers from shared memory. Lane l passes the address of row l % 8 of tile l / 8
// (16 bytes), and receives from every tile the pair of columns 2 t, 2 t + 1 (t = l % 4) of row l / 4.
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

// Load four tiles of 8 by 8 16-bit numbers from shared memory, transposed. Lane l passes the address of row l % 8 of
// tile l / 8 (16 bytes), and receives from every tile the rows 2 t, 2 t + 1 of column g. Two tiles, one below the
// other, form a `b`.
__device__ __forceinline__ void load_transposed(unsigned (&tiles)[4], const void* row) {
#ifndef HOST_SHIM
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
               : "r"((unsigned)__cvta_generic_to_shared(row))
               : "memory");
#else
  shim::load_transposed(tiles, row);
#endif
}

// --- memory that is requested before it is needed ------------------------------------------------------------------

// Prefetch a line of 128 bytes into the L2 cache.
__device__ __forceinline__ void fetch(const void* global) {
#ifndef HOST_SHIM
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
#else
  shim::fetch(global);
#endif
}

// --- asynchronous copies of 16 bytes from global to shared memory (sm_80 and newer) --------------------------------

__device__ __forceinline__ void copy_later(void* shared, const void* global) {
#ifndef HOST_SHIM
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(shared)),
               "l"(global)
               : "memory");
#else
  shim::copy_later(shared, global);
#endif
}

// The same for 4, 8 or 16 bytes.
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

// Close a group of all copies since the last call.
__device__ __forceinline__ void end_group() {
#ifndef HOST_SHIM
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  shim::end_group();
#endif
}

// Wait until all groups of this thread except the last `pending` are complete. The groups of other threads also need a
// barrier.
template <int pending>
__device__ __forceinline__ void wait_groups() {
#ifndef HOST_SHIM
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
#else
  shim::wait_groups(pending);
#endif
}

// --- copies of blocks of bytes from global to shared memory, by the copy engine (sm_90 and newer) ------------------

// The address of shared memory in the form that instructions accept.
__device__ __forceinline__ unsigned shared_address(const void* memory) {
#ifndef HOST_SHIM
  return (unsigned)__cvta_generic_to_shared(memory);
#else
  return shim::shared_address(memory);
#endif
}

// The first address that is a multiple of `bytes`, because the alignment of dynamic shared memory is not guaranteed.
// Swizzled rows for tensor cores start at multiples of 1,024; copies by warps are faster if their destinations are
// multiples of 128.
template <unsigned bytes>
__device__ __forceinline__ unsigned char* aligned_shared(unsigned char* memory) {
  return memory + (0u - shared_address(memory)) % bytes;
}

// Signals that copies are complete. It has phases: a phase ends when one thread has arrived with the number of bytes
// to be copied, and they have been copied; then the next phase starts.
typedef unsigned long long Arrival;

// Called by one thread, before a barrier for all others. The copy engine also sees the new state.
__device__ __forceinline__ void prepare_arrival(Arrival* arrival) {
#ifndef HOST_SHIM
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(arrival)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#else
  shim::prepare_arrival(arrival);
#endif
}

// One thread requests a copy of `bytes` bytes. The size and both addresses are multiples of 16.
__device__ __forceinline__ void copy_block_later(void* shared, const void* global, unsigned bytes, Arrival* arrival) {
#ifndef HOST_SHIM
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(arrival)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(arrival))
               : "memory");
#else
  shim::copy_block_later(shared, global, bytes, arrival);
#endif
}

// Wait until a phase has ended. The first phase has parity 0, the next has parity 1, then 0 again.
__device__ __forceinline__ void wait_arrival(Arrival* arrival, unsigned parity) {
#ifndef HOST_SHIM
  unsigned there = 0;
  while (!there)  // the instruction itself waits for a limited time
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(there)
        : "r"(shared_address(arrival)), "r"(parity)
        : "memory");
#else
  shim::wait_arrival(arrival, parity);
#endif
}

// Called by one lane of every warp that has finished with a resource; returns true for the last of `warps` warps (a
// power of two). The counter in shared memory starts at 0 and can be used repeatedly. The call does not order ordinary
// reads or writes of other threads, because that would cost a wait for all loads; products that were waited for have
// completed their reads.
__device__ __forceinline__ bool is_last_to_leave(unsigned* counter, unsigned warps) {
#ifndef HOST_SHIM
  unsigned before;
  asm volatile("atom.relaxed.cta.shared::cta.add.u32 %0, [%1], 1;" : "=r"(before) : "r"(shared_address(counter)) : "memory");
#else
  const unsigned before = atomicAdd(counter, 1u);
#endif
  return (before + 1) % warps == 0;
}

// --- tensor cores of warpgroups (sm_90a only) ----------------------------------------------------------------------

// A warpgroup is four warps, and the number of the first is a multiple of four. Its products run asynchronously to its
// threads, in this order:
//   begin_products()           makes registers that were written visible to the products after it
//   multiply_warpgroup(...)    any number of times; until they are waited for, no thread may touch their registers,
//                              or the shared memory that they read
//   end_products()             closes a group of the products since the last call
//   wait_products<pending>()   waits until all groups but the last `pending` are complete
__device__ __forceinline__ void begin_products() {
#ifndef HOST_SHIM
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#else
  shim::begin_products();
#endif
}

__device__ __forceinline__ void end_products() {
#ifndef HOST_SHIM
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#else
  shim::end_products();
#endif
}

template <int pending>
__device__ __forceinline__ void wait_products() {
#ifndef HOST_SHIM
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
#else
  shim::wait_products(pending);
#endif
}

// Call this after all products were waited for, and before the sums are read, because the compiler does not see that a
// wait changes the sums, and could read them before the wait.
template <int count>
__device__ __forceinline__ void read_behind(float (&sums)[count]) {
#ifndef HOST_SHIM
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(sums[i])::"memory");
#endif
}

// The descriptor of rows of 128 bytes in shared memory, which start at a multiple of 1,024 bytes. Piece p of 16 bytes
// of a row lies at position p ^ row % 8 ("swizzle of 128 bytes"), so that eight rows are read together from different
// banks. Groups of eight rows follow each other. To address further columns of the rows, add units of 16 bytes: two per
// product.
__device__ __forceinline__ unsigned long long swizzled_rows(unsigned address) {
  constexpr unsigned long long SWIZZLE_128 = 1ull << 62, GROUP = (unsigned long long)(1024 / 16) << 32, UNUSED = 1ull << 16;
  return SWIZZLE_128 | GROUP | UNUSED | (address & 0x3ffffu) >> 4;
}

// c[64, columns] += a[64, 16] b[16, columns], bfloat16 into float32. Warp w of the warpgroup has rows 16 w to 16 w +
// 15 of c and a. Its lanes hold a as in `multiply_tiles`, and c in tiles of eight columns, one after another (four
// numbers each). b: `columns` rows in shared memory, of 16 adjacent numbers each: see `swizzled_rows`.
template <int columns>
__device__ __forceinline__ void multiply_warpgroup(
    float (&c)[columns / 2], const unsigned (&a)[4], unsigned long long b) {
  static_assert(columns == 64 || columns == 128 || columns == 256, "these are spelled out");
#ifndef HOST_SHIM
#define FOUR(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define SIXTEEN(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)
#define INPUTS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
  if constexpr (columns == 64)
    asm volatile(
        "{ .reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,"
        "%27,%28,%29,%30,%31"
        "}, {%32,%33,%34,%35}, %36, p, 1, 1, 0; }"
        : SIXTEEN(0), SIXTEEN(16)
        : INPUTS);
  else if constexpr (columns == 128)
    asm volatile(
        "{ .reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,"
        "%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,"
        "%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
        "}, {%64,%65,%66,%67}, %68, p, 1, 1, 0; }"
        : SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48)
        : INPUTS);
  else
    asm volatile(
        "{ .reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,"
        "%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,"
        "%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,"
        "%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,"
        "%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,"
        "%121,%122,%123,%124,%125,%126,%127"
        "}, {%128,%129,%130,%131}, %132, p, 1, 1, 0; }"
        : SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48), SIXTEEN(64), SIXTEEN(80), SIXTEEN(96), SIXTEEN(112)
        : INPUTS);
#undef FOUR
#undef SIXTEEN
#undef INPUTS
#else
  shim::multiply_warpgroup<columns>(c, a, b);
#endif
}
