/* GCC before 13 gives _tile_loadconfig no memory clobber and drops the stores that fill the configuration. */
#if defined(__AMX_TILE__) && defined(__GNUC__)
#include <immintrin.h>
#undef _tile_loadconfig
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg (%0)" : : "r"((const void *)(config)) : "memory")
#endif
