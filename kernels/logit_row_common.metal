// What the passes of the row scans share: how a value becomes an integer that can be compared, and
// how two partial results become one. MLX puts this text in front of a kernel as its header.

namespace mlxspec {

// The key of a place where there is no logit: below every key a logit can have.
constant constexpr int ABSENT = -2147483647 - 1;
constant constexpr float FLOAT_MAX = 3.40282346638528859812e+38f;
constant constexpr uint SIMD_SIZE = 32;
constant constexpr uint MAX_SIMD_GROUPS = 8;

// The bits of +infinity, which is also the largest magnitude that is not a NaN.
template <typename T>
struct Infinity;
template <>
struct Infinity<float> {
  static constexpr constant int bits = 0x7f800000;
};
template <>
struct Infinity<half> {
  static constexpr constant int bits = 0x7c00;
};
template <>
struct Infinity<bfloat16_t> {
  static constexpr constant int bits = 0x7f80;
};

inline int signed_bits(float x) { return as_type<int>(x); }
inline int signed_bits(half x) { return int(as_type<short>(x)); }
inline int signed_bits(bfloat16_t x) { return int(as_type<short>(x)); }

template <typename T>
inline int magnitude_of(T x) {
  return signed_bits(x) & (sizeof(T) == 4 ? 0x7fffffff : 0x7fff);
}

// Tests bits, so that no maths mode of the compiler can assume NaN away.
template <typename T>
inline bool is_nan(T x) {
  return magnitude_of(x) > Infinity<T>::bits;
}

// Integers in the order of the values: -0 on +0, NaN on -infinity. Comparing them does not depend
// on whether the GPU flushes denormals.
template <typename T>
inline int order_key(T x) {
  int magnitude = magnitude_of(x);
  if (magnitude > Infinity<T>::bits) {
    return -Infinity<T>::bits;
  }
  return signed_bits(x) < 0 ? -magnitude : magnitude;
}

template <typename T>
struct FromBits;
template <>
struct FromBits<float> {
  static float value(int bits) { return as_type<float>(bits); }
};
template <>
struct FromBits<half> {
  static float value(int bits) { return float(as_type<half>(short(bits))); }
};
template <>
struct FromBits<bfloat16_t> {
  // A bfloat is the upper half of a float; shifting cannot flush a denormal, a conversion could.
  static float value(int bits) { return as_type<float>(bits << 16); }
};

// The value a key stands for; -0 comes back as +0.
template <typename T>
inline float value_of(int key) {
  float size = FromBits<T>::value(key < 0 ? -key : key);
  return key < 0 ? -size : size;
}

// Three operations, each rounded to T, as the models compute it: the rounding makes ties.
template <typename T>
inline T soft_capped(T x, T cap) {
  x = static_cast<T>(x / cap);
  x = static_cast<T>(metal::precise::tanh(x));
  x = static_cast<T>(x * cap);
  return x;
}

// What the exponentials of a part are relative to: its maximum, or the lowest finite number where
// the part holds nothing above -infinity, so that -infinity is never subtracted from itself. (What
// -infinity then adds to the sum vanishes beside any finite maximum.)
template <typename T>
inline float anchor_of(int key) {
  return key <= -Infinity<T>::bits ? -FLOAT_MAX : value_of<T>(key);
}

// What is known of a part of a row.
struct RowPart {
  int key;         // of the first maximum
  uint index;      // where it stands in the row
  float sum;       // of exp(value - anchor); without meaning where the maximum is infinite
  uint nan_count;
};

inline RowPart empty_part() {
  RowPart part;
  part.key = ABSENT;
  part.index = 0;
  part.sum = 0.0f;
  part.nan_count = 0;
  return part;
}

// The first of equal maxima wins, whichever side it comes from: parts may meet in any order.
inline bool comes_first(int key, uint index, int other_key, uint other_index) {
  return key > other_key || (key == other_key && index < other_index);
}

template <typename T>
inline RowPart merge(RowPart a, RowPart b) {
  bool b_first = comes_first(b.key, b.index, a.key, a.index);
  RowPart merged;
  merged.key = b_first ? b.key : a.key;
  merged.index = b_first ? b.index : a.index;
  float anchor = anchor_of<T>(merged.key);
  merged.sum = a.sum * metal::precise::exp(anchor_of<T>(a.key) - anchor) +
      b.sum * metal::precise::exp(anchor_of<T>(b.key) - anchor);
  merged.nan_count = a.nan_count + b.nan_count;
  return merged;
}

// Adds one logit. Indices come in ascending order, so an equal key never displaces.
template <typename T>
inline void include(thread RowPart& part, T x, uint index) {
  int key = order_key(x);
  bool wins = key > part.key;
  float old_anchor = anchor_of<T>(part.key);
  float anchor = anchor_of<T>(key);
  float decay = metal::precise::exp(wins ? old_anchor - anchor : anchor - old_anchor);
  part.sum = wins ? part.sum * decay + 1.0f : part.sum + decay;
  part.key = wins ? key : part.key;
  part.index = wins ? index : part.index;
  part.nan_count += is_nan(x) ? 1 : 0;
}

// Merges the 32 parts of a SIMD group; every lane gets the result. All 32 lanes must call it.
template <typename T>
inline RowPart merge_simd_group(RowPart part) {
  for (ushort distance = SIMD_SIZE / 2; distance > 0; distance /= 2) {
    RowPart other;
    other.key = simd_shuffle_xor(part.key, distance);
    other.index = simd_shuffle_xor(part.index, distance);
    other.sum = simd_shuffle_xor(part.sum, distance);
    other.nan_count = simd_shuffle_xor(part.nan_count, distance);
    part = merge<T>(part, other);
  }
  return part;
}

// A candidate for the list of the largest entries.
struct Candidate {
  int key;
  uint index;
};

inline Candidate make_candidate(int key, uint index) {
  Candidate candidate;
  candidate.key = key;
  candidate.index = index;
  return candidate;
}

// The best candidate of a SIMD group, on every lane. All 32 lanes must call it.
inline Candidate best_of_simd_group(Candidate best) {
  for (ushort distance = SIMD_SIZE / 2; distance > 0; distance /= 2) {
    int key = simd_shuffle_xor(best.key, distance);
    uint index = simd_shuffle_xor(best.index, distance);
    if (comes_first(key, index, best.key, best.index)) {
      best = make_candidate(key, index);
    }
  }
  return best;
}

} // namespace mlxspec
