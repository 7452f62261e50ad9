// See host_races.h. For each byte of global and of shared memory it is kept who wrote it last and who has read it since.
//
// Two threads of a block are ordered by __syncthreads, those of a warp by __syncwarp as well, and by nothing else: neither
// by shuffles nor by running in step. Two blocks are ordered by a count in global memory, before which the first one has
// published; what the second one then reads it reads past the first-level cache, or behind a fence. Without an order they
// may write what is there already: several threads the same. Two kernels are ordered where the second one has waited: before that
// it writes nothing, and reads nothing that the first one writes. Not looked at is who reads what the copy engine brought
// without having waited himself, and what products of warpgroups read (host_shim.h has checks of its own for these).

extern "C" char __ehdr_start __attribute__((visibility("hidden")));

namespace shim {

struct Byte {
  Stamp written, read;
  bool by_lanes = false, by_warps = false, by_blocks = false;  // several have read it since the last barrier, or write
  bool counted = false;                                        // whoever has read it has counted it up
  bool constant = false;                                       // was read as what this kernel does not write
};

// A count in global memory that was raised, and what its thread and, before barriers, others had published till then.
struct Count {
  Stamp own, published;
  std::vector<unsigned> publications;  // of each thread
};
// It was seen by a thread of the block that runs; where a fence came behind, by what it reads through caches as well.
struct Seen {
  const Count* count;
  Stamp own, fence;
};

struct Interval {
  uintptr_t first, end;
};

constexpr uintptr_t LINE = 64;
using Shadow = std::unordered_map<uintptr_t, std::vector<Byte>>;

// The guards of an array: whoever reads or writes there has counted wrong.
constexpr uintptr_t BESIDE = 256;

struct Races {
  bool is_busy = false, waits_itself = false;
  std::vector<Interval> memory;  // arrays of the device, in order
  std::vector<Interval> guarded;  // those of them beside which nothing else lies, in order
  std::vector<Interval> recent;  // what the kernel before has written, in order
  std::vector<Interval> written;
  std::vector<Interval> areas;  // of shared memory
  Shadow global, shared;
  std::unordered_map<uintptr_t, std::vector<Stamp>> readers;  // of bytes that several blocks have read
  std::unordered_map<uintptr_t, std::vector<std::unique_ptr<Count>>> counts;
  std::vector<Seen> seen;
  // A byte that is written in no order: it must be again what it was.
  const unsigned char* same = nullptr;
  unsigned char was = 0;
  std::string why;
};
static Races races;

static Stamp now(unsigned place) {
  const unsigned number = block->index.x + block->grid.x * (block->index.y + block->grid.y * block->index.z);
  return {number + 1, thread->number, static_cast<unsigned>(block->barriers), block->warps[thread->warp].syncs,
          thread->published.publications, place};
}

static std::string told(const Stamp& one, const char* what) {
  char place[32] = "";
  if (one.place) std::snprintf(place, sizeof place, " at +0x%x", one.place);
  return std::string(what) + " by thread " + std::to_string(one.thread) + " of block " + std::to_string(one.block - 1) + place;
}

// Of one block.
static bool follows(const Stamp& first, const Stamp& then) {
  return first.thread == then.thread || first.barriers < then.barriers ||
         (first.thread / 32 == then.thread / 32 && first.meetings < then.meetings);
}

static bool is_published(const Stamp& first, const Count& count) {
  if (first.publications < count.publications[first.thread]) return true;
  const Stamp& fence = count.published;
  return fence.block && first.thread != fence.thread && follows(first, fence);
}

// Whether a block has seen that another one counted; counts themselves are in order.
static bool is_seen(const Stamp& count, const Stamp& then) {
  for (const Seen& one : races.seen)
    if (one.count->own.block == count.block && follows(one.own, then)) return true;
  return count.block == 0 || (count.block == then.block && follows(count, then));
}

static bool is_ordered(const Stamp& first, const Stamp& then, bool through_caches = false) {
  if (!first.block) return true;
  if (first.block == then.block) return follows(first, then);
  for (const Seen& one : races.seen) {
    const Stamp& behind = through_caches ? one.fence : one.own;
    if (one.count->own.block == first.block && behind.block && follows(behind, then) && is_published(first, *one.count))
      return true;
  }
  return false;
}

static const Interval* interval_of(const std::vector<Interval>& all, uintptr_t place) {
  auto behind = std::upper_bound(
      all.begin(), all.end(), place, [](uintptr_t at, const Interval& one) { return at < one.first; });
  return behind != all.begin() && place < (behind - 1)->end ? &*(behind - 1) : nullptr;
}

static std::string name_of(uintptr_t place) {
  if (const Interval* own = interval_of(races.memory, place))
    return "byte " + std::to_string(place - own->first) + " of an array of " + std::to_string(own->end - own->first);
  for (const Interval& own : races.areas)
    if (place >= own.first && place < own.end)
      return "byte " + std::to_string(place - own.first) + " of " + std::to_string(own.end - own.first) + " of shared memory";
  return "";
}

static bool is_shared(uintptr_t place) {
  for (const Interval& own : races.areas)
    if (place >= own.first && place < own.end) return true;
  return false;
}

// Where a place lies beside an array, or "".
static std::string beside(uintptr_t place, const Interval& one, const char* what) {
  if (place >= one.end && place < one.end + BESIDE)
    return std::to_string(place - one.end) + " bytes behind " + what + std::to_string(one.end - one.first);
  if (place < one.first && place + BESIDE >= one.first)
    return std::to_string(one.first - place) + " bytes before " + what + std::to_string(one.end - one.first);
  return "";
}

// It is in no array; whether it lies beside one.
static void check_outside(uintptr_t place, unsigned from) {
  std::string found;
  const auto behind = std::upper_bound(
      races.guarded.begin(), races.guarded.end(), place, [](uintptr_t at, const Interval& one) { return at < one.first; });
  if (behind != races.guarded.begin()) found = beside(place, *(behind - 1), "an array of ");
  if (found.empty() && behind != races.guarded.end()) found = beside(place, *behind, "an array of ");
  for (const Interval& one : races.areas)
    if (found.empty()) found = beside(place, one, "shared memory of ");
  if (!found.empty()) fail(told(now(from), "memory is read or written") + ", " + found);
}

static void check_same() {
  if (races.same && *races.same != races.was) fail(races.why);
  races.same = nullptr;
}

static void note_reader(Byte& byte, uintptr_t place, const Stamp& stamp) {
  const Stamp& before = byte.read;
  if (before.block != stamp.block || before.barriers != stamp.barriers) {
    if (before.block && before.block != stamp.block) byte.by_blocks = true, races.readers[place].push_back(before);
    byte.by_lanes = byte.by_warps = false;
  } else if (before.thread / 32 != stamp.thread / 32) {
    byte.by_warps = true;
  } else {
    byte.by_lanes = before.meetings == stamp.meetings && (byte.by_lanes || before.thread != stamp.thread);
  }
  byte.read = stamp;
}

// Whether whoever has read a byte in the same block did so before.
static bool have_read(const Byte& byte, const Stamp& stamp) {
  if (byte.read.barriers < stamp.barriers) return true;
  return !byte.by_warps && is_ordered(byte.read, stamp) && !(byte.by_lanes && byte.read.meetings == stamp.meetings);
}

static void check_write(Byte& byte, uintptr_t place, const Stamp& stamp) {
  auto clashes = [&](const Stamp& other, const char* what) {
    const std::string text = name_of(place) + told(stamp, " is written") + told(other, what) + ", in no order";
    if (!races.same)
      races.same = reinterpret_cast<const unsigned char*>(place), races.was = *races.same, races.why = text;
  };
  auto was_read = [&](const Stamp& one) {
    if (!(byte.counted ? is_seen(one, stamp) : is_ordered(one, stamp))) clashes(one, ", and read");
  };
  if (byte.constant) fail(name_of(place) + told(stamp, " is written") + ", and read as a constant by the same kernel");
  if (!is_ordered(byte.written, stamp)) clashes(byte.written, ", and written");
  if (byte.read.block != stamp.block) was_read(byte.read);
  else if (!have_read(byte, stamp)) clashes(byte.read, ", and read");
  if (byte.by_blocks) {
    for (const Stamp& one : races.readers[place]) was_read(one);
    races.readers.erase(place);
  }
  const bool constant = byte.constant;
  byte = {};
  byte.written = stamp, byte.constant = constant;
}

static void check_early(uintptr_t place, const Stamp& stamp, bool writes) {
  if (writes) fail(name_of(place) + told(stamp, " is written") + ", before the kernels before were waited for");
  else if (interval_of(races.recent, place))
    fail(name_of(place) + told(stamp, " is read") + ", before the kernel before, which writes it, was waited for");
}

static void check(Byte& byte, uintptr_t place, const Stamp& stamp, Access how, bool is_global) {
  if (is_global && !thread->has_waited) check_early(place, stamp, how == Access::WRITE || how == Access::COUNT);
  if (how == Access::WRITE) return check_write(byte, place, stamp);
  if (how == Access::COUNT) {
    if (!byte.counted && !is_ordered(byte.written, stamp))
      fail(name_of(place) + told(stamp, " is counted") + told(byte.written, ", and written") + ", in no order");
    byte.counted = true;
  } else {
    if (byte.counted && byte.read.thread != stamp.thread && !is_ordered(byte.read, stamp))
      fail(name_of(place) + told(stamp, " is read") + told(byte.read, ", and counted") + ", in no order");
    if (!is_ordered(byte.written, stamp, is_global && how == Access::READ))
      fail(name_of(place) + told(stamp, " is read") + told(byte.written, ", and written") + ", in no order");
    if (how == Access::READ_CONSTANT && byte.written.block)
      fail(name_of(place) + told(stamp, " is read") + " as a constant" + told(byte.written, ", and written"));
    byte.constant |= how == Access::READ_CONSTANT;
    byte.counted = false;
  }
  note_reader(byte, place, stamp);
}

static void note_count(uintptr_t place, const Stamp& stamp) {
  auto& counts = races.counts[place];
  for (const auto& one : counts)
    if (one->own.block != stamp.block) races.seen.push_back({one.get(), stamp, {}});
  auto own = std::make_unique<Count>(Count{stamp, thread->published, {}});
  for (const Thread& one : block->threads) {
    const unsigned last = one.published.publications;
    own->publications.push_back(!last || follows(one.published, stamp) ? last : last - 1);
  }
  counts.push_back(std::move(own));
}

void touched(const void* pointer, size_t bytes, Access how, unsigned from) {
  if (races.is_busy || !block || !thread) return;  // this file's own
  if (static_cast<size_t>(static_cast<const char*>(pointer) - thread->stack) < STACK) return;  // the thread's own
  if (static_cast<size_t>(static_cast<const char*>(pointer) - static_cast<const char*>(kernel_arguments)) < argument_bytes)
    return;
  races.is_busy = true;
  check_same();
  const uintptr_t place = reinterpret_cast<uintptr_t>(pointer);
  const bool is_global = interval_of(races.memory, place) != nullptr;
  if (is_global || is_shared(place)) {
    const Stamp stamp = now(from);
    if (how == Access::COUNT && is_global) note_count(place, stamp);
    std::vector<Byte>* line = nullptr;
    for (uintptr_t at = place; at < place + bytes && block->error.empty(); ++at) {
      if (!line || at % LINE == 0) line = &(is_global ? races.global : races.shared)[at / LINE];
      if (line->empty()) line->resize(LINE);
      check((*line)[at % LINE], at, stamp, how, is_global);
    }
  }
  const uintptr_t last = place + bytes - 1;
  if (is_global ? !interval_of(races.memory, last) : !is_shared(last))
    check_outside(is_global || is_shared(place) ? last : place, from);
  races.is_busy = false;
}

void note_shared(const void* first, size_t bytes) {
  races.areas.push_back({reinterpret_cast<uintptr_t>(first), reinterpret_cast<uintptr_t>(first) + bytes});
}

void forget(const void* pointer, size_t bytes) {
  const uintptr_t place = reinterpret_cast<uintptr_t>(pointer);
  for (uintptr_t at = place; at < place + bytes; ++at)
    if (auto line = races.shared.find(at / LINE); line != races.shared.end()) line->second[at % LINE] = {};
}

void published() {
  const unsigned before = thread->published.publications;
  thread->published = now(0);
  thread->published.publications = before + 1;
  for (Seen& one : races.seen)
    if (!one.fence.block && follows(one.own, thread->published)) one.fence = thread->published;
}

void waited() { thread->has_waited = true; }

void begin_races(bool waits_itself) {
  races.global.clear(), races.readers.clear(), races.counts.clear(), races.written.clear();
  races.waits_itself = waits_itself, races.same = nullptr;
}

void begin_block_races() {
  races.shared.clear(), races.seen.clear(), races.areas.clear();
  for (Thread& one : block->threads) one.has_waited = !races.waits_itself;
}

void end_block_races() {
  check_same();
  bool is_late = false;
  for (const Thread& one : block->threads) is_late |= one.has_waited;
  if (!is_late) fail("no thread of the block waits for the kernels before");
}

void end_races() {
  std::vector<uintptr_t> places;
  for (const auto& [number, line] : races.global)
    for (uintptr_t i = 0; i < LINE; ++i)
      if (line[i].written.block || line[i].counted) places.push_back(number * LINE + i);
  std::sort(places.begin(), places.end());
  for (const uintptr_t place : places)
    if (!races.written.empty() && races.written.back().end == place) ++races.written.back().end;
    else races.written.push_back({place, place + 1});
}

}  // namespace shim

#define VISIBLE extern "C" __attribute__((visibility("default")))
#define FROM static_cast<unsigned>(static_cast<char*>(__builtin_return_address(0)) - &__ehdr_start)

// What memory there is, what of it lies between guards, and what the kernel before has written.
VISIBLE void shim_watch(
    const shim::Interval* memory, size_t arrays, const shim::Interval* guarded, size_t between,
    const shim::Interval* recent, size_t count) {
  shim::races.memory.assign(memory, memory + arrays), shim::races.guarded.assign(guarded, guarded + between);
  shim::races.recent.assign(recent, recent + count);
}
// What this one has written.
VISIBLE size_t shim_written(const shim::Interval** written) {
  *written = shim::races.written.data();
  return shim::races.written.size();
}

// What the compiler calls.
#define HOOKS(bytes)                                                                                                  \
  extern "C" void __tsan_read##bytes(void* at) { shim::touched(at, bytes, shim::Access::READ, FROM); }                \
  extern "C" void __tsan_write##bytes(void* at) { shim::touched(at, bytes, shim::Access::WRITE, FROM); }              \
  extern "C" void __tsan_unaligned_read##bytes(void* at) { shim::touched(at, bytes, shim::Access::READ, FROM); }      \
  extern "C" void __tsan_unaligned_write##bytes(void* at) { shim::touched(at, bytes, shim::Access::WRITE, FROM); }    \
  extern "C" void __tsan_volatile_read##bytes(void* at) { shim::touched(at, bytes, shim::Access::READ_PAST_CACHE, FROM); } \
  extern "C" void __tsan_volatile_write##bytes(void* at) { shim::touched(at, bytes, shim::Access::WRITE, FROM); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
// -fsanitize=alignment: a GPU ends with an error where an address is no multiple of a number's size.
struct Mismatch {
  const char* file;
  unsigned line, column;
  const void* type;
  unsigned char alignment, kind;
};
extern "C" void __ubsan_handle_type_mismatch_v1(const Mismatch* told, uintptr_t place) {
  const std::string line = std::string(told->file).substr(std::string(told->file).rfind('/') + 1) + ":" + std::to_string(told->line);
  shim::fail("an address is no multiple of " + std::to_string(1u << told->alignment) + " at " + line);
  shim::give_turn();
}
extern "C" void __tsan_read_range(void* at, size_t bytes) { shim::touched(at, bytes, shim::Access::READ, FROM); }
extern "C" void __tsan_write_range(void* at, size_t bytes) { shim::touched(at, bytes, shim::Access::WRITE, FROM); }
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_vptr_read(void*) {}
extern "C" void __tsan_vptr_update(void*, void*) {}
extern "C" unsigned char __tsan_atomic8_load(const volatile unsigned char* at, int) { return *at; }
extern "C" int __tsan_atomic32_load(const volatile int* at, int) { return *at; }
extern "C" int __tsan_atomic32_fetch_add(volatile int* at, int x, int) { return __atomic_fetch_add(at, x, __ATOMIC_SEQ_CST); }
