// Matrices in device memory, and the conversion of a chunk of 32 columns of one row to numbers.
//
// One formula covers all formats: value = (code's number - zero point) * factor - minimum. A code's number is the
// code, or an entry of a grid. Factors, zero points and minima are numbers per block, or integers per block times a
// number per group of blocks. Parts that a matrix does not have are left out when a kernel is compiled.
//
// Codes of b bits are stored in planes, the first of which holds the lowest bits: 3 = 2 + 1, 5 = 4 + 1, 6 = 4 + 2. A
// plane has the same number of words for every chunk, [rows][chunks][words]. So lanes that read adjacent chunks read
// adjacent bytes whatever b is, with one instruction of at most 16 bytes per plane (8 bits are two planes of 16 bytes).
//
// In a chunk, codes lie in cells of 8 bits, which byte products need, or in cells of 4 bits, which the look-up of four
// bytes at a time needs. A slice has as many columns as a word has cells. A plane of w bits has w words: slice s is in
// word s % w and starts at bit s / w * w of each cell. So a shift and a mask extract a slice, with its columns in
// order.
#pragma once
#include "portable.cuh"

constexpr int CHUNK = 32;
// Words of a chunk's columns as bytes.
constexpr int BYTE_WORDS = CHUNK / 4;

// Numbers are [rows][count]. Chunk c (or half 2 c + h, if the halves of chunks have separate numbers) reads number c
// >> shift. chunks: chunks of a row; rows of floats have 32 numbers per chunk. zero: the zero point, an integer, of
// codes without separate zero points; codes minus the zero point are signed bytes. table: the grid as bytes in `unit`s,
// rounded to nearest; grid: its values.
struct BlockMatrix {
  const unsigned char* data;
  const unsigned char* second;
  const void* scales;
  const void* multipliers;
  const void* offset_scales;
  const void* offsets;
  int chunks;
  int scale_count;
  int scale_shift;
  int multiplier_count;
  int multiplier_shift;
  int offset_scale_count;
  int offset_scale_shift;
  int offset_count;
  int offset_shift;
  float zero;
  float unit;
  int table[4];
  float grid[16];
};

// --- numbers of few bits --------------------------------------------------------------------------------------------

struct exponent_bits {  // 2 ** (bits - 127); 0 = 0
  unsigned char bits;
};

struct low_nibble {
  unsigned char bits;
};

struct high_nibble {
  unsigned char bits;
};

__device__ __forceinline__ float to_float(unsigned char x) { return (float)x; }
__device__ __forceinline__ float to_float(signed char x) { return (float)x; }
__device__ __forceinline__ float to_float(low_nibble x) { return (float)(x.bits & 15); }
__device__ __forceinline__ float to_float(high_nibble x) { return (float)(x.bits >> 4); }
__device__ __forceinline__ float to_float(exponent_bits x) { return __uint_as_float((unsigned)x.bits << 23); }

// --- numbers of blocks ----------------------------------------------------------------------------------------------

// The location of numbers: one per block, or one per group and an integer per block.
struct BlockNumbers {
  const void* numbers;
  const void* integers;
  int count;
  int shift;
  int integer_count;
  int integer_shift;
};

template <class T, int n>
struct alignas(sizeof(T) * n) Together {
  T of[n];
};

// True for numbers that are so small and have so few bits that their product with a number of a few bits is exact, even
// after multiplication by a byte.
template <class T>
constexpr bool HAS_FEW_BITS = false;
template <>
constexpr bool HAS_FEW_BITS<half_bits> = true;
template <>
constexpr bool HAS_FEW_BITS<float8_bits> = true;

// One number per block.
template <class Scale>
struct Single {
  static constexpr bool IS_NARROW = HAS_FEW_BITS<Scale>;
  static constexpr bool IS_BESIDE = false;
  static constexpr int NUMBER_BYTES = sizeof(Scale), INTEGER_BYTES = 0;  // of half a chunk
  template <int halves>
  struct Loaded {
    Scale numbers[halves];

    __device__ __forceinline__ void read(const BlockNumbers& from, long long row, int chunk) {
      const Scale* own = static_cast<const Scale*>(from.numbers) + row * from.count;
#pragma unroll
      for (int half = 0; half < halves; ++half) numbers[half] = own[(chunk * halves + half) >> from.shift];
    }
    __device__ __forceinline__ float number(int half) const { return to_float(numbers[half]); }
  };
};

// One number per group, times one integer per block. With blocks of 16 columns, the two integers of a chunk are
// adjacent.
template <class Scale, class Integer>
struct Double {
  static constexpr bool IS_NARROW = HAS_FEW_BITS<Scale>;
  static constexpr bool IS_BESIDE = false;
  static constexpr int NUMBER_BYTES = sizeof(Scale), INTEGER_BYTES = sizeof(Integer);
  template <int halves>
  struct Loaded {
    Scale scale;
    Together<Integer, halves> integers;

    __device__ __forceinline__ void read(const BlockNumbers& from, long long row, int chunk) {
      scale = static_cast<const Scale*>(from.numbers)[row * from.count + (chunk >> from.shift)];
      const Together<Integer, halves>* own = static_cast<const Together<Integer, halves>*>(from.integers);
      integers = own[row * from.integer_count + (chunk >> from.integer_shift)];
    }
    __device__ __forceinline__ float number(int half) const { return to_float(scale) * to_float(integers.of[half]); }
  };
};

// The same, with integers in the high halves of the bytes that hold those of the factors in their low halves.
template <class Scale>
struct Beside {
  static constexpr bool IS_BESIDE = true;
  static constexpr int NUMBER_BYTES = sizeof(Scale), INTEGER_BYTES = 0;
  template <int halves>
  struct Loaded {
    Scale scale;
    Together<low_nibble, halves> bytes;

    __device__ __forceinline__ void read_beside(
        const BlockNumbers& from, long long row, int chunk, const Together<low_nibble, halves>& of_factors) {
      scale = static_cast<const Scale*>(from.numbers)[row * from.count + (chunk >> from.shift)];
      bytes = of_factors;
    }
    __device__ __forceinline__ float number(int half) const {
      return to_float(scale) * to_float(high_nibble{bytes.of[half].bits});
    }
  };
};

// What is subtracted: the zero point of the matrix, from all codes.
struct Constant {
  static constexpr bool HAS_POINTS = false, HAS_MINIMUM = false, IS_BESIDE = false;
  static constexpr int NUMBER_BYTES = 0, INTEGER_BYTES = 0;
  template <int halves>
  struct Loaded {
    __device__ __forceinline__ void read(const BlockNumbers&, long long, int) {}
    __device__ __forceinline__ float number(int) const { return 0.0f; }
  };
};

// What is subtracted: the zero point of a block, from its codes.
template <class T>
struct Point : Single<T> {
  static constexpr bool HAS_POINTS = true, HAS_MINIMUM = false;
};

// What is subtracted: a minimum, from the product with the factor.
template <class Numbers>
struct Minimum : Numbers {
  static constexpr bool HAS_POINTS = false, HAS_MINIMUM = true;
};

// --- chunks ---------------------------------------------------------------------------------------------------------

// Sixteen numbers in shared memory. Lanes that look up different numbers read different banks.
__device__ __forceinline__ const float* shared_grid(const BlockMatrix& matrix) {
  SHARED(float, values, 16);
  __syncthreads();
  if (threadIdx.x < 16) values[threadIdx.x] = matrix.grid[threadIdx.x];
  __syncthreads();
  return values;
}

// Four bytes of a table of 16 (or of its first half), by the four nibbles of a selector.
template <int bits>
__device__ __forceinline__ unsigned four_of(const int (&table)[4], unsigned selector) {
  const unsigned low = __byte_perm(table[0], table[1], selector & 0x7777u);
  if (bits < 4) return low;
  const unsigned high = __byte_perm(table[2], table[3], selector & 0x7777u);
  return __byte_perm(low, high, 0x3210u | (selector & 0x8888u) >> 1);
}

// The zero point, factor and minimum of a chunk of a row, per half (or of the whole chunk: halves = 1).
template <int halves>
struct Factors {
  float scale[halves];
  float zero[halves];
  float minimum[halves];
};

// Reads chunks of a matrix. Factor: Single<T> or Double<T, integers>; Offset: Constant, Point<T> or Minimum<numbers>.
template <int bits, int halves, bool grid, class Factor, class Offset>
struct BlockReader {
  static constexpr int WORDS = bits, HALVES = halves, COLUMNS = CHUNK / halves;
  // The bits of codes in the two planes, the words of the two planes in memory, and what was subtracted from the
  // codes.
  static constexpr int FIRST = bits == 8 ? 8 : bits >= 4 ? 4 : 2, SECOND = bits - FIRST;
  static constexpr int WORDS_1 = bits >= 4 ? 4 : 2, WORDS_2 = bits - WORDS_1, BIAS = bits == 8 ? 128 : 0;
  static constexpr int CELL = grid ? 4 : 8;
  static constexpr unsigned CELLS = grid ? 0x11111111u : 0x01010101u;
  using OwnFactor = Factor;
  using OwnOffset = Offset;
  static constexpr bool HAS_MINIMUM = Offset::HAS_MINIMUM, HAS_ZERO = !grid && !HAS_MINIMUM, IS_GRID = grid;
  static constexpr bool HAS_POINTS = HAS_ZERO && Offset::HAS_POINTS;
  // Codes minus their common zero point are signed bytes.
  static constexpr bool ARE_SIGNED = HAS_ZERO && !HAS_POINTS;
  // A number of two significant bits times a factor is an exact float.
  static constexpr bool IS_NARROW = !grid && Factor::IS_NARROW;
  static constexpr bool ARE_IN_PLACE = bits == 4 && !grid && halves == 1;
  static_assert(!grid || bits <= 4, "tables have 16 entries");

  // A chunk in its stored form. Nothing is computed from the chunk before it is used, so that no read is waited for.
  struct Chunk {
    unsigned codes[WORDS];
    typename Factor::template Loaded<halves> factor;
    typename Offset::template Loaded<halves> offset;
  };

  const BlockMatrix& matrix;
  const float* values = nullptr;  // of a grid, if numbers are requested

  // Return a reader for numbers. All threads of a block call this together.
  __device__ __forceinline__ static BlockReader of_numbers(const BlockMatrix& matrix) {
    if constexpr (grid) return BlockReader{matrix, shared_grid(matrix)};
    else return BlockReader{matrix};
  }

  __device__ __forceinline__ void read(long long row, int chunk, Chunk& into) const {
    const long long index = row * matrix.chunks + chunk;
    load_once<WORDS_1>(matrix.data + index * (4 * WORDS_1), into.codes);
    if constexpr (WORDS_2 > 0) load_once<WORDS_2>(matrix.second + index * (4 * WORDS_2), into.codes + WORDS_1);
    read_numbers(row, chunk, into);
  }
  __device__ __forceinline__ void read_numbers(long long row, int chunk, Chunk& into) const {
    const BlockNumbers factors{matrix.scales, matrix.multipliers, matrix.scale_count, matrix.scale_shift,
                               matrix.multiplier_count, matrix.multiplier_shift};
    into.factor.read(factors, row, chunk);
    const BlockNumbers offsets{matrix.offset_scales, matrix.offsets, matrix.offset_scale_count,
                               matrix.offset_scale_shift, matrix.offset_count, matrix.offset_shift};
    if constexpr (Offset::IS_BESIDE) into.offset.read_beside(offsets, row, chunk, into.factor.integers);
    else into.offset.read(offsets, row, chunk);
  }

  __device__ __forceinline__ Factors<halves> factors(const Chunk& chunk) const {
    Factors<halves> found;
#pragma unroll
    for (int half = 0; half < halves; ++half) {
      found.scale[half] = chunk.factor.number(half);
      const float own = chunk.offset.number(half);
      found.minimum[half] = HAS_MINIMUM ? own : 0.0f;
      found.zero[half] = !HAS_ZERO ? 0.0f : Offset::HAS_POINTS ? own : matrix.zero;
    }
    return found;
  }

  // The chunk's columns 4 g to 4 g + 3 as signed bytes in word g: codes minus BIAS, or bytes of a grid. 4-bit codes in
  // the high half of a byte stay there, so that nothing is shifted; `dot` accounts for this.
  __device__ __forceinline__ void bytes(const Chunk& chunk, int (&words)[BYTE_WORDS]) const {
    if constexpr (ARE_IN_PLACE) {
#pragma unroll
      for (int s = 0; s < BYTE_WORDS / 2; ++s)
        words[s] = chunk.codes[s] & 0x0f0f0f0fu, words[s + BYTE_WORDS / 2] = chunk.codes[s] & 0xf0f0f0f0u;
    } else if constexpr (grid) {
#pragma unroll
      for (int s = 0; s < BYTE_WORDS / 2; ++s) {
        const unsigned eight = slice(chunk, s);
        words[2 * s] = four_of<bits>(matrix.table, eight);
        words[2 * s + 1] = four_of<bits>(matrix.table, eight >> 16);
      }
    } else {
#pragma unroll
      for (int s = 0; s < BYTE_WORDS; ++s) words[s] = slice(chunk, s);
    }
  }

  // Only word q of these words; code(i) is word i of the chunk.
  template <class Code>
  __device__ __forceinline__ int byte_word(const Code& code, int q) const {
    if constexpr (grid) return four_of<bits>(matrix.table, slice_of(code, q / 2) >> q % 2 * 16);
    else return slice_of(code, q);
  }

  // The same minus the zero point, if all codes share a zero point.
  __device__ __forceinline__ int signed_bytes(int word) const {
    if constexpr (!ARE_SIGNED || bits == 8) return word;  // 8-bit codes are stored minus 128, their zero point
    else return (int)(((unsigned)word + (128u - (unsigned)(int)matrix.zero) * 0x01010101u) ^ 0x80808080u);
  }

  // The sums of a row's bytes over a chunk's halves, or over the chunk, from two 16-bit numbers.
  __device__ __forceinline__ static float ones_of(int sums, int half) {
    const int low = (short)sums, high = sums >> 16;
    return (float)(halves == 1 ? low + high : half ? high : low);
  }

  // Return what the chunk adds to a sum: its bytes times those of a row, in units of the row's scale.
  // ones_of_half(half): the sum of the row's bytes, as from `ones_of`.
  template <class Ones>
  __device__ __forceinline__ float dot(
      const int (&words)[BYTE_WORDS], const Factors<halves>& given, const int (&x)[BYTE_WORDS], const Ones& ones_of_half) const {
    float total = 0.0f;
#pragma unroll
    for (int half = 0; half < halves; ++half) {
      float whole;
      if constexpr (ARE_IN_PLACE) {
        int low = 0, high = 0;
#pragma unroll
        for (int i = 0; i < BYTE_WORDS / 2; ++i) {
          low = dot4(words[i], x[i], low);
          high = dot4_unsigned(words[i + BYTE_WORDS / 2], x[i + BYTE_WORDS / 2], high);
        }
        whole = (float)(16 * low + high) * 0.0625f;  // exact
      } else {
        int sum = 0;
#pragma unroll
        for (int i = 0; i < COLUMNS / 4; ++i) sum = dot4(words[half * (COLUMNS / 4) + i], x[half * (COLUMNS / 4) + i], sum);
        whole = (float)sum;
      }
      const float ones = ones_of_half(half);
      if constexpr (HAS_ZERO) whole = fmaf((float)BIAS - given.zero[half], ones, whole);
      total = fmaf(whole, grid ? given.scale[half] * matrix.unit : given.scale[half], total);
      if constexpr (HAS_MINIMUM) total = fmaf(-given.minimum[half], ones, total);
    }
    return total;
  }

  // The numbers of columns 4 g to 4 g + 3, before zero points and factors are applied.
  __device__ __forceinline__ void numbers(const Chunk& chunk, int g, float (&found)[4]) const {
    if constexpr (grid) {
      const unsigned four = slice(chunk, g / 2) >> g % 2 * 16;
#pragma unroll
      for (int i = 0; i < 4; ++i) found[i] = values[four >> 4 * i & 15u];
    } else {
      unsigned four = slice(chunk, g);
      if (bits == 8) four ^= 0x80808080u;
#pragma unroll
      for (int i = 0; i < 4; ++i) found[i] = __uint_as_float(__byte_perm(four, 0x4b000000u, 0x7440u + i)) - 8388608.0f;
    }
  }

  // The values of columns 4 g to 4 g + 3, without their factor if there is no minimum (see `factor_left`).
  __device__ __forceinline__ void unscaled(const Chunk& chunk, const Factors<halves>& given, int g, float (&found)[4]) const {
    const int half = g * 4 / COLUMNS;
    numbers(chunk, g, found);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (HAS_ZERO) found[i] -= given.zero[half];
      if constexpr (HAS_MINIMUM) found[i] = fmaf(found[i], given.scale[half], -given.minimum[half]);
    }
  }
  __device__ __forceinline__ static float factor_left(const Factors<halves>& given, int half) {
    return HAS_MINIMUM ? 1.0f : given.scale[half];
  }

  // The values of columns 4 g to 4 g + 3.
  __device__ __forceinline__ void four(const Chunk& chunk, const Factors<halves>& given, int g, float (&found)[4]) const {
    unscaled(chunk, given, g, found);
    if constexpr (!HAS_MINIMUM) {
#pragma unroll
      for (int i = 0; i < 4; ++i) found[i] *= given.scale[g * 4 / COLUMNS];
    }
  }

  // The same for values to be rounded to bfloat16, in fewer instructions: a code becomes the number 128 + code (with 8
  // bits, 32,768 + code) when its bits are put in place, and the excess is part of what is subtracted. The loss is less
  // than a hundredth of the rounding error.
  __device__ __forceinline__ void four_of_prompt(
      const Chunk& chunk, const Factors<halves>& given, int g, float (&found)[4]) const {
    if constexpr (grid) {
      four(chunk, given, g, found);
    } else {
      const int half = g * 4 / COLUMNS;
      constexpr unsigned LARGE = bits == 8 ? 0x47000000u : 0x43000000u, SELECTOR = bits == 8 ? 0x7404u : 0x7044u;
      constexpr int SHIFT = bits == 8 ? 4 : 8;
      const float base = (bits == 8 ? 32768.0f : 128.0f) + given.zero[half], scale = given.scale[half];
      const float minimum = fmaf(base, scale, given.minimum[half]);
      const unsigned codes = bits == 8 ? slice(chunk, g) ^ 0x80808080u : slice(chunk, g);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float large = __uint_as_float(__byte_perm(codes, LARGE, SELECTOR | i << SHIFT));
        if constexpr (bits < 8) found[i] = fmaf(large, scale, -minimum);
        else if constexpr (HAS_MINIMUM) found[i] = fmaf(large - base, scale, -given.minimum[half]);
        else found[i] = (large - base) * scale;
      }
    }
  }

 private:
  __device__ __forceinline__ static unsigned moved(unsigned word, int right) {
    return right >= 0 ? word >> right : word << -right;
  }

  // Slice s of the codes, one per cell.
  __device__ __forceinline__ static unsigned slice(const Chunk& chunk, int s) {
    return slice_of([&](int word) { return chunk.codes[word]; }, s);
  }
  template <class Code>
  __device__ __forceinline__ static unsigned slice_of(const Code& code, int s) {
    unsigned low = code(s % FIRST) >> s / FIRST * FIRST;
    if (FIRST < CELL) low &= CELLS * ((1u << FIRST) - 1u);
    if constexpr (SECOND > 0) {
      const unsigned high = moved(code(FIRST + s % SECOND), s / SECOND * SECOND - FIRST);
      low |= high & CELLS * (((1u << SECOND) - 1u) << FIRST);
    }
    return low;
  }
};

// A chunk as 32 values for tensor cores, from integers.
template <class Reader>
struct BlockSource {
  using Reads = Reader;
  static constexpr int HALVES = 2;  // halves of a chunk that are read together
  typename Reader::Chunk chunk;

  __device__ __forceinline__ void read(const Reader& reader, long long row, int which) { reader.read(row, which, chunk); }
  __device__ __forceinline__ void read_halves(const Reader& reader, long long row, int which, int) {
    read(reader, row, which);
  }
  // All values as pairs of bfloat16.
  __device__ __forceinline__ void pairs(const Reader& reader, unsigned (&found)[CHUNK / 2]) const {
    some_pairs<0>(reader, found);
  }
  // The values of half of the columns.
  __device__ __forceinline__ void pairs_of_half(const Reader& reader, int half, unsigned (&found)[CHUNK / 4]) const {
    if (half == 0) some_pairs<0>(reader, found);
    else some_pairs<CHUNK / 8>(reader, found);
  }

 private:
  template <int first, int count>
  __device__ __forceinline__ void some_pairs(const Reader& reader, unsigned (&found)[count]) const {
    const auto factors = reader.factors(chunk);
#pragma unroll
    for (int g = 0; g < count / 2; ++g) {
      float four[4];
      reader.four_of_prompt(chunk, factors, first + g, four);
      found[2 * g] = bfloat_pair(four[0], four[1]), found[2 * g + 1] = bfloat_pair(four[2], four[3]);
    }
  }
};

__device__ constexpr bool is_bfloat(bfloat_bits) { return true; }
__device__ constexpr bool is_bfloat(half_bits) { return false; }
__device__ constexpr bool is_bfloat(float) { return false; }

// Rows of floats, [rows][32 chunks] with zeros at the end.
template <class T>
struct DenseReader {
  static constexpr int WIDTH = 16 / sizeof(T);  // numbers that are read together

  const BlockMatrix& matrix;

  __device__ __forceinline__ static DenseReader of_numbers(const BlockMatrix& matrix) { return DenseReader{matrix}; }
  // Columns WIDTH part to WIDTH (part + 1) - 1, as they are stored.
  __device__ __forceinline__ void read(long long row, int part, unsigned (&words)[4]) const {
    load_once<4>(address(row, part), words);
  }
  // The same if the next part is also read, but by a separate instruction.
  __device__ __forceinline__ void read_beside(long long row, int part, unsigned (&words)[4]) const {
    load_four(address(row, part), words);
  }
  __device__ __forceinline__ static void numbers(const unsigned (&words)[4], float (&found)[WIDTH]) {
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      if constexpr (sizeof(T) == 4) found[i] = __uint_as_float(words[i]);
      else found[i] = to_float(T{(unsigned short)(words[i / 2] >> i % 2 * 16)});
    }
  }
  // The numbers as pairs of bfloat16.
  __device__ __forceinline__ static void pairs(const unsigned (&words)[4], unsigned* found) {
    float read[WIDTH];
    numbers(words, read);
#pragma unroll
    for (int i = 0; i < WIDTH; i += 2)
      if constexpr (is_bfloat(T{})) found[i / 2] = words[i / 2];
      else found[i / 2] = bfloat_pair(read[i], read[i + 1]);
  }

 private:
  __device__ __forceinline__ const unsigned char* address(long long row, int part) const {
    return matrix.data + (row * matrix.chunks * (CHUNK / WIDTH) + part) * 16;
  }
};

// A chunk as 32 values for tensor cores, from floats.
template <class T>
struct DenseSource {
  using Reads = DenseReader<T>;
  static constexpr int PARTS = CHUNK / Reads::WIDTH;
  unsigned words[PARTS][4];

  __device__ __forceinline__ void read(const Reads& reader, long long row, int which) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) reader.read(row, which * PARTS + part, words[part]);
  }
  __device__ __forceinline__ void pairs(const Reads&, unsigned (&found)[CHUNK / 2]) const {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) Reads::pairs(words[part], found + part * (Reads::WIDTH / 2));
  }
};

// The same, half a chunk at a time, because a whole chunk needs many registers.
template <class T>
struct DenseHalf {
  using Reads = DenseReader<T>;
  static constexpr int HALVES = 1, PARTS = CHUNK / 2 / Reads::WIDTH;
  unsigned words[PARTS][4];

  __device__ __forceinline__ void read_halves(const Reads& reader, long long row, int which, int half) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) reader.read_beside(row, (2 * which + half) * PARTS + part, words[part]);
  }
  __device__ __forceinline__ void pairs_of_half(const Reads&, int, unsigned (&found)[CHUNK / 4]) const {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) Reads::pairs(words[part], found + part * (Reads::WIDTH / 2));
  }
};
