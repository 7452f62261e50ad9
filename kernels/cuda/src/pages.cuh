// Pages of keys and values: 32 tokens of a layer's head, in the layout of `kernels.cache_layout`.
//
// A lane processes units: 4 columns of 4 tokens. They are 16 bytes of small integers (with 4 bits: 8 columns), or four
// lines of 16, 8 or 4 bytes of floats. Eight adjacent lanes read a whole line of keys.
#pragma once
#include "portable.cuh"

constexpr int PAGE = 32, UNIT = 4, QUADS = PAGE / UNIT;

// keys: for floats [block][kv_head][head_size][PAGE]; values: [block][kv_head][PAGE][v_head_size]. key_block,
// value_block: bytes from one block to the next.
struct Pages {
  unsigned char* keys;
  unsigned char* values;
  long long key_block;
  long long value_block;
};

// The tables of a step's rows. tables: [sequences][table_stride] block ids. sequence_of, positions, slots: [rows].
struct StepRows {
  const int* tables;
  const int* sequence_of;
  const int* positions;
  const int* slots;
  int table_stride;
};

// The first position that a row sees, given the end of the positions that it sees. window: -1 = all tokens. chunk: number
// of tokens in a chunk of the sequence, of which a row sees its own; 0 = off.
__device__ __forceinline__ int first_seen(int end, int window, int chunk) {
  if (chunk > 0) return (end - 1) / chunk * chunk;
  return window < 0 ? 0 : max(0, end - window);
}

// Kinds of pages in addition to pages of floats (float, half_bits, bfloat_bits, float8_bits): small integers with
// scales.
struct Int8 {};
struct Int4 {};

// The layout of a head's page: bytes of integers (or floats), then float16 scales [groups][PAGE].
template <class Kind>
struct PageFormat {
  static constexpr int COLUMNS = UNIT;  // columns of a unit
  static constexpr bool PACKED = false;
  __device__ __forceinline__ static constexpr int key_columns(int size) { return size * (int)sizeof(Kind); }
  __device__ __forceinline__ static constexpr int value_columns(int size) { return size * (int)sizeof(Kind); }
  __device__ __forceinline__ static constexpr int groups(int) { return 0; }
};
template <>
struct PageFormat<Int8> {
  static constexpr int COLUMNS = UNIT;
  static constexpr bool PACKED = true;
  __device__ __forceinline__ static constexpr int key_columns(int size) { return size; }
  __device__ __forceinline__ static constexpr int value_columns(int size) { return (size + 15) / 16 * 16; }
  __device__ __forceinline__ static constexpr int groups(int) { return 1; }
};
template <>
struct PageFormat<Int4> {
  static constexpr int COLUMNS = 2 * UNIT;
  static constexpr bool PACKED = true;
  __device__ __forceinline__ static constexpr int key_columns(int size) { return size / 2; }
  __device__ __forceinline__ static constexpr int value_columns(int size) { return size / 2; }
  __device__ __forceinline__ static constexpr int groups(int size) { return size / 32; }
};

template <class Kind>
__device__ __forceinline__ constexpr int key_bytes(int size) {
  return PAGE * (PageFormat<Kind>::key_columns(size) + 2 * PageFormat<Kind>::groups(size));
}
template <class Kind>
__device__ __forceinline__ constexpr int value_bytes(int size) {
  return PAGE * (PageFormat<Kind>::value_columns(size) + 2 * PageFormat<Kind>::groups(size));
}

// Column `i` of a unit. With 4 bits, a byte holds two columns that are 16 apart.
template <class Kind>
__device__ __forceinline__ int column_of(int unit, int i) {
  return UNIT * unit + i;
}
template <>
__device__ __forceinline__ int column_of<Int4>(int unit, int i) {
  return unit / 4 * 32 + unit % 4 * UNIT + i % UNIT + i / UNIT * 16;
}

// Scales of four tokens.
struct Scales {
  uint2 four;

  __device__ __forceinline__ float of(int token) const {
    return to_float(half_bits{(unsigned short)((token < 2 ? four.x : four.y) >> 16 * (token % 2))});
  }
};

// The scales of a unit, given the start of the page's scales; 0 for tokens outside of [first, last) of the page.
template <class Kind>
__device__ __forceinline__ Scales read_scales(const unsigned char* scales, int unit, int quad, int first, int last) {
  const int group = PageFormat<Kind>::COLUMNS > UNIT ? unit / 4 : 0;  // of 32 columns, or one for all
  uint2 four = *reinterpret_cast<const uint2*>(scales + 2 * (group * PAGE + UNIT * quad));
  first -= UNIT * quad, last -= UNIT * quad;
  four.x &= (first <= 0 && last > 0 ? 0xffffu : 0u) | (first <= 1 && last > 1 ? 0xffff0000u : 0u);
  four.y &= (first <= 2 && last > 2 ? 0xffffu : 0u) | (first <= 3 && last > 3 ? 0xffff0000u : 0u);
  return Scales{four};
}

// A unit of a page in its stored form. Its lines are the columns of keys, or the tokens of values. Number `i` of a line
// belongs to a token of keys, or to a column of values.
template <class Line>
struct Lines {
  Line lines[UNIT];

  // Lines outside of [first, last) are zeros, because tokens that are not visible may hold NaN.
  __device__ __forceinline__ void read(const unsigned char* from, int stride, int first, int last) {
#pragma unroll
    for (int i = 0; i < UNIT; ++i)
      lines[i] = i >= first && i < last ? *reinterpret_cast<const Line*>(from + i * stride) : Line{};
  }
};
template <class T>
struct Unit : Lines<uint4> {
  __device__ __forceinline__ float number(int line, int i) const {
    const uint4 four = lines[line];
    return __uint_as_float(i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w);
  }
};
template <class T>
struct ShortUnit : Lines<uint2> {
  __device__ __forceinline__ float number(int line, int i) const {
    const unsigned pair = i < 2 ? this->lines[line].x : this->lines[line].y;
    return to_float(T{(unsigned short)(pair >> 16 * (i % 2))});
  }
};
template <>
struct Unit<half_bits> : ShortUnit<half_bits> {};
template <>
struct Unit<bfloat_bits> : ShortUnit<bfloat_bits> {};
template <>
struct Unit<float8_bits> : Lines<unsigned> {
  __device__ __forceinline__ float number(int line, int i) const {
    return to_float(float8_pair{(unsigned short)(lines[line] >> 16 * (i / 2))}, i % 2);
  }
};

// Small integers are converted to floats exactly, because their bits follow the exponent of 2 ** 23.
struct PackedUnit {
  uint4 words;

  __device__ __forceinline__ void read(const unsigned char* from, int, int, int) {
    words = *reinterpret_cast<const uint4*>(from);
  }
  __device__ __forceinline__ unsigned word(int i) const {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
  }
};
template <>
struct Unit<Int8> : PackedUnit {
  __device__ __forceinline__ float number(int half, int line, int i) const {
    (void)half;
    return __uint_as_float(0x4b000000u | ((word(i) ^ 0x80808080u) >> 8 * line & 0xffu)) - 8388736.0f;
  }
};
template <>
struct Unit<Int4> : PackedUnit {
  __device__ __forceinline__ float number(int half, int line, int i) const {
    return __uint_as_float(0x4b000000u | (word(i) >> (8 * line + 4 * half) & 15u)) - 8388608.0f - 7.5f;
  }
};

// A unit of keys, with its numbers by column and token.
template <class Kind, int size>
struct KeyUnit {
  static constexpr int COLUMNS = PageFormat<Kind>::COLUMNS, COUNT = size / COLUMNS;
  Unit<Kind> raw;
  Scales scales;

  __device__ __forceinline__ static const unsigned char* address(const unsigned char* page, int unit, int quad) {
    if (PageFormat<Kind>::PACKED) return page + (unit * PAGE + UNIT * quad) * UNIT;
    return page + (UNIT * unit * PAGE + UNIT * quad) * (int)sizeof(Kind);
  }
  __device__ __forceinline__ static Scales scales_of(const unsigned char* page, int unit, int quad) {
    return read_scales<Kind>(page + PAGE * PageFormat<Kind>::key_columns(size), unit, quad, 0, PAGE);
  }
  __device__ __forceinline__ void read(const unsigned char* page, int unit, int quad) {
    raw.read(address(page, unit, quad), PAGE * sizeof(Kind), 0, UNIT);
    if (PageFormat<Kind>::PACKED) scales = scales_of(page, unit, quad);
  }
  __device__ __forceinline__ float number(int column, int token) const {
    if constexpr (PageFormat<Kind>::PACKED) return raw.number(column / UNIT, column % UNIT, token) * scales.of(token);
    else return raw.number(column, token);
  }
};

// A unit of values, with its numbers by column and token. Tokens outside of [first, last) of the page are 0.
template <class Kind, int size>
struct ValueUnit {
  static constexpr int COLUMNS = PageFormat<Kind>::COLUMNS, COUNT = size / COLUMNS;
  Unit<Kind> raw;
  Scales scales;

  __device__ __forceinline__ static const unsigned char* address(const unsigned char* page, int unit, int quad) {
    const int columns = PageFormat<Kind>::value_columns(size);
    if (PageFormat<Kind>::PACKED) return page + (quad * columns + UNIT * unit) * UNIT;
    return page + UNIT * quad * columns + UNIT * unit * (int)sizeof(Kind);
  }
  __device__ __forceinline__ static Scales scales_of(
      const unsigned char* page, int unit, int quad, int first, int last) {
    return read_scales<Kind>(page + PAGE * PageFormat<Kind>::value_columns(size), unit, quad, first, last);
  }
  __device__ __forceinline__ void read(const unsigned char* page, int unit, int quad, int first, int last) {
    raw.read(address(page, unit, quad), PageFormat<Kind>::value_columns(size), first - UNIT * quad, last - UNIT * quad);
    if (PageFormat<Kind>::PACKED) scales = scales_of(page, unit, quad, first, last);
  }
  __device__ __forceinline__ float number(int column, int token) const {
    if constexpr (PageFormat<Kind>::PACKED) return raw.number(column / UNIT, token, column % UNIT) * scales.of(token);
    else return raw.number(token, column);
  }
};
