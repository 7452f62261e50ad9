// CUDA's execution model on a host, for tests of kernels without a GPU.
//
// Blocks run one after another. Every CUDA thread of a block is a fiber with a stack of its own, which runs until it
// waits (at a barrier, for other lanes of its warp); in which order fibers run is chosen by the test. What can only go
// wrong on a GPU (bank conflicts, registers, fast mathematics) is not seen here; races are where host_races.h looks.
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
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "host_races.h"
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
  int bytes = 0;
};

// A product of a warpgroup that is under way. What it reads is kept as it was when it was asked for: whoever changes it
// before it is waited for is found.
struct Right {
  unsigned descriptor_low, descriptor_high, columns;
  std::vector<unsigned short> numbers;  // [columns][16]
};
struct Under_way {
  float* c;
  const unsigned* a_place;
  unsigned a[4];
  float left[2][16];  // rows g and g + 8
  std::shared_ptr<Right> right;
};
struct Products {
  std::vector<std::vector<Under_way>> groups;  // the last one is open
  std::map<float*, std::vector<float>> sums;   // of those that registers do not show yet
  bool begun = false;
  size_t asked = 0;
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
  Products products;
  const char* stack = nullptr;
  Stamp published;  // the last time, and how often
  bool has_waited = true;
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
  unsigned exited = 0, syncs = 0;
  float a[16][16], b[16][8];  // of an emulated tensor core
  int8_t left[16][32], right[32][8];
};

// What says when blocks of bytes are there: how many phases have ended, and what the current one waits for.
struct Arrivals {
  uint64_t ended = 0;
  bool asked = false;
  void* to = nullptr;
  const void* from = nullptr;
  unsigned bytes = 0;
};

struct Block {
  uint3 index, size, grid;
  unsigned count = 0, live = 0, at_barrier = 0, dynamic_bytes = 0;
  uint64_t barriers = 0;
  const char* barrier = nullptr;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::map<const void*, std::vector<unsigned char>> shared;
  std::map<const void*, unsigned> windows;  // where arrays begin in the addresses of shared memory
  unsigned next_window = 16;
  std::map<const void*, Arrivals> arrivals;
  std::map<unsigned, std::vector<std::shared_ptr<Right>>> rights;  // of warpgroups, in order
  std::string error;
};

inline Block* block = nullptr;
inline Thread* thread = nullptr;
inline Fiber main_fiber;
inline void (*kernel)(const void*) = nullptr;
inline const void* kernel_arguments = nullptr;
inline size_t argument_bytes = 0;

#pragma GCC visibility push(hidden)
void fail(const std::string& text);
void wait_until_changed(const uint64_t& number, uint64_t seen, const char* where);
void barrier(const char* where);
const uint64_t* meet(unsigned mask, uint64_t value, const char* operation);
std::string run(
    uint3 grid, uint3 size, unsigned shared, int order, void (*function)(const void*), const void* arguments,
    bool waits_itself);
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
  if (memory.empty()) {
    memory.assign(count * sizeof(T) + 2 * GUARD, 0xff);
    block->windows[site] = block->next_window;  // multiples of 16, and of nothing more
    block->next_window += (count * sizeof(T) + 15) / 16 * 16 + 16;
    note_shared(memory.data() + GUARD, count * sizeof(T));
  }
  return reinterpret_cast<T*>(memory.data() + GUARD);
}

inline unsigned char* dynamic_shared() {
  static char site;
  if (!block->dynamic_bytes) fail("dynamic shared memory, of which the launch gives none");
  return shared_array<unsigned char>(&site, std::max(block->dynamic_bytes, 1u));
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
  if (own.arrived == mask) {
    own.arrived = 0, ++own.times;
    warp.syncs += mask == ~0u && same(operation, "__syncwarp");
  }
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
  if (!thread->products.sums.empty()) fail("a thread ends with products under way");
  give_turn();
  std::abort();
}

#ifdef SHIM_RACES
constexpr size_t STACK = 256 << 10;  // traced functions keep more on it
#else
constexpr size_t STACK = 64 << 10;
#endif

inline void run_block(const std::vector<unsigned>& order, const std::vector<char*>& stacks) {
  // Where all stacks begin at the same place of a page they share a few lines of the processor's cache.
  for (unsigned i = 0; i < block->count; ++i) {
    block->threads[i].stack = stacks[i];
    block->threads[i].fiber.prepare(stacks[i], STACK - i % 128 * 320, thread_entry);
    block->threads[order[i]].following = &block->threads[order[(i + 1) % block->count]];
  }
  thread = &block->threads[order[0]];
  begin_block_races();
  switch_between(main_fiber, thread->fiber);
  end_block_races();
  if (block->error.empty())
    for (Thread& stuck : block->threads)
      if (!stuck.done) fail("thread " + std::to_string(stuck.number) + " waits for ever at " + stuck.where);
  check_guards();
  for (const auto& [place, arrival] : block->arrivals)
    if (arrival.asked) fail("a block ends with copies under way");
  for (const Thread& one : block->threads)
    if (one.products.asked != block->rights[one.number / 128].size()) fail("warps of a warpgroup ask for other products");
}

// All blocks; `order`: 0 forwards, 1 backwards, others shuffle the threads. waits_itself: whether the kernel waits for
// those before where it needs them, not first of all. Returns "" or what went wrong.
std::string run(
    uint3 grid, uint3 size, unsigned shared, int order, void (*function)(const void*), const void* arguments,
    bool waits_itself) {
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
  begin_races(waits_itself);
  std::mt19937 random(order);
  if (order > 1) std::shuffle(turns.begin(), turns.end(), random);
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        Block own;
        block = &own;
        own.index = {x, y, z}, own.grid = grid, own.size = size, own.count = own.live = count, own.dynamic_bytes = shared;
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
  block = nullptr, thread = nullptr;
  end_races();
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
inline int dot4_unsigned(unsigned a, int b, int c) {
  for (int i = 0; i < 4; ++i) c += static_cast<uint8_t>(a >> 8 * i) * static_cast<int8_t>(b >> 8 * i);
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
  touched(from, 4 * count, Access::READ_CONSTANT);
  std::memcpy(to, from, 4 * count);
}
template <class T>
UNTRACED T load_published(const T* from) {
  touched(from, sizeof(T), Access::READ_PAST_CACHE);
  return *from;
}
UNTRACED inline void fetch(const void* from) { (void)*static_cast<const volatile char*>(from); }
// Fibers take turns only where they wait, and blocks run one after another: plain arithmetic is atomic.
template <class T, class Change>
UNTRACED T change(T* place, T x, const Change& changed) {
  touched(place, sizeof(T), Access::COUNT);
  const T before = *place;
  *place = changed(before, x);
  return before;
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
inline void load_transposed(unsigned (&tiles)[4], const void* row) {
  if (reinterpret_cast<uintptr_t>(row) % 16) fail("load_transposed: not aligned");
  const uint64_t* rows = meet(~0u, packed(row), "load_transposed");
  const unsigned group = thread->lane / 4, place = thread->lane % 4;
  for (unsigned i = 0; i < 4; ++i) {
    auto number = [&](unsigned at) { return unpacked<const unsigned short*>(rows[8 * i + at])[group]; };
    tiles[i] = number(2 * place) | static_cast<unsigned>(number(2 * place + 1)) << 16;
  }
  meet(~0u, 0, "load_transposed, read");
}

inline void multiply_tiles(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  multiply_pairs(c, a, b, [](unsigned bits) { return bfloat_to_float(bits); });
}
inline void multiply_half_tiles(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  multiply_pairs(c, a, b, [](unsigned bits) { return half_to_float(static_cast<unsigned short>(bits)); });
}

// start + the first `columns` columns of a and rows of b.
inline void multiply_bytes(int (&c)[4], const int (&a)[4], const int (&b)[2], int start, int columns) {
  Warp& warp = block->warps[thread->warp];
  const int group = thread->lane / 4, place = thread->lane % 4;
  meet(~0u, 0, "multiply_bytes");  // those before have been read
  for (int i = 0; i < 4; ++i) {
    const int column = 4 * place + i, bits = 8 * i;
    warp.left[group][column] = static_cast<int8_t>(a[0] >> bits);
    warp.left[group + 8][column] = static_cast<int8_t>(a[1] >> bits);
    warp.left[group][column + 16] = static_cast<int8_t>(a[2] >> bits);
    warp.left[group + 8][column + 16] = static_cast<int8_t>(a[3] >> bits);
    warp.right[column][group] = static_cast<int8_t>(b[0] >> bits);
    warp.right[column + 16][group] = static_cast<int8_t>(b[1] >> bits);
  }
  meet(~0u, 0, "multiply_bytes, filled");
  for (int i = 0; i < 4; ++i) {
    c[i] = start;
    for (int k = 0; k < columns; ++k) c[i] += warp.left[group + i / 2 * 8][k] * warp.right[k][2 * place + i % 2];
  }
}

inline void load_tiles(unsigned (&tiles)[4], const unsigned* row) {
  if (reinterpret_cast<uintptr_t>(row) % 16) fail("load_tiles: not aligned");
  const uint64_t* rows = meet(~0u, reinterpret_cast<uintptr_t>(row), "load_tiles");
  for (unsigned tile = 0; tile < 4; ++tile)
    tiles[tile] = reinterpret_cast<const unsigned*>(rows[tile * 8 + thread->lane / 4])[thread->lane % 4];
  meet(~0u, 0, "load_tiles, read");
}

// A copy happens when a wait says that it must have, not before: too weak a wait shows as what was there before.
inline void copy_later(void* to, const void* from, int bytes = 16) {
  if (reinterpret_cast<uintptr_t>(to) % bytes || reinterpret_cast<uintptr_t>(from) % bytes)
    fail("copy_later: not aligned");
  touched(from, bytes, Access::READ_PAST_CACHE), touched(to, bytes, Access::WRITE);
  thread->copies.push_back({to, from, bytes});
}
inline void end_group() { thread->copies.push_back({nullptr, nullptr}); }
inline void wait_groups(int pending) {
  auto& copies = thread->copies;
  int groups = 0;
  for (const Copy& copy : copies) groups += copy.to == nullptr;
  size_t done = 0;
  for (; groups > pending; ++done) {
    if (const Copy& one = copies[done]; one.to) {
      touched(one.to, one.bytes, Access::WRITE);
      std::memcpy(one.to, one.from, one.bytes);
    } else {
      --groups;
    }
  }
  copies.erase(copies.begin(), copies.begin() + done);
}

// --- the copy engine and tensor cores of warpgroups -------------------------------------------------------------------

inline unsigned shared_address(const void* place) {
  const unsigned char* own = static_cast<const unsigned char*>(place);
  for (auto& [site, memory] : block->shared)
    if (own >= memory.data() + GUARD && own < memory.data() + memory.size() - GUARD)
      return block->windows[site] + static_cast<unsigned>(own - memory.data() - GUARD);
  fail("an address of shared memory of what lies elsewhere");
  return 0;
}
inline const unsigned char* shared_place(unsigned address) {
  for (auto& [site, memory] : block->shared)
    if (const unsigned first = block->windows[site]; address >= first && address - first < memory.size() - 2 * GUARD)
      return memory.data() + GUARD + (address - first);
  fail("shared memory is read where there is none");
  static const unsigned char nothing[16] = {};
  return nothing;
}

inline void prepare_arrival(void* arrival) {
  shared_address(arrival);
  block->arrivals[arrival] = {};
}

// The 16 numbers of every column that a descriptor names, by the rules of the instruction set: address bits 4 to 6 are
// turned by bits 7 to 9, eight rows of 128 bytes are a group, groups are as far apart as it says.
inline std::vector<unsigned> places_of(const Right& right) {
  const uint64_t descriptor = right.descriptor_low | static_cast<uint64_t>(right.descriptor_high) << 32;
  const unsigned start = (descriptor & 0x3fff) << 4, group = (descriptor >> 32 & 0x3fff) << 4;
  if (descriptor >> 62 != 1 || descriptor >> 49 & 7) fail("a descriptor of another form");
  std::vector<unsigned> places;
  for (unsigned column = 0; column < right.columns; ++column)
    for (unsigned piece = 0; piece < 2; ++piece) {
      const unsigned address = start + column / 8 * group + column % 8 * 128 + piece * 16;
      places.push_back(address ^ (address >> 7 & 7) << 4);
    }
  return places;
}
UNTRACED inline std::vector<unsigned short> numbers_of(const Right& right) {
  std::vector<unsigned short> numbers(right.columns * 16);
  size_t filled = 0;
  for (const unsigned place : places_of(right)) std::memcpy(&numbers[8 * filled++], shared_place(place), 16);
  return numbers;
}

inline void copy_block_later(void* to, const void* from, unsigned bytes, void* arrival) {
  const unsigned first = shared_address(to);
  if (first % 16 || reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16 || !bytes) fail("copy_block_later: not aligned");
  if (!block->arrivals.count(arrival)) return fail("copy_block_later: its arrival is not prepared");
  if (block->arrivals[arrival].asked) fail("copy_block_later: the phase before has not ended");
  for (const Thread& other : block->threads)
    for (const auto& group : other.products.groups)
      for (const Under_way& one : group)
        for (const unsigned place : other.lane ? std::vector<unsigned>() : places_of(*one.right))
          if (place >= first && place < first + bytes) return fail("copy_block_later: products read what is there");
  touched(from, bytes, Access::READ_PAST_CACHE), touched(to, bytes, Access::WRITE);
  std::memset(to, 0xff, bytes);  // until it is waited for
  auto& own = block->arrivals[arrival];
  own.asked = true, own.to = to, own.from = from, own.bytes = bytes;
}
inline void wait_arrival(void* arrival, unsigned parity) {
  if (!block->arrivals.count(arrival)) return fail("wait_arrival: it is not prepared");
  Arrivals& own = block->arrivals[arrival];
  if (own.ended % 2 != parity) return;
  const uint64_t seen = own.ended;
  if (own.asked) {
    std::memcpy(own.to, own.from, own.bytes), own.asked = false, ++own.ended;
    forget(own.to, own.bytes);
  } else {
    wait_until_changed(own.ended, seen, "wait_arrival");
  }
}

inline void begin_products() {
  meet(~0u, 0, "begin_products");
  thread->products.begun = true;
  thread->products.groups.emplace_back();
}
inline void end_products() {
  meet(~0u, 0, "end_products");
  if (!thread->products.begun) fail("end_products: none have begun");
  thread->products.begun = false;
}

template <unsigned columns>
void multiply_warpgroup(float (&c)[columns / 2], const unsigned (&a)[4], uint64_t b) {
  Products& own = thread->products;
  if (!own.begun) return fail("multiply_warpgroup: registers may have been written since the last begin_products");
  Warp& warp = block->warps[thread->warp];
  const unsigned group = thread->lane / 4, place = thread->lane % 4;
  meet(~0u, 0, "multiply_warpgroup");  // the tiles before have been read
  for (unsigned i = 0; i < 2; ++i) {
    auto number = [&](unsigned pair) { return bfloat_to_float(pair >> 16 * i & 0xffff); };
    const unsigned column = 2 * place + i;
    warp.a[group][column] = number(a[0]), warp.a[group + 8][column] = number(a[1]);
    warp.a[group][column + 8] = number(a[2]), warp.a[group + 8][column + 8] = number(a[3]);
  }
  meet(~0u, 0, "multiply_warpgroup, filled");
  auto& rights = block->rights[thread->number / 128];
  if (own.asked == rights.size()) {
    rights.push_back(std::make_shared<Right>(Right{static_cast<unsigned>(b), static_cast<unsigned>(b >> 32), columns, {}}));
    rights.back()->numbers = numbers_of(*rights.back());
  }
  Under_way made{c, a, {a[0], a[1], a[2], a[3]}, {}, rights[own.asked++]};
  if (made.right->columns != columns || made.right->descriptor_low != static_cast<unsigned>(b))
    fail("multiply_warpgroup: warps of a warpgroup name other numbers");
  for (unsigned i = 0; i < 2; ++i) std::copy_n(warp.a[group + 8 * i], 16, made.left[i]);
  own.groups.back().push_back(made);
  if (!own.sums.count(c)) own.sums[c].assign(c, c + columns / 2);
  std::fill_n(c, columns / 2, NAN);  // until it is waited for
}

inline void multiply_now(const Under_way& one, std::vector<float>& sums) {
  for (unsigned i = 0; i < 4; ++i)
    if (one.a_place[i] != one.a[i]) fail("registers are written while products read them");
  if (thread->lane == 0 && numbers_of(*one.right) != one.right->numbers)
    fail("shared memory is written while products read it");
  for (unsigned i = 0; i < one.right->columns / 4; ++i) {
    const unsigned column = i / 2 * 8 + 2 * (thread->lane % 4) + i % 2;
    const unsigned short* numbers = &one.right->numbers[16 * column];
    for (unsigned k = 0; k < 16; ++k) {
      const float right = bfloat_to_float(numbers[k]);
      sums[i / 2 * 4 + i % 2] += one.left[0][k] * right;
      sums[i / 2 * 4 + i % 2 + 2] += one.left[1][k] * right;
    }
  }
}
inline void wait_products(int pending) {
  meet(~0u, 0, "wait_products");
  Products& own = thread->products;
  if (own.begun) fail("wait_products: some have not been ended");
  while (own.groups.size() > static_cast<size_t>(pending)) {
    for (const Under_way& one : own.groups.front()) multiply_now(one, own.sums[one.c]);
    own.groups.erase(own.groups.begin());
  }
  for (auto at = own.sums.begin(); at != own.sums.end();) {
    bool is_left = false;
    for (const auto& group : own.groups)
      for (const Under_way& one : group) is_left |= one.c == at->first;
    if (!is_left) std::copy(at->second.begin(), at->second.end(), at->first), at = own.sums.erase(at);
    else ++at;
  }
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

#define DYNAMIC_SHARED(name) unsigned char* const name = shim::dynamic_shared()

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
inline void __threadfence() { shim::published(); }
inline int atomicAdd(int* place, int x) { return shim::change(place, x, std::plus<int>()); }
inline unsigned atomicAdd(unsigned* place, unsigned x) { return shim::change(place, x, std::plus<unsigned>()); }
inline int atomicOr(int* place, int x) { return shim::change(place, x, std::bit_or<int>()); }
inline int atomicMax(int* place, int x) {
  return shim::change(place, x, [](int a, int b) { return std::max(a, b); });
}
using std::max;
using std::min;

#define KERNEL(name, Arguments, size, threads, ...) KERNEL_OF(false, name, Arguments, size, threads, __VA_ARGS__)
#define EARLY_KERNEL(name, Arguments, size, threads, ...) KERNEL_OF(true, name, Arguments, size, threads, __VA_ARGS__)
#define BOUND_KERNEL(name, Arguments, size, threads, blocks, ...) KERNEL(name, Arguments, size, threads, __VA_ARGS__)
#define BOUND_EARLY_KERNEL(name, Arguments, size, threads, blocks, ...) \
  EARLY_KERNEL(name, Arguments, size, threads, __VA_ARGS__)
// One entry per kernel: returns nullptr or what went wrong.
#define KERNEL_OF(waits_itself, name, Arguments, size, threads, ...)                                      \
  static_assert(sizeof(Arguments) == size, "the host lays out " #Arguments " otherwise");                 \
  extern "C" __attribute__((visibility("default"))) const char* name(                                     \
      const unsigned* grid, const unsigned* block, unsigned shared, int order, const void* given) {        \
    static std::string error;                                                                              \
    if (block[0] * block[1] * block[2] != threads) return "launched with other threads than it was made for"; \
    auto function = [](const void* given) { __VA_ARGS__(*static_cast<const Arguments*>(given)); };         \
    shim::argument_bytes = size;                                                                           \
    error = shim::run(                                                                                     \
        {grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, shared, order, function, given,       \
        waits_itself);                                                                                     \
    return error.empty() ? nullptr : error.c_str();                                                       \
  }
#if defined(SHIM_ONCE) && defined(SHIM_RACES)
#include "host_races.cpp"
#endif
