// Convert codes from the form in which models store them (rows of bits with the lowest bits first) to the planes that
// weights.cuh reads. This is done once per weight, when the weight is loaded.
#include "weights.cuh"

// source: `rows` rows of row_bytes bytes, of which the first becomes row `first_row`. Columns past a row's last byte
// become 0.
struct PackArguments {
  const unsigned char* source;
  unsigned* data;
  unsigned* second;
  long long first_row;
  long long row_bytes;
  int rows;
  int chunks;
};

constexpr int PACK_THREADS = 128;

// One thread per chunk: grid (chunks / 128, rows).
template <class Reader>
__device__ __forceinline__ void pack_codes(const PackArguments& given) {
  constexpr int BITS = Reader::WORDS, CELL = Reader::CELL, CELLS_OF_WORD = 32 / CELL;
  const int chunk = blockIdx.x * PACK_THREADS + threadIdx.x;
  if (chunk >= given.chunks) return;
  const unsigned char* source = given.source + blockIdx.y * given.row_bytes;
  const long long first = (long long)chunk * (4 * BITS);
  unsigned stored[BITS], words[BITS] = {};
#pragma unroll
  for (int word = 0; word < BITS; ++word) {
    unsigned four = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const long long offset = first + 4 * word + i;
      four |= (offset < given.row_bytes ? source[offset] : 0u) << 8 * i;
    }
    stored[word] = four;
  }
#pragma unroll
  for (int column = 0; column < CHUNK; ++column) {
    const int bit = column * BITS, word = bit / 32, within = bit % 32;
    unsigned code = stored[word] >> within;
    if (within + BITS > 32) code |= stored[(word + 1) % BITS] << (32 - within) % 32;
    code &= (1u << BITS) - 1u;
    if (BITS == 8) code ^= 128u;  // as a signed byte, which is smaller by 128
    const int slice = column / CELLS_OF_WORD, cell = column % CELLS_OF_WORD * CELL;
    constexpr int FIRST = Reader::FIRST, SECOND = Reader::SECOND, DIVISOR = SECOND ? SECOND : 1;
    words[slice % FIRST] |= (code & ((1u << FIRST) - 1u)) << (cell + slice / FIRST * FIRST);
    if (SECOND) words[FIRST + slice % DIVISOR] |= code >> FIRST << (cell + slice / DIVISOR * SECOND);
  }
  const long long index = (given.first_row + blockIdx.y) * given.chunks + chunk;
#pragma unroll
  for (int word = 0; word < BITS; ++word) {
    if (word < Reader::WORDS_1) given.data[index * Reader::WORDS_1 + word] = words[word];
    else given.second[index * Reader::WORDS_2 + word - Reader::WORDS_1] = words[word];
  }
}
