// Who reads and writes what, on a host that plays a GPU: what no barrier and no fence orders is found.
//
// With SHIM_RACES the compiler calls `touched` before every read and write of a kernel (-fsanitize=thread, without that
// tool's library; see host_races.cpp); without it nothing of this is there.
#pragma once

namespace shim {

// When a thread did something: how often it had met others before, and published.
struct Stamp {
  unsigned block = 0;  // the first one is 1; 0: nobody did
  unsigned thread = 0, barriers = 0, meetings = 0, publications = 0;
  unsigned place = 0;  // in the library
};

enum class Access { READ, READ_PAST_CACHE, READ_CONSTANT, WRITE, COUNT };

#ifdef SHIM_RACES
#define UNTRACED __attribute__((no_sanitize("thread"), noinline))
// A part of a kernel's memory is read or written.
void touched(const void* place, size_t bytes, Access how, unsigned from = 0);
// Shared memory of the block.
void note_shared(const void* first, size_t bytes);
// Bytes that were under way have come, and whoever waited for them may read them.
void forget(const void* place, size_t bytes);
// The thread publishes what it wrote; it has waited for the kernels before.
void published();
void waited();
void begin_races(bool waits_itself);
void begin_block_races();
void end_block_races();
void end_races();
#else
#define UNTRACED
inline void touched(const void*, size_t, Access, unsigned = 0) {}
inline void note_shared(const void*, size_t) {}
inline void forget(const void*, size_t) {}
inline void published() {}
inline void waited() {}
inline void begin_races(bool) {}
inline void begin_block_races() {}
inline void end_block_races() {}
inline void end_races() {}
#endif

}  // namespace shim
