// Seeded noise: Threefry-2x32 with 20 rounds (Salmon, Moraes, Dror, Shaw: "Parallel random numbers:
// as easy as 1, 2, 3", SC 2011), counted as MLX's generator counts, so that both draw the same bits
// from the same key; and MLX's way from bits to uniform to Gumbel numbers.

namespace mlxspec {

struct RandomPair {
  uint low;  // the bits of index `count`
  uint high; // the bits of index `count + half`
};

inline uint rotate_left(uint x, uint by) { return (x << by) | (x >> (32 - by)); }

inline void threefry_round(thread RandomPair& v, uint by) {
  v.low += v.high;
  v.high = rotate_left(v.high, by) ^ v.low;
}

inline RandomPair threefry(uint key0, uint key1, uint count0, uint count1) {
  const uint keys[3] = {key0, key1, key0 ^ key1 ^ 0x1BD11BDA};
  RandomPair v;
  v.low = count0 + key0;
  v.high = count1 + key1;
  for (uint group = 0; group < 5; group++) {
    const bool even = group % 2 == 0;
    threefry_round(v, even ? 13 : 17);
    threefry_round(v, even ? 15 : 29);
    threefry_round(v, even ? 26 : 16);
    threefry_round(v, even ? 6 : 24);
    v.low += keys[(group + 1) % 3];
    v.high += keys[(group + 2) % 3] + group + 1;
  }
  return v;
}

// A row of n numbers is drawn in pairs: index i with index i + half, half = ceil(n / 2). The last
// pair of an odd row has no second index and counts 0 there.
inline RandomPair random_pair(uint key0, uint key1, uint i, uint n) {
  const uint half_of_n = (n + 1) / 2;
  return threefry(key0, key1, i, i + half_of_n < n ? i + half_of_n : 0);
}

inline float gumbel(uint bits) {
  // 2^32 in float, and the number below 1.
  const float uniform_number = metal::min(float(bits) / 4294967296.0f, 0.99999994f);
  return -metal::precise::log(-metal::precise::log(uniform_number));
}

} // namespace mlxspec
