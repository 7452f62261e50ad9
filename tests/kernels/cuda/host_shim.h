// CUDA's execution model on a host, for tests of kernels without a GPU.
//
// Blocks run one after another. Every CUDA thread of a block is a fiber with a stack of its own, which runs until it
// waits (at a barrier, for other lanes of its warp); in which order fibers run is chosen by the test. What can only go
// wrong on a GPU (races between warps of one step, bank conflicts, registers, fast mathematics) is not seen here.
//
// What runs kernels is compiled once, where SHIM_ONCE is defined, and not again with every kernel.
#pragma once
#define HOST_SHIM 1
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __restrict__ __restrict
#define __align__(n) __attribute__((aligned(n)))

struct uint3 {
  unsigned x, y, z;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

namespace shim {

// --- fibers ---------------------------------------------------------------------------------------------------------

#if defined(__x86_64__)
// Switching saves the registers that a call must keep, and the stack pointer: two nanoseconds, without the system.
extern "C" __attribute__((visibility("hidden"))) void shim_switch(void** save, void* load);
#ifdef SHIM_ONCE
asm(R"(.text
.globl shim_switch
.hidden shim_switch
.type shim_switch,@function
shim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size shim_switch,.-shim_switch
)");
#endif

struct Fiber {
  void* place = nullptr;

  void prepare(char* stack, size_t size, void (*entry)()) {
    uint64_t* top = reinterpret_cast<uint64_t*>(stack + size);
    *--top = 0;
    *--top = reinterpret_cast<uint64_t>(entry);
    for (int i = 0; i < 6; ++i) *--top = 0;
    place = top;
  }
};
inline void switch_between(Fiber& from, Fiber& to) { shim_switch(&from.place, to.place); }
#else
struct Fiber {
  ucontext_t place;

  void prepare(char* stack, size_t size, void (*entry)()) {
    getcontext(&place);
    place.uc_stack.ss_sp = stack, place.uc_stack.ss_size = size, place.uc_link = nullptr;
    makecontext(&place, entry, 0);
  }
};
inline void switch_between(Fiber& from, Fiber& to) { swapcontext(&from.place, &to.place); }
#endif

// --- threads, warps, blocks -----------------------------------------------------------------------------------------

struct Copy {
  void* to;  // nullptr: the end of a group
  const void* from;
};

struct alignas(64) Thread {  // what every switch reads lies in one line of the processor's cache
  uint3 index;
  unsigned number, lane, warp;
  bool done = false;
  Fiber fiber;
  const uint64_t* waits_for = nullptr;  // until this is another number than `seen`
  uint64_t seen = 0;
  Thread* following = nullptr;  // in the order in which threads take turns; the first follows the last
  const char* where = "";
  std::vector<Copy> copies;
};

// Where lanes of a warp meet: each leaves a value, and reads those of the others when all are there.
struct Meeting {
  unsigned arrived = 0;
  uint64_t times = 0;
  const char* operation = nullptr;
  uint64_t values[2][32];
};

struct Warp {
  Meeting everyone;
  std::map<unsigned, Meeting> meetings;  // of some lanes, by mask
  unsigned exited = 0;
  float a[16][16], b[16][8];  // of an emulated tensor core
};

struct Block {
  uint3 index, size, grid;
  unsigned count = 0, live = 0, at_barrier = 0;
  uint64_t barriers = 0;
  const char* barrier = nullptr;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::map<const void*, std::vector<unsigned char>> shared;
  std::string error;
};

inline Block* block = nullptr;
inline Thread* thread = nullptr;
inline Fiber main_fiber;
inline void (*kernel)(const void*) = nullptr;
inline const void* kernel_arguments = nullptr;

#pragma GCC visibility push(hidden)
void fail(const std::string& text);
void wait_until_changed(const uint64_t& number, uint64_t seen, const char* where);
void barrier(const char* where);
const uint64_t* meet(unsigned mask, uint64_t value, const char* operation);
std::string run(uint3 grid, uint3 size, int order, void (*function)(const void*), const void* arguments);
#pragma GCC visibility pop

#ifdef SHIM_ONCE
void fail(const std::string& text) {
  if (block->error.empty()) block->error = text;
}

// The next thread in turn that need not wait goes on, without a detour; where there is none, or after an error, whoever
// runs the block does.
inline void give_turn() {
  Thread* own = thread;
  if (block->error.empty())
    for (Thread* next = own->following; next != own; next = next->following)
      if (!next->done && !(next->waits_for && *next->waits_for == next->seen)) {
        thread = next;
        return switch_between(own->fiber, next->fiber);
      }
  switch_between(own->fiber, main_fiber);
}

void wait_until_changed(const uint64_t& number, uint64_t seen, const char* where) {
  Thread* own = thread;
  own->waits_for = &number, own->seen = seen, own->where = where;
  while (number == seen) give_turn();
  own->waits_for = nullptr;
}
#endif

// Shared memory: of one place in the source, as often as it is asked for; it holds NaN and -1 at first.
constexpr size_t GUARD = 4096;
template <class T>
T* shared_array(const void* site, size_t count) {
  auto& memory = block->shared[site];
  if (memory.empty()) memory.assign(count * sizeof(T) + 2 * GUARD, 0xff);
  return reinterpret_cast<T*>(memory.data() + GUARD);
}

#ifdef SHIM_ONCE
inline void check_guards() {
  static const std::vector<unsigned char> untouched(GUARD, 0xff);
  for (auto& [site, memory] : block->shared)
    if (std::memcmp(memory.data(), untouched.data(), GUARD) ||
        std::memcmp(memory.data() + memory.size() - GUARD, untouched.data(), GUARD))
      fail("shared memory was written out of bounds");
}

inline bool same(const char* a, const char* b) { return a == b || std::strcmp(a, b) == 0; }

void barrier(const char* where) {
  if (block->live != block->count) fail(std::string(where) + ": threads of the block have ended already");
  if (block->at_barrier && !same(block->barrier, where))
    fail(std::string("threads of the block meet at different barriers: ") + where + " and " + block->barrier);
  block->barrier = where;
  const uint64_t seen = block->barriers;
  if (++block->at_barrier == block->live) block->at_barrier = 0, ++block->barriers;
  else wait_until_changed(block->barriers, seen, where);
}

const uint64_t* meet(unsigned mask, uint64_t value, const char* operation) {
  Warp& warp = block->warps[thread->warp];
  Meeting& own = mask == ~0u ? warp.everyone : warp.meetings[mask];
  if (!(mask >> thread->lane & 1)) fail(std::string(operation) + ": the lane is not in its own mask");
  if (mask & warp.exited) fail(std::string(operation) + ": a lane in the mask has ended");
  if (own.arrived && !same(own.operation, operation))
    fail(std::string("lanes meet in different operations: ") + operation + " and " + own.operation);
  own.operation = operation;
  const uint64_t seen = own.times;
  uint64_t* values = own.values[seen & 1];
  values[thread->lane] = value;
  own.arrived |= 1u << thread->lane;
  if (own.arrived == mask) own.arrived = 0, ++own.times;
  else wait_until_changed(own.times, seen, operation);
  return values;
}

inline void thread_entry() {
  kernel(kernel_arguments);
  thread->done = true;
  --block->live;
  block->warps[thread->warp].exited |= 1u << thread->lane;
  if (block->at_barrier) fail(std::string("a thread ends while others wait at ") + block->barrier);
  if (!thread->copies.empty() && thread->copies.back().to) fail("a thread ends with copies that no group holds");
  give_turn();
  std::abort();
}

constexpr size_t STACK = 64 << 10;

inline void run_block(const std::vector<unsigned>& order, const std::vector<char*>& stacks) {
  // Where all stacks begin at the same place of a page they share a few lines of the processor's cache.
  for (unsigned i = 0; i < block->count; ++i) {
    block->threads[i].fiber.prepare(stacks[i], STACK - i % 128 * 320, thread_entry);
    block->threads[order[i]].following = &block->threads[order[(i + 1) % block->count]];
  }
  thread = &block->threads[order[0]];
  switch_between(main_fiber, thread->fiber);
  if (block->error.empty())
    for (Thread& stuck : block->threads)
      if (!stuck.done) fail("thread " + std::to_string(stuck.number) + " waits for ever at " + stuck.where);
  check_guards();
}

// All blocks; `order`: 0 forwards, 1 backwards, others shuffle the threads. Returns "" or what went wrong.
std::string run(uint3 grid, uint3 size, int order, void (*function)(const void*), const void* arguments) {
  static std::vector<char*> stacks;
  kernel = function, kernel_arguments = arguments;
  const unsigned count = size.x * size.y * size.z;
  while (stacks.size() < count) {
    void* stack = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stack == MAP_FAILED) return "no memory for the stacks of threads";
    stacks.push_back(static_cast<char*>(stack));
  }
  std::vector<unsigned> turns(count);
  for (unsigned i = 0; i < count; ++i) turns[i] = order == 1 ? count - 1 - i : i;
  std::mt19937 random(order);
  if (order > 1) std::shuffle(turns.begin(), turns.end(), random);
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        Block own;
        block = &own;
        own.index = {x, y, z}, own.grid = grid, own.size = size, own.count = own.live = count;
        own.threads.resize(count), own.warps.resize((count + 31) / 32);
        for (unsigned i = 0; i < count; ++i) {
          Thread& one = own.threads[i];
          one.number = i, one.lane = i % 32, one.warp = i / 32;
          one.index = {i % size.x, i / size.x % size.y, i / (size.x * size.y)};
        }
        run_block(turns, stacks);
        if (!own.error.empty())
          return "block (" + std::to_string(x) + ", " + std::to_string(y) + ", " + std::to_string(z) + "): " + own.error;
      }
  return "";
}
#endif

// --- numbers --------------------------------------------------------------------------------------------------------

template <class To, class From>
To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
template <class T>
uint64_t packed(T value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}
template <class T>
T unpacked(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline float half_to_float(unsigned short bits) { return static_cast<float>(same_bits<_Float16>(bits)); }
inline unsigned short float_to_half(float x) { return same_bits<unsigned short>(static_cast<_Float16>(x)); }
inline unsigned short float_to_bfloat(float x) {
  const unsigned bits = same_bits<unsigned>(x);
  if (x != x) return 0x7fff;
  return static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float bfloat_to_float(unsigned bits) { return same_bits<float>(bits << 16); }
inline int dot4(int a, int b, int c) {
  for (int i = 0; i < 4; ++i) c += static_cast<int8_t>(a >> 8 * i) * static_cast<int8_t>(b >> 8 * i);
  return c;
}

inline unsigned byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t both = a | static_cast<uint64_t>(b) << 32;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned which = selector >> 4 * i & 15;
    const unsigned byte = both >> 8 * (which & 7) & 255;
    result |= (which & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;  // its sign eight times
  }
  return result;
}
inline void load_once(const void* from, unsigned* to, int count) {
  if (reinterpret_cast<uintptr_t>(from) % (4 * count)) fail("load_once: not aligned");
  std::memcpy(to, from, 4 * count);
}

// --- tensor cores and copies ----------------------------------------------------------------------------------------

template <class Number>
void multiply_pairs(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2], const Number& number_of) {
  Warp& warp = block->warps[thread->warp];
  const unsigned group = thread->lane / 4, place = thread->lane % 4;
  meet(~0u, 0, "multiply_tiles");  // the tiles before have been read
  for (unsigned i = 0; i < 2; ++i) {
    auto number = [&](unsigned pair) { return number_of(pair >> 16 * i & 0xffff); };
    const unsigned column = 2 * place + i;
    warp.a[group][column] = number(a[0]), warp.a[group + 8][column] = number(a[1]);
    warp.a[group][column + 8] = number(a[2]), warp.a[group + 8][column + 8] = number(a[3]);
    warp.b[column][group] = number(b[0]), warp.b[column + 8][group] = number(b[1]);
  }
  meet(~0u, 0, "multiply_tiles, filled");
  for (unsigned k = 0; k < 16; ++k)
    for (unsigned i = 0; i < 2; ++i) {
      c[i] += warp.a[group][k] * warp.b[k][2 * place + i];
      c[2 + i] += warp.a[group + 8][k] * warp.b[k][2 * place + i];
    }
}
inline void load_turned(unsigned (&tiles)[4], const void* row) {
  if (reinterpret_cast<uintptr_t>(row) % 16) fail("load_turned: not aligned");
  const uint64_t* rows = meet(~0u, packed(row), "load_turned");
  const unsigned group = thread->lane / 4, place = thread->lane % 4;
  for (unsigned i = 0; i < 4; ++i) {
    auto number = [&](unsigned at) { return unpacked<const unsigned short*>(rows[8 * i + at])[group]; };
    tiles[i] = number(2 * place) | static_cast<unsigned>(number(2 * place + 1)) << 16;
  }
  meet(~0u, 0, "load_turned, read");
}

inline void multiply_tiles(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  multiply_pairs(c, a, b, [](unsigned bits) { return bfloat_to_float(bits); });
}
inline void multiply_half_tiles(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  multiply_pairs(c, a, b, [](unsigned bits) { return half_to_float(static_cast<unsigned short>(bits)); });
}

inline void load_tiles(unsigned (&tiles)[4], const unsigned* row) {
  if (reinterpret_cast<uintptr_t>(row) % 16) fail("load_tiles: not aligned");
  const uint64_t* rows = meet(~0u, reinterpret_cast<uintptr_t>(row), "load_tiles");
  for (unsigned tile = 0; tile < 4; ++tile)
    tiles[tile] = reinterpret_cast<const unsigned*>(rows[tile * 8 + thread->lane / 4])[thread->lane % 4];
  meet(~0u, 0, "load_tiles, read");
}

// A copy happens when a wait says that it must have, not before: too weak a wait shows as what was there before.
inline void copy_later(void* to, const void* from) {
  if (reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16) fail("copy_later: not aligned");
  thread->copies.push_back({to, from});
}
inline void end_group() { thread->copies.push_back({nullptr, nullptr}); }
inline void wait_groups(int pending) {
  auto& copies = thread->copies;
  int groups = 0;
  for (const Copy& copy : copies) groups += copy.to == nullptr;
  size_t done = 0;
  for (; groups > pending; ++done) {
    if (copies[done].to) std::memcpy(copies[done].to, copies[done].from, 16);
    else --groups;
  }
  copies.erase(copies.begin(), copies.begin() + done);
}

}  // namespace shim

// --- what kernels see -----------------------------------------------------------------------------------------------

#define threadIdx (shim::thread->index)
#define blockIdx (shim::block->index)
#define blockDim (shim::block->size)
#define gridDim (shim::block->grid)
#define SHIM_TEXT_(x) #x
#define SHIM_TEXT(x) SHIM_TEXT_(x)
#define __syncthreads() shim::barrier("__syncthreads, line " SHIM_TEXT(__LINE__) " of " __FILE__)
#define SHARED(T, name, count)     \
  static char name##_site;         \
  T* const name = shim::shared_array<T>(&name##_site, count)

inline void __syncwarp(unsigned mask = ~0u) { shim::meet(mask, 0, "__syncwarp"); }
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int distance) {
  return shim::unpacked<T>(shim::meet(mask, shim::packed(value), "__shfl_xor_sync")[shim::thread->lane ^ distance]);
}
template <class T>
T __shfl_sync(unsigned mask, T value, int lane) {
  return shim::unpacked<T>(shim::meet(mask, shim::packed(value), "__shfl_sync")[lane & 31]);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance) {
  const unsigned lane = shim::thread->lane;
  return shim::unpacked<T>(
      shim::meet(mask, shim::packed(value), "__shfl_up_sync")[lane < distance ? lane : lane - distance]);
}
inline int __any_sync(unsigned mask, bool value) {
  const uint64_t* values = shim::meet(mask, value, "__any_sync");
  bool any = false;
  for (unsigned lane = 0; lane < 32; ++lane) any |= (mask >> lane & 1) && values[lane];
  return any;
}
template <class T>
unsigned __match_any_sync(unsigned mask, T value) {
  const uint64_t own = shim::packed(value), *values = shim::meet(mask, own, "__match_any_sync");
  unsigned same = 0;
  for (unsigned lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1 && values[lane] == own) same |= 1u << lane;
  return same;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) { return shim::byte_perm(a, b, selector); }
inline float __uint_as_float(unsigned bits) { return shim::same_bits<float>(bits); }
inline unsigned __float_as_uint(float x) { return shim::same_bits<unsigned>(x); }
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(x) * y >> 64);
}
// Fibers take turns only where they wait, and blocks run one after another: plain arithmetic is atomic.
inline void __threadfence() {}
inline int atomicAdd(int* place, int x) { return std::exchange(*place, *place + x); }
inline int atomicOr(int* place, int x) { return std::exchange(*place, *place | x); }
inline int atomicMax(int* place, int x) { return std::exchange(*place, std::max(*place, x)); }
using std::max;
using std::min;

#define BOUND_KERNEL(name, Arguments, size, threads, blocks, ...) KERNEL(name, Arguments, size, threads, __VA_ARGS__)
// One entry per kernel: returns nullptr or what went wrong.
#define KERNEL(name, Arguments, size, threads, ...)                                                       \
  static_assert(sizeof(Arguments) == size, "the host lays out " #Arguments " otherwise");                 \
  extern "C" __attribute__((visibility("default"))) const char* name(                                     \
      const unsigned* grid, const unsigned* block, int order, const void* given) {                         \
    static std::string error;                                                                              \
    if (block[0] * block[1] * block[2] != threads) return "launched with other threads than it was made for"; \
    auto function = [](const void* given) { __VA_ARGS__(*static_cast<const Arguments*>(given)); };         \
    error = shim::run({grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, order, function, given); \
    return error.empty() ? nullptr : error.c_str();                                                       \
  }
